"""Who handed in what, in every shape that a folder of submissions takes."""

import io
import json
import os
import stat
import unicodedata
import zipfile
from pathlib import Path

import pytest

from shared.errors import InputError
from solutions.grading.intake import archives
from solutions.grading.intake.archives import MAX_BYTES
from solutions.grading.intake.notebook import Unreadable
from solutions.grading.intake.submissions import (
    Submission,
    doubtful_names,
    find_submissions,
    left_out,
)


def notebook(text: str = "", lesson: str = "02") -> bytes:
    """A notebook that holds an exercise of a lesson."""
    cell = {"cell_type": "code", "source": f'@exercise("{lesson}.1")\ndef f():\n    {text!r}'}
    return json.dumps({"nbformat": 4, "cells": [cell]}).encode()


def zipped(*members: tuple[str | zipfile.ZipInfo, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


ONE, ANOTHER = notebook(), notebook("another")
ZIP, ANOTHER_ZIP = zipped(("02.ipynb", ONE)), zipped(("02.ipynb", ANOTHER))


def put(top: Path, *files: str | tuple[str, bytes]) -> None:
    """Write files below a folder; those without a content hold a notebook of lesson 02."""
    for each in files:
        path, content = (each, ONE) if isinstance(each, str) else each
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_bytes(content)


def found_in(folder: Path) -> dict[str, str]:
    """Each student's lessons, in one text."""
    return {each.student: " ".join(each.notebooks) for each in find_submissions(folder)}


def only(folder: Path) -> Submission:
    [submission] = find_submissions(folder)
    assert submission.student == "Ada"
    return submission


def reason_of(folder: Path) -> str:
    """Why Ada's lesson 02 cannot be read: said at once, or when it is read."""
    submission = only(folder)
    if problem := submission.problems.get("02", submission.problems.get("")):
        return problem
    with pytest.raises(Unreadable) as caught:
        submission.notebooks["02"].read()
    return str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "Ada/lessons/lesson02_attention/lesson.ipynb",
        "Ada/torch-handle-main/lessons/lesson02_attention/lesson.ipynb",
        "Ada/lesson02_attention/lesson-Copy1.ipynb",
        "Ada/02.ipynb",
        "Ada/2.ipynb",
        "Ada/lesson02.ipynb",
        "Ada/Lesson 2 final.ipynb",
        "Ada/lesson02_attention.ipynb",
        "Ada/02 attention (1).ipynb",
        "Ada/02(1).ipynb",
        "Ada/02.IPYNB",
        "Ada/a/b/c/d/02.ipynb",
        "Ada/homework.ipynb",  # known by what it holds
        "Ada/2026-11-21.ipynb",  # a year is no lesson
        "Ada__02.ipynb",
        "Ada__02_attention.ipynb",
        "Ada.ipynb",
    ],
)
def test_a_notebook_is_found_where_it_lies_and_in_a_zip(tmp_path, path):
    put(tmp_path, f"folder/{path}")
    put(tmp_path, ("zip/Ada.zip", zipped((path.removeprefix("Ada/"), ONE))))
    for form in ("folder", "zip"):
        submission = only(tmp_path / form)
        assert list(submission.notebooks) == ["02"] and not submission.problems
        assert submission.notebooks["02"].read() == ONE


def test_every_form_may_stand_beside_the_others(tmp_path):
    put(tmp_path, ("Ada__01.ipynb", notebook(lesson="01")), "Ada__02.ipynb")
    put(tmp_path, ("Bo.zip", zipped(("03.ipynb", ONE), ("lessons/lesson04_x/lesson.ipynb", b"x"))))
    put(tmp_path, ("Cy/came.zip", zipped(("x/02.ipynb", ONE))), ("Cy/note.txt", b"dear teacher"))
    assert found_in(tmp_path) == {"Ada": "01 02", "Bo": "03 04", "Cy": "02"}


def test_what_systems_and_editors_leave_is_no_submission(tmp_path):
    put(tmp_path, "Ada/02.ipynb", "Ada/.venv/x/03.ipynb", "__MACOSX/x/02.ipynb")
    checkpoint = (".ipynb_checkpoints/02-checkpoint.ipynb", ANOTHER)
    put(tmp_path / "Ada", checkpoint, ("__MACOSX/._02.ipynb", b"\0"))
    put(tmp_path, ("Bo.zip", zipped(("02.ipynb", ONE), ("__MACOSX/._02.ipynb", b"\0"), checkpoint)))
    put(tmp_path, (".DS_Store", b""), ("class.csv", b""))
    assert found_in(tmp_path) == {"Ada": "02", "Bo": "02"}
    assert left_out(tmp_path) == ["class.csv"]


