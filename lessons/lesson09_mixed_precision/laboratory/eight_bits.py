"""Products of 8-bit factors, by torch's own kernel and by formula with one thing wrong."""

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# The largest number of both formats is 1.75 times a power of two. So are the rows': dividing by a
# scale is exact, and an answer that multiplies by its inverse rounds no number differently.
EXPONENTS = (-20, 3, -9, -2, -15)


def factor(seed: int, rows: int, columns: int, down: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix whose rows are of very different sizes, and these: the largest of each row, > 0.

    The largest in size is negative, and the row's largest positive number is below half of it.
    """
    draw = torch.Generator().manual_seed(seed)
    numbers = 0.4 * (2 * torch.rand(rows, columns, generator=draw) - 1)
    places = torch.randint(columns, (rows, 1), generator=draw)
    numbers.scatter_(1, places, -torch.ones(rows, 1))
    exponents = [EXPONENTS[row % len(EXPONENTS)] - down for row in range(rows)]
    sizes = 1.75 * 2.0 ** torch.tensor(exponents)[:, None]
    return numbers * sizes, sizes


def in_8_bits(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """The matrix over its scale in the format, and the scale: (1, 1), or (rows, 1) by row."""
    largest = x.float().abs().amax(1 if by_row else (0, 1), keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)
    return (x.float() / scale).to(dtype), scale


def by_torch(x: Tensor, weight: Tensor, dtype: torch.dtype, by_row: bool) -> Tensor:
    """torch's own product of the two, in float32.

    The scales come after it: an older torch's kernel for a CPU takes none by row.
    """
    (a, scale_a), (b, scale_b) = (in_8_bits(each, dtype, by_row) for each in (x, weight))
    one = torch.ones(())
    out = torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return out * scale_a * scale_b.T


def by_formula(x: Tensor, weight: Tensor, dtype: torch.dtype, by_row: bool, wrong: str) -> Tensor:
    """The product with one thing wrong.

    That is one of: unscaled, left scaled, one back, shared, signed, to one, by column, whole x,
    whole weight, 16 bits, or floor 1e-12: no scale is smaller.
    """
    x, weight = x.float(), weight.float()
    scales = []
    for each in (x, weight):
        sizes = each if wrong == "signed" else each.abs()
        dim = (0 if wrong == "by column" else 1) if by_row else (0, 1)
        scale = sizes.amax(dim, keepdim=True) / (1 if wrong == "to one" else torch.finfo(dtype).max)
        scale = scale.clamp(min=float(wrong[6:])) if wrong.startswith("floor ") else scale
        scales.append(torch.ones(1, 1) if wrong == "unscaled" else scale)
    if wrong == "shared":
        scales = 2 * [torch.maximum(scales[0].amax(), scales[1].amax()).view(1, 1)]
    a, b = ((m / scale).to(dtype).float() for m, scale in zip((x, weight), scales, strict=True))
    a = x / scales[0] if wrong == "whole x" else a
    b = weight / scales[1] if wrong == "whole weight" else b
    if wrong == "by column":
        return (a * scales[0]) @ (b * scales[1]).T
    out = a @ b.T
    out = out if wrong == "left scaled" else out * scales[0]
    out = out if wrong in ("left scaled", "one back") else out * scales[1].T
    return out.bfloat16().float() if wrong == "16 bits" else out
