"""Right answers to lesson 11 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import functools
import math

import torch
from torch import Tensor

from shared.measuring.activations import peak_bytes


class Twice(torch.autograd.Function):
    """The random state by hand, and one list of tensors with None where there is none."""

    @staticmethod
    def forward(ctx, function, state, autocast, dummy, *args):
        ctx.function, ctx.state, ctx.autocast = function, state, autocast
        ctx.others = [None if torch.is_tensor(x) else x for x in args]
        ctx.save_for_backward(*[x if torch.is_tensor(x) else None for x in args])
        return function(*args)

    @staticmethod
    def backward(ctx, *grads):
        args = []
        for number, (tensor, other) in enumerate(zip(ctx.saved_tensors, ctx.others, strict=True)):
            if tensor is not None:
                tensor = tensor.detach()
                tensor.requires_grad = ctx.needs_input_grad[4 + number]
            args.append(other if tensor is None else tensor)
        now = torch.random.get_rng_state()
        try:
            torch.random.set_rng_state(ctx.state)
            with torch.autocast(**ctx.autocast), torch.enable_grad():
                results = ctx.function(*args)
        finally:
            torch.random.set_rng_state(now)
        if not isinstance(results, tuple):
            results = [results]
        picked = [i for i, r in enumerate(results) if torch.is_tensor(r) and r.requires_grad]
        picked = [i for i in picked if grads[i] is not None]
        if picked:
            torch.autograd.backward([results[i] for i in picked], [grads[i] for i in picked])
        back = [x.grad if torch.is_tensor(x) else None for x in args]
        return (None, None, None, None, *back)


def by_hand(function, *args):
    """The state and autocast are taken outside and handed in."""
    if torch.is_grad_enabled() is False:
        return function(*args)
    autocast = {
        "device_type": "cpu",
        "enabled": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
    dummy = torch.zeros(1, requires_grad=True)
    return Twice.apply(function, torch.get_rng_state(), autocast, dummy, *args)


def of_tensors_only(function, *args):
    """What is no tensor is bound before, so that the Function sees tensors alone."""
    places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]

    def rebuilt(*tensors):
        whole = list(args_without_tensors)
        for place, tensor in zip(places, tensors, strict=True):
            whole[place] = tensor
        return function(*whole)

    args_without_tensors = [None if isinstance(x, Tensor) else x for x in args]
    return by_hand(rebuilt, *(args[i] for i in places))


def by_factory(layers, x, segments=None):
    """A function for each segment from a factory; the first ones are longer by one."""
    layers = [*layers]
    count = len(layers)
    if segments is None:
        segments = math.floor(math.sqrt(count) + 0.5)
    if count == 0 or segments < 1 or segments > count:
        raise ValueError(f"{segments} segments for {count} layers")
    bounds = [number * count // segments for number in range(segments + 1)]

    def segment(start, end):
        def run(x):
            for layer in layers[start:end]:
                x = layer(x)
            return x

        return run

    for number in range(segments - 1):
        x = by_hand(segment(bounds[number], bounds[number + 1]), x)
    return segment(bounds[-2], bounds[-1])(x)


def by_recursion(layers, x, segments=None):
    """The first segment, then the rest in one segment less."""
    layers = list(layers)
    if not layers:
        raise ValueError("there is no layer")
    segments = round(len(layers) ** 0.5) if segments is None else segments
    if segments not in range(1, len(layers) + 1):
        raise ValueError(f"segments={segments}, layers={len(layers)}")
    size = math.ceil(len(layers) / segments)

    def run(layers, x):
        return functools.reduce(lambda value, layer: layer(value), layers, x)

    if segments == 1:
        return run(layers, x)
    x = of_tensors_only(run, tuple(layers[:size]), x)
    return by_recursion(layers[size:], x, segments - 1)


def refuse(costs, budget):
    """Raise for a budget that nothing fits in."""
    least = before = 0
    for cost in costs:
        least = max(least, before + cost.saved)
        before += min(cost.saved, cost.inputs)
    if least > budget:
        raise ValueError(f"{budget} bytes are too few, {least} are needed")


def by_bytes(costs, budget):
    """For each number of bytes held so far the least FLOPs, and how they come about."""
    refuse(costs, budget)
    best = {0: (0, [])}
    for cost in costs:
        following = {}
        for held, (flops, choice) in best.items():
            if held + cost.saved > budget:
                continue
            for again, bytes_, price in ((False, cost.saved, 0), (True, cost.inputs, cost.flops)):
                new = flops + price, [*choice, again]
                at = held + bytes_
                if at not in following or new[0] < following[at][0]:
                    following[at] = new
        best = following
    return min(best.values(), key=lambda pair: pair[0])[1]


def by_memory(costs, budget):
    """The cheapest way on from layer i with so many bytes held, remembered."""

    @functools.cache
    def onwards(i, held):
        if i == len(costs):
            return 0, ()
        if held + costs[i].saved > budget:
            return math.inf, ()
        keep, kept = onwards(i + 1, held + costs[i].saved)
        drop, dropped = onwards(i + 1, held + costs[i].inputs)
        if keep <= drop + costs[i].flops:
            return keep, (False, *kept)
        return drop + costs[i].flops, (True, *dropped)

    if onwards(0, 0)[0] == math.inf:
        # `saved` has the input among it, so that every layer checkpointed takes the fewest bytes.
        least = peak_bytes(costs, [True] * len(costs))
        raise ValueError(f"{budget} bytes are too few, {least} are needed")
    return onwards(0, 0)[1]


ALTERNATIVES = {
    "11.1": [by_hand, of_tensors_only],
    "11.2": [by_factory, by_recursion],
    "11.3": [by_bytes, by_memory],
}
