"""A class of twelve with mixed work in lessons 01 and 02, and what must come of each exercise.

python tests/grading/made_class.py DIR   writes the submissions, to try the grader on
"""

import io
import json
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from solutions.grading.intake.answer_cells import AnswerCells, hand_in
from solutions.grading.intake.lesson import read_lessons
from solutions.grading.results import Outcome

ROOT = Path(__file__).resolve().parents[2]
LESSONS = read_lessons(ROOT, ["01", "02"])
FOLDER, ZIP, SINGLE = "folder", "zip", "single notebooks"


@dataclass(frozen=True)
class Work:
    """What a student did in one exercise: a cell, what must come of it, and what is said to it."""

    cell: str
    outcome: Outcome
    says: str = ""


@dataclass(frozen=True)
class Student:
    """A name, the way of handing in, and for each lesson the exercises that are not right.

    `files` go in as they are, beside the notebooks; `lost` is what must come of a lesson as a
    whole.
    """

    name: str
    form: str
    lessons: Mapping[str, Mapping[str, Work]]
    files: Mapping[str, bytes] = field(default_factory=dict)
    lost: Mapping[str, tuple[Outcome, str]] = field(default_factory=dict)

    def expected(self) -> dict[str, tuple[Outcome, str]]:
        """What must come of every exercise of both lessons: the outcome, and words of the row."""
        found = {}
        for number, lesson in LESSONS.items():
            for exercise in lesson.exercises:
                work = self.lessons.get(number, {}).get(exercise.id)
                as_due = (work.outcome, work.says) if work else (Outcome.RIGHT, "")
                found[exercise.id] = self.lost.get(number, as_due)
        return found

    def notebook(self, number: str) -> bytes:
        """The notebook of a lesson with the student's cells."""
        lesson = LESSONS[number]
        cells = dict(_known(number).references)
        cells |= {id: work.cell for id, work in self.lessons[number].items()}
        pristine = (ROOT / "lessons" / lesson.folder / "lesson.ipynb").read_bytes()
        return hand_in(pristine, cells)

    def paths(self) -> dict[str, bytes]:
        """The files that are handed in, by their path."""
        layout = {
            FOLDER: "lessons/{folder}/lesson.ipynb",
            ZIP: "torch-handle-main/lessons/{folder}/lesson.ipynb",
            SINGLE: "{folder} (1).ipynb",
        }[self.form]
        notebooks = {
            layout.format(folder=LESSONS[number].folder): self.notebook(number)
            for number in self.lessons
        }
        return {**notebooks, **self.files}


@cache
def _known(number: str) -> AnswerCells:
    return AnswerCells(ROOT, LESSONS[number])


def mistake(id: str, says: str, outcome: Outcome = Outcome.PARTLY) -> dict[str, Work]:
    """A known mistake of solutions/mistakes, by its words."""
    known = [each for each in _known(id[:2]).mistakes if each.exercise == id and says in each.says]
    assert len(known) == 1, f"{len(known)} mistakes of {id} say {says!r}"
    return {id: Work(known[0].cell, outcome, known[0].says)}


def stub(id: str) -> dict[str, Work]:
    """The exercise as the course has it."""
    return {id: Work(LESSONS[id[:2]].stubs[id], Outcome.UNSOLVED, "not solved")}


def typed(id: str, cell: str, outcome: Outcome, says: str) -> dict[str, Work]:
    """Any cell at all."""
    return {id: Work(cell, outcome, says)}


SHIFT_TWICE = """@exercise("01.3")
def shift_matrix(offset, d_model):
    return torch.eye(d_model)


@exercise("01.3")
def shift_matrix_again(offset, d_model):
    return torch.eye(d_model)"""
UNFINISHED = """@exercise("01.2")
class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        super().__init__(
        self.dropout = nn.Dropout(dropout)"""
OTHER_ID = """@exercise("01.9")
def rotary(x, positions):
    return x"""
BORROWS = """from shared.model import embeddings


@exercise("01.1")
def sinusoidal_encoding(max_len, d_model):
    return embeddings.sinusoidal_encoding(max_len, d_model)"""
