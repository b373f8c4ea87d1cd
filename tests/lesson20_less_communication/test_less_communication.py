"""The proofs: torch's own hooks and averagers, error feedback's sum, bytes, the curve."""

from functools import partial
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from lessons.lesson20_less_communication.asking_torch import power_sgd_of_torch
from lessons.lesson20_less_communication.laboratory import SHAPES, World, hooked
from shared.ddp import wrapping
from shared.errors import InputError
from shared.less_communication.hierarchical import (
    hierarchical_all_reduce,
    hierarchical_hook,
    two_levels,
)
from shared.less_communication.hooks import (
    fp16_hook,
    one_bit_with_error_feedback,
    topk_with_error_feedback,
)
from shared.less_communication.local_sgd import LocalSGD
from shared.less_communication.packing import orthonormal, pack_signs, unpack_signs
from shared.less_communication.power_sgd import power_sgd
from shared.less_communication.reference import hooked_reference, local_reference
from shared.less_communication.states import ErrorFeedback, LowRank, TopK
from shared.ranks.forked import RankFailed, run_ranks
from shared.ranks.links import throttled_links
from shared.training.engine import reference_curve
from shared.training.reference_run import compare_with_record, run_reference

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def test_fixed_buffers_are_not_sent_by_an_older_torch_either(monkeypatch):
    def older(module, broadcast_buffers=True):
        return broadcast_buffers

    monkeypatch.setattr(wrapping, "DistributedDataParallel", older)
    assert wrapping.ddp_of_fixed_buffers(nn.Linear(1, 1)) is False


def results(hook, make_state, world):
    """Each rank's gradients after each step."""
    return [seen.results for seen in run_ranks(hooked, world.ranks, hook, make_state, world, 5)]


def mean_gradient(world, step, index):
    return torch.stack([world.gradient(5, r, step, index) for r in range(world.ranks)]).mean(0)


@pytest.mark.parametrize("scale", [1.0, 1e5])  # the second is beyond what 16 bits hold
@pytest.mark.parametrize("ranks", [1, 3])
def test_fp16_is_torchs_hook_bit_for_bit(ranks, scale):
    world = World(ranks, dtype=torch.float32, scale=scale)
    ours = results(fp16_hook, lambda group: group, world)
    theirs = results(default_hooks.fp16_compress_hook, lambda group: group, world)
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in zip(chain(*mine), chain(*other), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (3, 2), (2, 3)])
def test_power_sgd_is_torchs_hook(ranks, rank):
    # One bucket: torch draws its factors anew for each bucket, ours once for all.
    world = World(ranks, steps=6, one_bucket=True)

    def theirs(group):
        return powerSGD_hook.PowerSGDState(group, rank, start_powerSGD_iter=2)

    ours = results(power_sgd, partial(LowRank, rank, 2, 0), world)
    torchs = results(power_sgd_of_torch, theirs, world)
    compressed = 0.0
    for mine, other in zip(ours, torchs, strict=True):
        for step, (a, b) in enumerate(zip(mine, other, strict=True)):
            for index, (x, y) in enumerate(zip(a, b, strict=True)):
                torch.testing.assert_close(x, y, **EXACT)
                compressed += (x - mean_gradient(world, step, index)).abs().sum().item()
    assert compressed > 1, "something was compressed"


def test_a_zero_gradient_stays_finite_here_and_becomes_nan_in_torchs_hook():
    world = World(2, zeros=True, one_bucket=True)
    ours = results(power_sgd, partial(LowRank, 2, 2, 0), world)[0]
    assert all(x.isfinite().all() for x in chain(*ours))

    def theirs(group):
        return powerSGD_hook.PowerSGDState(group, 2, start_powerSGD_iter=2)

    torchs = results(power_sgd_of_torch, theirs, world)[0]
    assert not all(x.isfinite().all() for x in torchs[-1])


STATES = {
    "top-k": (topk_with_error_feedback, partial(TopK, 0.1)),
    "one bit": (one_bit_with_error_feedback, ErrorFeedback),
    "low rank": (power_sgd, partial(LowRank, 1, 0, 0)),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_error_feedback_loses_nothing_in_the_sum(name, ranks):
    """What all ranks' gradients sum to is what was applied and what is kept, in other buckets."""
    world = World(ranks, steps=5)
    seen = run_ranks(hooked, ranks, *STATES[name], world, 5)
    steps = range(world.steps)
    for index, shape in enumerate(SHAPES):
        given = sum(mean_gradient(world, step, index) for step in steps)
        applied = sum(seen[0].results[step][index] for step in steps)
        kept = sum(one.state["residuals"][index] for one in seen).view(shape) / ranks
        torch.testing.assert_close(applied + kept, given, **EXACT)
        for one in seen:
            assert all(torch.equal(one.results[s][index], seen[0].results[s][index]) for s in steps)


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
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_local_sgd_is_torchs_averager_and_torchs_nesterov(every, lr, momentum, ranks):
    for ours, theirs in run_ranks(outer_run, ranks, every, lr, momentum, 6):
        torch.testing.assert_close(ours, theirs, **EXACT)


def sgd_twins(rank):
    """A linear layer by DDP's averaged gradients, and by local SGD with H = 1."""
    torch.manual_seed(0)
    layers = [nn.Linear(5, 3, dtype=torch.float64) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ddp = nn.parallel.DistributedDataParallel(layers[0])
    local = LocalSGD(layers[1].parameters(), 1)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in layers]
    for step in range(4):
        x = torch.randn(
            7, 5, generator=torch.Generator().manual_seed(9 * step + rank), dtype=torch.float64
        )
        for model, optimizer in zip((ddp, layers[1]), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        local.step()
    return [p.detach() for each in layers for p in each.parameters()]


def test_every_step_with_plain_sgd_is_ddp():
    a, b, c, d = run_ranks(sgd_twins, 2)[1]
    torch.testing.assert_close(a, c, **EXACT)
    torch.testing.assert_close(b, d, **EXACT)


def levelled(rank, nodes, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    want = x.clone()
    dist.all_reduce(want)
    levels = two_levels(nodes)
    hierarchical_all_reduce(x, levels.inside, levels.across)
    return x, want


@pytest.mark.parametrize(
    ("nodes", "inside", "shape"), [(2, 2, (3, 5)), (1, 3, (4,)), (3, 1, (2, 2)), (2, 3, (1,))]
)
def test_two_levels_are_one_sum(nodes, inside, shape):
    for ours, want in run_ranks(levelled, nodes * inside, nodes, shape):
        torch.testing.assert_close(ours, want, **EXACT)


def curve(rank, name):
    """The reference run's losses."""
    if name == "hierarchical":
        return reference_curve(hooked_reference(two_levels(2), hierarchical_hook)).losses
    if name == "all":
        return reference_curve(hooked_reference(TopK(1.0), topk_with_error_feedback)).losses
    if name == "fp16":
        return reference_curve(hooked_reference(None, fp16_hook)).losses
    return run_reference(local_reference(rank, 4, 1.0, 0.0))


@pytest.mark.parametrize(("name", "ranks"), [("hierarchical", 4), ("all", 2)])
def test_what_sends_everything_has_the_one_loss_curve(name, ranks):
    assert compare_with_record(run_ranks(curve, ranks, name)[0]) < 1e-5


def test_what_sends_less_has_a_different_curve():
    with pytest.raises(AssertionError, match="in the record"):
        compare_with_record(run_ranks(curve, 2, "local")[0])


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
        run_ranks(levelled, 3, 2, (4,))
