"""Wrong answers to lesson 11 that people really give, and what the check must say to each."""

import copy
import itertools
import math
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from shared.exercises.mistakes import mistake
from shared.measuring.activations import LayerCost, peak_bytes
from solutions import lesson11_gradient_checkpointing as right

LAST: dict[str, Any] = {}  # what the last checkpoint was given


class Flawed(torch.autograd.Function):
    """A checkpoint in which one thing is done wrongly."""

    @staticmethod
    def forward(ctx, always, flaw, function, *args):
        ctx.flaw, ctx.function, ctx.surroundings = flaw, function, right.Surroundings(args)
        LAST.update(function=function, surroundings=ctx.surroundings)
        # In the place of a tensor is one without numbers, but for the flaws that keep it.
        kept = flaw in ("on ctx", "also on ctx")
        ctx.args = [x if kept or not isinstance(x, Tensor) else torch.empty(0) for x in args]
        if flaw == "a seed":
            ctx.seed = torch.initial_seed()
            torch.default_generator.manual_seed(ctx.seed)
        tensors = [x for x in args if isinstance(x, Tensor)]
        if flaw == "own version":
            ctx.save_for_backward(*(x.data.requires_grad_(x.requires_grad) for x in tensors))
        elif flaw == "state saved":
            ctx.save_for_backward(*tensors, ctx.surroundings.random)
        elif flaw != "on ctx":
            ctx.save_for_backward(*tensors)
        result = function(*args)
        if flaw == "result on ctx":
            ctx.result = result
        if flaw == "put back at once":
            torch.set_rng_state(ctx.surroundings.random)
        if flaw == "result kept":
            ctx.save_for_backward(*tensors, result)
        return result

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.args if ctx.flaw == "on ctx" else iter(ctx.saved_tensors)
        args = list(ctx.args)
        if ctx.flaw != "on ctx":
            args = [next(saved) if isinstance(x, Tensor) else x for x in args]
        if ctx.flaw != "attached":
            needy = ctx.flaw.removeprefix("all need") if "all need" in ctx.flaw else None
            cuts = [cut(x, needy) if isinstance(x, Tensor) else x for x in args]
            if ctx.flaw == "one leaf":
                places = [next(i for i, y in enumerate(args) if y is x) for x in args]
                cuts = [cuts[place] for place in places]
            args = cuts
        outputs = second_run(ctx, args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if ctx.flaw == "first result":
            outputs, grads = outputs[:1], grads[:1]
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if ctx.flaw == "all results"
            or (isinstance(output, Tensor) and output.requires_grad and grad is not None)
        ]
        needing = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        if ctx.flaw == "autograd.grad":
            outs, given = zip(*pairs, strict=True)
            found = iter(torch.autograd.grad(outs, needing, given))
            need = [next(found) if any(x is n for n in needing) else None for x in args]
            return None, None, None, *need
        if ctx.flaw == "of a module":
            weights = getattr(ctx.function, "parameters", list)()
            back(pairs, inputs=[*needing, *weights])
        elif ctx.flaw == "way back":
            with ctx.surroundings.restored():
                back(pairs)
        elif pairs or ctx.flaw == "no graph":
            back(pairs) if pairs else raise_as_torch()
        if ctx.flaw == "twice":
            once_more = [cut(x, None) if isinstance(x, Tensor) else x for x in args]
            back([(second_run(ctx, once_more), grads[0])])
        return None, None, None, *(x.grad if isinstance(x, Tensor) else None for x in args)


def back(pairs, inputs=None):
    """Backward from results with their gradients, to all leaves or to some."""
    outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
    torch.autograd.backward(outputs, grads, inputs=inputs)


def raise_as_torch():
    """What torch says where there is no graph."""
    raise RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn")


def cut(x, needy):
    """A leaf with the same numbers."""
    needs = x.requires_grad if needy is None else bool(needy) or x.is_floating_point()
    return x.detach().requires_grad_(needs)


