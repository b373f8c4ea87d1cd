"""Trying a written student edition out, lesson by lesson, unsolved and then solved.

Everything runs in a copy of the edition, in an environment made for it that has the packages of the
course and not the course: nothing can be found that a class would not have.
"""

import ast
import json
import os
import re
import shutil
import sysconfig
import tempfile
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shared.ranks.processes import supervise
from solutions.grading.intake.answer_cells import AnswerCells, hand_in
from solutions.grading.intake.sources import bound_by
from solutions.grading.results import Lesson

STOPPED = re.compile(r"exercise (\d\d\.\d+[a-z]?) \(\w+\) is not solved yet")
COLOUR = re.compile(r"(?:#x1B|\x1b)\[[\d;]*m")  # as pytest's XML has it, and as a terminal
TIME_LIMIT = 400  # seconds for one command; a whole notebook takes half a minute


class Finding(NamedTuple):
    """What was looked at; `problem` is empty where it is as it should be."""

    what: str
    problem: str = ""


def finding(what: str, good: bool, said: str) -> Finding:
    """A finding whose problem is the end of what a command said."""
    return Finding(what, "" if good else said[-2000:] or "it said nothing")


class EditionCopy:
    """A copy of the edition, and an environment that knows it and not the course."""

    def __init__(self, edition: Path, place: Path) -> None:
        self.root, self.place = place / "edition", place
        shutil.copytree(edition, self.root)
        venv.create(place / "venv", with_pip=False, symlinks=True)
        self.python = place / "venv" / "bin" / "python"
        site = next((place / "venv").glob("lib/*/site-packages"))
        # The packages of this environment; its .pth files, one of them the course's, do not count.
        packages = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
        (site / "edition.pth").write_text("\n".join([str(self.root), *sorted(packages)]) + "\n")

    def run(self, *command: str | Path) -> tuple[int, str]:
        """Run a command as a learner would; return its status and all that it said."""
        ours = ("TORCH_HANDLE", "PYTEST", "PYTHON", "JUPYTER", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env["PATH"] = f"{self.python.parent}{os.pathsep}{env.get('PATH', '')}"
        env |= {"OMP_NUM_THREADS": "1", "JUPYTER_DATA_DIR": str(self.place / "jupyter")}
        log = self.place / "said.txt"
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.root), *map(str, command)]
        outcome = supervise(there, env=env, log=log, time_limit=TIME_LIMIT)
        late = f"\n(stopped after {TIME_LIMIT} s)\n" if outcome.timed_out else ""
        return outcome.status, log.read_text(encoding="utf-8", errors="replace") + late

    def cells(self, lesson: Lesson) -> dict[int, str]:
        """The code cells under nbval: what each that failed said, "" where it passed."""
        report = self.place / "report.xml"
        report.unlink(missing_ok=True)
        folder = f"lessons/{lesson.folder}"
        self.run(self.python, "-m", "pytest", "--nbval", folder, "-q", f"--junit-xml={report}")
        cells = {}
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            if "::Cell " in f"::{case.get('name', '')}":
                faults = [each for each in case if each.tag in ("failure", "error")]
                said = "".join(f"{each.get('message')}\n{each.text}" for each in faults)
                cells[int(case.get("name", "").split()[-1])] = COLOUR.sub("", said)
        return cells


def try_out(edition: Path, course: Path, lessons: Mapping[str, Lesson]) -> Iterator[Finding]:
    """The pages' links, then each lesson unsolved, then solved."""
    with tempfile.TemporaryDirectory(prefix="student_edition_") as place:
        copy = EditionCopy(edition, Path(place))
        test = "tests/frame/test_links.py"
        status, said = copy.run("./run_all.sh", "--no-setup", "test", test)
        good = status == 0 and "Your own answers are tested" in said
        yield finding(f"./run_all.sh test {test}: all links resolve", good, said)
        status, said = copy.run("./run_all.sh", "--no-setup", "--preset", "tiny", *lessons)
        for lesson in lessons.values():
            what = "./run_all.sh names the exercise that the script needs first"
            yield _stops(what, lesson, status, said)
        for number, lesson in lessons.items():
            words = ["-m", "shared.cli.notebooks", number, "--mode", "reading", "--no-write"]
            what = "Run All stops at the first use of an unsolved exercise"
            yield _stops(what, lesson, *copy.run(copy.python, *words))
            yield _to_do_list(copy, lesson, "open")
            yield strict_form(copy, lesson)
            folder = Path("lessons") / lesson.folder
            notebook = copy.root / folder / "lesson.ipynb"
            solved = hand_in(notebook.read_bytes(), AnswerCells(course, lesson).references)
            notebook.write_bytes(solved)
            yield _to_do_list(copy, lesson, "right")
            words = ["--mine", "--preset", "tiny", "--out", f"runs/mine{number}"]
            status, said = copy.run(copy.python, folder / "train.py", *words)
            good = status == 0 and (copy.root / words[-1] / "metrics.json").exists()
            yield finding(f"{number}: the script runs with --mine", good, said)
            results = copy.cells(lesson)
            failed = [f"cell {n}: {said[:500]}" for n, said in results.items() if said]
            what = f"{number}: with every exercise solved by hand, no cell fails"
            yield finding(what, bool(results) and not failed, "\n".join(failed))


def _stops(what: str, lesson: Lesson, status: int, said: str) -> Finding:
    """Whether a command failed, and named an exercise of the lesson that is not solved."""
    found = next((id for id in STOPPED.findall(said) if id.startswith(lesson.number)), "")
    return finding(f"{lesson.number}: {what} ({found})", status == 1 and found != "", said)


def _to_do_list(copy: EditionCopy, lesson: Lesson, outcome: str) -> Finding:
    """./run_all.sh todo, where every exercise must have the same outcome."""
    status, said = copy.run("./run_all.sh", "--no-setup", "todo", lesson.number)
    lines = [line.split()[:2] for line in said.splitlines() if line.endswith(f"  {outcome}")]
    good = status == (outcome != "right") and lines == [[e.id, e.name] for e in lesson.exercises]
    what = f"{lesson.number}: ./run_all.sh todo lists {len(lesson.exercises)} exercises"
    return finding(f"{what} as {outcome}", good, said)


def strict_form(copy: EditionCopy, lesson: Lesson) -> Finding:
    """nbval with nothing solved: the checks fail, cells that use what is unsolved may, no other."""
    path = copy.root / "lessons" / lesson.folder / "lesson.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    said = copy.cells(lesson)
    missing = {each.name for each in lesson.exercises}  # and what cells that failed were to make
    checks, users, problems = 0, 0, []
    for n, source in enumerate(sources):
        tree = ast.parse(source)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        words = said.get(n, "")
        if n not in said:
            problems.append(f"cell {n} did not run")
        elif source.startswith("check("):
            checks += 1
            problems += [] if words else [f"cell {n} passes"]
        elif words:
            users += 1
            excused = STOPPED.search(words) or used & missing
            problems += [] if excused else [f"cell {n} fails: {words[:600]}"]
            missing |= {name for node in tree.body for name in bound_by(node)}
    what = f"nbval lists {checks} checks and {users} cells that use what is unsolved"
    return Finding(f"{lesson.number}: {what}", "\n".join(problems))
