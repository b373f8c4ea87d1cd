"""A linear layer whose frozen weight is in NF4, and is whole only while it is multiplied with."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from shared.lora.adapter import Adapter, check_rank, start_factors
from shared.lora.nf4 import (
    dequantize_nf4,
    dequantize_scales,
    double_quantize,
    quantize_nf4,
)


class NF4Weight(nn.Module):
    """A frozen weight in four bits, its scales in eight, and a bias as it was.

    Codes, scales, ranges and mean are parameters that nothing trains, not buffers: sharding
    (FSDP, ZeRO-3) shards parameters, and leaves buffers whole on every rank.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.shape, self.dtype = tuple(linear.weight.shape), linear.weight.dtype
        codes, scales = quantize_nf4(linear.weight)
        eighths, ranges, mean = double_quantize(scales)
        # As bytes: nothing that casts a model (`.to(torch.bfloat16)`) may touch them.
        self.codes = _frozen(codes)
        self.eighths = _frozen(eighths.view(torch.uint8))
        self.ranges = _frozen(ranges.view(torch.uint8))
        self.mean = _frozen(mean.view(torch.uint8))
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def dequantize(self, dtype: torch.dtype) -> Float[Tensor, "d_out d_in"]:
        """The weight as it is computed with: a new tensor, every time."""
        eighths = self.eighths.view(torch.float8_e4m3fn)
        ranges, mean = (x.view(torch.float32) for x in (self.ranges, self.mean))
        scales = dequantize_scales(eighths, ranges, mean)
        return dequantize_nf4(self.codes, scales, self.shape, dtype)

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """The same, in the dtype that the weight had."""
        return self.dequantize(self.dtype)


def _frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


class _Product(torch.autograd.Function):
    """x W^T with a weight that is dequantized in forward, freed, and dequantized in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: NF4Weight) -> Tensor:
        ctx.base = base
        return F.linear(x, base.dequantize(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.base.dequantize(gradients[0].dtype), None


class QLoRALinear(Adapter):
    """LoRALinear over a weight in NF4; autograd keeps nothing of the weight's size."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        """Keep `NF4Weight(linear)` as `base`, and nothing else of `linear`.

        `lora_a`, `lora_b` from `start_factors`, `scale` and the error as LoRALinear's.
        """
        super().__init__()
        check_rank(rank, linear.in_features, linear.out_features)
        self.base = NF4Weight(linear)
        self.lora_a, self.lora_b = start_factors(linear.weight, rank)
        self.scale = alpha / rank

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        """Return x W^T + bias + scale * B A x in the dtype of x, W being `base`'s in that dtype."""
        y = _Product.apply(x, self.base)
        if self.base.bias is not None:
            y = y + self.base.bias
        update = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return (y + self.scale * update).to(y.dtype)
