"""What comes out: tables that run nothing, pages that run nothing, a picture, and a summary."""

import csv
import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path

import matplotlib.image
import pytest

from solutions.grading.reports import table
from solutions.grading.reports.feedback import page_names, write_feedback
from solutions.grading.reports.picture import draw_class, headline
from solutions.grading.reports.summary import summary
from solutions.grading.results import Answers, Exercise, Outcome, Verdict
from solutions.grading.verdicts import make_verdict

ROOT = Path(__file__).resolve().parents[2]
TITLES = {"01": "lesson01_positional_encoding", "02": "lesson02_attention"}
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'`*_[a](javascript:b)\x1b[2J\u202e"
)


def verdict(exercise, outcome=Outcome.RIGHT, points=0.0, message="", *, student="Ada", **more):
    """A verdict on an exercise that is worth two points."""
    fields = {"name": "f", "max": 2, "outcome": outcome, "message": message, **more}
    return Verdict(student, exercise[:2], exercise, points=points, **fields)


RIGHT = verdict("01.1", points=2.0, message="right (4 of 4)", hint="no hint")
PARTLY = verdict(
    "01.2",
    Outcome.PARTLY,
    1.33,
    "not right at the check of dropout",
    title="dropout",
    mistake="dropout does not reach the output",
    expected="about half of the sum zero",
    seen="0 % zero",
    hint="apply it to the sum of x and encoding",
    also=("x's dtype", "gradients"),
    passed=4,
    total=6,
)
UNSOLVED = verdict("01.3", Outcome.UNSOLVED, message="not solved yet", hint="one block a pair")
STOPPED = verdict("01.4", Outcome.STOPPED, message="stopped: took longer than 60 s")
FLAGGED = verdict("02.1", Outcome.RIGHT, message="right", flags=("line 3 imports os",))
ALL = [RIGHT, PARTLY, UNSOLVED, STOPPED, FLAGGED]


def test_the_same_verdicts_give_the_same_bytes(tmp_path):
    """Also in another process: other hashes, and another matplotlibrc, in the folder it runs in."""
    (tmp_path / "matplotlibrc").write_text("figure.facecolor: red\nfont.size: 30\n")
    code = (
        "import sys; from pathlib import Path; from solutions.grade import write_results; "
        "from solutions.grading.results import Lesson, Limits, Outcome, Verdict; "
        "some = 'm <>', 't', 'x', 'e', 's', 'h', ('f',), 2, 9; "
        "out = Path(sys.argv[1]); out.mkdir(); "
        "write_results(out, [Verdict(who, '01', f'01.{i}', 'f', i, 7, outcome, *some) "
        "for who in ('Zoë', 'zoë') for i, outcome in enumerate(Outcome)], "
        "{'01': Lesson('01', 'lesson01_x', (), '', {}, '')}, Limits())"
    )
    found = []
    for seed, folder in enumerate((tmp_path, ROOT)):
        out = tmp_path / f"out{seed}"
        environment = {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        command = [sys.executable, "-c", code, str(out)]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        files = (path for path in sorted(out.rglob("*")) if path.is_file())
        found.append({str(path.relative_to(out)): path.read_bytes() for path in files})
    assert found[0] == found[1]
    assert len(found[0]) == 7, "three tables, a picture, three pages"


def test_a_row_is_one_exercise_and_replaces_the_table_before(tmp_path):
    path = tmp_path / "g.csv"
    for these in (ALL, [RIGHT, replace(PARTLY, exercise="01.4a", points=1.5)]):
        table.write_csv(path, these)
    assert path.read_bytes() == (
        b"\xef\xbb\xbfstudent,lesson,exercise,points,max,message\n"
        b"Ada,01,01.1,2,2,right (4 of 4)\n"
        b"Ada,01,01.4a,1.5,2,not right at the check of dropout\n"
    )
    assert list(tmp_path.iterdir()) == [path]


def test_rows_are_ordered_by_student_and_lesson_whatever_came_first():
    ids = {"02": ["02.1", "02.4b", "02.10"], "03": ["03.1"], "10": ["10.1"]}
    groups = [
        [verdict(id, student=student) for id in ids[lesson]]
        for student in ("ada", "Bo", "bo", "Zoé")
        for lesson in ids
    ]
    assert table.in_order(chain(*reversed(groups))) == list(chain(*groups))


NAMES = ["Zoé, the 2nd", 'Bo "B" B', "李 明", "a;b|c"]
FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "=cmd|' /C x'!A0"]


