"""grades.csv and grades.json: the columns, the order, the bytes, and nothing a spreadsheet runs."""

import csv
import json

import pytest

from solutions.grading.reports.table import (
    COLUMNS,
    in_order,
    write_csv,
    write_json,
    write_points,
)
from solutions.grading.results import Outcome, Verdict


def verdict(student: str, exercise: str, **more) -> Verdict:
    """A verdict with what a test does not care about filled in."""
    fields = {"points": 1.0, "max": 2, "outcome": Outcome.PARTLY, "message": "1 of 2", **more}
    lesson = exercise.split(".")[0]
    return Verdict(student=student, lesson=lesson, exercise=exercise, name="f", **fields)


def rows(path):
    """The table as a reader of CSV sees it."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_columns_are_these_and_one_row_is_one_exercise(tmp_path):
    write_csv(tmp_path / "g.csv", [verdict("Ada", "02.1", points=2.0), verdict("Ada", "02.4a")])
    assert (tmp_path / "g.csv").read_bytes() == (
        b"student,lesson,exercise,points,max,message\n"
        b"Ada,02,02.1,2,2,1 of 2\n"
        b"Ada,02,02.4a,1,2,1 of 2\n"
    )
    assert tuple(rows(tmp_path / "g.csv")[0]) == COLUMNS


def test_rows_are_ordered_by_student_lesson_and_exercise_whatever_came_first(tmp_path):
    ids = ["02.1", "02.4a", "02.4b", "02.10", "03.1", "10.1"]
    expected = [(student, id) for student in ("ada", "Bo", "bo", "Zoé") for id in ids]
    verdicts = [verdict(student, id) for student, id in expected]
    assert [(v.student, v.exercise) for v in in_order(verdicts[::-1])] == expected
    write_csv(tmp_path / "a.csv", verdicts)
    write_csv(tmp_path / "b.csv", verdicts[::-1])
    write_json(tmp_path / "a.json", verdicts, {"lessons": {}})
    write_json(tmp_path / "b.json", reversed(verdicts), {"lessons": {}})
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


HOSTILE = ["=1+1", "+1", "-1", "@SUM(A1)", '=HYPERLINK("http://127.0.0.1","x")', "=cmd|' /C x'!A0"]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_cell_is_a_formula(tmp_path, text):
    write_csv(tmp_path / "g.csv", [verdict(text, "02.1", message=text)])
    [row] = rows(tmp_path / "g.csv")
    assert row["student"] == row["message"] == f"'{text}"
    write_json(tmp_path / "g.json", [verdict(text, "02.1")], {})
    assert json.loads((tmp_path / "g.json").read_text())["verdicts"][0]["student"] == text


@pytest.mark.parametrize("name", ["Zoé, the 2nd", 'Bo "B" B', "李 明", "a;b|c", "\u202efdp"])
def test_names_come_back_as_they_were(tmp_path, name):
    write_csv(tmp_path / "g.csv", [verdict(name, "02.1")])
    assert rows(tmp_path / "g.csv")[0]["student"] == name


def test_a_message_takes_one_line(tmp_path):
    write_csv(tmp_path / "g.csv", [verdict("Ada", "02.1", message="one\n two\n\tthree")])
    assert rows(tmp_path / "g.csv")[0]["message"] == "one two three"
    assert len((tmp_path / "g.csv").read_text().splitlines()) == 2


def test_json_holds_all_that_is_known(tmp_path):
    known = verdict("Ada", "02.1", mistake="the mask is upside down", flags=("imports os",))
    write_json(tmp_path / "g.json", [known], {"lessons": {"02": {"02.1": 3}}})
    content = json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))
    assert list(content) == ["lessons", "verdicts"]
    [found] = content["verdicts"]
    assert found["outcome"] == "partly right" and found["mistake"] == "the mask is upside down"
    assert found["flags"] == ["imports os"] and found["points"] == 1.0


def test_an_old_table_is_replaced_and_nothing_else_is_left(tmp_path):
    write_csv(tmp_path / "g.csv", [verdict("Ada", "02.1"), verdict("Bo", "02.1")])
    write_csv(tmp_path / "g.csv", [verdict("Ada", "02.1")])
    assert [row["student"] for row in rows(tmp_path / "g.csv")] == ["Ada"]
    assert [path.name for path in tmp_path.iterdir()] == ["g.csv"]


def test_one_row_a_student_for_a_learning_platform(tmp_path):
    none = {"outcome": Outcome.MISSING, "points": 0.0}
    verdicts = [
        verdict("=Bo", "01.1", **none),
        verdict("=Bo", "02.1", points=0.67),
        verdict("=Bo", "02.2", **none),
        verdict("Ada", "01.1", points=2.0),
        verdict("Ada", "02.1", points=0.0),
        verdict("Ada", "02.2", points=1.5),
    ]
    write_points(tmp_path / "p.csv", verdicts)
    assert (tmp_path / "p.csv").read_text() == (
        "student,lesson 01 of 2,lesson 02 of 4,all of 6\n'=Bo,,0.67,0.67\nAda,2,1.5,3.5\n"
    )
