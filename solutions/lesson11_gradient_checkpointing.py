"""Lesson 11, the instructor's side: activations that are computed twice in place of being kept.

The lesson's one idea: backward needs the activations of one layer at a time, so all others may be
thrown away and made again from the layer's input, for one more forward. All the care goes into
"again": same random numbers, same autocast, same inputs. What to recompute is then a small
optimisation problem, and sqrt(n) is seldom its answer.

Points are the difficulty at the exercise (10 in all). What to ask behind a right answer: where the
weights' gradients are added (inside the inner backward, so hooks fire there); what happens to a
tensor that the function reaches without being given it; why the last segment is left alone.
"""

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.errors import InputError
from shared.measuring.activations import LayerCost

__all__ = ["checkpoint", "checkpoint_sequential", "plan"]

State = tuple[int, int, list[bool]]  # bytes held, FLOPs computed again, the choice so far


class Surroundings:
    """All that a function's result depends on besides its arguments: random states and autocast."""

    def __init__(self, args: Sequence[Any]) -> None:
        devices = {x.device for x in args if isinstance(x, Tensor)}
        self.devices = [each for each in devices if each.type not in ("cpu", "meta")]
        self.random = torch.get_rng_state()
        self.device_random = [
            torch.get_device_module(each).get_rng_state(each) for each in self.devices
        ]
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", *(each.type for each in self.devices)})
        ]
        self.cache = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored(self) -> Generator[None]:
        """Everything as it was; afterwards as it is now."""
        kind = self.devices[0].type if self.devices else "cuda"
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices, device_type=kind))
            torch.set_rng_state(self.random)
            for device, state in zip(self.devices, self.device_random, strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            for name, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(name, dtype, enabled, self.cache))
            yield


class Recomputed(torch.autograd.Function):
    """A function that keeps its inputs, and computes everything else once more in backward."""

    @staticmethod
    def forward(ctx: Any, always: Tensor, function: Callable[..., Any], *args: Any) -> Any:
        """Run without a graph. `always` needs a gradient, so that the result does, too."""
        ctx.set_materialize_grads(False)
        ctx.function, ctx.surroundings = function, Surroundings(args)
        ctx.args = [None if isinstance(x, Tensor) else x for x in args]
        ctx.places = [place for place, x in enumerate(args) if isinstance(x, Tensor)]
        # save_for_backward notices changes in place; a tensor kept on ctx would hide them.
        ctx.save_for_backward(*(args[place] for place in ctx.places))
        given = {id(x) for x in args}

        def own(x: Any) -> Any:
            """What is handed on from elsewhere keeps its history, which apply would replace."""
            passed_on = isinstance(x, Tensor) and x.requires_grad and id(x) not in given
            return x.detach() if passed_on else x

        outputs = function(*args)
        return tuple(map(own, outputs)) if isinstance(outputs, tuple) else own(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Run again with a graph, on inputs that are cut off from theirs, and go back through it.

        autograd.backward and not autograd.grad: the weights' gradients are added on the way.
        """
        args = list(ctx.args)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        with torch.enable_grad(), ctx.surroundings.restored():
            outputs = ctx.function(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if grad is not None and isinstance(output, Tensor) and output.requires_grad
        ]
        if used:
            torch.autograd.backward([output for output, _ in used], [grad for _, grad in used])
        return None, None, *(x.grad if isinstance(x, Tensor) else None for x in args)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args) and keep nothing for backward but the arguments.

    Backward calls the function a second time, with the random states (of the CPU and of the
    arguments' devices) and the autocast settings of the first, and leaves both as they are.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return Recomputed.apply(torch.empty(0, requires_grad=True), function, *args)


def checkpoint_sequential(
    layers: Sequence[Callable[[Tensor], Tensor]],
    x: Float[Tensor, "batch *rest"],
    segments: int | None = None,
) -> Float[Tensor, "batch *rest"]:
    """Run the layers in turn, in checkpointed segments; by default round(sqrt(n)) of them.

    Their sizes differ by at most one. The last segment is not checkpointed: backward begins with
    it. The layers themselves are run, in the mode that they are in. Between forward and backward
    nothing is kept but each segment's input and what the last one saves, and afterwards nothing.
    Raises ValueError for no layers, and for fewer segments than 1 or more than layers.
    """
    layers = list(layers)
    if not layers:
        raise InputError("checkpoint_sequential needs at least one layer, got 0")
    count = round(math.sqrt(len(layers))) if segments is None else segments
    if not 1 <= count <= len(layers):
        raise InputError(f"segments must be from 1 to {len(layers)} (the layers), got {count}")
    size, longer = divmod(len(layers), count)
    start = 0
    for number in range(count):
        end = start + size + (number < longer)
        # partial binds this segment's layers now; a lambda would look them up in backward.
        run = partial(_run, layers[start:end])
        x = checkpoint(run, x) if end < len(layers) else run(x)
        start = end
    return x


def _run(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def plan(costs: Sequence[LayerCost], budget: int) -> list[bool]:
    """Choose the layers to checkpoint: at most `budget` bytes at any moment, fewest FLOPs.

    From the first layer to the last, with all (bytes held, FLOPs) that no other choice beats in
    both. Raises ValueError where no choice fits, with the smallest budget that would do.
    """
    states: list[State] = [(0, 0, [])]
    for cost in costs:
        grown: list[State] = []
        for held, flops, choice in states:
            if held + cost.saved <= budget:  # when backward is at this layer, either way
                grown.append((held + cost.saved, flops, [*choice, False]))
                grown.append((held + cost.inputs, flops + cost.flops, [*choice, True]))
        states = []
        for state in sorted(grown):
            if not states or state[1] < states[-1][1]:  # holds more, and has to pay less
                states.append(state)
    if not states:
        least, held = 0, 0
        for cost in costs:
            least, held = max(least, held + cost.saved), held + min(cost.saved, cost.inputs)
        raise InputError(f"a budget of {budget} bytes: these layers need {least} at the least")
    return states[-1][2]


NOTES = {
    "11.1": """
checkpoint: 4 points, 40 minutes. Values and gradients 1, only inputs kept 1, random states and
autocast 1, edges (several outputs, no input with a gradient, changes in place) 1.
Look for: enable_grad in backward; detach() before the second run; autograd.backward, since
autograd.grad on the inputs loses the weights; save_for_backward, which notices changes in place.
Ask what a dropout mask costs when it is kept, and what it costs when it is drawn again; and what
torch.autograd.grad(loss, x) leaves on the weights (gradients; torch's re-entrant mode refuses it).
Common mistakes: a seed in place of a random state; the random state of the backward left behind;
tensors on ctx beside save_for_backward, which live on; the inner backward under autocast.
""",
    "11.2": """
checkpoint_sequential: 2 points, 20 minutes. Segments and remainder 1, the last one left alone 1.
Look for: functions that are bound now. `lambda x: run(start, end, x)` in a loop is looked up in
backward, when start and end are the last segment's: right losses, wrong gradients.
Ask when sqrt(n) segments need less memory than n: see "Measure it".
""",
    "11.3": """
plan: 4 points, 35 minutes. The budget at its worst moment 1, least FLOPs 2, in little time 1.
Look for: the moment. Bytes at the end of forward are not the peak: while a checkpointed layer is
in backward, all that it saves is there again. Greedy choices (largest first, best ratio first)
miss by up to tens of per cent. All 2^n choices are right and end at some twenty layers.
""",
}
