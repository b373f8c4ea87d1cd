"""Wrong answers to lesson 11 that people really give, and what the check must say to each."""

import contextlib
import copy
import itertools
import math

import torch
import torch.utils.checkpoint
from torch import Tensor

from shared.exercises.mistakes import mistake
from shared.measuring.activations import LayerCost
from solutions import lesson11_gradient_checkpointing as right

# 11.1 checkpoint


def changed(change):
    """A checkpoint that keeps other things; `change` takes its ctx, the arguments, the result."""

    class Changed(right.Recomputed):
        @staticmethod
        def forward(ctx, always, function, *args):
            result = right.Recomputed.forward(ctx, always, function, *args)
            change(ctx, args, result)
            return result

    def checkpoint(function, *args):
        if not torch.is_grad_enabled():
            return function(*args)
        return Changed.apply(torch.empty(0, requires_grad=True), function, *args)

    return checkpoint


@mistake("11.1", says="torch.utils.checkpoint does the work")
def checkpoint(function, *args):
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


@mistake("11.1", says="tensors are made to need a gradient that needed none")
def checkpoint(function, *args):
    def needing(*args):
        for x in args if torch.is_grad_enabled() else ():  # the second run
            if isinstance(x, Tensor):
                x.requires_grad_()
        return function(*args)

    return right.checkpoint(needing, *args)


@mistake("11.1", says="autocast has another dtype")
def checkpoint(function, *args):
    def in_bfloat16(*args):
        second = torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16) if second else contextlib.nullcontext():
            return function(*args)

    return right.checkpoint(in_bfloat16, *args)


@mistake("11.1", says="an input that is changed in place before backward is accepted")
def checkpoint(function, *args):
    def own_versions(ctx, args, result):
        tensors = [x for x in args if isinstance(x, Tensor)]
        ctx.save_for_backward(*(x.data.requires_grad_(x.requires_grad) for x in tensors))

    return changed(own_versions)(function, *args)


@mistake("11.1", says="a random state is among the saved tensors")
def checkpoint(function, *args):
    def with_state(ctx, args, result):
        ctx.places.append(len(args))
        ctx.args.append(None)
        ctx.function = lambda *args: function(*args[:-1])
        ctx.save_for_backward(*(x for x in args if isinstance(x, Tensor)), ctx.surroundings.random)

    return changed(with_state)(function, *args)


@mistake("11.1", says="the result is kept on ctx: it holds its own graph")
def checkpoint(function, *args):
    return changed(lambda ctx, args, result: setattr(ctx, "result", result))(function, *args)


@mistake("11.1", says="just called, without a checkpoint")
def checkpoint(function, *args):
    if not any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return function(*args)
    return right.checkpoint(function, *args)


class WithoutFinally(right.Surroundings):
    """What an error in the second run leaves as it is."""

    @contextlib.contextmanager
    def restored(self):
        now = torch.get_rng_state()
        torch.set_rng_state(self.random)
        with torch.autocast("cpu", *self.autocast[0][1:]):
            yield
        torch.set_rng_state(now)


@mistake("11.1", says="the random state stays as the second run had it")
def checkpoint(function, *args):
    surroundings = WithoutFinally(args)
    return changed(lambda ctx, *_: setattr(ctx, "surroundings", surroundings))(function, *args)


class WholeBackwardRestored(right.Recomputed):
    """The inner backward runs under the random state of the first run, and not the run alone."""

    @staticmethod
    def backward(ctx, *grads):
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.surroundings.random)
            return right.Recomputed.backward(ctx, *grads)


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


def checked(layers, segments):
    """The layers as a list, and the number of segments."""
    layers = list(layers)
    if not layers:
        raise ValueError("no layers")
    count = max(1, round(math.sqrt(len(layers)))) if segments is None else segments
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
    return right.checkpoint_sequential(layers, x, len(layers))


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


def held(costs, choice):
    """Bytes at the end of forward."""
    return sum(c.inputs if again else c.saved for c, again in zip(costs, choice, strict=True))


@mistake("11.3", says="only what is held at the end of forward is counted")
def plan(costs, budget):
    best = right.plan(costs, budget)  # refuses what cannot be
    if len(costs) > 20:
        return best
    every = itertools.product((False, True), repeat=len(costs))
    fitting = [choice for choice in every if held(costs, choice) <= budget]

    def again(choice):
        return sum(cost.flops for cost, again in zip(costs, choice, strict=True) if again)

    return list(min(fitting, key=again, default=[True] * len(costs)))


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
