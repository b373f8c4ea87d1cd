"""Eight signs in a byte, and columns at right angles: what compressing hooks compute with."""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def pack_signs(x: Float[Tensor, "numbers"]) -> UInt8[Tensor, "bytes"]:
    """One bit a number, 1 for 0 and above; ceil(numbers / 8) bytes, filled up with zeros."""
    bits = torch.zeros(-(-x.numel() // 8) * 8, dtype=torch.uint8, device=x.device)
    bits[: x.numel()] = x >= 0
    return (bits.view(-1, 8) * _weights(x.device)).sum(1, dtype=torch.uint8)


def unpack_signs(
    packed: UInt8[Tensor, "bytes"], numbers: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "numbers"]:
    """The signs as +1 and -1."""
    bits = (packed[:, None] & _weights(packed.device)) > 0
    return bits.flatten()[:numbers].to(dtype) * 2 - 1


def orthonormal(x: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Columns of length 1 at right angles that span what x's columns span (rows >= columns).

    By Householder's QR, which also gives such columns where x is zero: Gram and Schmidt's way
    divides by zero there. In 16 bits, which QR has not, it is computed in 32.
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return torch.linalg.qr(wide).Q.to(x.dtype)


def _weights(device: torch.device) -> UInt8[Tensor, "8"]:
    return torch.tensor(WEIGHTS, dtype=torch.uint8, device=device)
