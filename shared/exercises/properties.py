"""What must hold of nearly every answer: gradients come back, results are new, devices are kept."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shared.exercises.expecting import expect, expect_close, recognise
from shared.exercises.seeds import fresh_generator


def expect_gradients(got: Tensor, want: Tensor, inputs: Mapping[str, Tensor], what: str) -> None:
    """The gradients of an output and of its oracle with respect to the same leaves are equal."""
    pull = torch.randn(want.shape, generator=fresh_generator()).to(want.dtype)
    leaves = list(inputs.values())
    ours = [None] * len(leaves)
    if got.requires_grad:
        ours = torch.autograd.grad(got, leaves, pull, allow_unused=True)
    theirs = torch.autograd.grad(want, leaves, pull)
    for name, mine, right in zip(inputs, ours, theirs, strict=True):
        recognise(
            {f"no gradient reaches {name}": mine is None},
            expected=f"{what} carries gradients back to {name}",
            seen="None",
            hint="torch.no_grad(), .detach(), .data, .item() and numpy cut a result off from what "
            "it was computed from",
        )
        expect_close(mine, right, what=f"the gradient of {name}")


def expect_new(answer: Callable[..., Tensor], *args: Any, what: str) -> None:
    """Two calls return two tensors that share no memory."""
    first, second = answer(*args), answer(*args)
    shared = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    expect(
        not shared,
        expected=f"two calls of {what} return two tensors",
        seen="both lie in the same memory",
        mistake="one tensor is handed out at every call: who writes into it changes all of them",
        hint="a cache that is shared needs a clone for each caller",
    )


def expect_device_kept(answer: Callable[..., Any], *args: Any, what: str) -> None:
    """Nothing that the answer makes lies on the CPU where what it is given lies elsewhere.

    The device meta, which has no numbers, stands for a GPU; an answer that reads values cannot
    be asked there, and passes.
    """
    try:
        answer(*(each.to("meta") if isinstance(each, Tensor) else each for each in args))
    except RuntimeError as error:
        expect(
            "device" not in str(error) or isinstance(error, NotImplementedError),
            expected=f"{what} works where its arguments lie",
            seen=f"arguments on another device than the CPU: {error}",
            mistake="a tensor is made on the CPU, wherever the arguments lie",
            hint="give device=x.device to what makes tensors",
        )
