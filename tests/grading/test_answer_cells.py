"""References and mistakes as exercise cells: they stand on their own and say what they said."""

import ast
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from shared.exercises.lessons import load_checks
from solutions.grading.intake.answer_cells import AnswerCells, hand_in
from solutions.grading.intake.lesson import read_lessons, take_answers
from solutions.grading.results import Exercise, Lesson

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = sorted(path.parent.name[:2] for path in ROOT.glob("lessons/*/lesson.ipynb"))


@cache
def known(number):
    """A lesson's references and mistakes as cells."""
    return AnswerCells(ROOT, read_lessons(ROOT, [number])[number])


def ends(number):
    """The first and the last mistake of each exercise; the whole is the self test."""
    by_id = {}
    for each in known(number).mistakes:
        by_id.setdefault(each.exercise, []).append(each)
    return [each for some in by_id.values() for each in (some[0], some[-1])]


def heard(number, exercise, cell):
    """The texts of what the checks say to a cell that runs after the setup cell and no other."""
    module = ModuleType("_a_notebook")
    sys.modules[module.__name__] = module
    exec(known(number).lesson.setup, module.__dict__)
    exec("exercise = lambda id: lambda own: own", module.__dict__)
    exec(compile(cell, "cell", "exec"), module.__dict__)
    checks = load_checks(number)[exercise]
    fault = checks.first_fault(vars(module)[checks.name])
    return (fault.mistake, fault.expected, fault.seen, fault.hint) if fault else ()


@pytest.mark.parametrize("number", ["01", "02"])
def test_every_reference_passes_from_its_cell(number):
    cells = known(number).references
    assert list(cells) == [each.id for each in known(number).lesson.exercises]
    assert {id: heard(number, id, cell) for id, cell in cells.items()} == dict.fromkeys(cells, ())


@pytest.mark.parametrize("number", ["01", "02", "03", "04"])
def test_a_mistake_hears_its_words_from_its_cell(number):
    said = {each.says: heard(number, each.exercise, each.cell) for each in ends(number)}
    assert [says for says, texts in said.items() if not any(says in t for t in texts)] == []


@pytest.mark.parametrize("number", NUMBERS)
def test_a_cell_imports_nothing_of_the_course(number):
    """The setup cell's names are enough: an answer that brings its own would be looked at."""
    cells = [*known(number).references.values(), *(each.cell for each in known(number).mistakes)]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell))]
    modules = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    assert not [name for name in modules if name.split(".")[0] in ("shared", "solutions")]


@pytest.mark.parametrize("number", NUMBERS)
def test_every_mistake_of_the_file_is_there(number):
    folder = known(number).lesson.folder
    text = (ROOT / "solutions" / "mistakes" / f"lesson{folder}.py").read_text()
    assert len(known(number).mistakes) == text.count("\n@mistake(")


def test_what_is_handed_in_is_taken_back():
    lesson = known("02").lesson
    pristine = (ROOT / "lessons" / lesson.folder / "lesson.ipynb").read_bytes()
    cells = known("02").references
    answers = take_answers("Ada", lesson, hand_in(pristine, cells))
    assert answers.cells == cells
    assert not answers.problems
    before, after = json.loads(pristine), json.loads(hand_in(pristine, {}))
    assert before == after


HELPERS = """
from dataclasses import dataclass
import json as writer
import xml.etree

SIZE, STEP = 3, 2


@dataclass
class Box:
    SIZE: int = 7

    def both(self):
        return self.SIZE, SIZE


def count(SIZE):
    total = STEP

    def add():
        nonlocal total
        total += SIZE

    add()
    return total


def again(n):
    return n if n < 1 else again(n - 1)


def _twice(x):
    return 2 * x


def twice(x):
    return xml.etree.__name__ and _twice(x)


def double(x):
    return writer.loads(str(twice(x)))
"""
MISTAKES = """
from shared import helpers as right
from shared.checking import mistake
from shared.helpers import Box, SIZE as size


def triple(x):
    return right.double(x) + x


@mistake("01.1", says="three " "times")
def double(x: "int") -> "int":
    return triple(x)


@mistake("01.1", says="something else")
def double(x):
    box = Box()
    return [right.double(x), box.both(), right.count(5), right.again(3), size]
"""


def test_names_are_kept_apart(tmp_path):
    """What shadows a name keeps it, and a cell can neither use nor disturb another one's names."""
    for name, source in {
        "shared/helpers.py": HELPERS,
        "solutions/lesson01_toy.py": "from shared.helpers import double as double",
        "solutions/mistakes/lesson01_toy.py": MISTAKES,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    setup = "import pickle as writer"
    lesson = Lesson("01", "01_toy", (Exercise("01.1", "double", 1),), setup, {}, "")
    toy = AnswerCells(tmp_path, lesson)
    assert [each.says for each in toy.mistakes] == ["three times", "something else"]
    found = []
    for cell in (toy.references["01.1"], *(each.cell for each in toy.mistakes)):
        names = {"exercise": lambda id: lambda own: own, "writer": None, "SIZE": None}
        exec(cell, names)
        found.append(names["double"](4))
        assert names["writer"] is None, "the setup cell's name keeps its meaning"
        assert not {"triple", "count", "again", "STEP", "Box"} & set(names)
    assert found == [8, 12, [8, (7, 3), 7, 0, 3]]
