"""The reference run whose matrix products take factors of 8 bits; all else is float32.

What float8 training does (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"): e4m3 for
activations and weights, e5m2 for gradients, a scale for each factor, sums in float32.
"""

from typing import Any, Literal
from unittest import mock

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from lessons.lesson09_mixed_precision.experiments.formats import first_model
from shared.training.reference_run import plain_step, reference_optimizer, run_reference

Scale = Literal["none", "tensor", "row"]


def rounded(
    x: Float[Tensor, "rows columns"], dtype: torch.dtype, scale: Scale, along: int
) -> Float[Tensor, "rows columns"]:
    """What a format keeps of x, in float32.

    With a scale the largest number of x becomes the format's largest: of all, or of each row
    (column) of those numbers that a product adds up, which lie `along` a dimension.
    """
    if scale == "none":
        return x.to(dtype).float()
    largest = x.abs().amax(along, keepdim=True) if scale == "row" else x.abs().amax()
    factor = largest.clamp(min=1e-30) / torch.finfo(dtype).max
    return (x / factor).to(dtype).float() * factor


class RoundedLinear(torch.autograd.Function):
    """x @ weight.T, and both products of its backward, of rounded factors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, dtypes: tuple[torch.dtype, torch.dtype], scale: Scale
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = dtypes, scale
        return rounded(x, dtypes[0], scale, 1) @ rounded(weight, dtypes[0], scale, 1).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        (numbers, gradients), scale = ctx.how
        for_x = rounded(grad, gradients, scale, 1) @ rounded(weight, numbers, scale, 0)
        for_weight = rounded(grad, gradients, scale, 0).T @ rounded(x, numbers, scale, 0)
        return for_x, for_weight, None, None


def train_with_products(
    dtypes: tuple[torch.dtype, torch.dtype], scale: Scale, steps: int, seed: int | None = None
) -> list[float]:
    """The losses of the reference run with every linear layer's products in a format.

    `dtypes` are that of activations and weights, and that of gradients.
    """

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = RoundedLinear.apply(x.flatten(0, -2), weight, dtypes, scale)
        out = out.unflatten(0, x.shape[:-1])  # (rows, D) -> (B, T, D)
        return out if bias is None else out + bias

    model = first_model(seed)
    optimizer = reference_optimizer(list(model.parameters()))
    with mock.patch.object(functional, "linear", linear):
        return run_reference(plain_step(model, optimizer), steps)
