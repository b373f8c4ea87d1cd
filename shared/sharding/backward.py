"""Moments of a backward pass: inside of it, when it has passed a module, at its end."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def backward_id() -> int:
    """The number of the backward pass that autograd runs on this thread; -1 for none.

    A backward inside of another, as a re-entrant checkpoint's, has a number of its own.
    """
    return torch._C._current_graph_task_id()


def inside_backward() -> bool:
    """Whether autograd is running a backward pass on this thread, as in a recomputed forward."""
    return backward_id() >= 0


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call when the backward that runs now is over; not if it ends in an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class AtBackward(torch.autograd.Function):
    """The identity; calls back when backward has passed everything behind it."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *grads


def at_backward(call: Callable[[], None], inputs: Any) -> Any:
    """Wrap a module's inputs so that `call` runs when all their gradients are computed.

    Those of this module's own use: the gradient of a tensor that others use, too, may be complete
    much later. Where no input needs a gradient, `call` never runs.
    """
    leaves, structure = tree_flatten(inputs)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if places and torch.is_grad_enabled():
        passed = AtBackward.apply(call, *(leaves[i] for i in places))
        for i, tensor in zip(places, passed, strict=True):
            leaves[i] = tensor
    return tree_unflatten(leaves, structure)
