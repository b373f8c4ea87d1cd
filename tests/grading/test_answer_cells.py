"""References and mistakes as exercise cells: they stand on their own and say what they said."""

import ast
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from shared.course import fault_words, load_checks
from solutions.grading.answer_cells import AnswerCells, hand_in
from solutions.grading.lesson import read_lessons, take_answers

ROOT = Path(__file__).resolve().parents[2]
LESSONS = read_lessons(ROOT, [path.parent.name for path in ROOT.glob("lessons/*/lesson.ipynb")])
# In the order of the file, the first and last mistake of each exercise; the whole is the self test.
SOME = {number: AnswerCells(ROOT, lesson) for number, lesson in LESSONS.items()}


def ends(number):
    """The first and the last known mistake of each exercise."""
    by_id = {}
    for each in SOME[number].mistakes:
        by_id.setdefault(each.exercise, []).append(each)
    return [each for known in by_id.values() for each in (known[0], known[-1])]


def heard(number, exercise, cell):
    """What the checks say to a cell that runs after the setup cell and no other."""
    module = ModuleType("_a_notebook")
    sys.modules[module.__name__] = module
    exec(LESSONS[number].setup, module.__dict__)
    exec("exercise = lambda id: lambda own: own", module.__dict__)
    exec(compile(cell, "cell", "exec"), module.__dict__)
    checks = load_checks(number)[exercise]
    fault = checks.first_fault(vars(module)[checks.name])
    return " ".join(fault_words(checks, fault).split()) if fault else ""


@pytest.mark.parametrize("number", ["01", "02"])
def test_every_reference_passes_from_its_cell(number):
    cells = SOME[number].references
    assert list(cells) == [each.id for each in LESSONS[number].exercises]
    assert {id: heard(number, id, cell) for id, cell in cells.items()} == dict.fromkeys(cells, "")


@pytest.mark.parametrize("number", ["01", "02", "03", "04"])
def test_a_mistake_hears_its_words_from_its_cell(number):
    said = {known.says: heard(number, known.exercise, known.cell) for known in ends(number)}
    assert [says for says, words in said.items() if " ".join(says.split()) not in words] == []


@pytest.mark.parametrize("number", LESSONS)
def test_a_cell_imports_nothing_of_the_course(number):
    """The setup cell's names are enough: an answer that brings its own would be looked at."""
    cells = [*SOME[number].references.values(), *(each.cell for each in SOME[number].mistakes)]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell))]
    modules = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    assert not [name for name in modules if name.split(".")[0] in ("shared", "solutions")]


@pytest.mark.parametrize("number", LESSONS)
def test_every_mistake_of_the_file_is_there(number):
    folder = LESSONS[number].folder
    text = (ROOT / "solutions" / "mistakes" / f"lesson{folder}.py").read_text()
    assert len(SOME[number].mistakes) == text.count("\n@mistake(")


def test_what_is_handed_in_is_taken_back():
    lesson = LESSONS["02"]
    pristine = (ROOT / "lessons" / lesson.folder / "lesson.ipynb").read_bytes()
    cells = SOME["02"].references
    answers = take_answers("Ada", lesson, hand_in(pristine, cells))
    assert answers.cells == cells
    assert not answers.problems
    before, after = json.loads(pristine), json.loads(hand_in(pristine, {}))
    assert before == after
