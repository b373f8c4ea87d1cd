"""Feedback pages: all is on them, nothing runs in them, equal verdicts give equal bytes."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from solutions.grading.reports.feedback import (
    headline,
    make_card,
    most_frequent,
    page_names,
    write_feedback,
)
from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import as_sentence, plain

ROOT = Path(__file__).resolve().parents[2]
RIGHT = Verdict(
    "Ada",
    "01",
    "01.1",
    "sinusoidal_encoding",
    2,
    2,
    Outcome.RIGHT,
    "right (4 of 4)",
    passed=4,
    total=4,
)
PARTLY = Verdict(
    student="Ada",
    lesson="01",
    exercise="01.2",
    name="PositionalEncoding",
    points=1.33,
    max=2,
    outcome=Outcome.PARTLY,
    message="not right at the check of dropout",
    title="dropout",
    mistake="dropout does not reach the output: no value of the sum is zero, however often "
    "it is called",
    expected="about half of the sum zero in training mode with dropout=0.5",
    seen="0 % zero",
    hint="apply it to the sum of x and encoding",
    also=("x's dtype", "gradients"),
    passed=4,
    total=6,
)
UNSOLVED = Verdict(
    "Ada",
    "01",
    "01.3",
    "shift_matrix",
    0,
    3,
    Outcome.UNSOLVED,
    "not solved yet",
    hint="one block a pair",
)
STOPPED = Verdict(
    "Ada", "01", "01.4", "rotary", 0, 4, Outcome.STOPPED, "stopped: took longer than 60 s"
)
FLAGGED = Verdict(
    student="Ada",
    lesson="02",
    exercise="02.1",
    name="attention",
    points=0,
    max=3,
    outcome=Outcome.WRONG,
    message="so it gets no points",
    flags=("torch.allclose was replaced",),
)
ALL = [RIGHT, PARTLY, UNSOLVED, STOPPED, FLAGGED]
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;\"'`*_[a](javascript:b)\x1b[2J\u202e"
)


class Reader(HTMLParser):
    """Collects the tags, the attributes and the text of a page; complains about broken nesting."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(page)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        """What a reader sees, in one line."""
        return " ".join(" ".join(self.texts).split())


def written(folder, verdicts=ALL, **more):
    """Ada's page."""
    return write_feedback(folder, {"Ada": verdicts}, **more)["Ada"].read_text(encoding="utf-8")


def test_a_page_has_each_exercise_its_points_the_words_and_the_hint(tmp_path):
    text = Reader(written(tmp_path, titles={"01": "01_positional_encoding"})).text
    assert "Ada" in text
    assert "3.33 of 14 points, 1 of 5 exercises right" in text
    assert "Lesson 01: positional encoding" in text
    assert "All 4 checks passed." in text
    assert "Not right yet, at the check of dropout. 4 of 6 checks passed." in text
    assert "no value of the sum is zero, however often it is called" in text
    assert "0 % zero" in text
    assert "about half of the sum zero in training mode" in text
    assert "x's dtype; gradients" in text
    assert text.count("pply it to the sum of x and encoding") == 1, "the hint, and once"
    assert "ne block a pair" in text
    assert "took longer than 60 s" in text
    assert "our instructor will look at this answer" in text
    assert text.count("torch.allclose was replaced") == 1
    assert "So it gets no points." in text
    assert text.strip().endswith("Mend exercises in order: a later one may call an earlier one.")
    assert "1.33 of 2" in text


def test_nothing_of_a_submission_becomes_markup(tmp_path):
    verdict = replace(
        PARTLY,
        student=HOSTILE,
        name=HOSTILE,
        message=HOSTILE,
        title=HOSTILE,
        mistake=HOSTILE,
        expected=f"{HOSTILE}\n```\n# {HOSTILE}",
        seen=HOSTILE,
        hint=HOSTILE,
        also=(HOSTILE,),
        flags=(HOSTILE,),
    )
    stopped = replace(verdict, exercise="01.3", outcome=Outcome.STOPPED, title="", flags=())
    page = write_feedback(tmp_path, {HOSTILE: [verdict, stopped]})[HOSTILE]
    for path in (page, tmp_path / "index.html"):
        reader = Reader(path.read_text(encoding="utf-8"))
        assert not {"script", "img", "iframe", "object"} & set(reader.tags)
        assert not [name for name, _ in reader.attributes if name.startswith("on")]
        links = [value for name, value in reader.attributes if name == "href"]
        assert all(re.fullmatch(r"[\w-]+\.html|#[\w-]+", link) for link in links)
        assert "<script>alert(1)</script>" in reader.text, "shown as text"
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", path.read_text(encoding="utf-8"))


def test_a_page_needs_no_other_file(tmp_path):
    picture = tmp_path / "class.png"
    picture.write_bytes(b"\x89PNG")
    html = written(tmp_path / "feedback", picture=picture)
    index = (tmp_path / "feedback" / "index.html").read_text()
    for page in (html, index):
        assert not re.search(r"https?:|//\w|@import|url\(", page)
        sources = [value for name, value in Reader(page).attributes if name == "src"]
        assert all(value.startswith("data:image/png;base64,") for value in sources)
        assert "prefers-color-scheme: dark" in page
        assert "@media print" in page
    assert "data:image/png" in index


