"""The blocks between embeddings and logits: layer norm, feed-forward, encoder and decoder layer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from shared.model.attention import MultiHeadAttention
from shared.model.config import TransformerConfig
from shared.model.embeddings import rotary


class LayerNorm(nn.Module):
    """Gives every vector mean 0 and variance 1, then a learned gain and shift (Ba et al. 2016).

    Statistics run over the last dim of one token alone: no batch statistics, no running averages,
    so training and evaluation do the same.
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return (x - mean) / sqrt(variance + eps) * weight + bias, with the biased variance."""
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class FusedLayerNorm(LayerNorm):
    """LayerNorm in one kernel, which keeps its input and two numbers a token for backward."""

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return (x - mean) / sqrt(variance + eps) * weight + bias, as LayerNorm does."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(config: TransformerConfig) -> LayerNorm:
    """The layer norm that `config.fused` asks for."""
    return (FusedLayerNorm if config.fused else LayerNorm)(config.d_model)


class PositionwiseFeedForward(nn.Module):
    """Two projections with a ReLU between them, the same for every position (section 3.3)."""

    inner = ("linear1",)  # whose outputs are the inner features, which tensor parallelism cuts

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear1 = nn.Linear(d_model, d_ff)
        self.linear2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return linear2(dropout(relu(linear1(x))))."""
        return self.linear2(self.dropout(F.relu(self.linear1(x))))


class ResidualBlock(nn.Module):
    """What encoder and decoder layers share: how a sub-layer is wrapped.

    Post-LN (the paper): x = norm(x + sublayer(x)). Pre-LN: x = x + sublayer(norm(x)), which leaves
    a path from output to input that no norm touches (Xiong et al. 2020).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.dropout = nn.Dropout(config.dropout)

    def residual(self, x: Tensor, norm: LayerNorm, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return x plus the sub-layer's output, normed before or after; same shape as x."""
        if self.pre:
            return x + self.dropout(sublayer(norm(x)))
        return norm(x + self.dropout(sublayer(x)))


class EncoderLayer(ResidualBlock):
    """Self-attention, then feed-forward, each with a residual connection and a layer norm.

    With `causal=True` the same layer is the block of a decoder-only language model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.self_attention = make_attention(config, rotate=config.positions == "rotary")
        self.feed_forward = make_feed_forward(config)
        self.norm1 = make_norm(config)
        self.norm2 = make_norm(config)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        mask: Bool[Tensor, "#batch 1 #length length"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "batch length d_model"]:
        """Return x after both sub-layers; True in `mask` marks what may be attended."""
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, mask, causal))
        return self.residual(x, self.norm2, self.feed_forward)


@dataclass
class LayerCache:
    """Keys and values of one decoder layer, each (B, H, length, K); its own grow by one a step."""

    memory_key: Float[Tensor, "batch heads source head_dim"]
    memory_value: Float[Tensor, "batch heads source head_dim"]
    key: Float[Tensor, "batch heads target head_dim"]
    value: Float[Tensor, "batch heads target head_dim"]

    def select(self, rows: Int[Tensor, "new_batch"]) -> "LayerCache":
        """The cache whose row i is this one's row rows[i]."""
        parts = (self.memory_key, self.memory_value, self.key, self.value)
        return LayerCache(*(part.index_select(0, rows) for part in parts))


class DecoderLayer(ResidualBlock):
    """Causal self-attention, attention to the encoder's output, feed-forward.

    No mask for padded targets is needed: padding comes last, and a causal layer never looks ahead.
    Pre-LN norms the decoder's side alone: the encoder has normed the memory already.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.self_attention = make_attention(config, rotate=config.positions == "rotary")
        self.cross_attention = make_attention(config)
        self.feed_forward = make_feed_forward(config)
        self.norm1 = make_norm(config)
        self.norm2 = make_norm(config)
        self.norm3 = make_norm(config)

    def forward(
        self,
        x: Float[Tensor, "batch target d_model"],
        memory: Float[Tensor, "batch source d_model"],
        memory_mask: Bool[Tensor, "#batch 1 #target source"] | None = None,
    ) -> Float[Tensor, "batch target d_model"]:
        """Return x after three sub-layers; position t sees targets 0 .. t and all of memory."""
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, causal=True))
        x = self.residual(
            x, self.norm2, lambda h: self.cross_attention(h, memory, memory, memory_mask)
        )
        return self.residual(x, self.norm3, self.feed_forward)

    def start_cache(self, memory: Float[Tensor, "batch source d_model"]) -> LayerCache:
        """Return a cache with the memory's keys and values, and no target position yet."""
        memory_key, memory_value = self.cross_attention.project(memory, memory)
        none = memory_key[:, :, :0]  # (B, H, 0, K)
        return LayerCache(memory_key, memory_value, none, none)

    def step(
        self,
        x: Float[Tensor, "batch 1 d_model"],
        cache: LayerCache,
        memory_mask: Bool[Tensor, "#batch 1 1 source"] | None,
    ) -> Float[Tensor, "batch 1 d_model"]:
        """Return forward's output for the newest position; its key and value join the cache."""

        def attend_past(h: Tensor) -> Tensor:
            key, value = self.self_attention.project(h, h)
            cache.key = torch.cat([cache.key, key], dim=2)
            cache.value = torch.cat([cache.value, value], dim=2)
            return self.self_attention.attend(h, cache.key, cache.value)

        def attend_memory(h: Tensor) -> Tensor:
            return self.cross_attention.attend(h, cache.memory_key, cache.memory_value, memory_mask)

        x = self.residual(x, self.norm1, attend_past)
        x = self.residual(x, self.norm2, attend_memory)
        return self.residual(x, self.norm3, self.feed_forward)


def make_attention(config: TransformerConfig, rotate: bool = False) -> MultiHeadAttention:
    """Multi-head attention of the model's width, by hand or fused, rotary if asked.

    `inner_dropout` acts on the attention weights. Cross-attention is never rotary: distances
    between a source and a target position mean nothing.
    """
    attention = MultiHeadAttention(
        config.d_model, config.num_heads, dropout=config.inner_dropout, fused=config.fused
    )
    attention.rotate = rotary if rotate else None
    return attention


def make_feed_forward(config: TransformerConfig) -> PositionwiseFeedForward:
    """The feed-forward network of the model's widths, with `inner_dropout` after the ReLU."""
    return PositionwiseFeedForward(config.d_model, config.d_ff, config.inner_dropout)
