"""A class with mixed work in lessons 01 and 02, graded by the command that an instructor types."""

import csv
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from solutions.grading.intake.known import KnownAnswers, hand_in
from solutions.grading.intake.lesson import read_lessons

ROOT = Path(__file__).resolve().parents[2]
LESSONS = read_lessons(ROOT, ["01", "02"])
KNOWN = {number: KnownAnswers(ROOT, lesson) for number, lesson in LESSONS.items()}
REFERENCES = {n: {each.exercise: k.cell(each) for each in k.references()} for n, k in KNOWN.items()}
IDS = [id for references in REFERENCES.values() for id in references]
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def mistake(id, says, outcome="partly right"):
    """A known mistake of solutions/mistakes by its words: cell, outcome, what the row says."""
    known = KNOWN[id[:2]]
    [one] = [each for each in known.mistakes() if each.exercise == id and says in each.says]
    return {id: (known.cell(one), outcome, one.says)}


def stub(id):
    """The exercise as the course has it."""
    return {id: (LESSONS[id[:2]].stubs[id], "not solved", "not solved")}


SHIFT = '@exercise("01.3")\ndef shift_matrix(offset, d_model):\n    return torch.eye(d_model)'
PE = '@exercise("01.2")\nclass PositionalEncoding(nn.Module):\n'
PE += "    def __init__(self, d_model, max_len=5000, dropout=0.0):\n"
ENCODING = '@exercise("01.1")\ndef sinusoidal_encoding(max_len, d_model):\n    return '
ROTARY = '@exercise("01.9")\ndef rotary(x, positions):\n    return x'
BORROWED = "embeddings.sinusoidal_encoding(max_len, d_model)"
SOME_OF_01 = {
    **mistake("01.1", "computed in float32"),
    **mistake("01.2", "plain attribute"),
    **mistake("01.3", "moves backwards", "wrong"),
    **mistake("01.4", "the pairs are (i, i + K / 2)"),
}
SOME_OF_02 = {
    **mistake("02.1", "gives NaN in the output"),
    **mistake("02.2", "one dim short", "wrong"),
    **mistake("02.4a", "does not swap L and H"),
    **mistake("02.5", "keys and values are taken from the query"),
}
HOSTILE = {
    "01.1": (
        f"from shared.model import embeddings\n{ENCODING}{BORROWED}",
        "right",
        "reaches for shared.model.embeddings.sinusoidal_encoding, an answer of the course",
    ),
    "01.2": (f"import os\n{PE}        os._exit(0)", "stopped", "imports os"),
    "01.3": (
        f"torch.allclose = lambda *values, **settings: True\n{SHIFT}",
        "partly right",
        "changes torch.allclose",
    ),
}
BROKEN = {
    "01.2": (f"{PE}        super(", "cannot be graded", "syntax error in line 4"),
    "01.3": (f"{SHIFT}\n{SHIFT}", "cannot be graded", "holds the exercises 01.3 and 01.3"),
    "01.4": (ROTARY, "cannot be graded", 'put @exercise("01.4") back'),
}
# A student's name, where the notebook of a lesson goes, and what differs from the references.
# A text in place of a lesson's cells is what is there instead of a notebook; None, nothing.
CLASS = {
    "=SUM(A1:A9)": ("{name}/{folder} (1).ipynb", {"01": {}, "02": SOME_OF_02}),
    "Ada Brandt": ("{name}/lessons/{folder}/lesson.ipynb", {"01": {}, "02": {}}),
    "Bálint <img src=x onerror=alert(1)>": (
        "torch-handle-main/lessons/{folder}/lesson.ipynb",
        {"01": SOME_OF_01, "02": SOME_OF_02},
    ),
    "Emil": ("{name}__{folder}.ipynb", {"01": {**stub("01.3"), **stub("01.4")}, "02": None}),
    "Hana": ("{name}/{folder}.ipynb", {"01": "<!doctype html><title>Sign in", "02": SOME_OF_02}),
    "Ivo": ("{name}/lessons/{folder}/lesson.ipynb", {"01": HOSTILE, "02": {}}),
    "Jörg  Müller": ("{name}/{folder}.ipynb", {"01": BROKEN, "02": {}}),
}
LOST = {"Emil": "no notebook of lesson 02", "Hana": "a web page was saved instead"}


