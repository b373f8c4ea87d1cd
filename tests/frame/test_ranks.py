"""run_ranks: results, and each way in which a rank can fail."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shared.exercises.lessons import lesson_folder
from shared.ranks.failures import Failure, RankFailed, is_own_file, own_line
from shared.ranks.forked import run_ranks
from shared.ranks.watching import can_watch


def alive_children() -> list[int]:
    """Process ids whose parent is this process."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


@pytest.fixture(autouse=True)
def no_process_left():
    before = set(alive_children())
    yield
    assert set(alive_children()) <= before


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_form_one_group(world_size):
    def total(rank, size):
        values = torch.full((size,), float(rank))
        dist.all_reduce(values)
        return rank, dist.get_world_size(), values

    for rank, result in enumerate(run_ranks(total, world_size, 5)):
        expected = torch.full((5,), sum(range(world_size)), dtype=torch.float32)
        assert result[:2] == (rank, world_size)
        torch.testing.assert_close(result[2], expected)


def test_what_ranks_print_comes_in_their_order(capsys):
    def speak(rank):
        time.sleep(0.1 * (2 - rank))
        print(f"rank {rank}")

    run_ranks(speak, 3)
    assert capsys.readouterr().out == "rank 0\nrank 1\nrank 2\n"


def test_backward_in_the_parent_does_not_hang_the_ranks():
    weight = torch.randn(300, 300, requires_grad=True)
    (weight @ weight).sum().backward()

    def product(rank):
        x = torch.randn(300, 300, requires_grad=True)
        (x @ x).sum().backward()
        return torch.get_num_threads()

    assert run_ranks(product, 2, timeout=30) == [1, 1]


def test_a_rank_may_start_workers_of_its_own():
    def load(rank):
        loader = torch.utils.data.DataLoader(range(6), batch_size=3, num_workers=1)
        return [batch.tolist() for batch in loader]

    assert run_ranks(load, 2) == [[[0, 1, 2], [3, 4, 5]]] * 2


def test_an_exception_surfaces_with_rank_and_line():
    frames = "\nframe #0: <unknown function> + 0x67 (0x7fe3 in /libtorch_cpu.so)"

    def fail(rank):
        if rank == 1:
            raise ValueError("no such bucket" + frames)
        dist.barrier()

    with pytest.raises(
        RankFailed, match=r"rank 1 of 3 raised ValueError: no such bucket"
    ) as caught:
        run_ranks(fail, 3)
    assert 'raise ValueError("no such bucket" + frames)' in str(caught.value)
    assert "unknown function" not in str(caught.value)
    failed = caught.value
    assert (failed.kind, failed.rank) == (Failure.RAISED, 1)
    assert type(failed.error) is ValueError
    assert (failed.error_name, failed.error_text) == ("ValueError", "no such bucket")


def test_a_killed_rank_is_named():
    def die(rank):
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    with pytest.raises(RankFailed, match="rank 2 of 3 was ended by SIGKILL") as caught:
        run_ranks(die, 3)
    failed = caught.value
    assert (failed.kind, failed.rank, failed.signal) == (Failure.DIED, 2, "SIGKILL")


def test_a_rank_that_never_comes_back_ends_with_its_stack():
    def wait_for_nobody(rank):
        if rank == 0:
            time.sleep(60)

    with pytest.raises(
        RankFailed, match=r"ranks \[0\] of 2 were not back after 1 s; back: \[1\]"
    ) as e:
        run_ranks(wait_for_nobody, 2, timeout=1)
    assert "in wait_for_nobody" in str(e.value)
    assert (e.value.kind, e.value.rank) == (Failure.LATE, 0)
    (late,) = e.value.late
    assert late.is_in("wait_for_nobody")


@pytest.mark.skipif(not can_watch(), reason="processor time is read from /proc, on Linux")
def test_a_rank_that_waits_for_its_turn_has_time_until_it_has_had_it():
    def stopped_for_a_while(rank):
        parent = os.getpid()
        if os.fork() == 0:
            time.sleep(2.5)
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(parent, signal.SIGSTOP)
        return rank

    def at_work_for_ever(rank):
        while True:
            pass

    assert run_ranks(stopped_for_a_while, 1, timeout=1, quiet=0.5) == [0]
    with pytest.raises(RankFailed) as caught:
        run_ranks(at_work_for_ever, 1, timeout=1, quiet=0.5)
    assert (caught.value.kind, caught.value.quiet) == (Failure.LATE, False)


def test_a_lost_peer_and_a_message_to_oneself_are_told_apart():
    def receive(rank, peer):
        if rank == 0:
            dist.recv(torch.ones(1), peer)

    for peer, kind in ((1, Failure.PEER_LOST), (0, Failure.TO_ITSELF)):
        with pytest.raises(RankFailed) as caught:
            run_ranks(receive, 2, peer)
        assert caught.value.kind is kind


def test_a_result_that_cannot_travel_is_an_error_of_its_rank():
    with pytest.raises(RankFailed, match=r"rank 0 of 1 raised .*pickle"):
        run_ranks(lambda rank: lambda: rank, 1)


def test_world_size_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_ranks(print, 0)


def test_it_refuses_to_fork_once_cuda_is_initialised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA is initialised in this process"):
        run_ranks(print, 2)


def test_the_learners_own_line_is_found_behind_the_libraries_frames():
    def reshapes_wrongly(rank):
        return torch.zeros(3).view(rank + 2, 2)

    with pytest.raises(RankFailed) as caught:
        run_ranks(reshapes_wrongly, 1)
    line = ", in reshapes_wrongly at: return torch.zeros(3).view(rank + 2, 2)"
    assert own_line(str(caught.value)) == caught.value.at == line
    assert own_line("no traceback in it") == ""
    assert not is_own_file(torch.nn.__file__)
    lesson = lesson_folder("06")
    for name in ("checks.py", "laboratory/engines.py", "experiments/engine_runs.py"):
        assert (lesson / name).exists()
        assert not is_own_file(str(lesson / name)), "the course's, not the learner's"
    assert is_own_file(str(lesson / "train.py"))
    assert is_own_file(str(lesson / "lesson.ipynb"))
