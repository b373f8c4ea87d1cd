"""Trying a written student edition out, lesson by lesson, unsolved and then solved.

Everything runs in a copy of the edition, in an environment made for it that has the packages of the
course and not the course: nothing can be found that a class would not have.
"""

import ast
import os
import re
import shutil
import sysconfig
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import nbformat

from shared.ranks.processes import supervise
from solutions.edition.reading import Finding
from solutions.grading.answer_cells import AnswerCells, hand_in
from solutions.grading.intake.lesson import read_lessons
from solutions.grading.intake.sources import bound_by
from solutions.grading.results import Lesson

CHECK = re.compile(r"^check\(\s*['\"]([0-9]{2}\.[0-9]+[a-z]?)['\"]", re.MULTILINE)
STOPPED = re.compile(r"exercise (\d\d\.\d+[a-z]?) \(\w+\) is not solved yet")
COLOUR = re.compile(r"(?:#x1B|\x1b)\[[\d;]*m")  # as pytest's XML has it, and as a terminal
TIME_LIMIT = 400  # seconds for one command; a whole notebook takes half a minute
TOO_LONG = f"\n(stopped after {TIME_LIMIT} s)\n"


class EditionCopy:
    """A copy of the edition, and an environment that knows it and not the course."""

    def __init__(self, edition: Path, place: Path) -> None:
        self.root, self.place = place / "edition", place
        shutil.copytree(edition, self.root)
        venv.create(place / "venv", with_pip=False, symlinks=True)
        self.python = place / "venv" / "bin" / "python"
        version = sysconfig.get_python_version()
        site = place / "venv" / "lib" / f"python{version}" / "site-packages"
        # The packages of the environment that runs this; its own .pth files, and with them the
        # course, are not followed from there.
        packages = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
        (site / "edition.pth").write_text("\n".join([str(self.root), *sorted(packages)]) + "\n")

    def run(self, *command: str | Path) -> tuple[int, str]:
        """Run a command as a learner would; return its status and all that it said."""
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_HANDLE", "PYTEST"))}
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        env = {**keep, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= {"JUPYTER_DATA_DIR": str(self.place / "jupyter")}  # no kernels of one's own
        for name in ("PYTHONPATH", "JUPYTER_PATH", "VIRTUAL_ENV", "PYTHON_EXEC"):
            env.pop(name, None)
        log = self.place / "said.txt"
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.root)]
        outcome = supervise([*there, *map(str, command)], env=env, log=log, time_limit=TIME_LIMIT)
        said = log.read_text(encoding="utf-8", errors="replace")
        return outcome.status, said + (TOO_LONG if outcome.timed_out else "")

    def cells(self, number: str) -> dict[int, str]:
        """The lesson's code cells under nbval: what each that failed said, "" where it passed.

        Empty when there was no report.
        """
        folder = next((self.root / "lessons").glob(f"{number}_*"))
        report = self.place / "report.xml"
        report.unlink(missing_ok=True)
        self.run(self.python, "-m", "pytest", "--nbval", folder, "-q", f"--junit-xml={report}")
        cells = {}
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        for case in cases:
            if "::Cell " in f"::{case.get('name', '')}":
                fault = case.find("failure")
                fault = case.find("error") if fault is None else fault
                said = "" if fault is None else f"{fault.get('message')}\n{fault.text}"
                cells[int(case.get("name", "").split()[-1])] = COLOUR.sub("", said)
        return cells

    def solve(self, number: str, cells: Mapping[str, str]) -> None:
        """Type answers into the lesson's notebook."""
        path = next((self.root / "lessons").glob(f"{number}_*/lesson.ipynb"))
        path.write_bytes(hand_in(path.read_bytes(), cells))


def prove(edition: Path, course: Path, numbers: Sequence[str]) -> Iterator[Finding]:
    """Try the edition out: the pages' links, then each lesson unsolved, then solved."""
    lessons = read_lessons(course, numbers)
    with tempfile.TemporaryDirectory(prefix="student_edition_") as place:
        copy = EditionCopy(edition, Path(place))
        yield _tests(copy)
        status, said = copy.run("./run_all.sh", "--no-setup", "--preset", "tiny", *numbers)
        for number in numbers:
            yield _script(copy, number, status, said)
        for number, lesson in lessons.items():
            yield _run_all(copy, number)
            yield _to_do_list(copy, lesson, "open")
            yield strict_form(copy, lesson)
            copy.solve(number, AnswerCells(course, lesson).references)
            yield _to_do_list(copy, lesson, "right")
            yield _mine(copy, number)
            yield _all_solved(copy, number)


