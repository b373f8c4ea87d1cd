"""The self test: a right grader passes it, each way of being wrong is named, and ours passes."""

import json
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import InputError
from solutions.grading.results import Limits, Outcome, Verdict
from solutions.grading.sandbox import bubblewrap
from solutions.grading.selftest import self_test

ROOT = Path(__file__).resolve().parents[2]
SETUP = "import torch\nfrom shared.exercises.notebook import check, exercise"
STUB = '@exercise("01.{n}")\ndef {name}(x):\n    raise NotImplementedError'
CHECKS = """
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_equal, recognise

e1 = checks_for("01.1", name="double", difficulty=2, minutes=5, hint="x + x")
e2 = checks_for("01.2", name="half", difficulty=1, minutes=5, hint="x / 2")


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
ANSWERS = "def double(x):\n    return x + x\n\n\ndef half(x):\n    return x // 2\n"
ALTERNATIVES = 'def doubled(x):\n    return 2 * x\n\n\nALTERNATIVES = {"01.1": [doubled]}\n'
MISTAKES = """
from shared.exercises.mistakes import mistake


@mistake("01.1", says="it squares")
def double(x):
    return x * x


@mistake("01.2", says="half(4) = 2")
def half(x):
    return x
"""


@pytest.fixture
def course(tmp_path):
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
        "lessons/lesson01_toy/lesson.ipynb": json.dumps(notebook),
        "lessons/lesson01_toy/checks.py": CHECKS,
        "solutions/lesson01_toy.py": ANSWERS,
        "solutions/mistakes/lesson01_toy.py": MISTAKES,
        "solutions/alternatives/lesson01_toy.py": ALTERNATIVES,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "shared").symlink_to(ROOT / "shared")
    return tmp_path


class Ideal:
    """Knows what must come of every answer of this course; a test spoils what it says."""

    closing = threading.Event()

    def __init__(self, spoil):
        self.spoil = spoil

    def grade(self, answers, lesson, limits):
        judged = [each for each in lesson.exercises if each.id in answers.cells]
        return [self.spoil(self.judge(answers.cells[each.id], each)) for each in judged]

    def judge(self, cell, exercise):
        points, given = exercise.points, ("self-test", "01", exercise.id, exercise.name)
        whole = Verdict(*given, points, points, Outcome.RIGHT, "right")
        if "NotImplementedError" in cell:
            return replace(whole, points=0, outcome=Outcome.UNSOLVED)
        if "x * x" in cell or cell.endswith("return x"):
            says = "it squares; half(4) = 2"
            return replace(whole, points=0.5, outcome=Outcome.PARTLY, mistake=says)
        return whole


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


def severe(verdict):
    """Takes an honest answer for a call of the engine."""
    return replace(verdict, flags=("line 1 uses torch.f, which is the exercise itself",))


def lost(verdict):
    """Gives the verdict to another exercise."""
    return replace(verdict, exercise="01.9")


@pytest.mark.parametrize(
    ("spoil", "complaint", "bad"),
    [
        (lambda verdict: verdict, "", 0),
        (full, "01.1 mistake 'it squares' has 2 of 2", 4),
        (strict, "01.1 reference has 1 of 2", 3),
        (strict, "01.1 alternative 1 has 1 of 2", 3),
        (deaf, "01.1 mistake 'it squares' heard other words", 2),
        (suspicious, "01.1 reference is flagged: line 1 imports math", 5),
        (severe, "01.2 reference is flagged: line 1 uses torch.f", 5),
        (lost, "01.2 stub has no verdict", 7),
    ],
)
def test_a_wrong_grader_is_told_where(course, spoil, complaint, bad, capsys):
    judge = nullcontext(Ideal(spoil))
    assert self_test(course, 2, Limits(), None, open_judge=lambda course: judge) is (bad == 0)
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.out.splitlines()[-1].startswith("7 answers in ")
    assert said.out.endswith(f"{bad} not as due\n")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_our_grader_passes_on_a_lesson(course, capsys):
    with pytest.raises(InputError, match="99"):
        self_test(course, 1, Limits(), ["99"])
    try:
        bubblewrap.require()
    except InputError as why:
        pytest.skip(str(why))
    passed = self_test(course, 2, Limits(), None)
    said = capsys.readouterr()
    assert passed, said.err
    title, row, _ = said.out.splitlines()
    assert title.split() == ["lesson", "references", "stubs", "alternatives", "mistakes"]
    assert " ".join(row.split()) == "01 2 of 2 2 of 2 1 of 1 2 of 2"
