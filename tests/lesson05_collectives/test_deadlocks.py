"""run_ranks ends a deadlock as soon as nobody does anything, and is not fooled by slow work."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks


def both_send_first(rank):
    message = torch.ones(1)
    dist.send(message, 1 - rank)
    dist.recv(message, 1 - rank)


def test_a_deadlock_ends_before_the_timeout_with_both_stacks():
    with pytest.raises(RankFailed) as caught:
        run_ranks(both_send_first, 2, timeout=600, quiet=1.0)
    assert str(caught.value).count("in both_send_first") == 2


def one_works(rank):
    began = time.process_time()
    while rank == 0 and time.process_time() - began < 1.5:
        pass
    dist.barrier()
    return rank


def test_ranks_that_wait_for_one_that_works_are_left_alone():
    assert run_ranks(one_works, 3, quiet=0.4) == [0, 1, 2]


def sleeps(rank):
    time.sleep(1.5)
    return rank


def test_where_proc_shows_another_namespace_only_the_timeout_counts(monkeypatch):
    with pytest.raises(RankFailed):
        run_ranks(sleeps, 2, quiet=0.4)
    monkeypatch.setattr(os, "readlink", lambda path: "1")  # as a confined process would see it
    assert run_ranks(sleeps, 2, quiet=0.4) == [0, 1]


def returns_at_once(rank):
    return rank


def test_a_rank_that_is_done_at_once_does_not_hang_up_on_the_others():
    for _ in range(5):
        assert run_ranks(returns_at_once, 5) == [0, 1, 2, 3, 4]


def test_before_runs_in_each_rank_before_the_group_exists():
    seen = []

    def note(rank):
        seen.append((rank, dist.is_initialized()))

    assert run_ranks(lambda rank: seen, 2, before=note) == [[(0, False)], [(1, False)]]


def takes_a_message_that_is_too_short(rank):
    dist.isend(torch.ones(2), 1 - rank)
    for _ in range(3):
        out = dist.P2POp(dist.isend, torch.ones(8), 1 - rank)
        into = dist.P2POp(dist.irecv, torch.empty(8), 1 - rank)
        for work in dist.batch_isend_irecv([out, into]):
            work.wait()


def test_gloo_that_spins_over_a_message_does_no_work():
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] of 2 were not back after [1-9]\."):
        run_ranks(takes_a_message_that_is_too_short, 2, timeout=60, quiet=1.0)


def waits_for_a_thread(rank):
    def work():
        began = time.process_time()
        while time.process_time() - began < 1.5:
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return rank


def test_a_rank_whose_first_thread_waits_for_another_is_at_work():
    assert run_ranks(waits_for_a_thread, 1, quiet=0.4) == [0]
