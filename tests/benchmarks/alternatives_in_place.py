"""Are notebooks green with right answers in another style? nbval over copies that hold them.

python tests/benchmarks/alternatives_in_place.py [--lessons 02 05]

Each lesson runs once for each style: all its exercises are the first alternative, then all the
second. A line a run: cells that passed, and the first words of those that did not.
"""

import argparse
import importlib
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat

from shared.exercises.answers import EXERCISE
from shared.exercises.lessons import ROOT, load_checks

STYLES = 2


def write_copy(folder: Path, style: int, place: Path) -> Path:
    """Copy the lessons; the exercise cells of one take the alternatives of one style.

    All of them, because a notebook may start another lesson's script.
    """
    copy = place / "lessons" / folder.name
    shutil.copytree(
        folder.parent, copy.parent, ignore=shutil.ignore_patterns("__pycache__", "answers.ipynb")
    )
    number, module = folder.name[:2], f"solutions.alternatives.lesson{folder.name}"
    answers = importlib.import_module(module).ALTERNATIVES
    names = {id: each.name for id, each in load_checks(number).items()}
    notebook = nbformat.read(copy / "lesson.ipynb", as_version=4)
    for cell in notebook.cells:
        ids = EXERCISE.findall(cell.source) if cell.cell_type == "code" else []
        if ids:
            cell.source = f"from {module} import ALTERNATIVES as answers\n\n"
            for id in ids:
                chosen = min(style, len(answers[id]) - 1)
                cell.source += f'{names[id]} = exercise("{id}")(answers["{id}"][{chosen}])\n'
                # A notebook may print the name that a learner's class has.
                cell.source += f'{names[id]}.__name__ = "{names[id]}"\n'
    nbformat.write(notebook, copy / "lesson.ipynb")
    return copy / "lesson.ipynb"


def run(path: Path) -> tuple[int, list[str]]:
    """Return how many cells passed, and a line for each that did not."""
    report = path.parent / "report.xml"
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", f"--junitxml={report}", path.name]
    subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(path.parent)],
        cwd=path.parent, capture_output=True, text=True,
    )  # fmt: skip
    passed, failed = 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        faults = [each.get("message") or each.text or "" for each in case.iter("failure")]
        faults += [each.get("message") or "" for each in case.iter("error")]
        passed += not faults
        failed += [f"{case.get('name')}: {' '.join(fault.split())[:300]}" for fault in faults]
    return passed, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lessons", nargs="+", help="numbers (all)")
    args = parser.parse_args()
    for folder in sorted((ROOT / "lessons").glob("[0-9][0-9]_*")):
        if args.lessons and folder.name[:2] not in args.lessons:
            continue
        for style in range(STYLES):
            with tempfile.TemporaryDirectory() as place:
                passed, failed = run(write_copy(folder, style, Path(place)))
            print(
                f"{folder.name}, style {style + 1}: {passed} passed, {len(failed)} failed",
                flush=True,
            )
            for line in failed:
                print(f"    {line}", flush=True)


if __name__ == "__main__":
    main()
