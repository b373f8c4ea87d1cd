"""The proofs: gradients as without checkpoints, the one loss curve, bytes and FLOPs by formula."""

import gc
import itertools
import math
import random
import runpy
import weakref
from functools import partial

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lessons.lesson11_gradient_checkpointing.experiments.layers import (
    PAPER,
    bytes_of_step,
    checkpoint_layers,
    counted_terms,
    make_input,
    make_stack,
    run_stack,
    step_under,
)
from shared.exercises.lessons import ROOT
from shared.measuring.activations import (
    LayerCost,
    counting_saved,
    layer_costs,
    peak_bytes,
    saved_by_module,
)
from shared.measuring.live import count_live_bytes
from shared.measuring.memory import saved_bytes
from shared.ranks.forked import run_ranks
from shared.sharding.zero_reference import SETTINGS, build_zero
from shared.training.engine import DataParallelEngine, reference_curve
from shared.training.reference_run import (
    checksum,
    compare_with_record,
    reference_model,
    reference_optimizer,
)
from solutions import lesson06_ddp
from solutions.lesson11_gradient_checkpointing import checkpoint, checkpoint_sequential, plan

lesson06 = runpy.run_path(str(ROOT / "lessons" / "lesson06_ddp" / "train.py"))
ROUNDING = 5e-6  # of another order of additions, see lesson 06
MODES = {
    "ours": checkpoint,
    "re-entrant": partial(torch_checkpoint, use_reentrant=True),
    "non-reentrant": partial(torch_checkpoint, use_reentrant=False),
}


def plain(function, *args):
    """No checkpoint."""
    return function(*args)


def gradients(layers, run, seed):
    """Loss and gradients of a stack and of its input."""
    layers.zero_grad()
    torch.manual_seed(seed)
    x = make_input()
    loss = run(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in layers.parameters())]


@pytest.mark.parametrize("seed", range(5))
def test_gradients_with_dropout_are_a_plain_runs_to_the_bit(seed):
    layers = make_stack(5, attention_dropout=0.2, fused=False)
    every = [True] * 5
    want = gradients(layers, lambda x: run_stack(layers, x, plain, every), seed)
    runs = {
        name: lambda x, way=way: run_stack(layers, x, way, every) for name, way in MODES.items()
    }
    runs |= {n: partial(checkpoint_sequential, layers, segments=n) for n in (1, 2, 3, 5)}
    runs["mixed"] = lambda x: run_stack(layers, x, checkpoint, [True, False] * 2 + [True])
    for name, run in runs.items():
        got = gradients(layers, run, seed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name


def test_gradients_under_autocast_are_a_plain_runs():
    layers = make_stack(2)

    def run(way, x):
        with torch.autocast("cpu", torch.bfloat16):
            return run_stack(layers, x, way, [True, True])

    want, got = (gradients(layers, partial(run, way), 3) for way in (plain, checkpoint))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_curve_of_one_process_is_the_records():
    model = checkpoint_layers(reference_model(), checkpoint)
    names = list(model.state_dict())
    optimizer = reference_optimizer(list(model.parameters()))
    losses = reference_curve(DataParallelEngine(model, optimizer)).losses
    assert names == list(reference_model().state_dict())
    assert compare_with_record(losses) <= ROUNDING


def ddp_curve(rank, world_size, name):
    """The reference run under an engine of lesson 06, every layer checkpointed."""
    model = checkpoint_layers(reference_model(), checkpoint)
    engine = lesson06["wrap"](name, model, reference_optimizer, world_size)
    return reference_curve(engine).losses, checksum(model)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("ddp", 2),
        ("bucketed", 1),
        ("bucketed", 2),
        pytest.param("bucketed", 4, marks=pytest.mark.full),
    ],
)
def test_the_curve_under_ddp_by_hand_and_torchs(name, world_size):
    curves = run_ranks(ddp_curve, world_size, world_size, name, timeout=280)
    assert len({weights for _, weights in curves}) == 1
    assert compare_with_record(curves[0][0]) <= ROUNDING


def zero_curve(rank, checkpoint_first):
    """The reference run under ZeRO-3, the layers checkpointed before or after."""
    model = reference_model()
    if checkpoint_first:
        model = checkpoint_layers(model, checkpoint)
    optimizer = build_zero(3, model, **SETTINGS)
    if not checkpoint_first:
        model = checkpoint_layers(model, checkpoint)
    return reference_curve(DataParallelEngine(model, optimizer, dist.get_world_size())).losses


@pytest.mark.parametrize(
    ("world_size", "first"), [(2, True), (2, False), pytest.param(4, True, marks=pytest.mark.full)]
)
def test_the_curve_under_zero_3(world_size, first):
    curves = run_ranks(zero_curve, world_size, first, timeout=280)
    assert compare_with_record(curves[0]) <= ROUNDING


@pytest.mark.parametrize(
    ("way", "options", "shared", "seen"),
    [
        ("ours", {}, False, "gradients equal"),
        ("ours", {}, True, "RuntimeError: Expected to mark a variable ready only once"),
        ("re-entrant", {}, True, "RuntimeError: Expected to mark a variable ready only once"),
        ("re-entrant", {"find_unused_parameters": True}, False, "RuntimeError: Expected to mark"),
        ("re-entrant", {"static_graph": True}, True, "gradients equal"),
        ("non-reentrant", {"find_unused_parameters": True}, True, "gradients equal"),
    ],
)
def test_what_torchs_ddp_makes_of_a_backward_in_backward(way, options, shared, seen):
    wrap = partial(DistributedDataParallel, **options)
    assert run_ranks(step_under, 2, wrap, MODES[way], shared)[0].startswith(seen)


