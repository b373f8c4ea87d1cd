"""Who handed in what, in every shape that a folder of submissions takes."""

import json
import os
import stat
import unicodedata
import zipfile
from pathlib import Path

import pytest

from shared.errors import InputError
from solutions.grading.intake import archives
from solutions.grading.intake.notebook import MAX_BYTES, Unreadable
from solutions.grading.intake.submissions import doubtful_names, find_submissions, left_out


def notebook(text: str = "", lesson: str = "02") -> bytes:
    """A notebook that holds an exercise of a lesson."""
    cell = {"cell_type": "code", "source": f'@exercise("{lesson}.1")\ndef f():\n    {text!r}'}
    return json.dumps({"nbformat": 4, "cells": [cell]}).encode()


def put(path: Path, content: bytes | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(notebook() if content is None else content)


def put_zip(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes], **options: int) -> None:
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in members:
            archive.writestr(name, content)


def only(folder: Path):
    [submission] = find_submissions(folder)
    return submission


LAYOUTS = {
    "the course": ("Ada/lessons/02_attention/lesson.ipynb", "02"),
    "the course below a folder": ("Ada/torch-handle-main/lessons/02_attention/lesson.ipynb", "02"),
    "a lesson folder": ("Ada/02_attention/lesson.ipynb", "02"),
    "a copy in the lesson folder": ("Ada/02_attention/lesson-Copy1.ipynb", "02"),
    "a number": ("Ada/02.ipynb", "02"),
    "one digit": ("Ada/2.ipynb", "02"),
    "lesson and number": ("Ada/lesson02.ipynb", "02"),
    "words": ("Ada/Lesson 2 final.ipynb", "02"),
    "number and topic": ("Ada/02_attention.ipynb", "02"),
    "a browser's copy": ("Ada/02 attention (1).ipynb", "02"),
    "number in brackets": ("Ada/02(1).ipynb", "02"),
    "upper case ending": ("Ada/02.IPYNB", "02"),
    "deep": ("Ada/a/b/c/d/02.ipynb", "02"),
    "known by what it holds": ("Ada/homework.ipynb", "02"),
    "a year is no lesson": ("Ada/2026-11-21.ipynb", "02"),
    "beside the folders": ("Ada__02.ipynb", "02"),
    "beside, with a topic": ("Ada__02_attention.ipynb", "02"),
    "beside, named by the student": ("Ada.ipynb", "02"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_notebook_is_found_where_it_lies(tmp_path, case):
    path, lesson = LAYOUTS[case]
    put(tmp_path / path)
    submission = only(tmp_path)
    assert submission.student == "Ada"
    assert list(submission.notebooks) == [lesson] and not submission.problems
    assert submission.notebooks[lesson].read() == notebook()


@pytest.mark.parametrize("case", [case for case in LAYOUTS if "beside" not in case])
def test_a_zip_is_read_like_a_folder(tmp_path, case):
    path, lesson = LAYOUTS[case]
    put_zip(tmp_path / "Ada.zip", (path.removeprefix("Ada/"), notebook()))
    submission = only(tmp_path)
    assert submission.student == "Ada" and not submission.problems
    assert submission.notebooks[lesson].read() == notebook()


def test_several_lessons_and_single_files_come_together(tmp_path):
    put(tmp_path / "Ada__01.ipynb", notebook(lesson="01"))
    put(tmp_path / "Ada__02.ipynb")
    put_zip(tmp_path / "Bo.zip", ("03.ipynb", notebook()), ("lessons/04_x/lesson.ipynb", b"x"))
    found = {each.student: list(each.notebooks) for each in find_submissions(tmp_path)}
    assert found == {"Ada": ["01", "02"], "Bo": ["03", "04"]}


def test_a_folder_with_the_zip_that_came_is_looked_into(tmp_path):
    (tmp_path / "Ada").mkdir()
    put_zip(tmp_path / "Ada" / "homework.zip", ("x/02.ipynb", notebook()))
    put(tmp_path / "Ada" / "note.txt", b"dear teacher")
    assert list(only(tmp_path).notebooks) == ["02"]


def test_what_systems_and_editors_leave_is_no_submission(tmp_path):
    put(tmp_path / "Ada/02.ipynb")
    put(tmp_path / "Ada/.ipynb_checkpoints/02-checkpoint.ipynb", notebook("old"))
    put(tmp_path / "Ada/__MACOSX/._02.ipynb", b"\0")
    put(tmp_path / "Ada/.venv/x/03.ipynb")
    put_zip(
        tmp_path / "Bo.zip",
        ("02.ipynb", notebook()),
        ("__MACOSX/._02.ipynb", b"\0"),
        (".ipynb_checkpoints/02-checkpoint.ipynb", notebook("old")),
    )
    put(tmp_path / ".DS_Store", b"")
    put(tmp_path / "__MACOSX/x/02.ipynb")
    put(tmp_path / "class.csv", b"")
    found = find_submissions(tmp_path)
    assert [each.student for each in found] == ["Ada", "Bo"]
    assert all(list(each.notebooks) == ["02"] and not each.problems for each in found)
    assert left_out(tmp_path) == ["class.csv"]


def test_the_same_notebook_twice_is_one(tmp_path):
    put(tmp_path / "Ada/02.ipynb")
    put(tmp_path / "Ada/lessons/02_attention/lesson.ipynb")
    put_zip(tmp_path / "Ada.zip", ("02.ipynb", notebook()))
    submission = only(tmp_path)
    assert list(submission.notebooks) == ["02"] and not submission.problems


@pytest.mark.parametrize(
    "paths",
    [
        ("Ada/02.ipynb", "Ada/lesson02.ipynb"),
        ("Ada/02.ipynb", "Ada/02_attention/lesson.ipynb"),
        ("Ada/02.ipynb", "Ada__02.ipynb"),
    ],
)
def test_two_notebooks_for_one_lesson_that_differ_are_a_problem_of_that_lesson(tmp_path, paths):
    put(tmp_path / paths[0])
    put(tmp_path / paths[1], notebook("another"))
    put(tmp_path / "Ada/03.ipynb")
    submission = only(tmp_path)
    assert list(submission.notebooks) == ["03"]
    assert list(submission.problems) == ["02"]
    assert submission.problems["02"].startswith("2 notebooks for one lesson (")


def test_two_submissions_of_one_student_that_differ_are_a_problem(tmp_path):
    put(tmp_path / "Ada/02.ipynb")
    put_zip(tmp_path / "Ada.zip", ("02.ipynb", notebook("another")))
    words = "2 notebooks for one lesson (02.ipynb and 02.ipynb in Ada.zip): keep one"
    assert only(tmp_path).problems == {"02": words}


def test_two_entries_of_one_name_in_a_zip_are_two(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        put_zip(tmp_path / "Ada.zip", ("02.ipynb", notebook()), ("02.ipynb", b"other"))
    assert "2 notebooks for one lesson" in only(tmp_path).problems["02"]


def linked(target: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("02.ipynb")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


# Each case: the members of Ada.zip, and words of the reason, for lesson 02 or for all.
BAD_ZIPS = {
    "up and out": ([("../../02.ipynb", b"")], "'../../02.ipynb', which leads out"),
    "up within": ([("a/../02.ipynb", b"")], "which leads out"),
    "absolute": ([("/etc/02.ipynb", b"")], "which leads out"),
    "backslashes": ([("..\\02.ipynb", b"")], "which leads out"),
    "a link": ([(linked("x"), b"/etc/passwd")], "it is a link; links are not followed"),
    "a bomb": ([("02.ipynb", b" " * (MAX_BYTES + 1))], "it would unpack to 20 MB"),
    "a zip in it": ([("inner.zip", b"PK")], "only another archive in it (inner.zip in Ada.zip)"),
    "no notebook": ([("answers.py", b"x = 1")], "no notebook in it"),
    "nothing": ([], "no notebook in it"),
    "an unknown notebook": ([("x.ipynb", b"{}")], "no notebook in it that belongs to a lesson"),
    "two unknown lessons": (
        [("x.ipynb", notebook(lesson="02") + notebook(lesson="03"))],
        "belongs to a lesson (found x.ipynb in Ada.zip): name it like 02.ipynb",
    ),
    "201 notebooks": ([(f"{i}/02.ipynb", b"") for i in range(201)], "it holds 201 notebooks"),
}


@pytest.mark.parametrize("case", BAD_ZIPS)
def test_a_zip_that_cannot_be_used_has_its_reason(tmp_path, case):
    members, words = BAD_ZIPS[case]
    put_zip(tmp_path / "Ada.zip", *members, compression=zipfile.ZIP_DEFLATED)
    assert words in reason_of(only(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Ada.zip"]


def reason_of(submission) -> str:
    """Why lesson 02 cannot be read: said at once, or when it is read."""
    assert submission.student == "Ada"
    if problem := submission.problems.get("02", submission.problems.get("")):
        return problem
    with pytest.raises(Unreadable) as caught:
        submission.notebooks["02"].read()
    return str(caught.value)


def test_bytes_that_are_no_zip_or_a_damaged_one_have_a_reason(tmp_path):
    put_zip(tmp_path / "good.zip", ("02.ipynb", notebook("x" * 5000)))
    good = (tmp_path / "good.zip").read_bytes()
    (tmp_path / "good.zip").unlink()
    flipped = good.replace(b"xxxx", b"yyyy")
    for damaged in (b"", b"PK", b"<html>", good[:-30], good[len(good) // 2 :], flipped):
        (tmp_path / "Ada.zip").write_bytes(damaged)
        assert reason_of(only(tmp_path))


def test_a_zip_packed_in_a_way_that_has_no_bound_is_refused(tmp_path):
    put_zip(tmp_path / "Ada.zip", ("02.ipynb", notebook()), compression=zipfile.ZIP_BZIP2)
    assert "another way than deflate" in reason_of(only(tmp_path))


def test_an_encrypted_zip_is_refused(tmp_path):
    put_zip(tmp_path / "Ada.zip", ("02.ipynb", notebook()))
    content = bytearray((tmp_path / "Ada.zip").read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "Ada.zip").write_bytes(content)
    assert "it is encrypted" in reason_of(only(tmp_path))


def test_a_zip_of_very_many_files_is_counted_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_ENTRIES", 10)
    put_zip(tmp_path / "Ada.zip", *[(f"{i}.txt", b"") for i in range(11)])
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert "the zip holds more than 10 files" in reason_of(only(tmp_path))


def test_a_zip_that_says_it_is_larger_than_any_is_refused(tmp_path, monkeypatch):
    put_zip(tmp_path / "Ada.zip", ("02.ipynb", notebook()), ("big", b"x" * 1000))
    monkeypatch.setattr(archives, "MAX_UNPACKED", 1000)
    assert "the zip would unpack to" in reason_of(only(tmp_path))
    monkeypatch.setattr(archives, "MAX_ZIP", 500)
    assert "the zip has" in reason_of(only(tmp_path))


def test_links_in_a_folder_are_not_followed(tmp_path):
    secret = tmp_path / "secret.ipynb"
    put(secret)
    class_folder = tmp_path / "class"
    (class_folder / "Ada").mkdir(parents=True)
    (class_folder / "Ada/02.ipynb").symlink_to(secret)
    assert reason_of(only(class_folder)) == "it is a link; links are not followed"
    (class_folder / "Ada/02.ipynb").unlink()
    (class_folder / "Ada/02_attention").symlink_to(tmp_path, target_is_directory=True)
    assert "02_attention is a link, and none is followed" in reason_of(only(class_folder))
    (class_folder / "Ada/02_attention").unlink()
    (class_folder / "Ada").rmdir()
    (class_folder / "Ada").symlink_to(tmp_path, target_is_directory=True)
    assert reason_of(only(class_folder)) == "Ada: it is a link; links are not followed"


def test_what_would_block_a_reader_is_refused(tmp_path):
    (tmp_path / "Ada").mkdir()
    os.mkfifo(tmp_path / "Ada/02.ipynb")
    assert reason_of(only(tmp_path)) == "it is no plain file"
    (tmp_path / "Ada/02.ipynb").unlink()
    (tmp_path / "Ada").rmdir()
    os.mkfifo(tmp_path / "Ada.ipynb")
    assert reason_of(only(tmp_path)) == "Ada.ipynb: it is no plain file"


def test_a_large_notebook_is_refused(tmp_path):
    put(tmp_path / "Ada/02.ipynb", b" " * (MAX_BYTES + 1))
    assert reason_of(only(tmp_path)) == "it is larger than 20 MB"


def test_a_file_that_is_gone_when_its_turn_comes_has_a_reason(tmp_path):
    put(tmp_path / "Ada/02.ipynb")
    submission = only(tmp_path)
    (tmp_path / "Ada/02.ipynb").unlink()
    assert "it cannot be read (FileNotFoundError" in reason_of(submission)


def test_a_very_deep_or_full_folder_ends(tmp_path, monkeypatch):
    deep = tmp_path / "Ada" / "/".join("d" * 40)
    put(deep / "02.ipynb")
    assert reason_of(only(tmp_path)) == "no notebook in it"
    monkeypatch.setattr(archives, "MAX_ENTRIES", 5)
    for number in range(6):
        put(tmp_path / f"Ada/{number}.txt", b"")
    assert "it holds more than 5 files" in reason_of(only(tmp_path))


@pytest.mark.parametrize("ending", [".rar", ".7z", ".tar.gz", ".tgz"])
def test_another_kind_of_archive_is_named(tmp_path, ending):
    put(tmp_path / f"Ada{ending}", b"Rar!")
    assert "archive: hand in a zip" in reason_of(only(tmp_path))


NAMES = {
    "Ada Lovelace": "Ada Lovelace",
    'Bo "B" O\'Hara': 'Bo "B" O\'Hara',
    "Zoë Müller-Lüdenscheidt": "Zoë Müller-Lüdenscheidt",
    "李 明": "李 明",
    "two\nlines\tand a tab": "two\\x0alines\\x09and a tab",
    "red\x1b[31m": "red\\x1b[31m",
    "gnp.\u202efdp": "gnp.\\x202efdp",
    "=1+1": "=1+1",
    "--out": "--out",
    "$(reboot); rm -rf ~": "$(reboot); rm -rf ~",
    "n" * 255: "n" * 255,
    " outer blanks ": "outer blanks",
    unicodedata.normalize("NFD", "Zoé"): "Zoé",
}


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_a_student_in_one_line(tmp_path, name):
    put(tmp_path / name / "02.ipynb")
    assert only(tmp_path).student == NAMES[name]
    assert only(tmp_path).notebooks["02"].read() == notebook()


def test_a_name_that_is_no_text_is_shown_by_its_bytes(tmp_path):
    folder = os.fsencode(tmp_path) + b"/Jos\xe9"
    try:
        os.mkdir(folder)
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    assert only(tmp_path).student == "Jos\\xdce9"


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("Jo", "Jo .zip"), "taken for one student: 'Jo' and 'Jo '"),
        (("Zo\u00eb", "Zoe\u0308 "), "taken for one student: "),
        (("Ada", "ada"), "look alike: Ada and ada"),
        (("Ada", "\u0410da"), "look alike: Ada and \u0410da"),
        (("Bill", "Bi1l"), "look alike: Bi1l and Bill"),
        (("Mia Li", "Mia-Li"), "look alike: Mia Li and Mia-Li"),
    ],
)
def test_names_that_may_be_one_or_two_students_are_pointed_out(tmp_path, names, line):
    for name in (*names, "Bo", "Mo__02.ipynb", "Mo__03.ipynb"):
        if name.endswith((".zip", ".ipynb")):
            (tmp_path / name).touch()
        else:
            (tmp_path / name).mkdir()
    (said,) = doubtful_names(tmp_path)
    assert said.startswith(line)


def test_names_that_differ_in_case_are_two_students(tmp_path):
    put(tmp_path / "Ada/02.ipynb")
    put(tmp_path / "ada/02.ipynb", notebook("another"))
    if len(list(tmp_path.iterdir())) == 1:
        pytest.skip("this file system does not tell upper from lower case")
    found = find_submissions(tmp_path)
    assert [each.student for each in found] == ["Ada", "ada"]
    assert not any(each.problems for each in found)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere", "there is no folder"),
        ("a_file", "a_file is a file: unpack"),
        ("empty", "holds no submission"),
        ("notes", "holds no submission"),
        ("course", "is one copy of the course: give the folder above it"),
    ],
)
def test_a_folder_that_holds_no_class_is_an_input_error(tmp_path, path, words):
    put(tmp_path / "a_file", b"")
    (tmp_path / "empty").mkdir()
    put(tmp_path / "notes/readme.txt", b"")
    put(tmp_path / "course/lessons/02_attention/lesson.ipynb")
    with pytest.raises(InputError, match=words):
        find_submissions(tmp_path / path)
