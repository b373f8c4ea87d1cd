"""Before a reader a check bounds what an answer prints, and can be stopped with a word."""

import signal
import sys
import threading

import pytest

from shared.exercises import waiting
from shared.exercises.waiting import NUM_LINES, Stopped, before_a_reader


def test_the_first_lines_are_shown_and_the_others_counted(capsys):
    with before_a_reader("01.1 f", says_how_to_stop=False):
        for number in range(1200):
            print(number, "x" * 1000)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == NUM_LINES + 1
    assert said[NUM_LINES - 1].startswith(f"{NUM_LINES - 1} xxx")
    assert max(map(len, said)) == waiting.WIDTH
    assert said[-1] == "(and 1,180 more lines that the answer printed)"


def test_one_long_line_in_many_writes_is_cut(capsys):
    with before_a_reader("01.1 f", says_how_to_stop=False):
        for _ in range(900):
            print(".", end="")
    assert capsys.readouterr().out == "." * waiting.WIDTH


def test_a_stream_that_somebody_kept_goes_on_behind_the_check(capsys):
    with before_a_reader("01.1 f", says_how_to_stop=False):
        kept = sys.stdout
        print("\n" * 30)
    kept.write("a logger's line\n")
    assert capsys.readouterr().out.endswith("a logger's line\n")


def test_an_endless_answer_is_told_how_to_stop_and_stopped_names_its_line(monkeypatch, capsys):
    def endless():
        while True:
            pass

    monkeypatch.setattr(waiting, "SECONDS", 0.05)
    threading.Timer(0.3, signal.raise_signal, (signal.SIGINT,)).start()
    with (
        pytest.raises(Stopped, match=r"^01.1 endless, by you after \d+ s, in endless at: "),
        before_a_reader("01.1 endless", says_how_to_stop=True),
    ):
        endless()
    assert "01.1 endless: still running after 0.05 s; the square button" in capsys.readouterr().out