def test_a_reason_of_the_whole_lesson_is_said_once(tmp_path):
    reason = "no notebook of lesson 01 (handed in: 02)"
    gone = [
        replace(each, points=0, outcome=Outcome.MISSING, message=reason, title="", hint="")
        for each in (RIGHT, PARTLY, UNSOLVED, STOPPED)
    ]
    text = Reader(written(tmp_path, gone)).text
    assert text.count("o notebook of lesson 01") == 1
    assert "sinusoidal_encoding" in text
    index = Reader((tmp_path / "index.html").read_text()).text
    assert "lesson 01: No notebook of lesson 01 (handed in: 02)" in index


def test_the_index_tells_an_instructor_what_to_look_at(tmp_path):
    written(tmp_path)
    text = Reader((tmp_path / "index.html").read_text()).text
    assert "02.1: torch.allclose was replaced" in text
    assert "01.4: Stopped: took longer than 60 s" in text
    assert "3.33 / 14" in text


def test_the_same_verdicts_give_the_same_bytes(tmp_path):
    """Also in another process, where sets and hashes come in another order."""
    code = (
        "import sys; from pathlib import Path; "
        "from solutions.grading.reports.feedback import write_feedback; "
        "from solutions.grading.results import Outcome, Verdict; "
        "some = 'm <>', 't', 'x', 'e', 's', 'h', ('f',), 2, 9; "
        "vs = [Verdict('Zoë', '01', f'01.{i}', 'f', i, 4, o, *some) "
        "for i, o in enumerate(Outcome)]; "
        "write_feedback(Path(sys.argv[1]), {'Zoë': vs, 'zoë': vs})"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed)],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / seed).iterdir()}
        for seed in ("1", "2")
    )
    assert first == second
    assert len(first) == 3


def test_file_names_are_safe_and_unique():
    odd = [
        "Ada Brandt",
        "ada brandt",
        "Ada-Brandt",
        "Zoë",
        "张伟",
        "李娜",
        "..",
        "a/b",
        "CON",
        "index",
    ]
    odd += ["x" * 300, "x" * 301, "", "=SUM(A1)", "'; rm -rf", "\udcff", "a\nb", "nul.", "Jo"]
    names = page_names(odd)
    assert list(names) == odd
    assert len({name.casefold() for name in names.values()}) == len(odd)
    for name in names.values():
        assert re.fullmatch(r"[A-Za-z0-9-]{1,80}", name)
        assert name.casefold() not in ("con", "nul", "index")
    assert names["Jo"] == "Jo", "a plain name stays as it is"
    assert page_names(["Ada Brandt"]) == {"Ada Brandt": "Ada-Brandt"}


def test_what_a_check_said_is_shown_as_it_was_said():
    """A text that looks like a label, or like the page's own words, is a text."""
    odd = "  seen:       4\n  hint:       none (4 of 6 checks passed before it)"
    card = make_card(replace(PARTLY, mistake=odd, seen="expected: 5"))
    assert card.rows == [
        ("looks like", odd),
        ("expected", PARTLY.expected),
        ("seen", "expected: 5"),
        ("also not right", "x's dtype; gradients"),
    ]
    assert card.text == "Not right yet, at the check of dropout. 4 of 6 checks passed."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("not right yet, at the check", "Not right yet, at the check."),
        ("sin(a + b) = sin a", "sin(a + b) = sin a."),
        ("register_buffer", "register_buffer"),
        ("x was changed", "x was changed."),
        ("torch.allclose was replaced", "torch.allclose was replaced."),
        ("why?", "why?"),
        ("", ""),
    ],
)
def test_sentences_do_not_change_code(text, sentence):
    assert as_sentence(text) == sentence


def test_plain_text_keeps_lines_and_letters():
    assert plain("a\r\nb\tc\x1b[2J") == "a\nb c\ufffd[2J"
    assert plain("Żółć 张伟 🦊 \udcff") == "Żółć 张伟 🦊 \ufffd"


def test_a_page_of_nothing_is_a_page(tmp_path):
    assert headline([]) == "0 of 0 points, 0 of 0 exercises right"
    assert headline([]) in Reader(written(tmp_path, [])).text


def test_mistakes_are_counted_by_exercise_and_words(tmp_path):
    def made(id, words, *students):
        return [replace(PARTLY, student=s, exercise=id, mistake=words) for s in students]

    some = [*made("01.1", "sum, not mean", "a", "b", "c"), *made("01.2", "sum, not mean", "a", "b")]
    some += [*made("01.3", "transposed", "a"), *made("01.3", "", "b")]
    rows = [("01.1", "sum, not mean", 3), ("01.2", "sum, not mean", 2), ("01.3", "transposed", 1)]
    assert most_frequent(some) == rows
    written(tmp_path, some)
    assert "01.1 3 sum, not mean 01.2 2" in Reader((tmp_path / "index.html").read_text()).text
    some += made("01.4", "detached", "a", "b")
    assert rows[2] not in most_frequent(some), "three others came twice"
