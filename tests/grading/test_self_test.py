"""The self test: a right grader passes it, each way of being wrong is named, and ours passes."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import InputError
from solutions.grading.intake.answer_cells import AnswerCells
from solutions.grading.intake.lesson import read_lessons
from solutions.grading.results import Limits, Outcome, Verdict
from solutions.grading.sandbox import bubblewrap
from solutions.grading.selftest import Due, self_test

ROOT = Path(__file__).resolve().parents[2]
LESSON = read_lessons(ROOT, ["01"])["01"]
KNOWN = AnswerCells(ROOT, LESSON)
SAYS = {each.cell: each.says for each in KNOWN.mistakes}


class Ideal:
    """Knows every answer; a test spoils what it says."""

    promise = ""

    def __init__(self, spoil=lambda verdict: verdict):
        self.spoil = spoil
        self.num_graded = 0

    def grade(self, answers, lesson, limits):
        judged = [each for each in lesson.exercises if each.id in answers.cells]
        self.num_graded += len(judged)
        return [self.spoil(self.judge(answers, each)) for each in judged]

    def judge(self, answers, exercise):
        cell, points = answers.cells[exercise.id], exercise.points
        given = answers.student, "01", exercise.id, exercise.name
        whole = Verdict(*given, points, points, Outcome.RIGHT, "right")
        if cell == LESSON.stubs.get(exercise.id):
            return replace(whole, points=0, outcome=Outcome.UNSOLVED)
        if cell in SAYS:
            says = f"a {SAYS[cell]} b"
            return replace(whole, points=0.5, outcome=Outcome.PARTLY, mistake=says)
        return whole


def examine(judge, most=None):
    """The self test of lesson 01 with a judge."""
    return self_test(ROOT, 2, Limits(), ["01"], most=most, open_judge=lambda *_: nullcontext(judge))


def test_a_right_grader_passes_and_every_answer_is_tried(capsys):
    judge = Ideal()
    assert examine(judge)
    others = sum(map(len, KNOWN.alternatives.values()))
    assert judge.num_graded == 8 + others + len(KNOWN.mistakes)
    out = capsys.readouterr().out
    title, row, last = out.splitlines()
    assert title.split() == ["lesson", "references", "stubs", "alternatives", "mistakes"]
    count = len(KNOWN.mistakes)
    assert row.split() == f"01 4 of 4 4 of 4 {others} of {others} {count} of {count}".split()
    assert last.startswith(f"{judge.num_graded} answers in ")
    assert last.endswith("0 not as due")


def full(verdict):
    """Full marks whatever is wrong."""
    return replace(verdict, points=verdict.max, outcome=Outcome.RIGHT, mistake="")


def strict(verdict):
    """A point less for everybody."""
    return replace(verdict, points=max(0, verdict.points - 1))


def deaf(verdict):
    """Other words than the mistake's."""
    return replace(verdict, mistake="something else", message=verdict.mistake)


def suspicious(verdict):
    """Flags an honest answer."""
    return replace(verdict, flags=("line 1 imports math",)) if verdict.points else verdict


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (full, "01.1 mistake 'sine and cosine are swapped' has 2 of 2"),
        (full, "01.3 stub has 3 of 3"),
        (strict, "01.1 reference has 1 of 2"),
        (strict, "01.4 alternative 1 has 3 of 4"),
        (deaf, "01.1 mistake 'sine and cosine are swapped' heard other words"),
        (suspicious, "01.1 reference is flagged: line 1 imports math"),
    ],
)
def test_a_wrong_grader_fails_and_is_told_where(spoil, complaint, capsys):
    assert not examine(Ideal(spoil), most=1)
    assert complaint in capsys.readouterr().err


def test_a_verdict_that_is_missing_is_noticed(capsys):
    judge = Ideal()
    grade = judge.grade
    judge.grade = lambda *given: grade(*given)[:-1]
    assert not examine(judge, most=1)
    assert "01.4 reference has no verdict" in capsys.readouterr().err


def test_an_engine_may_be_flagged_as_a_mistake_and_nothing_else():
    flags = ("line 1 uses torch.f, which is the exercise itself",)
    verdict = Verdict("", "01", "01.1", "f", 0, 2, Outcome.WRONG, "", mistake="m", flags=flags)
    assert Due("01", "mistake", "01.1", "m").complaint(verdict) == ""
    assert "is flagged" in Due("01", "alternative", "01.1").complaint(verdict)


def test_an_unknown_lesson_is_an_input_error():
    with pytest.raises(InputError, match="99"):
        self_test(ROOT, 1, Limits(), ["99"])


SETUP = "import torch\nfrom shared.exercises.notebook import check, exercise"
STUB = '@exercise("01.{n}")\ndef {name}(x):\n    raise NotImplementedError'
CHECKS = """
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_equal, recognise

e1 = checks_for("01.1", name="double", difficulty=2, minutes=5, hints=["x + x"])
e2 = checks_for("01.2", name="half", difficulty=1, minutes=5, hints=["x / 2"])


@e1.check("three")
def three(double):
    recognise({"it squares": double(3) == 9}, expected="6", seen=str(double(3)))
    expect_equal(double(3), 6, what="double(3)")


@e1.check("zero")
def zero(double):
    expect_equal(double(0), 0, what="double(0)")


@e2.check("four")
def four(half):
    expect_equal(half(4), 2, what="half(4)")
"""
ANSWERS = """
def double(x):
    return x + x


def half(x):
    return x // 2
"""
MISTAKES = """
from shared.exercises.mistakes import mistake


@mistake("01.1", says="it squares")
def double(x):
    return x * x


@mistake("01.2", says="half(4) = 2")
def half(x):
    return x
"""


def toy_course(folder: Path) -> Path:
    """A course of one lesson with two exercises, on the real shared/."""
    cells = [{"source": SETUP, "metadata": {"tags": ["setup"]}}]
    for n, name, points in ((1, "double", 2), (2, "half", 1)):
        exercise, checked = {"grade_id": f"exercise-01-{n}"}, {"grade_id": f"check-01-{n}"}
        checked |= {"grade": True, "points": points}
        cells += [
            {"source": STUB.format(n=n, name=name), "metadata": {"nbgrader": exercise}},
            {"source": f'check("01.{n}", {name})', "metadata": {"nbgrader": checked}},
        ]
    notebook = {"nbformat": 4, "cells": [{"cell_type": "code", **cell} for cell in cells]}
    for name, text in {
        "lessons/01_toy/lesson.ipynb": json.dumps(notebook),
        "lessons/01_toy/checks.py": CHECKS,
        "solutions/lesson01_toy.py": ANSWERS,
        "solutions/mistakes/lesson01_toy.py": MISTAKES,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "shared").symlink_to(ROOT / "shared")
    return folder


ALTERNATIVES = """
def doubled(x):
    return 2 * x


ALTERNATIVES = {"01.1": [doubled]}
"""


@pytest.mark.timeout(600)
def test_our_grader_passes_on_a_lesson(tmp_path, capsys):
    try:
        bubblewrap.require()
    except InputError as why:
        pytest.skip(str(why))
    course = toy_course(tmp_path)
    (course / "solutions" / "alternatives").mkdir()
    (course / "solutions" / "alternatives" / "lesson01_toy.py").write_text(ALTERNATIVES)
    passed = self_test(course, 2, Limits(), None)
    said = capsys.readouterr()
    assert passed, said.err
    row = said.out.splitlines()[1].split()
    assert " ".join(row) == "01 2 of 2 2 of 2 1 of 1 2 of 2"
