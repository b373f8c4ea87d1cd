"""Weights whose codes are known before anybody quantizes them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.exercises.seeds import fresh_generator
from shared.lora.levels import NF4_LEVELS


@dataclass
class Planted:
    """A row of weights, the codes that it has to get, and the scales of its blocks."""

    weight: Tensor
    codes: Tensor
    scales: Tensor

    def packed(self, swapped: bool = False) -> Tensor:
        """Two codes to a byte, the first in the upper half."""
        codes = torch.cat([self.codes, self.codes.new_zeros(len(self.codes) % 2)])
        first, second = codes[::2], codes[1::2]
        return (second << 4 | first) if swapped else (first << 4 | second)

    def relative(self, block: int) -> Tensor:
        """Each weight over its block's scale; 0 where that is 0."""
        scales = self.scales.repeat_interleave(block)[: len(self.codes)]
        return torch.where(scales > 0, self.weight.float() / scales, 0)

    def floor(self, block: int) -> Tensor:
        """The codes of the levels next below."""
        below = torch.searchsorted(NF4_LEVELS, self.relative(block), right=True) - 1
        return below.clamp(0, 15).to(torch.uint8)

    def even(self, block: int) -> Tensor:
        """The codes if the levels were evenly spaced."""
        x = self.relative(block)
        zeros = self.scales.repeat_interleave(block)[: len(x)] == 0
        return torch.where(zeros, 7, ((x + 1) * 7.5).round()).to(torch.uint8)


def planted(numel: int, block: int, dtype: torch.dtype = torch.float32) -> Planted:
    """Weights within 0.4 of a gap of the level that was drawn: on either side, and never in doubt.

    Each block has a largest weight at its scale, which is a power of two times an odd number that
    every dtype has; half of the largest are negative. The second block, if there is one, is zeros.
    """
    draw = fresh_generator()
    codes = torch.randint(1, 15, (numel,), generator=draw)
    gaps = NF4_LEVELS[1:] - NF4_LEVELS[:-1]
    jitter = 0.8 * torch.rand(numel, generator=draw) - 0.4
    ups, downs = gaps[codes], gaps[codes - 1]
    x = NF4_LEVELS[codes] + torch.where(jitter > 0, jitter * ups, jitter * downs)
    num_blocks = -(-numel // block)
    scales = torch.randint(3, 8, (num_blocks,), generator=draw) * 2.0 ** torch.randint(
        -6, 3, (num_blocks,), generator=draw
    )
    for i in range(num_blocks):
        at = i * block + int(torch.randint(min(block, numel - i * block), (1,), generator=draw))
        codes[at], x[at] = (0, -1.0) if i % 2 == 0 else (15, 1.0)
    if num_blocks > 2:
        codes[block : 2 * block], x[block : 2 * block], scales[1] = 7, 0.0, 0.0
    weight = (x * scales.repeat_interleave(block)[:numel]).to(dtype)
    return Planted(weight, codes.to(torch.uint8), scales)


def unpack(codes: Tensor, numel: int) -> Tensor:
    """The codes of a packed row."""
    return torch.stack([codes >> 4, codes & 15], 1).flatten()[:numel]


def scales_like(numel: int) -> Tensor:
    """Scales as weights have them: positive, around 3; a small one, and larger ones in blocks."""
    draw = fresh_generator()
    scales = 2.5 + 0.3 * torch.randn(numel, generator=draw).abs()
    for start in range(0, numel, 256):
        scales[start] *= 1 + 0.4 * (start // 256)
    scales[1] = 0.5  # the first block's farthest from the mean lies below it
    return scales


def blocks_of(row: Tensor, block: int) -> Tensor:
    """A row in blocks, the last one filled up with zeros."""
    return torch.nn.functional.pad(row, (0, -len(row) % block)).unflatten(0, (-1, block))


def signed(row: Tensor, block: int) -> Tensor:
    """A block's largest number."""
    return blocks_of(row, block).amax(1)


def rms(row: Tensor, block: int) -> Tensor:
    """A block's root mean square."""
    return blocks_of(row, block).square().mean(1).sqrt()


def ranges_of(centred: Tensor, block: int) -> Tensor:
    """What a block of scales is divided by."""
    return blocks_of(centred, block).abs().amax(1) / 448