def second_run(ctx, args):
    """The function once more, under what the flaw leaves of its surroundings."""
    if ctx.flaw in LAST:
        setattr(ctx, ctx.flaw, LAST[ctx.flaw])
    then, flaw = ctx.surroundings, ctx.flaw
    grads = torch.set_grad_enabled(flaw != "no graph")
    with grads:
        if flaw == "other numbers":
            then.random = torch.get_rng_state()  # of now
        if flaw == "left behind":
            with then.restored():
                result = ctx.function(*args)
            torch.set_rng_state(then.random)
            return result
        if flaw == "no finally":
            now = torch.get_rng_state()
            torch.set_rng_state(then.random)
            with torch.autocast("cpu", then.autocast[0][1], then.autocast[0][2]):
                result = ctx.function(*args)
            torch.set_rng_state(now)
            return result
        if flaw == "default cache":
            then.cache = True
        if flaw == "a seed":
            with then.restored():
                torch.default_generator.manual_seed(ctx.seed)
                return ctx.function(*args)
        if flaw == "no autocast":
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(then.random)
                return ctx.function(*args)
        if flaw == "default dtype" and then.autocast[0][2]:
            with then.restored(), torch.autocast("cpu", torch.bfloat16):
                return ctx.function(*args)
        if flaw == "autocast if it was on" and not then.autocast[0][2]:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(then.random)
                return ctx.function(*args)
        with then.restored():
            return ctx.function(*args)


def flawed(flaw, function, args, always=True):
    """Run with a flaw."""
    if not torch.is_grad_enabled():
        return function(*args)
    return Flawed.apply(torch.empty(0, requires_grad=always), flaw, function, *args)


# 11.1 checkpoint


@mistake("11.1", says="torch.utils.checkpoint does the work")
def checkpoint(function, *args):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


@mistake("11.1", says="tensors are made to need a gradient that needed none")
def checkpoint(function, *args):
    return flawed("all need, integers too", function, args)


@mistake("11.1", says="autocast has another dtype")
def checkpoint(function, *args):
    return flawed("default dtype", function, args)


@mistake("11.1", says="an input that is changed in place before backward is accepted")
def checkpoint(function, *args):
    return flawed("own version", function, args)


@mistake("11.1", says="a random state is among the saved tensors")
def checkpoint(function, *args):
    return flawed("state saved", function, args)


@mistake("11.1", says="the result is kept on ctx: it holds its own graph")
def checkpoint(function, *args):
    return flawed("result on ctx", function, args)


@mistake("11.1", says="just called, without a checkpoint")
def checkpoint(function, *args):
    if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return function(*args)
    return right.checkpoint(function, *args)


@mistake("11.1", says="the random state stays as the second run had it")
def checkpoint(function, *args):
    return flawed("no finally", function, args)


class WholeBackwardRestored(right.Recomputed):
    """The inner backward runs under the random state of the first run, and not the run alone."""

    @staticmethod
    def backward(ctx, *grads):
        args = list(ctx.args)
        for place, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = x.detach().requires_grad_(x.requires_grad)
        with torch.random.fork_rng(devices=[]):
            with torch.enable_grad(), ctx.surroundings.restored():
                outputs = ctx.function(*args)
            torch.set_rng_state(ctx.surroundings.random)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            used = [
                (y, g)
                for y, g in zip(outputs, grads, strict=True)
                if g is not None and isinstance(y, Tensor) and y.requires_grad
            ]
            torch.autograd.backward([y for y, _ in used], [g for _, g in used])
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in args)


@mistake("11.1", says="what draws in backward draws the first run's numbers")
def checkpoint(function, *args):
    if not torch.is_grad_enabled():
        return function(*args)
    return WholeBackwardRestored.apply(torch.empty(0, requires_grad=True), function, *args)


@mistake("11.1", says="a tuple of results comes back as a list")
def checkpoint(function, *args):
    result = right.checkpoint(function, *args)
    return list(result) if isinstance(result, tuple) else result


# 11.2 checkpoint_sequential


def in_segments(layers, x, sizes, last=False, again=right.checkpoint):
    """Run in segments of these sizes, the last one checkpointed or not."""
    start = 0
    for number, size in enumerate(sizes):
        run = partial(right._run, layers[start : start + size])
        x = again(run, x) if last or number < len(sizes) - 1 else run(x)
        start += size
    return x


def checked(layers, segments, rounded=round):
    """The layers as a list, and the number of segments."""
    layers = list(layers)
    if not layers:
        raise ValueError("no layers")
    count = max(1, rounded(math.sqrt(len(layers)))) if segments is None else segments
    if not 1 <= count <= len(layers):
        raise ValueError(f"{count} segments of {len(layers)} layers")
    return layers, count


