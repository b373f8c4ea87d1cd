"""A term is played before the class has handed in anything."""

import itertools
import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from solutions import rehearsal
from solutions.grading.results import Outcome
from solutions.grading.verdicts import make_verdict

ROOT = Path(__file__).resolve().parents[2]


class Judge:
    """Finds right what it finds right."""

    promise = "nothing is run here"

    def __init__(self, right):
        self.right, self.graded, self.closing = right, 0, threading.Event()

    def grade(self, answers, lesson, limits):
        assert not self.closing.is_set(), "the week before has closed it"
        self.graded += 1
        found = []
        for each in lesson.exercises:
            stub = "raise NotImplementedError" in answers.cells[each.id]
            right = self.right(answers.student) and not stub
            outcome = Outcome.RIGHT if right else Outcome.UNSOLVED if stub else Outcome.WRONG
            found.append(make_verdict(answers, each, outcome, "it is"))
        return found


@pytest.mark.parametrize(
    ("right", "status", "said"),
    [
        (lambda student: student == "Student 01", 0, ["all as due"]),
        (lambda student: False, 1, ["Student 01, 01.1, a right answer: 0.0 of 2 (it is)"]),
        (lambda student: True, 1, ["a mistake answer: 3.0 of 3 (it is)", "NOT all as due"]),
    ],
)
def test_each_week_has_its_minutes_and_what_is_not_as_due(right, status, said, capsys):
    judge, words = Judge(right), ["--lessons", "01,02", "--students", "60", "--played", "5"]
    words += ["--jobs", "2"]
    done = rehearsal.main(words, open_judge=lambda _: nullcontext(judge), course=ROOT)
    out = capsys.readouterr().out
    assert (done, judge.graded) == (status, 10)
    assert "5 of 60 students are graded a week" in out
    assert [line[:10] for line in out.splitlines() if line.startswith("les")] == [
        "lesson 01:",
        "lesson 02:",
    ]
    assert all(each in out for each in said), out


@pytest.mark.parametrize(("jobs", "graded", "minutes"), [("8", 8, "8.0"), ("2", 3, "15.0")])
def test_the_minutes_are_of_as_many_rounds_as_the_class_takes(
    jobs, graded, minutes, capsys, monkeypatch
):
    """One minute is measured: of one round of eight, or of two rounds with three notebooks."""
    clock = SimpleNamespace(monotonic=itertools.count(step=60).__next__)
    monkeypatch.setattr(rehearsal, "time", clock)
    judge, words = Judge(lambda student: True), ["--lessons", "01", "--students", "60"]
    rehearsal.main([*words, "--jobs", jobs], open_judge=lambda _: nullcontext(judge), course=ROOT)
    assert judge.graded == graded
    assert f"lesson 01: 60 s, so at most {minutes} minutes\n" in capsys.readouterr().out


def test_ctrl_c_ends_the_term_and_not_the_week(capsys):
    judge = Judge(lambda student: os.kill(os.getpid(), signal.SIGINT))
    words = ["--lessons", "01,02", "--jobs", "1"]
    assert rehearsal.main(words, open_judge=lambda _: nullcontext(judge), course=ROOT) == 130
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == (
        "rehearsal: stopped; nothing is kept, --lessons plays the weeks that are left"
    )
    assert "lesson" not in said.out and "is kept" not in said.err.replace("nothing is kept", "")


def test_a_class_without_students_is_refused_in_a_line(capsys):
    assert rehearsal.main(["--students", "0"]) == 2
    assert capsys.readouterr().err == (
        "rehearsal: --students, --played and --jobs must be whole numbers from 1 up\n"
    )
