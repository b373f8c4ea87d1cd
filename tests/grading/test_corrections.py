"""Points by hand: what a row may hold, and what becomes of a verdict and of its row."""

from dataclasses import replace

import pytest

from shared.errors import InputError
from solutions.grading.corrections import (
    Correction,
    correct,
    no_longer_named,
    read_corrections,
)
from solutions.grading.reports.table import reason, write_json
from solutions.grading.results import Exercise, Lesson, Outcome, Verdict

EXERCISES = (Exercise("02.1", "f", 3), Exercise("02.2", "g", 1))
LESSONS = {"02": Lesson("02", "02_x", EXERCISES, "", {}, "")}
HALF = Verdict("Ada", "02", "02.1", "f", 1.5, 3, Outcome.PARTLY, "not right at the check of t")
HEAD = "student,exercise,points,why\n"


def read(tmp_path, text: str):
    path = tmp_path / "by_hand.csv"
    path.write_bytes(text.encode())
    return read_corrections(path, ["Ada", "Bo Li", "@mia"], LESSONS)


def test_a_table_is_read_as_spreadsheets_write_it(tmp_path):
    text = f'\ufeff{HEAD}Ada,02.1,2.5,"the idea is there, the scale is not"\nBo Li,02.2,0,copied\n'
    text += "'@mia,02.2,1,said\n@mia,02.1,1,said\n"
    assert read(tmp_path, text.replace("\n", "\r\n")) == {
        ("Ada", "02.1"): Correction(2.5, "the idea is there, the scale is not"),
        ("Bo Li", "02.2"): Correction(0.0, "copied"),
        ("@mia", "02.2"): Correction(1.0, "said"),  # as in grades.csv
        ("@mia", "02.1"): Correction(1.0, "said"),
    }
    assert read(tmp_path, f"{HEAD}\n") == {}


def test_a_table_is_read_as_a_german_excel_writes_it(tmp_path):
    text = f"{HEAD.replace(',', ';')}Ada;02.1;2,5;f\u00fcr den Ansatz, nicht mehr\r\n"
    (tmp_path / "x.csv").write_bytes(text.encode("cp1252"))
    assert read_corrections(tmp_path / "x.csv", ["Ada"], LESSONS) == {
        ("Ada", "02.1"): Correction(2.5, "f\u00fcr den Ansatz, nicht mehr")
    }


def test_points_by_hand_that_are_no_longer_named_are_told(tmp_path):
    corrected = correct([HALF], {("Ada", "02.1"): Correction(3, "see mail")})
    write_json(tmp_path / "grades.json", [*corrected, replace(HALF, exercise="02.2")], {})
    assert no_longer_named(tmp_path / "grades.json", {}) == ["Ada, 02.1"]
    named = {("Ada", "02.1"): Correction(0, "x")}
    assert no_longer_named(tmp_path / "grades.json", named) == []
    (tmp_path / "grades.json").write_text('{"verdicts": 3}')
    assert no_longer_named(tmp_path / "grades.json", {}) == []
    assert no_longer_named(tmp_path / "none.json", {}) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("student|exercise|points|why\n", "not with 'student,exercise,points,why'"),
        ("", "begins with ''"),
        (f"{HEAD}Adda,02.1,1,x\n", "line 2: there is no student 'Adda'"),
        (f"{HEAD}Ada,02.9,1,x\n", "line 2: there is no exercise '02.9'"),
        (f"{HEAD}Ada,02.1,1,x\nAda,02.2,4,x\n", "line 3: points must be a number from 0 to 1"),
        (f'{HEAD}Ada,02.1,"1,5",x\n', "got '1,5'"),
        (f"{HEAD}Ada,02.1,nan,x\n", "got 'nan'"),
        (f"{HEAD}Ada,02.1,1, \n", "say why"),
        (f'{HEAD}Ada,02.1,1,"x\nBo Li,02.1,2,y\n', "cannot be read: unexpected end of data"),
        (f"{HEAD}Ada,02.1,1\n", "there are 3 cells, not 4"),
        (f"{HEAD}Ada,02.1,1,a, b\n", "put quotes around"),
        (f"{HEAD}Ada,02.1,1,x\nAda,02.1,2,y\n", "line 3: Ada, 02.1 is there twice"),
        (f"{HEAD}@mia,02.1,1,x\n'@mia,02.1,2,y\n", "line 3: '@mia, 02.1 is there twice"),
    ],
)
def test_what_cannot_be_is_named_by_its_line(tmp_path, text, words):
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    assert words in str(error.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read(tmp_path, content):
    if content:
        (tmp_path / "no.csv").write_bytes(content)
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
        "points set by hand (before: 1.5): see mail; not right at the check of t"
    )


def test_a_flag_is_settled_by_it():
    """With the points as they are: whoever wrote the row has looked."""
    flagged = replace(HALF, outcome=Outcome.STOPPED, flags=("line 1 imports os",))
    assert reason(flagged) == f"needs a look: line 1 imports os; {HALF.message}"
    (new,) = correct([flagged], {("Ada", "02.1"): Correction(1.5, "left over from trying")})
    assert (new.flags, new.points) == ((), 1.5)
    assert "needs a look" not in reason(new)
    copied = replace(flagged, outcome=Outcome.RIGHT, points=0.0)
    (new,) = correct([copied], {("Ada", "02.1"): Correction(0.0, "copied")})
    assert new.outcome is Outcome.WRONG