def even(total, count):
    """Sizes that differ by at most one."""
    return [total // count + (number < total % count) for number in range(count)]


@mistake("11.2", says="in backward every segment runs the last segment's layers")
def checkpoint_sequential(layers, x, segments=None):
    layers, count = checked(layers, segments)
    start = end = 0
    for size in even(len(layers), count):
        start, end = end, end + size
        run = lambda x: right._run(layers[start:end], x)  # noqa: B023, E731
        x = right.checkpoint(run, x) if end < len(layers) else run(x)
    return x


@mistake("11.2", says="in backward a segment runs another segment's layers")
def checkpoint_sequential(layers, x, segments=None):
    layers, count = checked(layers, segments)
    *sizes, _ = even(len(layers), count)
    for size in sizes:
        segment, layers = layers[:size], layers[size:]
        x = right.checkpoint(lambda x: right._run(segment, x), x)  # noqa: B023
    return right._run(layers, x)


@mistake("11.2", says="every layer is a segment of its own")
def checkpoint_sequential(layers, x, segments=None):
    layers, _ = checked(layers, segments)
    return in_segments(layers, x, [1] * len(layers))


@mistake("11.2", says="the last segment's input is detached")
def checkpoint_sequential(layers, x, segments=None):
    layers, count = checked(layers, segments)
    start = len(layers) - even(len(layers), count)[-1]
    if start:
        x = right.checkpoint_sequential([*layers[:start], torch.clone], x, count)
        x = x.detach().requires_grad_()
    return right._run(layers[start:], x)


@mistake("11.2", says="where its input needs no gradient")
def checkpoint_sequential(layers, x, segments=None):
    if not x.requires_grad:
        return right._run(checked(layers, segments)[0], x)
    return right.checkpoint_sequential(layers, x, segments)


@mistake("11.2", says="copies of the layers are run")
def checkpoint_sequential(layers, x, segments=None):
    return right.checkpoint_sequential(copy.deepcopy(list(layers)), x, segments)


@mistake("11.2", says="does not name the number of layers")
def checkpoint_sequential(layers, x, segments=None):
    if segments is not None and not 1 <= segments <= len(layers):
        raise ValueError(f"{segments} segments are not possible")
    return right.checkpoint_sequential(layers, x, segments)


# 11.3 plan


def search(costs, budget, price, size=peak_bytes):
    """The cheapest of all choices under other rules."""
    right.plan(costs, budget)  # refuses what cannot be
    if len(costs) > 20:
        return right.plan(costs, budget)
    every = itertools.product((False, True), repeat=len(costs))
    fitting = [choice for choice in every if size(costs, choice) <= budget]
    return list(min(fitting, key=lambda choice: price(costs, choice), default=[True] * len(costs)))


def again_flops(costs, choice):
    """FLOPs that are computed again."""
    return sum(c.flops for c, again in zip(costs, choice, strict=True) if again)


def held(costs, choice):
    """Bytes at the end of forward."""
    return sum(c.inputs if again else c.saved for c, again in zip(costs, choice, strict=True))


@mistake("11.3", says="only what is held at the end of forward is counted")
def plan(costs, budget):
    return search(costs, budget, again_flops, held)


@mistake("11.3", says="the choice is in the order of backward")
def plan(costs, budget):
    return right.plan(costs, budget)[::-1]


@mistake("11.3", says="a peak of exactly the budget is refused")
def plan(costs, budget):
    return right.plan(costs, budget - 1)


@mistake("11.3", says="one below the smallest that can be met is accepted")
def plan(costs, budget):
    try:
        return right.plan(costs, budget)
    except ValueError:
        return [True] * len(costs)


@mistake("11.3", says="a table with a place for each")
def plan(costs, budget):
    right.plan(costs, budget)
    states = [None] * (budget + 1)  # at each number of bytes: FLOPs and choice
    states[0] = 0, []
    for cost in costs:
        grown = [None] * (budget + 1)
        for held in range(budget - cost.saved + 1):
            if states[held] is None:
                continue
            flops, choice = states[held]
            for again, more, price in ((False, cost.saved, 0), (True, cost.inputs, cost.flops)):
                old = grown[min(held + more, budget)]
                if old is None or flops + price < old[0]:
                    grown[min(held + more, budget)] = flops + price, [*choice, again]
        states = grown
    return min((state for state in states if state), key=lambda state: state[0])[1]


@mistake("11.3", says="bytes are rounded")
def plan(costs, budget):
    right.plan(costs, budget)
    grain = max(1, budget // 1000)
    rounded = [
        LayerCost(-(-cost.saved // grain), -(-cost.inputs // grain), cost.flops) for cost in costs
    ]
    try:
        return right.plan(rounded, budget // grain)
    except ValueError:
        return [*[True] * (len(costs) - 1), False]
