"""The class as a table: ids and addresses beside the points, who is missing, who is late."""

import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import InputError
from solutions.grading.intake.submissions import doubtful_names, find_submissions, late, users
from solutions.grading.reports.table import write_points
from solutions.grading.results import Outcome, Verdict
from solutions.grading.roster import Person, as_handed_in, differences, read_roster

RIGHT = Verdict("Jo Li", "02", "02.1", "f", 3.0, 3, Outcome.RIGHT, "right")


def read(folder: Path, content: bytes):
    (folder / "class.csv").write_bytes(content)
    return read_roster(folder / "class.csv")


@pytest.mark.parametrize("code", ["utf-8", "utf-8-sig", "cp1252"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_roster_is_read_as_spreadsheets_write_it(tmp_path, code, separator):
    text = "Email,Name,ID,group\r\nj@x.org,Jörg Ä,17,a\r\n,Jo Li,,b\r\n".replace(",", separator)
    assert read(tmp_path, text.encode(code)) == {
        "Jörg Ä": Person("Jörg Ä", "17", "j@x.org"),
        "Jo Li": Person("Jo Li"),
    }


@pytest.mark.parametrize(
    "content",
    [
        b"name,id\nJo,1\nJo,2\nKim,3\n",
        b"Student,ID,SIS Login ID\nJo,1,a\nJo,1,b\nKim,3,c\n",
    ],
)
def test_of_two_who_are_called_alike_nobody_gets_the_points(tmp_path, content):
    roster = read(tmp_path, content)
    assert [*roster] == ["Jo (line 2)", "Jo (line 3)", "Kim"], "the others are graded"
    twice = "which has it twice: a column folder says what each one's is called"
    assert differences(roster, ["Jo", "Kim", "X"]) == [
        *["handed in nothing: Jo"] * 2,
        f"not in the roster, {twice}: Jo",
        "not in the roster: X",
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no column called name"),
        (b"mail,id\nx,1\n", "has no column called name, but 'mail, id'"),
        (b"name,id\n,1\n", "line 2: there is no name"),
        (b"name,email\n,jo@x.org\n", "line 2: there is no name"),
        (b'name,id\n"Jo,1\n', "cannot be read: unexpected end of data"),
        ("name\nJo\n".encode("utf-16"), "cannot be read: save it as CSV in UTF-8"),
        (b"name\nJ\x81\n", "cannot be read: save it as CSV in UTF-8"),
    ],
)
def test_what_is_no_roster_is_refused_in_a_line(tmp_path, content, words):
    with pytest.raises(InputError) as error:
        read(tmp_path, content)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_points_have_ids_and_the_missing_a_row(tmp_path):
    roster = {"Jo Li": Person("Li, Jo", "17", "jo@x.org"), "Bo": Person("Bo", "18")}
    write_points(tmp_path / "points.csv", [RIGHT], roster)
    assert (tmp_path / "points.csv").read_text(encoding="utf-8-sig").splitlines() == [
        "student,id,email,lesson 02 of 3,all of 3",
        "Bo,18,,,",
        '"Li, Jo",17,jo@x.org,3,3',
    ]
    assert differences(roster, ["Jo Li", "Ann"]) == [
        "handed in nothing: Bo",
        "not in the roster: Ann",
    ]


def test_moodle_s_list_of_participants_is_a_roster(tmp_path):
    text = '"First name","Last name","ID number","Email address",Groups\nJo,Li,17,jo@x.org,\n\n'
    assert read(tmp_path, text.encode()) == {"Jo Li": Person("Jo Li", "17", "jo@x.org")}


def test_a_section_of_a_teacher_s_own_makes_no_gradebook(tmp_path):
    roster = read(tmp_path, b"name,id,email,section,login\nJo Li,17,jo@x.org,A,jli\n,,,,\n")
    write_points(tmp_path / "points.csv", [RIGHT], roster)
    assert (tmp_path / "points.csv").read_text(encoding="utf-8-sig").splitlines() == [
        "student,id,email,lesson 02 of 3,all of 3",
        "Jo Li,17,jo@x.org,3,3",
    ]


@pytest.mark.parametrize("login", ["SIS Login ID,", ""])  # not everybody may see it
def test_canvas_s_ids_tell_two_of_one_name_apart(tmp_path, login):
    text = f"Student,ID,{login}Section\n    Points Possible\n"
    text += "".join(f'"Li, Jo",{id},{login and "x,"}A\n' for id in (98765, 98766))
    (tmp_path / "in").mkdir()
    for number in ("98765", "98766"):
        (tmp_path / "in" / f"lijo_{number}_1234567_02.ipynb").write_bytes(b"{}")
    roster = as_handed_in(read(tmp_path, text.encode()), users(tmp_path / "in"))
    assert {called: person.id for called, person in roster.items()} == {
        "lijo 98765": "98765",
        "lijo 98766": "98766",
    }


def test_canvas_s_gradebook_goes_out_and_comes_back(tmp_path):
    """Its import wants these columns in this order, and finds people by ID; names of files are
    those of its download, with the user's number."""
    text = "Student,ID,SIS Login ID,Section,Quiz (77)\n"
    text += ",,,,Manual Posting\n    Points Possible,,,,5\n"
    text += '"Li, Jo",98765,jli,A,3\n"Bo, Al",98766,abo,A,\n'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lijo_LATE_98765_1234567_lesson02.ipynb").write_bytes(b"{}")
    roster = as_handed_in(read(tmp_path, text.encode()), users(tmp_path / "in"))
    students = [each.student for each in find_submissions(tmp_path / "in")]
    assert differences(roster, students) == ["handed in nothing: Bo, Al"]
    write_points(tmp_path / "points.csv", [replace(RIGHT, student="lijo")], roster)
    assert (tmp_path / "points.csv").read_text(encoding="utf-8-sig").splitlines() == [
        "Student,ID,SIS Login ID,Section,lesson 02 of 3,Final Points",
        "Points Possible,,,,3,",
        '"Bo, Al",98766,abo,A,,',
        '"Li, Jo",98765,jli,A,3,3',
    ]


def test_the_names_of_moodle_s_and_canvas_s_downloads_are_understood(tmp_path):
    (tmp_path / "Jo Li_12345_assignsubmission_file_").mkdir()
    names = ["doejane_LATE_98765_1234567_lesson02.ipynb", "doejane_98765_1234568_notes.zip"]
    for name in (*names, "Ann_02.ipynb", "max_2024_1001_lesson02.ipynb"):
        (tmp_path / name).write_bytes(b"{}")
    students = [each.student for each in find_submissions(tmp_path)]
    assert students == ["Ann_02", "Jo Li", "doejane", "max_2024_1001_lesson02"]
    assert late(tmp_path) == [f"late: doejane ({names[0]})"]
    assert doubtful_names(tmp_path) == []


@pytest.mark.parametrize(
    "names",
    [
        ("Jo Li_17_assignsubmission_file_", "Jo Li_18_assignsubmission_file_"),
        ("Jo Li_LATE_17000_1234567_02.ipynb", "Jo Li_18000_1234568_02.ipynb"),
    ],
)
def test_two_of_one_name_in_a_download_are_two(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"{}") if "." in name else (tmp_path / name).mkdir()
    one, other = (f"Jo Li {re.findall(r'[0-9]+', name)[0]}" for name in names)
    assert [each.student for each in find_submissions(tmp_path)] == [one, other]
    assert doubtful_names(tmp_path) == [f"one name with several numbers: {one} and {other}"]
    assert late(tmp_path) == ([f"late: {one} ({names[0]})"] if "LATE" in names[0] else [])


def test_a_name_is_found_however_a_spreadsheet_composes_it(tmp_path):
    written = unicodedata.normalize("NFD", "Jörg Ä")
    roster = read(tmp_path, f"name\n{written}\n".encode())
    assert differences(roster, ["Jörg Ä"]) == []
