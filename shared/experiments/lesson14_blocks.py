"""Lesson 14: the layers that are cut, the same in every process."""

from typing import Any

import torch

from shared.model.config import TransformerConfig
from shared.model.layers import DecoderLayer, EncoderLayer, ResidualBlock

KINDS: dict[str, type[ResidualBlock]] = {"encoder": EncoderLayer, "decoder": DecoderLayer}


def make_block(width: int = 64, heads: int = 12, **settings: Any) -> EncoderLayer:
    """A block of a language model, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(14)
        return block_of("encoder", width, heads, **settings)


def block_of(kind: str, width: int, heads: int, **settings: Any) -> Any:
    """An encoder or decoder layer without dropout unless told, from the random state of now."""
    settings = {"dropout": 0.0, "d_ff": 4 * width} | settings
    config = TransformerConfig(vocab_size=8, d_model=width, num_heads=heads, **settings)
    return KINDS[kind](config)
