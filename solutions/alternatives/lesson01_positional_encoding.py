"""Right answers to lesson 01 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

# 01.1


def table_of_complex_turns(max_len, d_model):
    """Each hand is a complex number that turns; its parts, swapped, are the row."""
    if d_model < 2 or d_model % 2:
        raise ValueError(f"d_model={d_model} makes no pairs")
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    angles = torch.outer(torch.arange(max_len, dtype=torch.float64), torch.pow(1e4, -exponents))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turns).flip(-1).reshape(max_len, d_model).float()


def table_number_by_number(max_len, d_model):
    """Python's own floats, which are float64, in two loops."""
    if d_model % 2 == 1 or d_model <= 0:
        raise ValueError(f"an even d_model of at least 2 is needed, not {d_model}")
    table = torch.zeros(max_len, d_model, dtype=torch.float32)
    for position in range(max_len):
        for pair in range(d_model // 2):
            angle = position / 10000 ** (2 * pair / d_model)
            table[position, 2 * pair] = math.sin(angle)
            table[position, 2 * pair + 1] = math.cos(angle)
    return table


# 01.2


class LooksRowsUp(nn.Module):
    """The rows are looked up as an embedding's are, and dropout is the function."""

    def __init__(self, d_model, max_len=5000, dropout=0.0):
        super().__init__()
        self.rate = dropout
        self.encoding = nn.Buffer(table_of_complex_turns(max_len, d_model))

    def forward(self, x, start=0):
        """Look up, cast, add, drop."""
        end, most = start + x.size(1), len(self.encoding)
        if end > most:
            raise ValueError(f"{end} positions, and max_len is {most}")
        places = torch.arange(start, end, device=x.device)
        rows = F.embedding(places, self.encoding)
        return F.dropout(x + rows.type_as(x), p=self.rate, training=self.training)


class AddsToEachSentence(nn.Module):
    """A narrowed table is added to the sentences one by one; dropout is a mask of its own."""

    def __init__(self, d_model, max_len=5000, dropout=0.0):
        super().__init__()
        self.max_len, self.keep = max_len, 1 - dropout
        self.register_buffer("encoding", table_number_by_number(max_len, d_model))

    def forward(self, x, start=0):
        """Stack the sentences, and keep each value with its probability."""
        length = x.shape[-2]
        if self.max_len < start + length:
            raise ValueError(f"start + length = {start + length} > max_len = {self.max_len}")
        added = self.get_buffer("encoding").narrow(0, start, length).to(x)
        total = torch.stack([sentence + added for sentence in x.unbind(0)])
        if not self.training or self.keep == 1:
            return total
        return total * torch.bernoulli(torch.full_like(total, self.keep)) / self.keep


# 01.3


def shift_of_blocks(offset, d_model):
    """A list of 2 x 2 blocks, put together by torch.block_diag."""
    if d_model < 2 or d_model % 2 != 0:
        raise ValueError(f"d_model must be even and positive, got {d_model}")
    blocks = []
    for i in range(d_model // 2):
        turn = offset * math.pow(10000, -2 * i / d_model)
        s, c = math.sin(turn), math.cos(turn)
        blocks.append(torch.tensor([[c, s], [-s, c]]))
    return torch.block_diag(*blocks)


def shift_as_a_flow(offset, d_model):
    """The exponential of `offset` times the generator of the turn, in float64."""
    if d_model % 2 or d_model < 2:
        raise ValueError(f"{d_model} features do not make pairs")
    speeds = [10000.0 ** (-2 * i / d_model) for i in range(d_model // 2)]
    above = torch.zeros(d_model - 1, dtype=torch.float64)
    above[::2] = torch.tensor(speeds, dtype=torch.float64)
    generator = torch.diag(above, 1) - torch.diag(above, -1)
    return torch.linalg.matrix_exp(offset * generator).to(torch.float32)


# 01.4


def rotary_by_complex_products(x, positions):
    """As Meta's Llama does it: a pair is a complex number, a turn a product."""
    K = x.shape[-1]
    if K % 2:
        raise ValueError(f"head_dim is {K}, which is odd")
    frequencies = 10000 ** (-torch.arange(0, K, 2, device=x.device).double() / K)
    angles = positions.double().unsqueeze(-1) * frequencies
    wide = x.double()
    turned = torch.complex(wide[..., ::2], wide[..., 1::2]) * torch.exp(1j * angles)
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def rotary_by_small_matrices(x, positions):
    """One 2 x 2 matrix a position and pair, applied by einsum."""
    *front, K = x.shape
    if K % 2 != 0:
        raise ValueError(f"pairs need an even head_dim, not {K}")
    powers = torch.linspace(0, 1, K // 2 + 1, dtype=torch.float64, device=x.device)[:-1]
    angles = positions.to(torch.float64)[..., None] / 10000**powers
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    pairs = x.unflatten(-1, (K // 2, 2))
    return torch.einsum("...ij,...j->...i", turns.to(x.dtype), pairs).reshape(*front, K)


def rotary_with_its_neighbour(x, positions):
    """As Hugging Face writes it, for neighbours: x cos + (its neighbour) sin, all at full width."""
    head_dim = x.size(-1)
    if head_dim & 1:
        raise ValueError(f"odd head_dim: {head_dim}")
    inverse = torch.exp(-math.log(10000) * 2 / head_dim * torch.arange(head_dim // 2).double())
    angles = positions[..., None].double() * inverse.to(x.device)
    angles = angles.repeat_interleave(2, dim=-1)
    neighbour = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).reshape(x.shape)
    return (x * angles.cos() + neighbour * angles.sin()).to(x.dtype)


ALTERNATIVES = {
    "01.1": [table_of_complex_turns, table_number_by_number],
    "01.2": [LooksRowsUp, AddsToEachSentence],
    "01.3": [shift_of_blocks, shift_as_a_flow],
    "01.4": [rotary_by_complex_products, rotary_by_small_matrices, rotary_with_its_neighbour],
}
