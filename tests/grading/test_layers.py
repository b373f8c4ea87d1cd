"""The grader's parts import only what the docstring of solutions/grading lists above them."""

import ast
import re
from pathlib import Path

import pytest

import solutions.grading

ROOT = Path(__file__).resolve().parents[2]
GRADER = ROOT / "solutions" / "grading"
LINES = re.findall(r"^((?:\w+/?(?:, )?)+)  ", solutions.grading.__doc__, re.MULTILINE)
ORDER = [name.rstrip("/") for line in LINES for name in line.split(", ")]
RANK = {name: n for n, line in enumerate(LINES) for name in re.findall(r"\w+", line)}
OF_THE_COURSE = ("shared", "solutions")


def imported(path: Path) -> set[str]:
    """The modules of the course that a file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return {name for name in found if name.split(".")[0] in OF_THE_COURSE}


def test_the_docstring_lists_everything_that_is_there():
    there = {path.stem for path in GRADER.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert sorted(ORDER) == sorted(there - {"__init__", "__pycache__"})


@pytest.mark.parametrize("name", ORDER)
def test_a_part_imports_what_stands_with_it_or_above(name):
    place = GRADER / name
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    others = {
        (path, each.split(".")[2])
        for path in files
        for each in imported(path)
        if each.startswith("solutions.grading.")
    }
    assert [(path.name, other) for path, other in others if RANK[other] > RANK[name]] == []


def test_what_runs_beside_an_answer_imports_nothing_of_the_grader():
    files = sorted((GRADER / "sandbox" / "inside").glob("*.py"))
    assert {path.stem for path in files} == {"__init__", "judge"}
    assert [path.name for path in files if imported(path)] == []
