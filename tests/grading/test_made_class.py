"""A class of twelve, graded by the command that an instructor types."""

import csv
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_helper():
    """The helper beside this file: under --import-mode=importlib no test can import it by name."""
    path = Path(__file__).with_name("made_class.py")
    spec = importlib.util.spec_from_file_location("made_class", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["made_class"] = module
    spec.loader.exec_module(module)
    return module


made_class = load_helper()
STUDENTS = {each.name: each for each in made_class.make_class()}
# One name has two spaces, which the table keeps and a page shows as one.
EXERCISES = [(name, id) for name, each in STUDENTS.items() for id in each.expected()]


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The folder of grades and what the terminal said."""
    folder = tmp_path_factory.mktemp("class")
    made_class.write_class(folder / "submissions")
    return folder, run(folder, "grades")


def run(folder, out):
    """Grade the class as an instructor would."""
    command = [sys.executable, "-m", "solutions.grade", str(folder / "submissions")]
    done = subprocess.run(
        [*command, "--out", str(folder / out), "--jobs", "2", "--timeout", "30"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def rows(graded):
    """grades.json's verdicts by student and exercise."""
    folder, _ = graded
    verdicts = json.loads((folder / "grades" / "grades.json").read_text())["verdicts"]
    return {(each["student"], each["exercise"]): each for each in verdicts}


@pytest.fixture(scope="module")
def table(graded):
    """grades.csv, row by row."""
    folder, _ = graded
    with (folder / "grades" / "grades.csv").open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.timeout(900)
def test_everybody_has_a_row_for_every_exercise(rows):
    assert sorted(rows) == sorted(EXERCISES)


@pytest.mark.parametrize("name", STUDENTS)
def test_each_exercise_comes_out_as_it_was_made(rows, table, name):
    expected = STUDENTS[name].expected()
    shown = f"'{name}" if name.startswith("=") else name
    messages = {row["exercise"]: row["message"] for row in table if row["student"] == shown}
    found = {id: rows[name, id] for id in expected}
    assert {id: row["outcome"] for id, row in found.items()} == {
        id: str(outcome) for id, (outcome, _) in expected.items()
    }
    for id, (outcome, says) in expected.items():
        row = found[id]
        texts = [row["mistake"], row["expected"], row["seen"], row["hint"], messages[id]]
        assert any(says in text for text in texts), (id, texts)
        if outcome in ("right", "partly right") and not row["flags"]:
            assert row["points"] == round(row["max"] * row["passed"] / row["total"], 2)
        else:
            assert row["points"] == 0


def test_only_the_hostile_one_is_flagged(rows):
    assert {name for (name, _), row in rows.items() if row["flags"]} == {"Ivo"}


def test_the_table_is_one_that_a_spreadsheet_may_open(table):
    assert list(table[0]) == ["student", "lesson", "exercise", "points", "max", "message"]
    assert len(table) == len(EXERCISES)
    assert not [row["student"] for row in table if row["student"].startswith("=")]


def test_there_is_a_page_for_everybody_that_runs_nothing(graded):
    folder, _ = graded
    pages = sorted((folder / "grades" / "feedback").glob("*.html"))
    assert len(pages) == len(STUDENTS) + 1
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<script|<iframe|https?:|<img src=x", text)
    ivo = (folder / "grades" / "feedback" / "Ivo.html").read_text()
    assert "changes torch.allclose" in ivo


def test_the_terminal_says_what_to_look_at(graded):
    _, said = graded
    assert "students: 12" in said
    assert "Ivo, 01.1: " in said
    assert "Hana, 01.1 and 3 more: not JSON" in said
    assert "lesson 02: =SUM(A1:A9), Bálint Szűcs, chen_wei (exercises: 6)" in said
    assert "notebooks run: 9;" in said, "equal ones once"


@pytest.mark.timeout(900)
def test_a_second_run_grades_nothing_and_writes_the_same_bytes(graded):
    folder, _ = graded
    before = contents(folder / "grades")
    said = run(folder, "grades")
    assert "notebooks run: 0" in said
    assert contents(folder / "grades") == before


def contents(folder):
    """The bytes of all that an instructor reads."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".graded" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
