"""Wrong answers that people give to lesson 01, each with the words that its check must say."""

import functools
import math

import torch
import torch.nn.functional as F
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


@mistake("01.1", says="the sines fill the first half")
def sinusoidal_encoding(max_len, d_model):
    return torch.cat(_table(max_len, _frequencies(d_model)), dim=1)


@mistake("01.1", says="the exponent is i / d_model")
def sinusoidal_encoding(max_len, d_model):
    frequencies = 10_000.0 ** (-torch.arange(d_model // 2, dtype=torch.float64) / d_model)
    return torch.stack(_table(max_len, frequencies), dim=-1).flatten(1)


@mistake("01.1", says="the first pair turns slowest")
def sinusoidal_encoding(max_len, d_model):
    return torch.stack(_table(max_len, _frequencies(d_model).flip(0)), dim=-1).flatten(1)


@mistake("01.1", says="the exponent is 4i / d_model")
def sinusoidal_encoding(max_len, d_model):
    return torch.stack(_table(max_len, _frequencies(d_model) ** 2), dim=-1).flatten(1)


@mistake("01.1", says="each column has its own exponent")
def sinusoidal_encoding(max_len, d_model):
    angles = torch.arange(max_len, dtype=torch.float64)[:, None] * 10_000.0 ** (
        -torch.arange(d_model, dtype=torch.float64) / d_model
    )
    encoding = angles.sin()
    encoding[:, 1::2] = angles[:, 1::2].cos()
    return encoding.float()


@mistake("01.1", says="positions start at 0")
def sinusoidal_encoding(max_len, d_model):
    return _encoding(max_len + 1, d_model)[1:]


@mistake("01.1", says="the frequencies end at 1/10000, as linspace makes them")
def sinusoidal_encoding(max_len, d_model):
    frequencies = 10_000.0 ** -torch.linspace(0, 1, len(_frequencies(d_model)), dtype=torch.float64)
    return torch.stack(_table(max_len, frequencies), dim=-1).flatten(1)


@mistake("01.1", says="is multiplied by 10000^(2i / d_model)")
def sinusoidal_encoding(max_len, d_model):
    sin, cos = _table(max_len, 1 / _frequencies(d_model))
    return torch.stack([sin, cos], dim=-1).flatten(1)


@mistake("01.1", says="the angles were computed in float32")
def sinusoidal_encoding(max_len, d_model):
    # The lines that circulate: exp of a logarithm, everything in float32.
    position = torch.arange(max_len).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    encoding = torch.zeros(max_len, d_model)
    encoding[:, 0::2] = torch.sin(position * div_term)
    encoding[:, 1::2] = torch.cos(position * div_term)
    return encoding


@mistake("01.1", says="an odd d_model (7) is accepted")
def sinusoidal_encoding(max_len, d_model):
    return _encoding(max_len, d_model + d_model % 2)[:, :d_model]


@mistake("01.1", says="raises the wrong kind of error")
def sinusoidal_encoding(max_len, d_model):
    assert d_model % 2 == 0, f"d_model is {d_model}"
    return _encoding(max_len, d_model)


@mistake("01.1", says="a d_model of 0 is accepted")
def sinusoidal_encoding(max_len, d_model):
    return _encoding(max_len, d_model) if d_model else torch.zeros(max_len, 0)


@mistake("01.1", says="one tensor is handed out at every call")
@functools.cache
def sinusoidal_encoding(max_len, d_model):
    if d_model < 2:
        raise ValueError(f"d_model is {d_model}")
    return _encoding(max_len, d_model)


@mistake("01.1", says="sinusoidal_encoding(1, 2) of shape (1, 2)")
def sinusoidal_encoding(max_len, d_model):
    return _encoding(max_len, d_model).squeeze()


@mistake("01.1", says="it is a constant, and nobody trains it")
def sinusoidal_encoding(max_len, d_model):
    if d_model < 2:
        raise ValueError(f"d_model is {d_model}")
    return nn.Parameter(_encoding(max_len, d_model))


@mistake("01.1", says="begin again after 10000 positions")
def sinusoidal_encoding(max_len, d_model):
    if d_model < 2:
        raise ValueError(f"d_model is {d_model}")
    return _encoding(min(max_len, 10_000), d_model)[torch.arange(max_len) % 10_000]


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


@mistake("01.2", says="the rows were chosen by the batch index")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return self.dropout(x + self.encoding[start : start + x.shape[0], None])


@mistake("01.2", says="scaling is the embedding's business")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return super().forward(x * math.sqrt(x.shape[-1]), start)


@mistake("01.2", says="start is ignored")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return super().forward(x, 0)


@mistake("01.2", says="the encoding is a Parameter")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        nn.Module.__init__(self)
        self.encoding = nn.Parameter(_encoding(max_len, d_model), requires_grad=False)
        self.dropout = nn.Dropout(dropout)


@mistake("01.2", says="the encoding is a plain attribute")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        nn.Module.__init__(self)
        self.encoding = _encoding(max_len, d_model)
        self.dropout = nn.Dropout(dropout)


@mistake("01.2", says="the names and shapes of the buffers = {'encoding': (9, 6)}")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        super().__init__(d_model, max_len, dropout)
        self.register_buffer("positions", torch.arange(max_len))


@mistake("01.2", says="the buffer is not persistent")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        nn.Module.__init__(self)
        self.register_buffer("encoding", _encoding(max_len, d_model), persistent=False)
        self.dropout = nn.Dropout(dropout)


@mistake("01.2", says="dropout does not reach the output")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return x + self.rows(x, start)


@mistake("01.2", says="dropout acts on x, before the encoding is added")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return self.dropout(x) + self.rows(x, start)


@mistake("01.2", says="dropout acts on the encoding alone")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return x + self.dropout(self.rows(x, start))


@mistake("01.2", says="dropout acts in training only")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        super().__init__(d_model, max_len)
        self.share = dropout

    def forward(self, x, start=0):
        return F.dropout(x + self.rows(x, start), self.share)


@mistake("01.2", says="bfloat16 plus float32 is float32")
class PositionalEncoding(_Right):
    def rows(self, x, start):
        return super().rows(x, start).float()


@mistake("01.2", says="raises the wrong kind of error")
class PositionalEncoding(_Right):
    def rows(self, x, start):
        return self.encoding[start : start + x.shape[1]].to(x.dtype)


@mistake("01.2", says="length 5 from start=6 with max_len=9 is accepted")
class PositionalEncoding(_Right):
    def rows(self, x, start):
        if x.shape[1] > len(self.encoding):
            raise ValueError(f"{x.shape[1]} positions, max_len {len(self.encoding)}")
        start = min(start, len(self.encoding) - x.shape[1])
        return super().rows(x, start)


@mistake("01.2", says="no gradient reaches x")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return super().forward(x.detach(), start)


@mistake("01.2", says="the sum in float32 after one in bfloat16")
class PositionalEncoding(_Right):
    def rows(self, x, start):
        self.encoding = self.encoding.to(x.dtype)
        return super().rows(x, start)


@mistake("01.2", says="x in float64 plus its codes")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return super().forward(x.float() if x.dtype == torch.float64 else x, start).to(x.dtype)


@mistake("01.2", says="forward does not add the buffer")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        super().__init__(d_model, max_len, dropout)
        self.table = _encoding(max_len, d_model)

    def rows(self, x, start):
        super().rows(x, start)  # raises where x is too long
        return self.table[start : start + x.shape[1]].to(x.dtype)


@mistake("01.2", says="the rate is 0.5 whatever `dropout` says")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=5000, dropout=0.0):
        super().__init__(d_model, max_len, 0.5)


@mistake("01.2", says="all sentences lose the same values")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return (x + self.rows(x, start)) * self.dropout(torch.ones_like(x[:1]))


@mistake("01.2", says="whole positions are dropped")
class PositionalEncoding(_Right):
    def forward(self, x, start=0):
        return (x + self.rows(x, start)) * self.dropout(torch.ones_like(x[..., :1]))


@mistake("01.2", says="start=6 with a length of 3 and max_len=9 is refused")
class PositionalEncoding(_Right):
    def rows(self, x, start):
        if start + x.shape[1] >= len(self.encoding):
            raise ValueError(f"{start + x.shape[1]} positions, max_len {len(self.encoding)}")
        return super().rows(x, start)


@mistake("01.2", says="the module remembers where the call before ended")
class PositionalEncoding(_Right):
    place = 0

    def rows(self, x, start):
        begin = start or self.place
        if begin + x.shape[1] > len(self.encoding):
            begin = start
        self.place = begin + x.shape[1]
        return super().rows(x, begin)


@mistake("01.2", says="the rows of the call before are added again")
class PositionalEncoding(_Right):
    kept = None

    def rows(self, x, start):
        rows = super().rows(x, start)
        if self.kept is None or self.kept.shape != rows.shape:
            self.kept = rows
        return self.kept.to(x.dtype)


@mistake("01.2", says="the number of rows by default = 5000")
class PositionalEncoding(_Right):
    def __init__(self, d_model, max_len=None, dropout=0.0):
        super().__init__(d_model, max_len or 512, dropout)


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


@mistake("01.3", says="the blocks are built for sines in the first half")
def shift_matrix(offset, d_model):
    angles = (offset * _frequencies(d_model)).float()
    cos, sin = angles.cos().diag(), angles.sin().diag()
    return torch.cat([torch.cat([cos, sin], dim=1), torch.cat([-sin, cos], dim=1)])


@mistake("01.3", says="a turn has one minus")
def shift_matrix(offset, d_model):
    blocks = []
    for a in (offset * _frequencies(d_model)).tolist():
        blocks.append(torch.tensor([[math.cos(a), math.sin(a)], [math.sin(a), math.cos(a)]]))
    return torch.block_diag(*blocks)


@mistake("01.3", says="every pair turns by the same angle")
def shift_matrix(offset, d_model):
    return _turn(torch.full((d_model // 2,), float(offset)))


@mistake("01.3", says="the blocks hold 1 and the angle")
def shift_matrix(offset, d_model):
    angles = (offset * _frequencies(d_model)).tolist()
    return torch.block_diag(*(torch.tensor([[1, a], [-a, 1]]) for a in angles))


@mistake("01.3", says="multiply it by the offset")
def shift_matrix(offset, d_model):
    return _turn(_frequencies(d_model))


@mistake("01.3", says="an odd d_model (5) is accepted")
def shift_matrix(offset, d_model):
    return _turn(offset * _frequencies(d_model + d_model % 2))[:d_model, :d_model]


@mistake("01.3", says="a d_model of 0 is accepted")
def shift_matrix(offset, d_model):
    return _turn(offset * _frequencies(d_model)) if d_model else torch.zeros(0, 0)


@mistake("01.3", says="one tensor is handed out at every call")
@functools.cache
def shift_matrix(offset, d_model):
    if d_model < 2:
        raise ValueError(f"d_model is {d_model}")
    return _turn(offset * _frequencies(d_model))


@mistake("01.3", says="the exponent is i / d_model")
def shift_matrix(offset, d_model):
    return _turn(offset * _frequencies(d_model).sqrt())


@mistake("01.3", says="the exponent is 4i / d_model")
def shift_matrix(offset, d_model):
    return _turn(offset * _frequencies(d_model) ** 2)


@mistake("01.3", says="a negative offset moves forwards")
def shift_matrix(offset, d_model):
    return _turn(abs(offset) * _frequencies(d_model))


@mistake("01.3", says="a matrix that is fitted to some positions is right for them alone")
def shift_matrix(offset, d_model):
    first = max(0, -offset)
    before, after = (_encoding(400, d_model)[at : at + 100] for at in (first, first + offset))
    return torch.linalg.lstsq(before, after).solution.T.contiguous()


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


@mistake("01.4", says="positions are counted from the first that is given")
def rotary(x, positions):
    return _rotate(x, *_cos_sin(x, positions - positions[..., :1])).to(x.dtype)


@mistake("01.4", says="the pairs turn the other way")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions)
    return _rotate(x, cos, -sin).to(x.dtype)


@mistake("01.4", says="use the positions that are given")
def rotary(x, positions):
    cos, sin = _cos_sin(x, torch.arange(x.shape[-2]))
    return _rotate(x, cos, sin).to(x.dtype)


@mistake("01.4", says="one position more than given")
def rotary(x, positions):
    return _rotate(x, *_cos_sin(x, positions + 1)).to(x.dtype)


@mistake("01.4", says="half after half")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1).to(x.dtype)


@mistake("01.4", says="rotary turns and adds nothing")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions)
    return x + torch.stack([sin, cos], dim=-1).flatten(-2).to(x.dtype)


@mistake("01.4", says="x was changed in place")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions)
    x[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
    x[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
    return x


@mistake("01.4", says="whose seven digits go into the position")
def rotary(x, positions):
    angles = positions[..., None].float() * _frequencies(x.shape[-1]).float()
    dtype = torch.promote_types(x.dtype, torch.float32)
    return _rotate(x, angles.cos().to(dtype), angles.sin().to(dtype)).to(x.dtype)


@mistake("01.4", says="x was turned in float32")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions)
    return _rotate(x.float(), cos.float(), sin.float()).to(x.dtype)


@mistake("01.4", says="the score depends on where the two words stand")
def rotary(x, positions):
    # Right at position 0 to 100, which small tests never leave: the table is too short.
    cos, sin = _cos_sin(x, positions.clamp(max=100))
    return _rotate(x, cos, sin).to(x.dtype)


@mistake("01.4", says="all sentences are turned by the positions of the first")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions.reshape(-1, positions.shape[-1])[0])
    return _rotate(x, cos, sin).to(x.dtype)


