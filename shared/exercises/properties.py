"""What must hold of many an answer: gradients come back, results are new, devices are kept."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shared.exercises.expecting import expect, expect_close, recognise
from shared.exercises.seeds import fresh_generator

CUT_OFF = (
    "torch.no_grad(), .detach(), .data, .item() and numpy cut a result off from what it was "
    "computed from"
)


def expect_gradients(
    got: Tensor, want: Tensor, inputs: Mapping[str, Tensor], what: str, hint: str = ""
) -> None:
    """The gradients of an output and of its oracle with respect to the same leaves are equal.

    `hint` is for gradients that come, and are not right.
    """
    expect_no_hooks(inputs)
    pull = torch.randn(want.shape, generator=fresh_generator()).to(want.dtype)
    leaves = list(inputs.values())
    ours = [None] * len(leaves)
    if got.grad_fn is not None:  # a view made under no_grad requires gradients, and has none
        ours = torch.autograd.grad(got, leaves, pull, allow_unused=True)
    theirs = torch.autograd.grad(want, leaves, pull)
    for name, mine in zip(inputs, ours, strict=True):
        recognise(
            {f"no gradient reaches {name}": mine is None},
            expected=f"{what} carries gradients back to {name}",
            seen="None",
            hint=CUT_OFF,
        )
    for name, mine, right in zip(inputs, ours, theirs, strict=True):
        expect_close(mine, right, what=f"the gradient of {name}", hint=hint)


def expect_no_hooks(inputs: Mapping[str, Tensor]) -> None:
    """A hook on what an answer was given changes its gradient for everybody, the oracle as well."""
    recognise(
        {f"a hook is left on {name}": bool(leaf._backward_hooks) for name, leaf in inputs.items()},
        expected="the caller's own tensors as they were",
        seen="a hook, which can change their gradients, whoever computes them",
        hint="a torch.autograd.Function has a backward of its own",
    )


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


def expect_device(answer: Callable[..., Any], *args: Any, what: str) -> None:
    """Nothing that the answer makes lies on the CPU where what it is given lies elsewhere.

    The device meta, which has no numbers, stands for a GPU; an answer that reads values cannot
    be asked there, and passes.
    """
    try:
        answer(*(arg.to("meta") if isinstance(arg, Tensor) else arg for arg in args))
    except RuntimeError as error:
        expect(
            "device" not in str(error) or isinstance(error, NotImplementedError),
            expected=f"{what} works where its arguments lie",
            seen=f"arguments on another device than the CPU: {error}",
            mistake="a tensor is made on the CPU, wherever the arguments lie",
            hint="give device=x.device to what makes tensors",
        )


class _Called(TorchFunctionMode):
    """Notes the name of every function of torch that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def functions_called(act: Callable[[], Any]) -> set[str]:
    """The names of torch's functions and methods that are called meanwhile."""
    with _Called() as called:
        act()
    return called.names


def expect_by_hand(act: Callable[[], Any], engine: str, what: str) -> None:
    """Torch's function of that name is not called."""
    expect(
        engine not in functions_called(act),
        expected=f"{what}, written out",
        seen=f"a call of {engine}",
        mistake=f"torch's {engine} does the work that is to be done by hand",
    )
