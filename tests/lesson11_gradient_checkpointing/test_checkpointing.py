"""Lesson 06's engines under checkpoints, bytes beside torch's, what the counters hold on to."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lessons.lesson11_gradient_checkpointing.experiments.layers import (
    PAPER,
    checkpoint_layers,
    counted_terms,
    make_input,
    make_stack,
    run_stack,
    step_under,
)
from shared.measuring.activations import counting_saved, saved_by_module
from shared.measuring.live import count_live_bytes
from shared.measuring.memory import saved_bytes
from shared.ranks.forked import run_ranks
from shared.training.reference_run import reference_model
from solutions import lesson06_ddp
from solutions.lesson11_gradient_checkpointing import checkpoint

MODES = {
    "ours": checkpoint,
    "re-entrant": partial(torch_checkpoint, use_reentrant=True),
    "non-reentrant": partial(torch_checkpoint, use_reentrant=False),
}


def test_checkpointed_layers_keep_their_names():
    names = list(reference_model().state_dict())
    assert list(checkpoint_layers(reference_model(), checkpoint).state_dict()) == names


@pytest.mark.parametrize("engine", [lesson06_ddp.OverlappedDDP, lesson06_ddp.BucketedDDP])
def test_ddp_by_hand_refuses_a_block_that_is_checkpointed_twice(engine):
    assert run_ranks(step_under, 2, engine, checkpoint, False)[0] == "gradients equal"
    refused = run_ranks(step_under, 2, engine, checkpoint, True)[0]
    assert refused.startswith("RuntimeError: a second backward()")


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


def test_what_is_saved_by_module_is_counted_when_the_module_itself_is_called():
    layer, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    assert sum(each.nbytes for each in saved_by_module(layer, lambda: layer(x).sum())) == x.nbytes


@pytest.mark.parametrize("kind", ["in a tuple", "by itself", "a parameter"])
def test_a_tensor_that_is_handed_on_as_it_is_has_its_own_history(kind):
    """In a tuple it is no argument: backward went round for ever."""

    def gradients(way):
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        hidden = x * 2
        functions = {
            "in a tuple": (lambda both: (torch.tanh(layer(both[0])), both[0]), (hidden, hidden)),
            "by itself": (lambda h: (torch.tanh(layer(h)), h), hidden),
            "a parameter": (lambda h: (torch.tanh(layer(h)), layer.weight), hidden),
        }
        new, same = way(*functions[kind])
        (new.sum() + same.square().sum()).backward()
        return [x.grad, layer.weight.grad]

    plain = gradients(lambda function, *args: function(*args))
    for mine, right in zip(gradients(checkpoint), plain, strict=True):
        assert torch.allclose(mine, right)