@mistake("01.4", says="no longer in x's dtype")
def rotary(x, positions):
    return _rotate(x, *_cos_sin(x, positions))


@mistake("01.4", says="bfloat16 takes position 1001 for 1000")
def rotary(x, positions):
    angles = positions[..., None].to(x.dtype) * _frequencies(x.shape[-1]).to(x.dtype)
    return _rotate(x, angles.cos(), angles.sin())


@mistake("01.4", says="an odd head_dim (5)")
def rotary(x, positions):
    cos, sin = _cos_sin(x[..., : x.shape[-1] // 2 * 2], positions)
    turned = _rotate(x[..., : x.shape[-1] // 2 * 2], cos, sin).to(x.dtype)
    return torch.cat([turned, x[..., x.shape[-1] // 2 * 2 :]], dim=-1)


@mistake("01.4", says="no gradient reaches x")
@torch.no_grad()
def rotary(x, positions):
    return _rotate(x, *_cos_sin(x, positions)).to(x.dtype)


@mistake("01.4", says="a tensor is made on the CPU")
def rotary(x, positions):
    return _rotate(x, *_cos_sin(x, positions)).to(x.dtype)


@mistake("01.4", says="at position 100,000 two digits are left")
def rotary(x, positions):
    dtype = torch.promote_types(x.dtype, torch.float32)
    angles = positions[..., None].to(dtype) * _frequencies(x.shape[-1]).to(dtype)
    return _rotate(x, angles.cos(), angles.sin()).to(x.dtype)


_turns: dict[torch.Size, tuple[Tensor, Tensor]] = {}


@mistake("01.4", says="other positions than those of the call before")
def rotary(x, positions):
    if x.shape not in _turns:
        _turns[x.shape] = _cos_sin(x, positions)
    return _rotate(x, *_turns[x.shape]).to(x.dtype)


@mistake("01.4", says="one position a head, (H, 1)")
def rotary(x, positions):
    if positions.shape[-1] != x.shape[-2]:
        positions = torch.arange(x.shape[-2])
    return _rotate(x, *_cos_sin(x, positions)).to(x.dtype)


@mistake("01.4", says="the second feature is computed from the first one already turned")
def rotary(x, positions):
    cos, sin = _cos_sin(x, positions)
    even, odd = x[..., 0::2], x[..., 1::2]
    even = even * cos - odd * sin
    odd = even * sin + odd * cos
    return torch.stack([even, odd], dim=-1).flatten(-2).to(x.dtype)


@mistake("01.4", says="pair must share one angle")
def rotary(x, positions):
    cos, sin = (torch.cat([each, each], dim=-1) for each in _cos_sin(x, positions))
    across = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    return (x * cos + across * sin).to(x.dtype)


@mistake("01.4", says="the exponent is 4i / head_dim")
def rotary(x, positions):
    angles = positions[..., None] * _frequencies(x.shape[-1]) ** 2
    return _rotate(x, angles.cos(), angles.sin()).to(x.dtype)


@mistake("01.4", says="the exponent is i / head_dim")
def rotary(x, positions):
    angles = positions[..., None] * _frequencies(x.shape[-1]) ** 0.5
    return _rotate(x, angles.cos(), angles.sin()).to(x.dtype)


@mistake("01.4", says="positions of more than one dim are refused")
def rotary(x, positions):
    angles = torch.outer(positions.flatten().double(), _frequencies(x.shape[-1]))
    return _rotate(x, angles.cos(), angles.sin()).to(x.dtype)