def test_autograd_grad_leaves_gradients_on_the_weights_and_torchs_reentrant_mode_refuses_it():
    for name, way in MODES.items():
        layer, x = make_stack(1, dropout=0.0)[0], make_input()
        (want,) = torch.autograd.grad(layer(x).sum(), x)
        if name == "re-entrant":
            with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\)"):
                torch.autograd.grad(way(layer, x).sum(), x)
            continue
        (got,) = torch.autograd.grad(way(layer, x).sum(), x)
        assert torch.equal(got, want)
        touched = {parameter.grad is not None for parameter in layer.parameters()}
        assert touched == {name == "ours"}


@pytest.mark.parametrize("engine", [lesson06_ddp.OverlappedDDP, lesson06_ddp.BucketedDDP])
def test_ddp_by_hand_refuses_a_block_that_is_checkpointed_twice(engine):
    assert run_ranks(step_under, 2, engine, checkpoint, False)[0] == "gradients equal"
    refused = run_ranks(step_under, 2, engine, checkpoint, True)[0]
    assert refused.startswith("RuntimeError: a second backward()")


@pytest.mark.parametrize("num_layers", [1, 4, 9, 16, 25])
def test_bytes_at_the_worst_moment_are_the_formulas(num_layers):
    layers, root = make_stack(num_layers), math.isqrt(num_layers)
    cost = layer_costs(layers[:1], make_input(), layers.parameters())[0]
    runs = {
        "none": lambda x: run_stack(layers, x, plain, [False] * num_layers),
        "sqrt": partial(checkpoint_sequential, layers),
        "all": lambda x: run_stack(layers, x, checkpoint, [True] * num_layers),
    }
    seen = {name: bytes_of_step(layers, run, make_input()) for name, run in runs.items()}
    assert seen["none"] == (num_layers * cost.saved,) * 2
    assert seen["sqrt"] == ((root - 1) * cost.inputs + root * cost.saved,) * 2
    assert seen["all"] == (
        num_layers * cost.inputs,
        (num_layers - 1) * cost.inputs + cost.saved,
    )


def test_live_storages_agree_and_torch_keeps_no_less():
    layers, peaks = make_stack(4), {}
    for name, way in MODES.items():
        seen = []

        def noting(layer, x, seen=seen):
            try:
                return layer(x)
            finally:  # torch ends a second run early by an exception
                seen.append(live.now())

        with count_live_bytes() as live:
            x = make_input()
            run_stack(
                [partial(noting, layer) for layer in layers], x, way, [True] * 4
            ).sum().backward()
        assert len(seen) == 8
        peaks[name] = max(seen)
    assert peaks["ours"] <= min(peaks.values())


def test_every_term_of_the_published_formula():
    paper = [sum(term[2] for term in PAPER), sum(term[3] for term in PAPER)]
    assert paper == [34, 5]
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        terms = counted_terms(dtype).values()
        assert [sum(term[i] for term in terms) for i in (0, 1)] == [14.0625 * size, 3 * size]
    layer = make_stack(1, attention_dropout=0.1, fused=False)[0]
    x = make_input()
    by_module = sum(each.nbytes for each in saved_by_module(layer, lambda: layer(x)))
    assert by_module == saved_bytes(lambda: layer(x), ignore=tuple(layer.parameters()))


class Noted(torch.autograd.Function):
    """Its input as it is; whether its node in the graph still lives can be asked."""

    @staticmethod
    def forward(ctx, x, nodes):
        nodes.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_what_was_counted_is_freed_with_the_result_also_without_a_backward():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    x = torch.randn(32, 64)
    with counting_saved(ignore=net.parameters()) as counter:
        result = net(x).softmax(-1).exp()
        assert counter.now > 0
        del result
        gc.collect()
        assert counter.now == 0
    for count in (saved_bytes, partial(saved_by_module, torch.nn.Identity())):
        nodes: list[weakref.ref] = []
        count(lambda nodes=nodes: Noted.apply(x.clone().requires_grad_(), nodes).softmax(-1).exp())
        gc.collect()
        assert [node() for node in nodes] == [None], count


def test_a_step_has_three_and_four_times_the_flops_of_a_forward():
    layers = make_stack(3, fused=False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run_stack(layers, make_input(), plain, [True] * 3)
    forward = counter.get_total_flops()
    for again in itertools.product((False, True), repeat=3):
        with FlopCounterMode(display=False) as counter:
            run_stack(layers, make_input(), checkpoint, again).sum().backward()
        assert counter.get_total_flops() == 3 * forward + sum(again) * forward / 3


def test_plans_are_the_best_of_all_choices_and_hold():
    draw = random.Random(11)
    for _ in range(60):
        count = draw.randrange(1, 11)
        costs = [LayerCost(*(draw.randrange(1, top) for top in (90, 30, 50))) for _ in range(count)]
        budget = draw.randrange(20, 500)
        fitting = [
            sum(c.flops for c, again in zip(costs, choice, strict=True) if again)
            for choice in itertools.product((False, True), repeat=count)
            if peak_bytes(costs, choice) <= budget
        ]
        if not fitting:
            with pytest.raises(ValueError, match=str(budget)):
                plan(costs, budget)
            continue
        chosen = plan(costs, budget)
        assert peak_bytes(costs, chosen) <= budget
        assert sum(c.flops for c, a in zip(costs, chosen, strict=True) if a) == min(fitting)


def test_what_is_saved_by_module_is_counted_when_the_module_itself_is_called():
    layer, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    assert sum(each.nbytes for each in saved_by_module(layer, lambda: layer(x).sum())) == x.nbytes