def _all_solved(copy: EditionCopy, number: str) -> Finding:
    """nbval with every answer typed in: the end of a learner's way."""
    results = copy.cells(number)
    failed = [f"cell {n}: {said}" for n, said in results.items() if said]
    problem = "\n".join(failed)[:2000] if results else "no cell came to an end"
    return Finding(f"{number}: with every exercise solved by hand, no cell fails", problem)


def _tests(copy: EditionCopy) -> Finding:
    """./run_all.sh test, on the quick tests; among them the one of the links."""
    test = "tests/frame/test_links.py"
    status, said = copy.run("./run_all.sh", "--no-setup", "test", test)
    good = status == 0 and "Your own answers are tested" in said
    return Finding(f"./run_all.sh test {test}: all links resolve", "" if good else said[-2000:])


def _script(copy: EditionCopy, number: str, status: int, said: str) -> Finding:
    """What ./run_all.sh said about a lesson with nothing solved."""
    what = f"{number}: ./run_all.sh names the exercise that the script needs first"
    log = next((copy.root / "runs").glob(f"{number}_*/run.log"), None)
    text = log.read_text(encoding="utf-8", errors="replace") if log else "it left no log"
    found = STOPPED.search(text)
    good = status == 1 and found and found[1].startswith(number) and found[0] in said
    return Finding(f"{what} ({found[1] if found else '?'})", "" if good else text[-2000:])


def _run_all(copy: EditionCopy, number: str) -> Finding:
    """Every cell in order, as Jupyter's Run All."""
    command = ["-m", "shared.cli.notebooks", number, "--mode", "reading", "--no-write"]
    status, said = copy.run(copy.python, *command)
    found = STOPPED.search(said)
    good = status == 1 and found and found[1].startswith(number) and "NotSolved" in said
    what = f"{number}: Run All stops at the first use of an unsolved exercise"
    return Finding(f"{what} ({found[1] if found else '?'})", "" if good else said[-2000:])


def _to_do_list(copy: EditionCopy, lesson: Lesson, outcome: str) -> Finding:
    """./run_all.sh todo, where every exercise must have the same outcome."""
    status, said = copy.run("./run_all.sh", "--no-setup", "todo", lesson.number)
    listed = [f"{each.id} {each.name} " for each in lesson.exercises]
    lines = [line for line in said.splitlines() if line.endswith(f"  {outcome}")]
    good = status == (outcome != "right") and len(lines) == len(listed)
    good &= all(line.startswith(start) for line, start in zip(lines, listed, strict=False))
    what = f"{lesson.number}: ./run_all.sh todo lists {len(listed)} exercises as {outcome}"
    return Finding(what, "" if good else said[-2000:])


def strict_form(copy: EditionCopy, lesson: Lesson) -> Finding:
    """nbval with nothing solved: which cells fail, and why."""
    number = lesson.number
    path = copy.root / "lessons" / lesson.folder / "lesson.ipynb"
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    said = copy.cells(number)
    checks = {n for n, cell in enumerate(cells) if CHECK.search(cell.source)}
    failed = {n for n, words in said.items() if words}
    unsolved = {exercise.name for exercise in lesson.exercises}
    rest = failed - checks
    uses = {n for n in rest if STOPPED.search(said[n]) or _names(cells[n], ast.Load) & unsolved}
    follows = {n for n in rest - uses if _follows(n, cells, failed)}
    passed = set(said) - failed
    what = (
        f"{number}: nbval lists {len(checks)} checks, {len(uses)} cells that use unsolved exercises"
        f" and {len(follows)} that need what those make; {len(passed)} cells pass"
    )
    problems = [f"cell {n} passes" for n in sorted(checks & passed)]
    problems += [
        f"cell {n} fails: {said[n][:600]}" for n in sorted(failed - checks - uses - follows)
    ]
    if len(said) != len(cells):
        problems.append(f"{len(cells)} cells, {len(said)} results")
    return Finding(what, "\n".join(problems))


def _names(cell: nbformat.NotebookNode, context: type[ast.expr_context]) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name)]
    return {node.id for node in nodes if isinstance(node.ctx, context)}


def _follows(number: int, cells: Sequence[nbformat.NotebookNode], failed: set[int]) -> bool:
    """Whether a cell uses a name that a cell before it, which failed, was to make."""
    trees = [ast.parse(cells[n].source) for n in failed if n < number]
    made = {name for tree in trees for node in tree.body for name in bound_by(node)}
    return bool(made & _names(cells[number], ast.Load))


def _mine(copy: EditionCopy, number: str) -> Finding:
    """The script with the learner's own answers."""
    script = next((copy.root / "lessons").glob(f"{number}_*/train.py"))
    out = copy.place / "mine"
    flags = ["--mine", "--preset", "tiny", "--out", out]
    status, said = copy.run(copy.python, script, *flags)
    good = status == 0 and (out / "metrics.json").exists()
    return Finding(f"{number}: the script runs with --mine", "" if good else said[-2000:])
