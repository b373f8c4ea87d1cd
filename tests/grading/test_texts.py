"""Text of a submission, made fit for a table, a page and a terminal."""

import pytest

from solutions.grading.texts import brief, clean, show_points, show_size


def test_words_are_made_harmless():
    assert clean("\x1b[31mred\x1b[0m\x1b]0;title\x07 \x00\u202e") == "red ??"
    assert clean("at 0x7f12345678") == "at 0x..."
    paths = {"/tmp/a/b": "<home>"}
    assert clean("in /tmp/a/b/f.py", paths) == "in <home>/f.py"
    random = ["check_08_0_4b6tpk/step_00000004.pt", "tmpab3_xy9z/f", "ranks_a_bcdefg'"]
    assert [clean(f"/tmp/a/b/{name}", paths) for name in random] == [
        "<home>/check_08_.../step_00000004.pt",
        "<home>/tmp.../f",
        "<home>/ranks_...'",
    ]
    assert len(brief("x" * 10**6)) == 300
    assert len(clean("a\n" * 10**6)) == 1000
    assert clean("a\n  b\tc") == "a b c"
    assert brief("a\r\nb") == "a? b"


def test_sizes():
    assert [show_size(n) for n in (12, 1 << 20, 3 << 29)] == ["12 bytes", "1 MiB", "1.5 GiB"]


@pytest.mark.parametrize(
    ("points", "text"),
    [(0.0, "0"), (3, "3"), (2.5, "2.5"), (4 / 3, "1.33"), (10.0, "10"), (0.1 + 0.2, "0.3")],
)
def test_points_are_written_without_needless_digits(points, text):
    assert show_points(points) == text
