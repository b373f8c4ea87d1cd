"""A lesson is judged beside what its class has that week: nothing later, no answer of its own."""

import os
import re
from pathlib import Path

import pytest

from solutions.answers_held import answers_held
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.lesson import read_lessons
from solutions.grading.results import Answers, Limits, Outcome
from solutions.grading.sandbox.editions import Editions
from solutions.grading.sandbox.run import Workspace

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ["02", "03"]


@pytest.fixture(scope="module")
def lessons():
    return read_lessons(ROOT, NUMBERS)


@pytest.fixture(scope="module")
def copies(lessons, tmp_path_factory):
    """Made by somebody whose files nobody else can read."""
    before = os.umask(0o077)
    try:
        editions = Editions(tmp_path_factory.mktemp("workspace"), ROOT)
        return {number: editions.of(lesson) for number, lesson in lessons.items()}
    finally:
        os.umask(before)


def test_the_sandbox_s_own_user_can_read_it(copies):
    paths = [path for each in copies.values() for path in (each.folder, *each.folder.rglob("*"))]
    assert [path for path in paths if path.stat().st_mode & 0o044 != 0o044] == []


@pytest.mark.parametrize("number", NUMBERS)
def test_no_file_holds_an_answer_of_the_week_or_later(number, lessons, copies):
    folder = copies[number].folder
    known = [*KnownAnswers(ROOT, lessons[number]).references()]
    known += KnownAnswers(ROOT, lessons["03"]).references()
    assert list(answers_held(folder, known)) == []
    there = sorted(path.name[6:8] for path in folder.glob("lessons/lesson*"))
    assert there == [f"{n:02}" for n in range(1, int(number) + 1)]
    compiled = {path.name.split(".")[0] for path in folder.glob("shared/**/__pycache__/*")}
    assert compiled <= {path.stem for path in folder.glob("shared/**/*.py")}
    assert not {"executor", "fully_shard"} & compiled


def test_what_checks_need_of_the_week_comes_as_text(copies):
    (text,) = copies["02"].texts.values()
    assert "class MultiHeadAttention" in text
    assert all("withheld(" not in text for each in copies.values() for text in each.texts.values())
    whole = ROOT.joinpath("shared/model/attention.py").read_text()
    assert copies["03"].folder.joinpath("shared/model/attention.py").read_text() == whole


LOOKING = """@exercise("01.1")
def sinusoidal_encoding(max_len, d_model):
    import pathlib, sys
    found = [p for p in pathlib.Path("/course").rglob("*.py") if "def rotary" in p.read_text()]
    finders = [each for each in sys.meta_path if type(each).__name__ == "KeptBack"]
    left = [each.texts for each in finders]
    raise ValueError(f"seen: {found} {left} {'shared.pipeline' in sys.modules}")
"""


@pytest.mark.full
def test_an_answer_finds_none_and_what_is_built_on_one_works():
    lesson = read_lessons(ROOT, ["01"])["01"]
    known = KnownAnswers(ROOT, lesson)
    cells = {each.exercise: known.cell(each) for each in known.references()}
    with Workspace(ROOT, confined=False) as workspace:
        answers = Answers("ada", "01", {**cells, "01.1": LOOKING}, {})
        verdicts = {each.exercise: each for each in workspace.grade(answers, lesson, Limits())}
    assert re.search(r"seen: \[\] \[\] False", verdicts["01.1"].seen)
    assert [verdicts[id].outcome for id in ("01.3", "01.4")] == [Outcome.RIGHT] * 2
