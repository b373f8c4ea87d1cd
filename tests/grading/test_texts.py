"""Text of a submission, made fit for a table, a page and a terminal."""

import pytest

from solutions.grading.texts import as_cell, brief, clean, show_points

CLEAN = {
    "\x1b[31mred\x1b[0m\x1b]0;title\x07 \x00\u202e\udcff": "red ???",
    "1\u200f2\u061c3\u200b4\u2028\xa05": "1?2?3?4 5",
    "at 0x7f12345678": "at 0x...",
    "a\n  b\tc\r\nd": "a b c d",
    "in /tmp/a/b/f.py": "in <home>/f.py",
    "/tmp/a/b/check_08_0_4b6tpk/step_00000004.pt": "<home>/check_08_.../step_00000004.pt",
    "/tmp/a/b/tmpab3_xy9z/f": "<home>/tmp.../f",
    "/tmp/a/b/ranks_a_bcdefg'": "<home>/ranks_...'",
    "Żółć 张伟 🦊": "Żółć 张伟 🦊",
}


@pytest.mark.parametrize(("text", "expected"), CLEAN.items())
def test_words_are_made_harmless_and_the_same_in_every_run(text, expected):
    assert clean(text, {"/tmp/a/b": "<home>"}) == expected


def test_words_are_cut():
    assert len(brief("x" * 10**6)) == 300
    assert len(clean("a\n" * 10**6)) == 1000


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (show_points(0.0), "0"),
        (show_points(10), "10"),
        (show_points(4 / 3), "1.33"),
        (show_points(0.1 + 0.2), "0.3"),
    ],
)
def test_numbers_have_no_needless_digits(shown, text):
    assert shown == text


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("seen x;=1+1", "seen x;'=1+1"),
        ("a | @SUM(1)", "a | '@SUM(1)"),
        ("got (3, -2); want 1", "got (3, -2); want 1"),
    ],
)
def test_no_spreadsheet_computes_a_cell_whatever_it_takes_for_a_separator(text, cell):
    assert as_cell(text) == cell
