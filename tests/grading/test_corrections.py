"""Points by hand: what a row may hold, and what becomes of a verdict and of its page."""

from dataclasses import replace

import pytest

from shared.errors import InputError
from solutions.grading.corrections import Correction, correct, read_corrections
from solutions.grading.reports.feedback import make_card
from solutions.grading.reports.table import reason
from solutions.grading.results import Exercise, Lesson, Outcome, Verdict

EXERCISES = (Exercise("02.1", "f", 3), Exercise("02.2", "g", 1))
LESSONS = {"02": Lesson("02", "02_x", EXERCISES, "", {}, "")}
HALF = Verdict(
    "Ada",
    "02",
    "02.1",
    "f",
    1.5,
    3,
    Outcome.PARTLY,
    "not right at the check of t",
    passed=1,
    total=2,
)
HEAD = "student,exercise,points,why\n"


def read(tmp_path, text: str):
    path = tmp_path / "by_hand.csv"
    path.write_bytes(text.encode())
    return read_corrections(path, ["Ada", "Bo Li"], LESSONS)


def test_a_table_is_read_as_spreadsheets_write_it(tmp_path):
    text = f'\ufeff{HEAD}Ada,02.1,2.5,"the idea is there, the scale is not"\nBo Li,02.2,0,copied\n'
    assert read(tmp_path, text.replace("\n", "\r\n")) == {
        ("Ada", "02.1"): Correction(2.5, "the idea is there, the scale is not"),
        ("Bo Li", "02.2"): Correction(0.0, "copied"),
    }
    assert read(tmp_path, HEAD) == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("student;exercise;points;why\n", "its first line must be student,exercise,points,why"),
        ("", "its first line must be"),
        (f"{HEAD}Adda,02.1,1,x\n", "line 2: there is no student 'Adda'"),
        (f"{HEAD}Ada,02.9,1,x\n", "line 2: there is no exercise '02.9'"),
        (f"{HEAD}Ada,02.1,1,x\nAda,02.1,4,x\n", "line 3: points must be a number from 0 to 3"),
        (f'{HEAD}Ada,02.1,"1,5",x\n', "got '1,5'"),
        (f"{HEAD}Ada,02.1,nan,x\n", "got 'nan'"),
        (f"{HEAD}Ada,02.1,1\n", "say why"),
        (f"{HEAD}Ada,02.1,1,a, b\n", "put quotes around"),
        (f"{HEAD}Ada,02.1,1,x\nAda,02.1,2,y\n", "line 3: Ada, 02.1 is there twice"),
    ],
)
def test_what_cannot_be_is_named_by_its_line(tmp_path, text, words):
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    assert words in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_corrections(tmp_path / "no.csv", [], LESSONS)


@pytest.mark.parametrize(
    ("points", "outcome"), [(3, Outcome.RIGHT), (2, Outcome.PARTLY), (0, Outcome.WRONG)]
)
def test_points_and_outcome_change_and_the_row_says_so(points, outcome):
    other = replace(HALF, exercise="02.2")
    new, same = correct([HALF, other], {("Ada", "02.1"): Correction(points, "see mail")})
    assert same == other
    assert (new.points, new.outcome) == (points, outcome)
    assert reason(new) == (
        "points set by hand (the checks gave 1.5): see mail; not right at the check of t"
    )
    assert make_card(new).text.startswith("Points set by hand (the checks gave 1.5): see mail.")


def test_what_the_checks_said_is_told_as_theirs():
    said = replace(HALF, title="t", seen="4")
    (new,) = correct([said], {("Ada", "02.1"): Correction(3, "fine")})
    assert make_card(new).text == (
        "Points set by hand (the checks gave 1.5): fine. The checks said: Not right yet, at the"
        " check of t. 1 of 2 checks passed."
    )


def test_a_flag_is_settled_by_it():
    """With the points as they are: whoever wrote the row has looked."""
    flag = "line 1 imports os"
    flagged = replace(HALF, flags=(flag,))
    assert reason(flagged).startswith(f"needs a look: {flag}; not right")
    (new,) = correct([flagged], {("Ada", "02.1"): Correction(1.5, "left over from trying")})
    assert (new.flags, new.outcome, new.points) == ((), Outcome.PARTLY, 1.5)
    assert "needs a look" not in reason(new)
    assert make_card(new).looks == ""


def test_what_could_not_be_graded_has_its_points_and_no_reason_twice():
    verdict = replace(HALF, outcome=Outcome.UNREADABLE, message="syntax error", passed=0, total=0)
    (new,) = correct([replace(verdict, points=0)], {("Ada", "02.1"): Correction(2, "a typo")})
    assert make_card(new).text == "Points set by hand (the checks gave 0): a typo."
