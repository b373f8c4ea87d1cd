"""A course of one tiny lesson in a folder of its own, to try the machinery on."""

import os
import shutil
import subprocess
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from shared.ranks.torchrun import python

ROOT = Path(__file__).resolve().parents[2]

STUBS = {
    "01.1": '''@exercise("01.1")
def double(x: int) -> int:
    """Return 2 x."""
    raise NotImplementedError''',
    "01.2": '''@exercise("01.2")
class Adder:
    """Adds `amount` to what it is called with."""

    def __init__(self, amount: int = 1) -> None:
        raise NotImplementedError

    def __call__(self, x: int) -> int:
        raise NotImplementedError''',
}
RIGHT = {
    "01.1": '@exercise("01.1")\ndef double(x: int) -> int:\n    return 2 * x',
    "01.2": """@exercise("01.2")
class Adder:
    def __init__(self, amount: int = 1) -> None:
        self.amount = amount

    def __call__(self, x: int) -> int:
        return x + self.amount""",
}
WRONG = {
    "01.1": '@exercise("01.1")\ndef double(x: int) -> int:\n    return x * x',
    "01.2": RIGHT["01.2"].replace("x + self.amount", "x - self.amount"),
}
CHECKS = """from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_equal

exercise_01_1 = checks_for("01.1", name="double", difficulty=1, minutes=5, hint="x + x")


@exercise_01_1.check("small numbers")
def small(double):
    expect(double(3) != 9, expected="6", seen="9", mistake="you squared it")
    expect_equal(double(3), 6, what="double(3)")


@exercise_01_1.check("zero")
def zero(double):
    expect_equal(double(0), 0, what="double(0)")


exercise_01_2 = checks_for("01.2", name="Adder", difficulty=3, minutes=5, hint="keep amount")


@exercise_01_2.check("one")
def one(Adder):
    expect_equal(Adder()(1), 2, what="Adder()(1)", mistake="it subtracts", hint="plus")
"""
SOLUTION = """class Adder:
    def __init__(self, amount: int = 1) -> None:
        self.amount = amount

    def __call__(self, x: int) -> int:
        return x + self.amount


def double(x: int) -> int:
    return x + x
"""
SCRIPT = """import argparse, json, os
from pathlib import Path

from shared.exercises.mine import put_mine_in_place
from solutions.lesson01_toy import Adder, double

parser = argparse.ArgumentParser()
parser.add_argument("--mine", action="store_true")
parser.add_argument("--out", type=Path)
args = parser.parse_args()
answers = put_mine_in_place("01", globals(), mine=args.mine)
if os.environ["RANK"] == "0":
    record = {"world_size": int(os.environ["WORLD_SIZE"]), "double": double(21)}
    (args.out / "metrics.json").write_text(json.dumps({**record, "answers": answers}))
"""


class ToyCourse:
    """The folder, and the few things that tests do with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lesson = root / "lessons" / "lesson01_toy"
        self.notebook = self.lesson / "lesson.ipynb"

    @classmethod
    def make(cls, root: Path) -> "ToyCourse":
        """Make the course with nothing solved, and run its notebook in solution mode once."""
        course = cls(root)
        shutil.copytree(ROOT / "shared", root / "shared", ignore=shutil.ignore_patterns("__pyc*"))
        course.lesson.mkdir(parents=True)
        (root / "solutions").mkdir()
        (root / "solutions" / "__init__.py").touch()
        (root / "solutions" / "lesson01_toy.py").write_text(SOLUTION)
        (course.lesson / "checks.py").write_text(CHECKS)
        (course.lesson / "train.py").write_text(SCRIPT)
        course.write(STUBS)
        course.build()
        return course

    def copy(self, root: Path) -> "ToyCourse":
        """Return a copy in another folder."""
        shutil.copytree(self.root, root)
        return ToyCourse(root)

    def write(self, exercises: dict[str, str], after: str = "double(4), Adder(2)(5)") -> None:
        """Store a notebook with these exercise cells, each followed by its check; no outputs."""
        cells = [
            new_markdown_cell("# Lesson 01: a toy"),
            new_code_cell(
                "from shared.exercises.notebook import check, exercise\n"
                "from shared.ranks.launching import launch",
                metadata={"tags": ["setup"]},
            ),
        ]
        for id, source in exercises.items():
            name = "double" if id == "01.1" else "Adder"
            cells += [new_code_cell(source), new_code_cell(f'check("{id}", {name})')]
        cells.append(new_code_cell(after))
        nbformat.write(new_notebook(cells=cells), self.notebook)

    def environment(self, **course: str) -> dict[str, str]:
        """This process's variables without the course's own (the tests run in solution mode)."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCH_HANDLE_", "PYTEST_")) and name != "RANK"
        }
        return {**kept, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", **course}

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run `python COMMAND` at the toy's root, with only these course variables set."""
        return subprocess.run(
            [python(), *command],
            cwd=self.root,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=200,
        )

    def replace(self, id: str, source: str) -> None:
        """Store another exercise cell, and leave all outputs as they are."""
        notebook = nbformat.read(self.notebook, as_version=4)
        (cell,) = [c for c in notebook.cells if c.source.startswith(f'@exercise("{id}")')]
        cell.source = source
        nbformat.write(notebook, self.notebook)

    def build(self) -> None:
        """Store the outputs of a run in solution mode."""
        done = self.run("-m", "shared.cli.notebooks")
        assert done.returncode == 0, done.stdout + done.stderr

    def nbval(self, **environment: str) -> dict[int, bool]:
        """Run the notebook under nbval; return for each code cell, by number, whether it passed."""
        config = self.root / "pytest.ini"
        config.write_text("[pytest]\naddopts = -p no:cacheprovider\n")
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # nbval alone starts in half the time
        options = ["-p", "nbval.plugin", "--nbval", "-rA"]
        done = self.run(
            "-m", "pytest", "-c", str(config), *options, str(self.notebook), **environment
        )
        results = {}
        for line in done.stdout.splitlines():
            if line.startswith(("PASSED ", "FAILED ")) and "::Cell " in line:
                results[int(line.split("::Cell ")[1].split()[0])] = line.startswith("PASSED")
        assert results, done.stdout + done.stderr
        return results

    def outputs(self) -> list[str]:
        """The text that each code cell has stored, joined."""
        cells = nbformat.read(self.notebook, as_version=4).cells
        texts = []
        for cell in cells:
            if cell.cell_type == "code":
                plain = [
                    o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs
                ]
                texts.append("".join(plain))
        return texts
