"""GPUs hidden where ranks are forked, and given back to what is launched; beside none here."""

import os

import pytest
import torch

from shared.errors import InputError
from shared.ranks import launching, visible
from shared.ranks.launching import LaunchFailed, launch
from shared.ranks.visible import (
    HIDDEN,
    VISIBLE,
    environment_with_gpus,
    with_gpus,
    without_gpus,
)


@pytest.fixture(params=[None, "2,3", ""])
def before(request, monkeypatch):
    """What CUDA_VISIBLE_DEVICES says: nothing, two of the GPUs, or none of them."""
    monkeypatch.setenv(HIDDEN, "")  # so that both are as they were when the test has ended
    monkeypatch.delenv(HIDDEN)
    monkeypatch.setenv(VISIBLE, request.param or "")
    if request.param is None:
        monkeypatch.delenv(VISIBLE)
    return request.param


def test_what_is_launched_sees_the_gpus_that_were_hidden(before, tmp_path, monkeypatch):
    def supervise(command, *, env, **rest):
        given.append(env)
        raise LaunchFailed("seen")

    given = []
    monkeypatch.setattr(launching, "supervise", supervise)
    for _ in range(2):
        without_gpus()
        assert os.environ[VISIBLE] == ""
        with pytest.raises(LaunchFailed, match="seen"):
            launch(__file__, 1, ["--out", str(tmp_path)])
    assert [each.get(VISIBLE) for each in given] == [before, before]
    assert HIDDEN not in given[0]


def test_nodes_share_out_the_gpus_that_were_hidden(before, monkeypatch):
    monkeypatch.setattr(launching, "num_gpus", lambda: 4)
    shares = {None: ["0,1", "2,3"], "2,3": ["", ""], "": ["", ""]}
    without_gpus()
    assert launching._shares_of_gpus(2, 2) == shares[before]


def test_what_somebody_sets_later_is_not_undone(before):
    without_gpus()
    os.environ[VISIBLE] = "1"
    assert environment_with_gpus()[VISIBLE] == "1"


def test_hiding_is_refused_where_torch_has_counted(before, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match="keeps what it found"):
        without_gpus()
    assert environment_with_gpus().get(VISIBLE) == before


@pytest.mark.parametrize("counted", [True, False])
def test_a_fork_tells_whether_torch_has_counted(counted, before, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: counted)
    why = visible.why_not_fork()
    assert why.startswith("torch has looked for GPUs" if counted else "") and bool(why) == counted


def full() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a")


def busy() -> None:
    raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nMore")


def no_room() -> None:
    raise RuntimeError("CUDA error: out of memory\nMore")


def full_before() -> bool:
    return True


def empty_before() -> bool:
    return False


@pytest.mark.parametrize(
    ("work", "before", "words"),
    [
        (full, full_before, "CUDA out of memory"),
        (busy, empty_before, "CUDA error: all CUDA-capable devices are busy or una"),
    ],
)
def test_a_cell_that_measures_a_gpu_says_that_somebody_else_has_it(
    work, before, words, capsys, monkeypatch
):
    monkeypatch.setattr(visible, "others_have_it", before)
    with_gpus(work)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"Not measured: the GPU cannot be used ({words}")
    assert "nvidia-smi" in line


def test_a_gpu_that_is_full_before_the_cell_begins(capsys, monkeypatch):
    """Its context cannot be made: the first look already ends in torch's error."""
    monkeypatch.setattr(visible, "others_have_it", no_room)
    with_gpus(empty_before)
    assert "cannot be used (CUDA error: out of memory)" in capsys.readouterr().out


def test_memory_that_the_cell_itself_has_taken_is_its_own_error(monkeypatch):
    monkeypatch.setattr(visible, "others_have_it", empty_before)
    with pytest.raises(RuntimeError, match="CUDA error: out of memory"):
        with_gpus(no_room)


def told() -> None:
    import sys

    print("RuntimeError: CUDA error: all CUDA-capable devices are busy", file=sys.stderr)
    print("measured")


def test_a_cell_that_reads_of_a_taken_gpu_and_ends_well_has_measured(capsys, monkeypatch):
    monkeypatch.setattr(visible, "others_have_it", full_before)
    with_gpus(told)
    assert capsys.readouterr().out == "measured\n"


def wrong() -> None:
    raise RuntimeError("CUDA error: an illegal memory access, which is neither")


def test_a_cells_own_error_is_raised():
    with pytest.raises(RuntimeError, match="is neither"):
        with_gpus(wrong)
