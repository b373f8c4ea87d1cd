"""Lesson 10: a model of whose live bytes nearly all are model states."""

import torch
from torch import Tensor, nn


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


class Nested(nn.Module):
    """Layers inside of a child, one of them frozen, and a parameter outside of all layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = Sums(dtype)
        self.layers = list(self.inner.layers)
        self.layers[2].requires_grad_(False)
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