def expected(name):
    """(outcome, words of the row) for each exercise."""
    found = dict.fromkeys(IDS, ("right", ""))
    for number, work in CLASS[name][1].items():
        for id in REFERENCES[number]:
            if not isinstance(work, dict):
                found[id] = ("cannot be graded" if work else "missing", LOST[name])
            elif id in work:
                found[id] = work[id][1:]
    return found


def write_class(folder):
    """Write the submissions, one of them as a zip, and a list of the class beside them."""
    for name, (layout, lessons) in CLASS.items():
        files = {}
        for number, work in lessons.items():
            lesson = LESSONS[number]
            path = layout.format(name=name, folder=lesson.folder)
            if isinstance(work, dict):
                pristine = (ROOT / "lessons" / lesson.folder / "lesson.ipynb").read_bytes()
                cells = REFERENCES[number] | {id: each[0] for id, each in work.items()}
                files[path] = hand_in(pristine, cells)
            elif work:
                files[path] = work.encode()
        if "{name}" not in layout:
            with zipfile.ZipFile(folder / f"{name}.zip", "w") as archive:
                for path, content in files.items():
                    archive.writestr(path, content)
            continue
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
    (folder / "list of the class.txt").write_text("everybody")


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The folder of grades and what the terminal said."""
    folder = tmp_path_factory.mktemp("class")
    (folder / "submissions").mkdir()
    write_class(folder / "submissions")
    return folder / "grades", run(folder)


def run(folder):
    """Grade the class as an instructor would."""
    command = [sys.executable, "-m", "solutions.grade", str(folder / "submissions")]
    command += ["--out", str(folder / "grades"), "--jobs", "2", "--timeout", "30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CLASS)
def test_each_exercise_comes_out_as_it_was_made(graded, name):
    grades, _ = graded
    verdicts = json.loads((grades / "grades.json").read_text())["verdicts"]
    found = {each["exercise"]: each for each in verdicts if each["student"] == name}
    assert list(found) == IDS
    with (grades / "grades.csv").open(encoding="utf-8-sig", newline="") as file:
        table = [row for row in csv.DictReader(file) if row["student"].lstrip("'") == name]
    messages = {row["exercise"]: row["message"] for row in table}
    for id, (outcome, says) in expected(name).items():
        row = found[id]
        assert row["outcome"] == outcome, row
        assert bool(row["flags"]) == (name == "Ivo" and id in HOSTILE), row
        texts = [row["mistake"], row["expected"], row["seen"], row["hint"], messages[id]]
        assert any(says in text for text in texts), texts
        full = row["max"] * row["passed"] / row["total"] if row["total"] else 0
        hollow = id == "02.4a" and outcome == "partly right"  # it passes what asks for a refusal
        counts = outcome in ("right", "partly right") and not row["flags"] and not hollow
        assert row["points"] == (round(full, 2) if counts else 0)


def test_the_tables_and_pages_run_nothing(graded):
    grades, _ = graded
    text = (grades / "grades.csv").read_text() + (grades / "points.csv").read_text()
    assert "\n'=SUM" in text
    assert "\n=" not in text
    pages = sorted((grades / "feedback").glob("*.html"))
    assert len(pages) == len(CLASS) + 1
    for page in pages:
        assert not re.search(r"<script|<iframe|https?:|<img src=x", page.read_text("utf-8"))
    assert "changes torch.allclose" in (grades / "feedback" / "Ivo.html").read_text()


def test_the_terminal_says_what_to_look_at(graded):
    _, said = graded
    assert "students: 7" in said
    assert "not a submission: list of the class.txt" in said
    assert "Ivo, 01.1: " in said
    assert "Hana, 01.1 and 3 more: not JSON" in said
    assert "02.1 02.2 02.4a 02.5: =SUM(A1:A9); Bálint" in said
    assert "notebooks run: 7;" in said, "equal ones once"


def test_a_second_run_grades_nothing_and_writes_the_same_bytes(graded):
    grades, _ = graded

    def contents():
        files = (path for path in grades.rglob("*") if ".graded" not in path.parts)
        return {path: path.read_bytes() for path in files if path.is_file()}

    before = contents()
    assert "notebooks run: 0" in run(grades.parent)
    assert contents() == before
