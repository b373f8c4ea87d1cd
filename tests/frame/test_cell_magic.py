"""`%%ranks 2` in a notebook: what the ranks show, what comes back, and how they fail."""

import signal
import sys
import threading
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from shared.exercises import cell_magic
from shared.exercises.cell_magic import CellFailed, ranks
from shared.exercises.waiting import NUM_LINES, Stopped


def test_each_rank_shows_its_prints_and_last_value(capsys):
    names = {"torch": torch, "dist": dist, "base": torch.tensor([1.0])}
    cell = "base += rank\ndist.all_reduce(base)\nif rank:\n    print('a')\n    print('b')\nbase"
    ranks("2", cell, names)
    assert capsys.readouterr().out == "rank 0: tensor([3.])\nrank 1:\na\nb\ntensor([3.])\n"
    assert names["base"].item() == 1.0, "the notebook's own is as it was"
    assert "rank" not in names


def test_names_come_back_as_lists_by_rank(capsys):
    names = {}
    ranks(" 3  --return square, world_size", "square = rank**2\nsquare;", names)
    assert capsys.readouterr().out == "rank 0:\nrank 1:\nrank 2:\n"
    assert names["square"] == [0, 1, 4]
    assert names["world_size"] == [3, 3, 3]


@pytest.mark.parametrize(
    ("line", "cell", "words"),
    [
        ("2", "x = 1\nif rank:\n    x / 0", "rank 1 of 2 raised ZeroDivisionError: .*at: x / 0"),
        ("2 --return y", "x = 1", "--return y: this rank has no such name"),
        ("1 --return C", "class C: pass", "C.*: an earlier cell must define what is returned"),
        ("1 --return f", "f = lambda: 1", "rank 0 of 1 raised"),
        (
            "2",
            "x = 1\nif rank = 0: pass",
            "^SyntaxError: invalid syntax.*, line 3: if rank = 0: pass$",
        ),
        ("2", "return 1", "^SyntaxError: 'return' outside function, line 2: return 1$"),
        ("two", "1", r"got %%ranks two"),
        ("0", "1", r"got %%ranks 0"),
        ("2 --rtn x", "1", r"got %%ranks 2 --rtn x"),
    ],
)
def test_a_fault_is_one_line(line, cell, words, monkeypatch):
    notebook = ModuleType("a_notebook")
    monkeypatch.setitem(sys.modules, "a_notebook", notebook)
    with pytest.raises(CellFailed, match=words) as failed:
        ranks(line, cell, vars(notebook))
    assert len(failed.value._render_traceback_()[0].splitlines()) == 1


def test_what_ranks_printed_is_shown_also_where_one_fails(capsys):
    cell = "print('before', rank)\ndist.barrier()\nif rank:\n    raise ValueError('no')"
    with pytest.raises(CellFailed, match="rank 1 of 2 raised ValueError: no"):
        ranks("2", cell, {"dist": dist})
    assert capsys.readouterr().out == "rank 0: before 0\nrank 1: before 1\n"


def test_ranks_that_wait_for_ever_are_ended_and_say_where(monkeypatch, capsys):
    monkeypatch.setattr(cell_magic, "QUIET", 0.5)
    cell = "print('before', rank)\ndist.recv(torch.ones(1), 1 - rank)"
    words = (
        r"^ranks \[0, 1\] of 2 were not back .* \(nobody did anything for 0.5 s\); rank 0 in line 3"
    )
    with pytest.raises(CellFailed, match=words):
        ranks("2", cell, {"dist": dist, "torch": torch})
    assert capsys.readouterr().out == "rank 0: before 0\nrank 1: before 1\n"


def test_a_rank_that_leaves_a_call_out_is_named_and_not_its_healthy_peer():
    cell = "x = torch.ones(1)\nif rank != 1:\n    dist.all_reduce(x)"
    words = (
        r"rank [02] lost a peer, in <module> at: dist.all_reduce\(x\); already back: ranks \[1\]$"
    )
    with pytest.raises(CellFailed, match=words):
        ranks("3", cell, {"dist": dist, "torch": torch})


def test_each_rank_s_first_lines_and_last_value_are_shown_and_the_others_counted(capsys):
    ranks("2", "for number in range(3000):\n    print(rank, number)\nrank + 7", {})
    said = capsys.readouterr().out.splitlines()
    of_rank = [[f"{r} {n}" for n in range(NUM_LINES)] for r in (0, 1)]
    more = f"(and {3000 - NUM_LINES:,} more lines)"
    assert said == ["rank 0:", *of_rank[0], more, "7", "rank 1:", *of_rank[1], more, "8"]


def test_a_cell_that_is_interrupted_says_so_in_a_line_behind_its_prints(capsys):
    threading.Timer(1.0, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(Stopped, match=r"^%%ranks 2, by you after \d+ s$") as stopped:
        ranks("2", "print('before', rank)\nwhile True:\n    pass", {})
    assert len(stopped.value._render_traceback_()[0].splitlines()) == 1
    assert capsys.readouterr().out == "rank 0: before 0\nrank 1: before 1\n"
