"""Where a token stands: the sinusoidal encoding, a learned table, and rotary embedding.

Attention treats its input as a set, so position has to be written into the vectors themselves.
Sinusoidal and learned positions are added once, at the bottom of the model; rotary embedding
turns queries and keys inside every attention layer. Lesson 01 builds all of it.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from shared.errors import InputError

# Vaswani et al. 2017, section 3.5: wavelengths run from 2 pi to (almost) 2 pi times this base.
BASE = 10_000.0


def pair_frequencies(dim: int, device: torch.device | None = None) -> Float[Tensor, "half_dim"]:
    """Angular frequency of each pair of features (2i, 2i + 1), in radians per position, float64.

    Raises InputError if `dim` is odd or below 2: sine and cosine come in pairs.
    """
    if dim < 2 or dim % 2:
        raise InputError(f"positions need an even number of features, at least 2, not {dim}")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    return BASE**-exponents


def sinusoidal_encoding(max_len: int, d_model: int) -> Float[Tensor, "max_len d_model"]:
    """The fixed encoding of positions 0 .. max_len - 1 (Vaswani et al. 2017, section 3.5), float32.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same angle.
    The angles are float64: in float32, one at position 5000 is already wrong in the fourth decimal.
    Raises InputError (a ValueError) if `d_model` is odd or below 2, or `max_len` is below 1.
    """
    if max_len < 1:
        raise InputError(f"max_len must be at least 1, not {max_len}")
    frequencies = pair_frequencies(d_model)
    positions = torch.arange(max_len, dtype=torch.float64)
    angles = torch.outer(positions, frequencies)  # (max_len, D / 2)
    encoding = torch.stack([angles.sin(), angles.cos()], dim=-1)  # (max_len, D / 2, 2)
    return encoding.flatten(start_dim=1).float()  # (max_len, D)


class PositionalEncoding(nn.Module):
    """Adds the sinusoidal encoding to a batch of embeddings, then applies dropout.

    The encoding is a constant: a buffer, which `.to()` moves and `state_dict()` saves, and which
    the optimizer never sees.
    """

    encoding: Tensor

    def __init__(self, d_model: int, max_len: int = 5000, dropout: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("encoding", sinusoidal_encoding(max_len, d_model))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """Return x plus the encoding of positions start .. start + length - 1, in x's dtype.

        `start` is above 0 when a sequence is decoded piece by piece (lesson 04).
        Raises InputError if the last position lies beyond `max_len`.
        """
        check_length(start + x.shape[-2], self.encoding.shape[0])
        rows = self.encoding[start : start + x.shape[-2]]  # (L, D)
        return self.dropout(x + rows.to(x.dtype))


class LearnedPositions(nn.Module):
    """Adds a trained vector for each position, then applies dropout (Gehring et al. 2017).

    The table starts out as large as the sinusoidal encoding (mean square 1/2): lesson 01's models
    hardly learn from one that is far smaller than the embeddings it is added to.
    A position that training never visited keeps the vector it was initialised with.
    """

    def __init__(self, d_model: int, max_len: int = 5000, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(max_len, d_model)
        nn.init.normal_(self.table.weight, std=0.5**0.5)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """Return x plus the vectors of positions start .. start + length - 1, in x's dtype.

        Raises InputError if the last position lies beyond `max_len`.
        """
        check_length(start + x.shape[-2], self.table.num_embeddings)
        rows = self.table.weight[start : start + x.shape[-2]]  # (L, D)
        return self.dropout(x + rows.to(x.dtype))


def check_length(length: int, max_len: int) -> None:
    """Raise InputError, naming both numbers, if a sequence is longer than its encoding."""
    if length > max_len:
        raise InputError(
            f"a sequence of {length} positions is longer than the encoding, which has {max_len}: "
            f"build it with max_len={length} or more, or shorten the sequence"
        )


def rotary(
    x: Float[Tensor, "... length head_dim"], positions: Int[Tensor, "*batch length"]
) -> Float[Tensor, "... length head_dim"]:
    """Rotary embedding of queries or keys (Su et al. 2021): turn each pair by its position's angle.

    The pair (x[2i], x[2i + 1]) at position p turns by p / 10000^(2i / head_dim), so the dot product
    of a turned query and a turned key depends on the distance between their positions alone.
    `positions` holds one position per row of x, in any shape that broadcasts to x.shape[:-1]:
    (L,) for all sequences, or (B, 1, L) for x of shape (B, H, L, K). Angles are float64,
    the rotation is at least float32, the result has x's dtype.
    Raises InputError if head_dim is odd or below 2.
    """
    frequencies = pair_frequencies(x.shape[-1], x.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies  # (..., L, K / 2)
    compute = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(compute), angles.sin().to(compute)
    even, odd = x[..., 0::2].to(compute), x[..., 1::2].to(compute)  # (..., L, K / 2) each
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(start_dim=-2).to(x.dtype)  # (..., L, K)
