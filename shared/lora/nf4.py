"""Weights in four bits: NormalFloat levels, blocks with a scale each, scales in eight bits.

Source: Dettmers et al. 2023, "QLoRA" (arXiv 2305.14314), section 3 and appendix E.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from shared.errors import InputError
from shared.lora.levels import NF4_LEVELS

BLOCK = 64  # weights that share a scale
SCALE_BLOCK = 256  # scales that share a range
LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quantize_nf4(
    weight: Float[Tensor, "*shape"], block: int = BLOCK
) -> tuple[UInt8[Tensor, "half"], Float[Tensor, "blocks"]]:
    """Return codes, two to a byte, and the scale of each block, float32.

    The weights are taken as one row and cut into blocks; the last one may be shorter. A block's
    scale is its largest absolute value, and each weight becomes the number in `NF4_LEVELS` of the
    level next to weight / scale. The first weight of a pair is in the byte's upper half; an odd
    row ends in a lower half that does not count. A block of zeros has scale 0 and the level 0.
    Raises ValueError for a dtype other than float32, bfloat16, float16.
    """
    if weight.dtype not in DTYPES:
        raise InputError(f"NF4 takes float32, bfloat16 or float16 weights, not {weight.dtype}")
    row = weight.detach().flatten().float()
    blocks = F.pad(row, (0, -len(row) % block)).unflatten(0, (-1, block))
    scales = blocks.abs().amax(1)
    small = torch.where(scales > 0, 1 / scales, 0)  # (blocks,)
    levels = NF4_LEVELS.to(row.device)
    middles = (levels[1:] + levels[:-1]) / 2
    # By the 15 middles, not by 16 distances a weight, which would take 64 bytes of each.
    codes = torch.bucketize(blocks * small[:, None], middles, out_int32=True).to(torch.uint8)
    pairs = F.pad(codes.flatten()[: len(row)], (0, len(row) % 2)).unflatten(0, (-1, 2))
    return pairs[:, 0] << 4 | pairs[:, 1], scales


def dequantize_nf4(
    codes: UInt8[Tensor, "half"],
    scales: Float[Tensor, "blocks"],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    block: int = BLOCK,
) -> Float[Tensor, "*shape"]:
    """The weights that codes and scales stand for."""
    numel = math.prod(shape)
    levels = NF4_LEVELS.to(codes.device)
    row = levels[torch.stack([codes >> 4, codes & 15], 1).flatten().int()[:numel]]
    blocks = F.pad(row, (0, -numel % block)).unflatten(0, (-1, block)) * scales[:, None]
    return blocks.flatten()[:numel].view(*shape).to(dtype)


def double_quantize(
    scales: Float[Tensor, "blocks"], block: int = SCALE_BLOCK
) -> tuple[Tensor, Float[Tensor, "ranges"], Float[Tensor, "1"]]:
    """Return the scales in 8-bit floats, the range of each block of them, and their mean.

    Scales are positive: their mean (float32, shape (1,)) is subtracted first, so that the sign bit
    is used. A block's range (float32) is its largest absolute value / 448, and what is kept is
    (scale - mean) / range as torch.float8_e4m3fn, whose largest number is 448. The last block may
    be shorter; where all scales are the mean, the range is 0 and so are the numbers.
    """
    mean = scales.mean().reshape(1)
    centred = F.pad(scales - mean, (0, -len(scales) % block)).unflatten(0, (-1, block))
    ranges = centred.abs().amax(1) / LARGEST
    eighths = centred * torch.where(ranges > 0, 1 / ranges, 0)[:, None]
    eighths = eighths.to(torch.float8_e4m3fn)
    return eighths.flatten()[: len(scales)], ranges, mean


def dequantize_scales(
    eighths: Tensor,
    ranges: Float[Tensor, "ranges"],
    mean: Float[Tensor, "1"],
    block: int = SCALE_BLOCK,
) -> Float[Tensor, "blocks"]:
    """The scales that `double_quantize` kept."""
    return eighths.float() * ranges.repeat_interleave(block)[: len(eighths)] + mean
