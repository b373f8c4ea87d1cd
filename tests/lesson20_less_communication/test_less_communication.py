"""What neither check nor notebook has: torch's averager, overflow as torch's hook, odd inputs."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from lessons.lesson20_less_communication.laboratory import World, hooked
from shared.ddp import wrapping
from shared.errors import InputError
from shared.less_communication.hierarchical import two_levels
from shared.less_communication.hooks import fp16_hook
from shared.less_communication.local_sgd import LocalSGD
from shared.less_communication.packing import orthonormal, pack_signs, unpack_signs
from shared.less_communication.states import LowRank, TopK
from shared.ranks.forked import RankFailed, run_ranks
from shared.ranks.links import throttled_links

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def test_fixed_buffers_are_not_sent_by_an_older_torch_either(monkeypatch):
    def older(module, broadcast_buffers=True):
        return broadcast_buffers

    monkeypatch.setattr(wrapping, "DistributedDataParallel", older)
    assert wrapping.ddp_of_fixed_buffers(nn.Linear(1, 1)) is False


def test_fp16_overflows_where_torchs_hook_does():
    world = World(3, dtype=torch.float32, scale=1e5)  # beyond what 16 bits hold
    ours, theirs = (
        [
            seen.results
            for seen in run_ranks(hooked, world.ranks, hook, lambda group: group, world, 5)
        ]
        for hook in (fp16_hook, default_hooks.fp16_compress_hook)
    )
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(chain(*mine), chain(*other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("numbers", [1, 7, 8, 9, 64])
def test_signs_take_a_bit_each(numbers):
    x = torch.randn(numbers, generator=torch.Generator().manual_seed(numbers))
    x[0] = 0
    packed = pack_signs(x)
    assert packed.nbytes == -(-numbers // 8)
    assert torch.equal(unpack_signs(packed, numbers), torch.where(x >= 0, 1.0, -1.0))


def test_columns_at_right_angles_of_a_zero_matrix():
    q = orthonormal(torch.zeros(5, 2, dtype=torch.float64))
    torch.testing.assert_close(q.T @ q, torch.eye(2, dtype=torch.float64))


def outer_run(rank, every, lr, momentum, steps):
    """Parameters after some steps under our outer step, and under torch's."""
    make = torch.Generator().manual_seed(3)
    start = torch.randn(6, generator=make, dtype=torch.float64)
    ours, theirs = nn.Parameter(start + rank), nn.Parameter(start.clone())
    local = LocalSGD([ours], every, lr, momentum)
    theirs.grad = torch.zeros_like(theirs)  # without one it counts as not trained
    averager = PeriodicModelAverager(period=every)
    outer = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([outer], lr, momentum, nesterov=momentum > 0)
    for step in range(steps):
        draw = torch.Generator().manual_seed(10 * step + rank)
        move = torch.randn(6, generator=draw, dtype=torch.float64)
        with torch.no_grad():
            for p in (ours, theirs):
                p -= move
        local.step()
        if momentum == 0 and lr == 1:
            averager.step = step + 1  # it counts from 0, and averages before the first step as well
            averager.average_parameters([theirs])
        elif (step + 1) % every == 0:
            gradient = outer.detach() - theirs.detach()
            dist.all_reduce(gradient)
            outer.grad = gradient / dist.get_world_size()
            optimizer.step()
            with torch.no_grad():
                theirs.copy_(outer)
    return ours.detach(), theirs.detach()


@pytest.mark.parametrize(("every", "lr", "momentum"), [(1, 1, 0), (3, 1, 0), (2, 0.7, 0.9)])
def test_local_sgd_is_torchs_averager_and_torchs_nesterov(every, lr, momentum):
    for ours, theirs in run_ranks(outer_run, 3, every, lr, momentum, 6):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(0.0), "a density of 0.0"),
        (lambda: TopK(1.5), "a density of 1.5"),
        (lambda: LowRank(0), "a rank of 0"),
        (lambda: LowRank(1, -1), "a start of -1"),
        (lambda: LocalSGD([], 0), "every 0 steps"),
        (lambda: LocalSGD([], 1, 1.0, 1.0), "an outer momentum of 1.0"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_a_link_without_speed_is_refused():
    with pytest.raises(InputError, match="a link of 0 Mbit/s"), throttled_links(1, 0):
        pass


def test_nodes_that_do_not_divide_the_ranks():
    with pytest.raises(RankFailed, match="3 ranks cannot be shared out evenly over 2 nodes"):
        run_ranks(lambda rank: two_levels(2), 3)
