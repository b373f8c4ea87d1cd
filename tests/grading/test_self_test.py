"""The self test: a right grader passes it, each way of being wrong is named, and ours passes."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import InputError
from solutions.grading.answer_cells import AnswerCells
from solutions.grading.intake.lesson import read_lessons
from solutions.grading.results import Limits, Outcome, Verdict
from solutions.grading.selftest import hand_ins, self_test

ROOT = Path(__file__).resolve().parents[2]
LESSON = read_lessons(ROOT, ["01"])["01"]
KNOWN = AnswerCells(ROOT, LESSON)
SAYS = {each.cell: each.says for each in KNOWN.mistakes}


class Ideal:
    """Knows every answer; a test spoils what it says."""

    layers = ()

    def __init__(self, spoil=lambda verdict: verdict):
        self.spoil = spoil
        self.num_graded = 0

    def grade(self, answers, lesson, limits):
        self.num_graded += 1
        return [self.spoil(self.judge(answers, each)) for each in lesson.exercises]

    def judge(self, answers, exercise):
        cell = answers.cells[exercise.id]
        whole = Verdict(
            answers.student,
            "01",
            exercise.id,
            exercise.name,
            exercise.points,
            exercise.points,
            Outcome.RIGHT,
            "right",
        )
        if cell == LESSON.stubs[exercise.id]:
            return replace(whole, points=0, outcome=Outcome.UNSOLVED)
        if cell == KNOWN.references[exercise.id]:
            return whole
        return replace(whole, points=0.5, outcome=Outcome.PARTLY, mistake=f"a {SAYS[cell]} b")


def examine(judge, most=None):
    """The self test of lesson 01 with a judge."""
    return self_test(ROOT, 2, Limits(), ["01"], most=most, open_judge=lambda *_: nullcontext(judge))


def test_a_right_grader_passes_and_every_mistake_is_tried(capsys):
    judge = Ideal()
    assert examine(judge)
    assert judge.num_graded == 2 + len(KNOWN.mistakes)
    out = capsys.readouterr().out
    assert out.splitlines()[:2] == [
        "lesson  references   stubs  mistakes",
        f"01          as due  as due  {len(KNOWN.mistakes)} of {len(KNOWN.mistakes)}",
    ]
    assert f"{judge.num_graded} notebooks in" in out
    assert out.endswith("0 not as due\n")


def full(verdict):
    """Full marks whatever is wrong."""
    return replace(verdict, points=verdict.max, outcome=Outcome.RIGHT, mistake="")


def strict(verdict):
    """A point less for everybody."""
    return replace(verdict, points=max(0, verdict.points - 1))


def drags(verdict):
    """An exercise that goes down whatever was handed in."""
    spoilt = replace(verdict, points=0, outcome=Outcome.STOPPED, message="stopped: it left")
    return spoilt if verdict.exercise == "01.4" and verdict.points else verdict


def deaf(verdict):
    """Other words than the mistake's."""
    return replace(verdict, mistake="something else", message=verdict.mistake)


def suspicious(verdict):
    """Flags an honest answer."""
    return replace(verdict, flags=("line 1 imports math",)) if verdict.points else verdict


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (full, "01.1 mistake 'sine and cosine are swapped': 01.1 has 2 of 2"),
        (full, "01 stubs: 01.3 has 3 of 3"),
        (strict, "01 references: 01.1 has 1 of 2"),
        (drags, "01.1 mistake 'sine and cosine are swapped': 01.4 has 0 of 4 (stopped: it left)"),
        (deaf, "01.1 mistake 'sine and cosine are swapped': 01.1 heard other words"),
        (suspicious, "01 references: 01.1 is flagged: line 1 imports math"),
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
    assert "01 references: there are verdicts for ['01.1', '01.2', '01.3']" in (
        capsys.readouterr().err
    )


def test_an_unknown_lesson_is_an_input_error():
    with pytest.raises(InputError, match="99"):
        self_test(ROOT, 1, Limits(), ["99"])


def test_a_mistake_is_handed_in_alone():
    first = next(each for each in hand_ins(ROOT, LESSON) if each.kind == "mistake")
    different = [id for id, cell in first.cells.items() if cell != KNOWN.references[id]]
    assert different == [first.exercise] == ["01.1"]


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


@pytest.mark.timeout(600)
def test_our_grader_passes_on_a_lesson(tmp_path, capsys):
    passed = self_test(toy_course(tmp_path), 2, Limits(), None)
    said = capsys.readouterr()
    assert passed, said.err
    assert "01          as due  as due    2 of 2" in said.out
