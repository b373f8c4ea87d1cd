"""run_ranks ends a deadlock as soon as nobody does anything, and is not fooled by slow work."""

import os
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
