"""One layer of a Transformer by itself, to be cut, counted or checkpointed."""

from typing import Any

import torch

from shared.model.config import TransformerConfig
from shared.model.layers import DecoderLayer, EncoderLayer, FusedLayerNorm, ResidualBlock

HEADS = 4


def make_layer(
    *,
    width: int = 64,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    fused: bool = True,
) -> EncoderLayer:
    """An encoder layer with norms in one kernel; `fused` is about its attention."""
    config = TransformerConfig(
        vocab_size=8,
        d_model=width,
        num_heads=HEADS,
        d_ff=4 * width,
        dropout=dropout,
        fused=fused,
    )
    layer = EncoderLayer(config)
    layer.self_attention.dropout = attention_dropout
    layer.norm1, layer.norm2 = FusedLayerNorm(width), FusedLayerNorm(width)
    return layer


KINDS: dict[str, type[ResidualBlock]] = {"encoder": EncoderLayer, "decoder": DecoderLayer}


def make_block(width: int = 64, heads: int = 12, **settings: Any) -> EncoderLayer:
    """A block of a language model, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(14)  # manual_seed would seed GPUs as well
        return block_of("encoder", width, heads, **settings)


def block_of(kind: str, width: int, heads: int, **settings: Any) -> Any:
    """An encoder or decoder layer without dropout unless told, from the random state of now."""
    settings = {"dropout": 0.0, "d_ff": 4 * width} | settings
    config = TransformerConfig(vocab_size=8, d_model=width, num_heads=heads, **settings)
    return KINDS[kind](config)
