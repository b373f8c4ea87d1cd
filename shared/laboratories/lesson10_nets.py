"""Lesson 10: a model of whose live bytes nearly all are model states."""

import torch
from torch import Tensor, nn


class Sums(nn.Module):
    """Layers whose activations are single numbers: whatever is larger is a model state.

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


class Sum(nn.Module):
    """Adds a product with the sums of its two parameters."""

    def __init__(self, weight: int, bias: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(weight) / weight)
        self.bias = nn.Parameter(torch.randn(bias) / bias)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.weight.sum()) + self.bias.sum()
