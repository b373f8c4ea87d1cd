"""Wrong answers that people give to lesson 01, each with the words that its check must say."""

import functools
import math

import torch
from torch import Tensor, nn

from shared.exercises.mistakes import mistake


def _table(max_len: int, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.arange(max_len, dtype=torch.float64)[:, None] * frequencies
    return angles.sin().float(), angles.cos().float()


def _frequencies(dim: int) -> Tensor:
    if dim % 2:
        raise ValueError(f"d_model must be even, got {dim}")
    return 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _encoding(max_len: int, d_model: int) -> Tensor:
    return torch.stack(_table(max_len, _frequencies(d_model)), dim=-1).flatten(1)


@mistake("01.1", says="sine and cosine are swapped")
def sinusoidal_encoding(max_len, d_model):
    sin, cos = _table(max_len, _frequencies(d_model))
    return torch.stack([cos, sin], dim=-1).flatten(1)


@mistake("01.1", says="the angles were computed in float32")
def sinusoidal_encoding(max_len, d_model):
    # The lines that circulate: exp of a logarithm, everything in float32.
    position = torch.arange(max_len).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    encoding = torch.zeros(max_len, d_model)
    encoding[:, 0::2] = torch.sin(position * div_term)
    encoding[:, 1::2] = torch.cos(position * div_term)
    return encoding


@mistake("01.1", says="a d_model of 0 is accepted")
def sinusoidal_encoding(max_len, d_model):
    return _encoding(max_len, d_model) if d_model else torch.zeros(max_len, 0)


@mistake("01.1", says="one tensor is handed out at every call")
@functools.cache
def sinusoidal_encoding(max_len, d_model):
    if d_model < 2:
        raise ValueError(f"d_model is {d_model}")
    return _encoding(max_len, d_model)


class _Right(nn.Module):
    """A right answer, cut so that each mistake below changes one part."""

    encoding: Tensor

    def __init__(self, d_model, max_len=5000, dropout=0.0):
        super().__init__()
        self.register_buffer("encoding", _encoding(max_len, d_model))
        self.dropout = nn.Dropout(dropout)

    def rows(self, x, start):
        if start + x.shape[1] > len(self.encoding):
            raise ValueError(f"{start + x.shape[1]} positions, max_len {len(self.encoding)}")
        return self.encoding[start : start + x.shape[1]].to(x.dtype)

    def forward(self, x, start=0):
        return self.dropout(x + self.rows(x, start))


@mistake("01.2", says="x was changed in place")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        x += self.rows(x, start)
        return self.dropout(x)


@mistake("01.2", says="start is ignored")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return super().forward(x, 0)


@mistake("01.2", says="the encoding is a plain attribute")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        nn.Module.__init__(self)
        self.encoding = _encoding(max_len, d_model)
        self.dropout = nn.Dropout(dropout)


@mistake("01.2", says="dropout acts on the encoding alone")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return x + self.dropout(self.rows(x, start))


@mistake("01.2", says="bfloat16 plus float32 is float32")
class PositionalEncoding(_Right):
    def rows(self, x, start):
        return super().rows(x, start).float()


@mistake("01.2", says="raises the wrong kind of error")
class PositionalEncoding(_Right):
    def rows(self, x, start):
        return self.encoding[start : start + x.shape[1]].to(x.dtype)


@mistake("01.2", says="no gradient reaches x")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return super().forward(x.detach(), start)


def _turn(angles: Tensor) -> Tensor:
    return torch.block_diag(
        *[
            torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]])
            for a in angles.tolist()
        ]
    )


@mistake("01.3", says="the matrix moves backwards")
def shift_matrix(offset, d_model):
    return _turn(offset * _frequencies(d_model)).T


@mistake("01.3", says="a d_model of 0 is accepted")
def shift_matrix(offset, d_model):
    return _turn(offset * _frequencies(d_model)) if d_model else torch.zeros(0, 0)


@mistake("01.3", says="angles in float64, straight from the offset")
def shift_matrix(offset, d_model):
    if d_model < 2:
        raise ValueError(f"d_model is {d_model}")
    return _turn(offset * _frequencies(d_model).float())


def _rotate(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def _cos_sin(x, positions):
    angles = positions[..., None].double() * _frequencies(x.shape[-1])
    dtype = torch.promote_types(x.dtype, torch.float32)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@mistake("01.4", says="the pairs are (i, i + K / 2)")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions)
    first, second = x.chunk(2, dim=-1)
    turned = [first * cos - second * sin, first * sin + second * cos]
    return torch.cat(turned, dim=-1).to(x.dtype)


@mistake("01.4", says="x was turned in float32")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions)
    return _rotate(x.float(), cos.float(), sin.float()).to(x.dtype)


@mistake("01.4", says="no longer in x's dtype")
def rotary(x, positions):
    return _rotate(x, *_cos_sin(x, positions))


@mistake("01.4", says="an odd head_dim (5)")
def rotary(x, positions):
    cos, sin = _cos_sin(x[..., : x.shape[-1] // 2 * 2], positions)
    turned = _rotate(x[..., : x.shape[-1] // 2 * 2], cos, sin).to(x.dtype)
    return torch.cat([turned, x[..., x.shape[-1] // 2 * 2 :]], dim=-1)


@mistake("01.4", says="no gradient reaches x")
@torch.no_grad()
def rotary(x, positions):
    return _rotate(x, *_cos_sin(x, positions)).to(x.dtype)


@mistake("01.4", says="one position a head, (H, 1)")
def rotary(x, positions):
    if positions.shape[-1] != x.shape[-2]:
        positions = torch.arange(x.shape[-2])
    return _rotate(x, *_cos_sin(x, positions)).to(x.dtype)
