"""Known answers as exercise cells: they stand on their own and say what they said."""

import ast
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from solutions.grading.intake.audit import audit
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.sources import parsed
from solutions.grading.results import Exercise, Lesson
from tests.grading.course import course

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = sorted(
    path.parent.name.removeprefix("lesson")[:2] for path in ROOT.glob("lessons/*/lesson.ipynb")
)


@pytest.mark.full
@pytest.mark.parametrize("number", NUMBERS)
def test_every_known_answer_has_a_cell_that_imports_nothing_of_the_course_and_has_no_flag(number):
    """The setup cell's names are enough: an answer that brings its own would be looked at."""
    lesson = course()[number]
    known = KnownAnswers(ROOT, lesson)
    assert list(lesson.wrong) == list(known.names), "the judge tries one beside every answer"
    folder = f"{next(ROOT.glob(f'lessons/lesson{number}_*')).name}.py"
    mistakes = list(known.mistakes())
    written = (ROOT / "solutions" / "mistakes" / folder).read_text().count("\n@mistake(")
    assert len(mistakes) == written
    flags = {id: audit(stub, lesson, id) for id, stub in lesson.stubs.items()}
    for each in chain(known.references(), known.alternatives(), mistakes):
        cell = known.cell(each)
        imports = (line for line in cell.splitlines() if "import " in line)
        assert [x for x in imports if x.split()[1].startswith(("shared", "solutions"))] == []
        found = audit(cell, lesson, each.exercise)
        # A mistake may be the engine called in place of one's own hand.
        flags[cell] = tuple(x for x in found if not each.says or "itself" not in x.what)
    assert {cell: found for cell, found in flags.items() if found} == {}


HELPERS = """
from dataclasses import dataclass
import json as writer
import xml.etree
import torch
import torch.utils.checkpoint

SIZE, STEP = 3, 2


@dataclass
class Box:
    STEP: int = 7

    def both(self):
        return self.STEP, SIZE


def count(times):
    total = STEP

    def add():
        nonlocal total
        total += times

    add()
    return total


def again(n):
    return n if n < 1 else again(n - 1)


def _twice(x):
    return 2 * x


def twice(x):
    return xml.etree.__name__ and torch.utils and _twice(x)


def double(x):
    return writer.loads(str(twice(x)))
"""
MISTAKES = """
from shared import helpers as right
from shared.checking import mistake
from shared.helpers import Box, SIZE as size


def triple(x):
    right.STEP, before = 10, right.STEP
    return right.double(x) + right.STEP - before


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
    lesson = Lesson("01", "lesson01_toy", (Exercise("01.1", "double", 1),), "import torch", {}, "")
    toy = KnownAnswers(tmp_path, lesson)
    assert [each.says for each in toy.mistakes()] == ["three times", "something else"]
    found = []
    for each in chain(toy.references(), toy.mistakes()):
        names = {"exercise": lambda id: lambda own: own, "torch": __import__("torch")}
        exec(toy.cell(each), names)
        found.append(names["double"](4))
        assert not {"triple", "count", "again", "Box"} & set(names)
    assert found == [8, 16, [8, (7, 3), 7, 0, 3]]


def test_threads_take_turns_at_parsing(monkeypatch):
    inside, most = [], []

    def parse(source):
        inside.append(source)
        most.append(len(inside))
        time.sleep(0.01)
        return inside.pop()

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(ast, "parse", parse)
        assert list(pool.map(parsed, "abcdefgh")) == list("abcdefgh")
    assert set(most) == {1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parsed(r'"\d"').body, "an odd escape is nobody's business"