@pytest.mark.parametrize("text", [*NAMES, *FORMULAS])
def test_names_come_back_as_they_were_and_no_cell_is_a_formula(tmp_path, text):
    these = [verdict("02.1", student=text, message=text)]
    table.write_csv(tmp_path / "g.csv", these)
    table.write_points(tmp_path / "p.csv", these)
    [row], [points] = (
        list(csv.DictReader((tmp_path / name).read_text(encoding="utf-8-sig").splitlines()))
        for name in ("g.csv", "p.csv")
    )
    shown = text if text in NAMES else f"'{text}"
    assert row["student"] == row["message"] == points["student"] == shown
    table.write_json(tmp_path / "g.json", these, {})
    assert json.loads((tmp_path / "g.json").read_text())["verdicts"][0]["student"] == text


def test_json_holds_all_that_is_known(tmp_path):
    table.write_json(tmp_path / "g.json", [FLAGGED, PARTLY], {"lessons": {"02": {"02.1": 3}}})
    content = json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))
    assert list(content) == ["lessons", "verdicts"]
    flagged, partly = content["verdicts"]
    assert (flagged["flags"], partly["mistake"]) == (["line 3 imports os"], PARTLY.mistake)


def test_one_row_a_student_for_a_learning_platform(tmp_path):
    missing = verdict("01.1", Outcome.MISSING, student="Bo")
    two = [replace(missing, lesson="02", exercise=id) for id in ("02.1", "02.2")]
    half = replace(two[0], points=0.67, outcome=Outcome.PARTLY)
    ada = [replace(each, student="Ada", points=1.5, outcome=Outcome.PARTLY) for each in two]
    table.write_points(tmp_path / "p.csv", [RIGHT, *ada, missing, half, two[1]])
    assert (tmp_path / "p.csv").read_text(encoding="utf-8-sig") == (
        "student,lesson 01 of 2,lesson 02 of 4,all of 6\nAda,2,3,5\nBo,,0.67,0.67\n"
    )