def test_the_same_notebook_several_times_is_one(tmp_path):
    put(tmp_path, "Ada/02.ipynb", "Ada/lessons/lesson02_attention/lesson.ipynb", ("Ada.zip", ZIP))
    assert list(only(tmp_path).notebooks) == ["02"] and not only(tmp_path).problems


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            ("Ada/lesson02.ipynb", ANOTHER),
            "2 notebooks for one lesson (02.ipynb and lesson02.",
        ),
        (
            ("Ada/lesson02_attention/lesson.ipynb", ANOTHER),
            "(02.ipynb and lesson02_attention/lesson.ipynb)",
        ),
        (("Ada__02.ipynb", ANOTHER), "(02.ipynb and Ada__02.ipynb): keep one"),
        (("Ada.zip", ANOTHER_ZIP), "(02.ipynb and 02.ipynb in Ada.zip): keep one"),
    ],
)
def test_two_notebooks_for_one_lesson_that_differ_are_a_problem_of_that_lesson(
    tmp_path, other, words
):
    put(tmp_path, "Ada/02.ipynb", other, "Ada/03.ipynb")
    submission = only(tmp_path)
    assert list(submission.notebooks) == ["03"] and list(submission.problems) == ["02"]
    assert words in submission.problems["02"]


def test_two_entries_of_one_name_in_a_zip_are_two(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        put(tmp_path, ("Ada.zip", zipped(("02.ipynb", ONE), ("02.ipynb", ANOTHER))))
    assert "2 notebooks for one lesson" in reason_of(tmp_path)


def a_link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("02.ipynb")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


LONG = zipped(("02.ipynb", notebook("x" * 5000)), how=zipfile.ZIP_STORED)
ENCRYPTED = bytearray(ZIP)
ENCRYPTED[ZIP.index(b"PK\x01\x02") + 8] |= 1
BOTH = notebook(lesson="02") + notebook(lesson="03")
NO_ZIP = "no zip, or a damaged one"
# Each case: the name and the bytes of what Ada handed in, and words of the reason.
BAD = {
    "up and out": ("Ada.zip", zipped(("../../02.ipynb", b"")), "'../../02.ipynb', which leads out"),
    "up within": ("Ada.zip", zipped(("a/../02.ipynb", b"")), "which leads out"),
    "absolute": ("Ada.zip", zipped(("/etc/02.ipynb", b"")), "which leads out"),
    "backslashes": ("Ada.zip", zipped(("..\\02.ipynb", b"")), "which leads out"),
    "a link": ("Ada.zip", zipped((a_link(), b"/etc/passwd")), "it is a link; links are not"),
    "a bomb": ("Ada.zip", zipped(("02.ipynb", b" " * (MAX_BYTES + 1))), "it would unpack to 20 MB"),
    "a zip in it": ("Ada.zip", zipped(("in.zip", ZIP)), "in.zip in Ada.zip is another archive"),
    "no notebook": ("Ada.zip", zipped(("answers.py", b"x = 1")), "no notebook in it"),
    "nothing": ("Ada.zip", zipped(), "no notebook in it"),
    "endless names": (
        "Ada.zip",
        zipped(*((f"{i}{'_' * 65000}", b"") for i in range(9))),
        "no notebook in it",
    ),
    "unknown": ("Ada.zip", zipped(("x.ipynb", b"{}")), "no notebook in it that belongs to a"),
    "two lessons": ("Ada.ipynb", BOTH, "(found Ada.ipynb): name it like 02.ipynb"),
    "201 notebooks": (
        "Ada.zip",
        zipped(*((f"{i}/02.ipynb", b"") for i in range(201))),
        "it holds 201 notebooks; at most 200 are read",
    ),
    "empty": ("Ada.zip", b"", NO_ZIP),
    "a web page": ("Ada.zip", b"<html>", NO_ZIP),
    "cut at its end": ("Ada.zip", LONG[:-30], NO_ZIP),
    "cut at its start": ("Ada.zip", LONG[len(LONG) // 2 :], "it cannot be read"),
    "wrong sum": ("Ada.zip", LONG.replace(b"xxxx", b"yyyy"), "it cannot be read (BadZipFile: Bad"),
    "bzip2": (
        "Ada.zip",
        zipped(("02.ipynb", ONE), how=zipfile.ZIP_BZIP2),
        "other way than deflate",
    ),
    "encrypted": ("Ada.zip", bytes(ENCRYPTED), "it is encrypted"),
    "large": ("Ada/02.ipynb", b" " * (MAX_BYTES + 1), "it is larger than 20 MB"),
    "too deep": (f"Ada/{'d/' * 40}02.ipynb", ONE, "no notebook in it"),
    **{kind: (f"Ada.{kind}", b"Rar!", "archive: hand in a zip") for kind in ("rar", "tar.gz")},
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_has_its_reason(tmp_path, case):
    name, content, words = BAD[case]
    put(tmp_path, (name, content))
    assert words in reason_of(tmp_path) and "\n" not in reason_of(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [name.split("/")[0]]


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [("MAX_ENTRIES", 10, "the zip holds more than 10 files"), ("MAX_ZIP", 500, "the zip has 0 MB")],
)
def test_a_zip_is_measured_before_it_is_read(tmp_path, monkeypatch, limit, value, words):
    put(tmp_path, ("Ada.zip", zipped(*((f"{i}.txt", b"") for i in range(11)))))
    monkeypatch.setattr(archives, limit, value)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert words in reason_of(tmp_path)


def test_a_full_folder_is_not_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_ENTRIES", 5)
    put(tmp_path, *(f"Ada/{number}/02.ipynb" for number in range(3)))
    assert "it holds more than 5 files" in reason_of(tmp_path)


@pytest.mark.parametrize(
    ("link", "target", "words"),
    [
        ("Ada/02.ipynb", "secret/02.ipynb", "it is a link; links are not followed"),
        ("Ada/lesson02_attention", "secret", "lesson02_attention is a link, and none is followed"),
        ("Ada/in.zip", "secret/in.zip", "it is a link; links are not followed"),
        ("Ada", "secret", "Ada: it is a link; links are not followed"),
        ("Ada.zip", "secret/in.zip", "Ada.zip: it is a link; links are not followed"),
    ],
)
def test_links_are_not_followed(tmp_path, link, target, words):
    put(tmp_path, "secret/02.ipynb", ("secret/in.zip", ZIP))
    path = tmp_path / "class" / link
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / target)
    assert words in reason_of(tmp_path / "class")


@pytest.mark.parametrize("name", ["Ada/02.ipynb", "Ada.ipynb", "Ada.zip"])
def test_what_would_block_a_reader_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    assert reason_of(tmp_path).endswith("it is no plain file")


def test_a_file_that_is_gone_when_its_turn_comes_has_a_reason(tmp_path):
    put(tmp_path, "Ada/02.ipynb")
    entry = only(tmp_path).notebooks["02"]
    (tmp_path / "Ada/02.ipynb").unlink()
    with pytest.raises(Unreadable, match=r"it cannot be read \(FileNotFoundError"):
        entry.read()


SAME = ["李 明", 'Bo "B" O\'Hara', "=1+1", "--out", "$(reboot); rm -rf ~", "n" * 255]
NAMES = {
    **dict.fromkeys(SAME),
    "علی\u200cرضا": None,  # two letters that are not joined
    "two\nlines,\ttabs,  blanks": "two lines, tabs,  blanks",
    "red\x1b[31m": "red\\x1b[31m",
    "gnp.\u202efdp": "gnp.\\x202efdp",
    " outer blanks ": "outer blanks",
    unicodedata.normalize("NFD", "Zoé"): "Zoé",
    "Jos\udce9": "Jos\\xdce9",  # a byte that is no text, as Python reads it
}


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_a_student_in_one_line(tmp_path, name):
    put(tmp_path, f"{name}/02.ipynb")
    assert found_in(tmp_path) == {NAMES[name] or name: "02"}


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("Jo", "Jo .zip"), "taken for one student: 'Jo' and 'Jo '"),
        (("Zo\u00eb", "Zoe\u0308 "), "taken for one student: "),
        (("Ada", "ada"), "look alike: Ada and ada"),
        (("Ada", "\u0410da"), "look alike: Ada and \u0410da (CYRILLIC CAPITAL LETTER A)"),
        (("Ivan", "\u0406van"), "look alike: Ivan and \u0406van (CYRILLIC CAPITAL LETTER BYELO"),
        (("Bill", "Bi1l"), "look alike: Bi1l and Bill"),
        (("Mia Li", "Mia-Li"), "look alike: Mia Li and Mia-Li"),
    ],
)
def test_names_that_may_be_one_or_two_students_are_pointed_out(tmp_path, names, line):
    put(tmp_path, "Bo/02.ipynb", "Mo__02.ipynb", "Mo__03.ipynb")
    for name in names:
        put(tmp_path, (name, ZIP) if name.endswith(".zip") else f"{name}/02.ipynb")
    (said,) = doubtful_names(tmp_path)
    assert said.startswith(line)
    assert len(found_in(tmp_path)) == (3 if "taken" in line else 4)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "there is no folder"),
        ("a_file", "a_file is a file: unpack"),
        ("notes", "holds no submission"),
        ("course", "is one copy of the course: give the folder above it"),
    ],
)
def test_a_folder_that_holds_no_class_is_an_input_error(tmp_path, path, words):
    put(
        tmp_path,
        "a_file",
        ("notes/readme.txt", b""),
        "course/lessons/lesson02_attention/lesson.ipynb",
    )
    with pytest.raises(InputError, match=words):
        find_submissions(tmp_path / path)
