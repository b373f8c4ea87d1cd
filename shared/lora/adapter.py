"""What `add_lora` puts in a linear layer's place and `merge` takes out again."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shared.errors import InputError


class Adapter(nn.Module):
    """A frozen linear layer `base` with an update of low rank beside it.

    The layer computes with W + scale * lora_b @ lora_a. `base` has `weight` (d_out, d_in) and
    `bias` (or None), whatever it keeps them as. Hu et al. 2021 (arXiv 2106.09685), section 4.1.
    """

    base: Any
    lora_a: nn.Parameter  # (rank, d_in)
    lora_b: nn.Parameter  # (d_out, rank)
    scale: float  # alpha / rank

    @property
    def weight(self) -> Tensor:
        """The updated matrix, for a parent that reads it and does not call the layer.

        nn.MultiheadAttention does so with `out_proj`, and nn.TransformerEncoderLayer in evaluation.
        """
        base = self.base.weight
        return (base + self.scale * (self.lora_b @ self.lora_a)).to(base.dtype)

    @property
    def bias(self) -> Tensor | None:
        """That of the layer below."""
        return self.base.bias


def check_rank(rank: int, d_in: int, d_out: int) -> None:
    """Raise InputError, naming rank and layer, for a rank that no update of the layer can have."""
    if not 1 <= rank <= min(d_in, d_out):
        raise InputError(
            f"LoRA rank {rank} on a layer of {d_out} x {d_in}: 1 to {min(d_in, d_out)} would do"
        )


def start_factors(
    weight: Float[Tensor, "d_out d_in"], rank: int
) -> tuple[nn.Parameter, nn.Parameter]:
    """A (rank, d_in) drawn as nn.Linear draws its weight, and B (d_out, rank) of zeros.

    The update begins at zero, and B has a gradient from the first step on. In float32 at least,
    because steps of Adam are lost in 16 bits (lesson 09). As PEFT does it.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    d_out, d_in = weight.shape
    a = nn.Parameter(torch.empty(rank, d_in, dtype=dtype, device=weight.device))
    nn.init.kaiming_uniform_(a, a=math.sqrt(5))
    return a, nn.Parameter(torch.zeros(d_out, rank, dtype=dtype, device=weight.device))
