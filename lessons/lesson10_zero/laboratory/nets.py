"""Lesson 10: a model of whose live bytes nearly all are model states, and what is counted of it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared.measuring.traffic import Call


def whole_gradients(net: nn.Module) -> list[str]:
    """The names of the parameters whose gradients are alive, with all of their memory."""
    grads = {name: parameter.grad for name, parameter in net.named_parameters()}
    return [
        name
        for name, grad in grads.items()
        if grad is not None and grad.untyped_storage().nbytes() >= grad.nbytes > 0
    ]


class Sums(nn.Module):
    """Layers whose activations are single numbers: what is larger when they send is a model state.

    Every size divides by 12, so that nothing has to be padded on 1, 2, 3 or 4 ranks.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = ((600, 36), (480, 36), (540, 48), (360, 60))
        self.layers = nn.ModuleList(Sum(*size) for size in sizes)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Within(nn.Module):
    """Layers inside of a child: the units are these, not the model's children."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = Sums(dtype)
        self.layers = list(self.inner.layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Nested(nn.Module):
    """Layers inside of a child, one of them frozen, and a parameter outside of all layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = Sums(dtype)
        self.layers = list(self.inner.layers)
        self.layers[2].requires_grad_(False)
        self.layers[0].bias.requires_grad_(False)  # its input needs no gradient: freed at the end
        self.own = nn.Parameter(torch.randn(96, dtype=dtype) / 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.own.square().sum()


class Sum(nn.Module):
    """A product and a sum with numbers made of its parameters.

    Autograd saves a view of the weight, as a linear layer's `weight.t()`: memory that it keeps.
    """

    def __init__(self, weight: int, bias: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(weight) / weight)
        self.bias = nn.Parameter(torch.randn(bias) / bias)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight.view(-1).square().sum()) + self.bias.sum()


class Slopes(nn.Sequential):
    """bf16 weights from 1.25 to 1.75, one rounding step of 2**-7 apart, and positive gradients.

    Adam's steps at a rate of 0.001 are too small for a single one to survive the rounding.
    """

    def __init__(self) -> None:
        super().__init__(Slope(7), Slope(10))
        self.bfloat16()


class Slope(nn.Module):
    """A product with the sum of the weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.25 + torch.rand(size) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


class TwoOutputs(nn.Module):
    """A layer in the middle returns a tuple of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 4), Branches(), nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.middle(self.first(x))
        return self.last(left * right)


class Branches(nn.Module):
    """Two layers beside each other, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x).tanh(), self.right(x).tanh()


def numbers(tensors: Iterable[Tensor]) -> int:
    """How many numbers the tensors have."""
    return sum(each.numel() for each in tensors)


def flat(weights: dict[str, Tensor]) -> Tensor:
    """All weights in one vector."""
    return torch.cat([each.flatten() for each in weights.values()])


def messages(calls: Sequence[Call]) -> dict[str, int]:
    """The bytes on a ring by operation, the smallest messages (flags, counts) left out."""
    total: dict[str, float] = {}
    for call in calls:
        n = call.group_size
        share = {"reduce_scatter": (n - 1) / n, "all_gather": n - 1}
        if call.num_bytes > 16:
            share_of = share.get(call.op, 2 * (n - 1) / n)
            total[call.op] = total.get(call.op, 0) + share_of * call.num_bytes
    return {op: round(size) for op, size in total.items()}


def rounded_since(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a float32 tensor of a state came back with the numbers that 16 bits leave of it."""
    pairs = zip(tree_leaves(saved), tree_leaves(now), strict=False)
    return any(
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype == torch.float32
        and not torch.equal(a, b)
        and torch.equal(a.bfloat16().float(), b)
        for a, b in pairs
    )