class Reader(HTMLParser):
    """Collects the tags, the attributes and the text of a page; complains about broken nesting."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)


def read_pages(folder, verdicts=ALL):
    """The first student's page, and the instructor's."""
    (picture := folder / "class.png").write_bytes(b"\x89PNG")
    students = table.by_student(table.in_order(verdicts))
    paths = write_feedback(folder, students, titles=TITLES, picture=picture)
    return Reader(next(iter(paths.values()))), Reader(folder / "index.html")


ON_THE_PAGE = (
    "Ada 3.33 of 10 points, 2 of 5 exercises right",
    "Lesson 01: positional encoding 1 of 4 3.33 of 8 Lesson 02: attention 1 of 1 0 of 2",
    "01.1 f right 2 of 2 right (4 of 4) 01.2 f partly right 1.33 of 2"
    " Not right yet, at the check of dropout. Checks passed: 4 of 6."
    " looks like dropout does not reach the output expected about half of the sum zero"
    " seen 0 % zero also not right x's dtype; gradients"
    " Hint: apply it to the sum of x and encoding",
    "01.3 f not solved 0 of 2 Hint: one block a pair",
    "01.4 f stopped 0 of 2 stopped: took longer than 60 s",
    "No points until your instructor has looked at this answer: line 3 imports os",
    "Mend exercises in order",
)
IN_THE_INDEX = (
    "Students: 1. Lessons: 01, 02.",
    "Ada 3.33 of 8 0 of 2 3.33 of 10 01.4: stopped: took longer than 60 s 02.1: line 3 imports os",
    "01.2 1 dropout does not reach the output",
)


def test_pages_say_what_came_out_and_need_no_other_file(tmp_path):
    page, index = read_pages(tmp_path)
    assert [words for words in ON_THE_PAGE if words not in page.text] == []
    assert [words for words in IN_THE_INDEX if words not in index.text] == []
    assert [value for name, value in index.attributes if name == "src"] == [
        "data:image/png;base64,iVBORw=="
    ]
    for source in (page.source, index.source):
        assert not re.search(r"https?:|//\w|@import|url\(", source)
        assert "prefers-color-scheme: dark" in source and "@media print" in source


def test_nothing_of_a_submission_becomes_markup(tmp_path):
    answers = Answers("<b>" + HOSTILE[:50], "01", {}, {})
    texts = dict.fromkeys(("title", "mistake", "expected", "seen", "hint"), HOSTILE)
    lists = {"also": [HOSTILE], "flags": [HOSTILE]}
    exercise = Exercise("01.1", HOSTILE[:60], 2)
    hostile = make_verdict(answers, exercise, Outcome.WRONG, HOSTILE, **texts, **lists)
    stopped = replace(hostile, exercise="01.3", outcome=Outcome.STOPPED, title="", flags=())
    for reader in read_pages(tmp_path, [hostile, stopped]):
        assert not {"script", "iframe", "object", "b"} & set(reader.tags)
        assert not [name for name, _ in reader.attributes if name.startswith("on")]
        links = [value for name, value in reader.attributes if name == "href"]
        assert all(re.fullmatch(r"[\w-]+\.html|#[\w-]+", link) for link in links)
        assert "<script>alert(1)</script>" in reader.text, "shown as text"
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", reader.source)


def test_a_reason_of_the_whole_lesson_is_said_once(tmp_path):
    reason = "no notebook of lesson 01 (handed in: 02)"
    gone = [verdict(id, Outcome.MISSING, message=reason) for id in ("01.1", "01.2")]
    page, index = read_pages(tmp_path, gone)
    assert page.text.count(reason) == 1
    assert "Exercises: 01.1 f, 01.2 f." in page.text
    assert f"Ada – 0 of 4 lesson 01: {reason}" in index.text
    _, index = read_pages(tmp_path, [*gone, verdict("02.1", Outcome.RIGHT, points=2.0)])
    assert reason not in index.text, "a dash says it where something else was handed in"
    by_hand = "points set by hand (before: 0): seen on paper"
    page, _ = read_pages(tmp_path, [replace(each, by_hand=by_hand) for each in gone])
    assert by_hand in page.text


def test_mistakes_are_counted_by_exercise_and_words(tmp_path):
    made = {("01.1", "not mean"): "abc", ("01.2", "not mean"): "ab", ("01.2", "transposed"): "c"}
    some = [
        verdict(id, Outcome.WRONG, mistake=words, student=student)
        for (id, words), students in made.items()
        for student in students
    ]
    _, index = read_pages(tmp_path, some)
    assert "01.1 3 not mean 01.2 2 not mean 01.2 1 transposed" in index.text


def test_file_names_are_safe_and_unique():
    odd = ["Ada Brandt", "ada brandt", "Ada-Brandt", "Zoë", "张伟", "李娜", "..", "a/b", "CON"]
    odd += ["index", "x" * 300, "x" * 301, "=SUM(A1)", "'; rm -rf", "\udcff", "a\nb", "nul.", "Jo"]
    names = page_names([*odd, page_names(["Zoë"])["Zoë"]])
    assert len({name.casefold() for name in names.values()}) == len(odd) + 1
    assert [name for name in names.values() if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}", name)] == []
    assert not {name.casefold() for name in names.values()} & {"con", "nul", "index"}
    assert (names["Jo"], names["Ada Brandt"]) == ("Jo", "Ada-Brandt"), "plain names stay"


@pytest.mark.parametrize("size", [(12, 2, 5), (30, 8, 6), (1, 1, 1), (200, 1, 1)])
def test_the_picture_has_a_line_for_every_exercise(tmp_path, size):
    students, lessons, exercises = (range(1, count + 1) for count in size)
    a_class = [
        verdict(f"{n:02}.{k}", list(Outcome)[(s * 5 + n * 3 + k) % 7], student=f"s{s}")
        for s in students
        for n in lessons
        for k in exercises
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_class(tmp_path / "a.png", a_class)
    height, width, _ = matplotlib.image.imread(tmp_path / "a.png").shape
    assert width == 1200 and height > 31 * size[1] * size[2]


def test_the_headline_names_the_hardest():
    ben = [replace(each, student="Ben") for each in ALL]
    assert headline([RIGHT, ben[0]]) == "Everybody has every exercise right"
    assert headline([RIGHT, PARTLY, *ben[:2]]) == "Hardest: 01.2 (right for 0 of 2)"
    assert headline([PARTLY, STOPPED]) == "Hardest: 01.2, 01.4 (right for 0 of 1)"


def test_the_summary_counts_outcomes_and_points_and_says_what_to_look_at():
    lost = verdict("01.1", Outcome.UNREADABLE, message="not JSON", student="Cem")
    partly = replace(RIGHT, student="Ben", points=0.5, outcome=Outcome.PARTLY, flags=("a", "b"))
    assert summary([RIGHT, partly, lost]).splitlines() == [
        "exercise  right  partly  wrong  not graded  not solved  mean points",
        "01.1 f        1       1      0           1           0    0.83 of 2",
        "",
        "students: 3; points of 2: median 0.5, from 0 to 2",
        "",
        "needs a look:",
        "  Ben, 01.1: a; b",
        "",
        "stopped, or cannot be graded:",
        "  Cem, 01.1: not JSON",
    ]
    assert "Cem, 01.1 and 1 more: not JSON" in summary(
        [lost, replace(lost, exercise="01.2"), replace(lost, exercise="01.3", flags=("c",))]
    )


def test_a_long_list_is_cut_and_says_so():
    lost = verdict("01.1", Outcome.UNREADABLE, message="not JSON")
    lines = summary([replace(lost, student=f"s{i}") for i in range(30)]).splitlines()
    assert lines[-1] == "  and 18 more, in grades.csv"
    assert sum("not JSON" in line for line in lines) == 12
