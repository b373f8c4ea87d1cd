"""The blocks of today's language models: RMSNorm, SwiGLU, grouped queries, rotary positions.

Each is a few lines over lessons 01 to 03. Rotary positions are lesson 01's own; what is new is a
norm without a mean, a feed-forward with a gate, and fewer heads of keys than of queries.
Sources: Zhang and Sennrich 2019 (arXiv 1910.07467), Shazeer 2020 (arXiv 2002.05202), Ainslie et
al. 2023 (arXiv 2305.13245); together in Llama (Touvron et al. 2023, arXiv 2302.13971).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from shared.errors import InputError
from shared.model.attention import Kernel, MultiHeadAttention, split_heads, with_causal
from shared.model.config import Positions, TransformerConfig
from shared.model.embeddings import rotary
from shared.model.language_model import LanguageModel
from shared.model.layers import EncoderLayer, PositionwiseFeedForward
from shared.model.transformer import initialise


@dataclass(frozen=True)
class ModernConfig(TransformerConfig):
    """As TransformerConfig, with rotary positions and `num_kv_heads` heads of keys and values.

    `inner_dropout` is not read, and a stack ends in a norm whatever `norm` says.
    """

    positions: Positions = "rotary"
    num_kv_heads: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} kv heads evenly: "
                f"num_kv_heads must divide num_heads"
            )


class RMSNorm(nn.Module):
    """Gives every vector a mean square of 1, then a learned gain: LayerNorm without mean and shift.

    Source: Zhang and Sennrich 2019, section 4.
    """

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return x / sqrt(mean(x^2) + eps) * weight."""
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight


class SwiGLU(PositionwiseFeedForward):
    """A feed-forward whose inner features are multiplied by a gate: three matrices, no biases."""

    inner = ("linear1", "gate")

    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, d_ff, dropout)
        self.linear1 = nn.Linear(d_model, d_ff, bias=False)
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.linear2 = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return linear2(dropout(silu(gate(x)) * linear1(x))), with silu(z) = z sigmoid(z)."""
        return self.linear2(self.dropout(F.silu(self.gate(x)) * self.linear1(x)))


def grouped_attention(
    query: Float[Tensor, "batch heads target head_dim"],
    key: Float[Tensor, "batch kv_heads source head_dim"],
    value: Float[Tensor, "batch kv_heads source head_dim"],
    mask: Bool[Tensor, "#batch #heads #target #source"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch heads target head_dim"]:
    """Attention where neighbouring heads share a head of keys and values, which is not copied.

    Head h reads head h // (heads / kv_heads) of keys. The queries that share one are laid behind
    each other, as if they were more positions: one product then serves them all. Every query has a
    key to look at: without one its result is NaN, and 0 by torch's kernel.
    """
    groups, length = key.shape[1], query.shape[2]
    together = query.unflatten(1, (groups, -1)).flatten(2, 3)  # (B, G, H/G T, K)
    scores = together @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    scores = scores.unflatten(2, (-1, length)).flatten(1, 2)  # (B, H, T, S)
    mask = with_causal(mask, query, key) if causal else mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(dim=-1).unflatten(1, (groups, -1)).flatten(2, 3)  # (B, G, H/G T, S)
    return (weights @ value).unflatten(2, (-1, length)).flatten(1, 2)  # (B, H, T, K)


def fused_grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """The same through torch's kernel, which does not keep the scores."""
    if causal and (mask is not None or query.shape[2] != key.shape[2]):
        # Torch promises an error for both, and counts from the first key, we from the last.
        mask, causal = with_causal(mask, query, key), False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=True
    )


class GroupedQueryAttention(MultiHeadAttention):
    """Self-attention with fewer heads of keys and values than of queries; no biases.

    With as many it is multi-head attention, with one multi-query attention. What a decoder keeps
    of each token shrinks with them. `kernel` attends in the heads, without dropout, and keeps no
    weights, whatever `keep_weights` says.
    """

    def __init__(self, config: ModernConfig, kernel: Kernel) -> None:
        super().__init__(config.d_model, config.num_heads)
        self.num_kv_heads = config.num_kv_heads
        width = self.head_dim * config.num_kv_heads
        for name, size in (("w_q", config.d_model), ("w_k", width), ("w_v", width)):
            setattr(self, name, nn.Linear(config.d_model, size, bias=False))
        self.w_o = nn.Linear(config.d_model, config.d_model, bias=False)
        self.rotate, self.kernel = rotary, kernel

    def project(
        self, key: Float[Tensor, "batch source d_model"], value: Float[Tensor, "batch source d"]
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, split into their own number of heads."""
        keys, values = self.w_k(key), self.w_v(value)
        return split_heads(keys, self.num_kv_heads), split_heads(values, self.num_kv_heads)


class ModernLayer(EncoderLayer):
    """The layer of lesson 03 with the four parts exchanged."""

    def __init__(self, config: ModernConfig, kernel: Kernel) -> None:
        super().__init__(config)
        self.self_attention = GroupedQueryAttention(config, kernel)
        self.feed_forward = SwiGLU(config.d_model, config.d_ff)
        self.norm1 = RMSNorm(config.d_model)
        self.norm2 = RMSNorm(config.d_model)


class ModernModel(LanguageModel):
    """A language model of the shape of Llama: what differs from lesson 03's are its layers."""

    def __init__(self, config: ModernConfig, kernel: Kernel | None = None) -> None:
        super().__init__(config)
        fitting = fused_grouped_attention if config.fused else grouped_attention
        layers = (ModernLayer(config, kernel or fitting) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.d_model)
        initialise(self)