LEAVES = """import os


@exercise("01.2")
class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        os._exit(0)"""
REPLACES = """torch.allclose = lambda *values, **settings: True


@exercise("01.3")
def shift_matrix(offset, d_model):
    return torch.zeros(d_model, d_model)"""


def make_class() -> list[Student]:
    """The twelve, in the order of their names; few notebooks differ, for each takes seconds."""
    some_of_01 = {
        **mistake("01.1", "computed in float32"),
        **mistake("01.2", "plain attribute"),
        **mistake("01.3", "moves backwards", Outcome.WRONG),
        **mistake("01.4", "the pairs are (i, i + K / 2)"),
    }
    begun = {**stub("01.3"), **stub("01.4")}
    some_of_02 = {
        **mistake("02.1", "gives NaN in the output"),
        **mistake("02.4a", "does not swap L and H"),
        **mistake("02.5", "keys and values are taken from the query"),
    }
    more_of_02 = {
        **mistake("02.1", "not scaled"),
        **mistake("02.2", "one dim short", Outcome.WRONG),
        **mistake("02.3", "sees the words after it"),
        **mistake("02.5", "the mask is not used"),
    }
    ivo = {
        **typed("01.1", BORROWS, Outcome.RIGHT, "needs a look"),
        **typed("01.2", LEAVES, Outcome.STOPPED, "needs a look"),
        **typed("01.3", REPLACES, Outcome.PARTLY, "needs a look"),
    }
    joerg = {
        **typed("01.2", UNFINISHED, Outcome.UNREADABLE, "syntax error in line 4"),
        **typed("01.3", SHIFT_TWICE, Outcome.UNREADABLE, "holds the exercises 01.3 and 01.3"),
        **typed("01.4", OTHER_ID, Outcome.MISSING, 'put @exercise("01.4") back'),
    }
    return [
        Student("=SUM(A1:A9)", SINGLE, {"01": {}, "02": some_of_02}),
        Student("Ada Brandt", FOLDER, {"01": {}, "02": {}}),
        Student("Bálint Szűcs", ZIP, {"01": some_of_01, "02": some_of_02}),
        Student("Dorothea O'Neill-Quist", FOLDER, {"01": some_of_01, "02": more_of_02}),
        Student(
            "Emil",
            SINGLE,
            {"01": begun},
            lost={"02": (Outcome.MISSING, "no notebook of lesson 02")},
        ),
        Student(
            "Fatima al-Zahra",
            FOLDER,
            {"01": begun, "02": {id: stub(id)[id] for id in LESSONS["02"].stubs}},
        ),
        Student("Gus <img src=x onerror=alert(1)>", ZIP, {"01": {}, "02": more_of_02}),
        Student(
            "Hana",
            FOLDER,
            {"02": more_of_02},
            files={"lessons/01_positional_encoding/lesson.ipynb": b"<!doctype html><title>Sign in"},
            lost={"01": (Outcome.UNREADABLE, "a web page was saved instead")},
        ),
        Student("Ivo", FOLDER, {"01": ivo, "02": {}}),
        Student("Jörg  Müller", FOLDER, {"01": joerg, "02": {}}),
        Student(
            "Kim",
            ZIP,
            {},
            files={"../../Kim/02.ipynb": b"{}"},
            lost=dict.fromkeys(LESSONS, (Outcome.MISSING, "leads out of its folder")),
        ),
        Student("chen_wei", SINGLE, {"01": {}, "02": some_of_02}),
    ]


def write_class(folder: Path) -> list[Student]:
    """Write the submissions of all twelve; the same bytes every time."""
    students = make_class()
    for student in students:
        paths = student.paths()
        if student.form == ZIP:
            _write(folder / f"{student.name}.zip", _zipped(paths))
            continue
        for path, content in paths.items():
            _write(folder / student.name / path, content)
    _write(folder / "list of the class.txt", json.dumps([s.name for s in students]).encode())
    return students


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _zipped(paths: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in paths.items():
            named = zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0))
            archive.writestr(named, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/grading/made_class.py DIR")
    for each in write_class(Path(sys.argv[1])):
        print(each.name)
