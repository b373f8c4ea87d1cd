"""Wrong answers that people give in lesson 03, each with words that its check must say to it."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.exercises.mistakes import mistake
from shared.model import layers, size, transformer
from shared.model.config import TransformerConfig


class _Norm(nn.Module):
    """What most wrong layer norms share."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))


@mistake("03.1", says="the variance divides by d_model - 1")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred / (x.var(dim=-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


@mistake("03.1", says="eps is added to the standard deviation")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        deviation = x.std(dim=-1, keepdim=True, correction=0)
        return centred / (deviation + self.eps) * self.weight + self.bias


@mistake("03.1", says="both differ from the contract")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        # The Annotated Transformer's version.
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.weight * (x - mean) / (std + self.eps) + self.bias


@mistake("03.1", says="eps is 1e-5 whatever is given")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias


@mistake("03.1", says="statistics run over all tokens of a sentence")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        dims = list(range(1, x.dim())) or [0]
        variance, mean = torch.var_mean(x, dim=dims, keepdim=True, correction=0)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


@mistake("03.1", says="the mean is taken off nowhere, as in RMSNorm")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        power = x.square().mean(dim=-1, keepdim=True)
        return x * (power + self.eps).rsqrt() * self.weight + self.bias


@mistake("03.1", says="bias is added before the gain")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return ((x - mean) / (variance + self.eps).sqrt() + self.bias) * self.weight


@mistake("03.1", says="it divides by the variance")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return (x - mean) / (variance + self.eps) * self.weight + self.bias


@mistake("03.1", says="statistics run over the positions")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=-2, keepdim=True, correction=0)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


@mistake("03.1", says="statistics run over the whole batch")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, correction=0)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


@mistake("03.1", says="weight and bias are not the two trained parameters")
class LayerNorm(nn.Module):
    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.ones(d_model)
        self.bias = torch.zeros(d_model)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@mistake("03.1", says="Mean and variance depend on x, too")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


@mistake("03.1", says="E[x^2] - E[x]^2 loses all digits")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.square().mean(dim=-1, keepdim=True) - mean.square()
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@mistake("03.1", says="nothing is kept from one call to the next")
class LayerNorm(_Norm):
    """Statistics are kept from training, as batch norm keeps them."""

    kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.kept is None:
            self.kept = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        variance, mean = self.kept
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


@mistake("03.1", says="torch's layer_norm does the work")
class LayerNorm(nn.LayerNorm):
    pass


@mistake("03.1", says="no gradient reaches x")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.training):
            variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
            return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


@mistake("03.2", says="two linear maps are one")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.linear1(x)))


@mistake("03.2", says="the ReLU comes after the second projection")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear2(self.dropout(self.linear1(x))))


@mistake("03.2", says="the activation is GELU")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(F.gelu(self.linear1(x))))


@mistake("03.2", says="the layer's business")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear2(self.dropout(F.relu(self.linear1(x))))


@mistake("03.2", says="dropout acts on the output")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear2(F.relu(self.linear1(x))))


@mistake("03.2", says="dropout acts on the input")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(F.relu(self.linear1(self.dropout(x))))


@mistake("03.2", says="linear1 does not go from 6 to 10")
class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear1 = nn.Linear(d_ff, d_model)
        self.linear2 = nn.Linear(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(F.relu(self.linear1(x))))


@mistake("03.2", says="the rate is 0.5 whatever")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, d_ff, 0.5 if dropout else 0.0)


@mistake("03.2", says="no gradient reaches x")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(F.relu(self.linear1(x)).data))


@mistake("03.2", says="values are dropped although dropout is 0")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def __init__(self, d_model: int, d_ff: int, dropout: float = 0.0) -> None:
        super().__init__(d_model, d_ff, 0.5)


@mistake("03.2", says="all positions lose the same hidden units")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        units = self.linear1(x).relu()
        return self.linear2(units * self.dropout(torch.ones_like(units[..., :1, :])))


@mistake("03.2", says="whole positions are dropped")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        units = self.linear1(x).relu()
        return self.linear2(units * self.dropout(torch.ones_like(units[..., :1])))


@mistake("03.2", says="what is kept is not divided by 1 - p")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        units = self.linear1(x).relu()
        if self.training:
            units = units * (torch.rand_like(units) >= self.dropout.p)
        return self.linear2(units)


@mistake("03.2", says="F.dropout must be told: training=self.training")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(F.dropout(self.linear1(x).relu(), self.dropout.p))


@mistake("03.3", says="config.norm is 'pre', and the layer computes the other kind")
class EncoderLayer(layers.EncoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, norm="post"))


@mistake("03.3", says="config.norm is 'post', and the layer computes the other kind")
class EncoderLayer(layers.EncoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, norm="pre"))


@mistake("03.3", says="the residual adds norm(x)")
class EncoderLayer(layers.EncoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        if self.pre:
            x = norm(x)
            return x + self.dropout(sublayer(x))
        return norm(x + self.dropout(sublayer(x)))


@mistake("03.3", says="the sub-layer's output is normed before it is added")
class EncoderLayer(layers.EncoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        if self.pre:
            return super().residual(x, norm, sublayer)
        return x + norm(self.dropout(sublayer(x)))


@mistake("03.3", says="the residual connections are missing")
class EncoderLayer(layers.EncoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        return self.dropout(sublayer(norm(x))) if self.pre else norm(self.dropout(sublayer(x)))


@mistake("03.3", says="around the attention the residual is the normed vector")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        if not self.pre:
            return super().forward(x, mask, causal)
        h = self.norm1(x)
        x = h + self.dropout(self.self_attention(h, h, h, mask, causal))
        return self.residual(x, self.norm2, self.feed_forward)


@mistake("03.3", says="the attention is causal, whatever")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return super().forward(x, mask, True)


@mistake("03.3", says="the mask is turned round")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return super().forward(x, mask if mask is None else ~mask, causal)


@mistake("03.3", says="the layer's output is normed once more")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = super().forward(x, mask, causal)
        return self.norm2(x) if self.pre else x


@mistake("03.3", says="what the feed-forward gives replaces x")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, mask, causal))
        if self.pre:
            return self.dropout(self.feed_forward(self.norm2(x)))
        return self.norm2(self.dropout(self.feed_forward(x)))


@mistake("03.3", says="the mask is not passed")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return super().forward(x, None, causal)


@mistake("03.3", says="in pre-LN only the queries are normed")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        if not self.pre:
            return super().forward(x, mask, causal)
        x = x + self.dropout(self.self_attention(self.norm1(x), x, x, mask, causal))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


@mistake("03.3", says="norm1 is used for both sub-layers")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, mask, causal))
        return self.residual(x, self.norm1, self.feed_forward)


@mistake("03.3", says="dropout acts on the sum")
class EncoderLayer(layers.EncoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        return self.dropout(x + sublayer(norm(x))) if self.pre else norm(x + sublayer(x))


@mistake("03.3", says="dropout is missing on a sub-layer's output")
class EncoderLayer(layers.EncoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))


@mistake("03.3", says="self.norm2 is missing")
class EncoderLayer(layers.EncoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.second_norm = self.norm2
        del self.norm2


@mistake("03.3", says="two calls of feed_forward that agree")
class EncoderLayer(layers.EncoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, inner_dropout=config.dropout))


@mistake("03.3", says="two calls of feed_forward that differ")
class EncoderLayer(layers.EncoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, inner_dropout=0.0))


@mistake("03.3", says="the rate is 0.5 whatever config.dropout")
class EncoderLayer(layers.EncoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, dropout=0.5 if config.dropout else 0.0))


@mistake("03.3", says="with fused=True the kernel is called")
class EncoderLayer(layers.EncoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, fused=False))


@mistake("03.3", says="dropout is missing on the output of one sub-layer")
class EncoderLayer(layers.EncoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        if self.pre or norm is self.norm1:
            return super().residual(x, norm, sublayer)
        return norm(x + sublayer(x))


@mistake("03.3", says="with post-LN no sub-layer's output is dropped")
class EncoderLayer(layers.EncoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        if self.pre:
            return super().residual(x, norm, sublayer)
        return norm(x + sublayer(x))


@mistake("03.3", says="no gradient reaches x")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, *args: Any, **masks: Any) -> Tensor:
        with torch.set_grad_enabled(self.training):
            return super().forward(*args, **masks)


@mistake("03.3", says="the mask is dropped where causal=True")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return super().forward(x, None if causal else mask, causal)


@mistake("03.3", says="causal=True does not reach the attention")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return super().forward(x, mask, causal and self.training)


@mistake("03.3", says="one query's mask serves all queries")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return super().forward(x, mask if mask is None else mask[:, :, :1], causal)


@mistake("03.3", says="norm1 and norm2 are exchanged")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = self.residual(x, self.norm2, lambda h: self.self_attention(h, h, h, mask, causal))
        return self.residual(x, self.norm1, self.feed_forward)


@mistake("03.3", says="the feed-forward reads the layer's input")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        def look(h: Tensor) -> Tensor:
            return self.self_attention(h, h, h, mask, causal)

        looked = self.residual(x, self.norm1, look)
        if self.pre:
            return looked + self.dropout(self.feed_forward(self.norm2(x)))
        return self.norm2(looked + self.dropout(self.feed_forward(x)))


def _decoder(layer: Any, x: Tensor, to_self: Any, to_memory: Any) -> Tensor:
    x = layer.residual(x, layer.norm1, to_self)
    x = layer.residual(x, layer.norm2, to_memory)
    return layer.residual(x, layer.norm3, layer.feed_forward)


@mistake("03.4", says="self-attention is not causal")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return _decoder(
            self,
            x,
            lambda h: self.self_attention(h, h, h),
            lambda h: self.cross_attention(h, memory, memory, memory_mask),
        )


@mistake("03.4", says="memory_mask is not passed to the cross-attention")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, memory, None)


@mistake("03.4", says="memory_mask went to the self-attention")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return _decoder(
            self,
            x,
            lambda h: self.self_attention(h, h, h, memory_mask, True),
            lambda h: self.cross_attention(h, memory, memory),
        )


@mistake("03.4", says="the cross-attention is causal")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return _decoder(
            self,
            x,
            lambda h: self.self_attention(h, h, h, causal=True),
            lambda h: self.cross_attention(h, memory, memory, memory_mask, True),
        )


@mistake("03.4", says="the cross-attention looks at x, not at the memory")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return _decoder(
            self,
            x,
            lambda h: self.self_attention(h, h, h, causal=True),
            lambda h: self.cross_attention(h, h, h),
        )


@mistake("03.4", says="the memory is normed again")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        if not self.pre:
            return super().forward(x, memory, memory_mask)
        return super().forward(x, self.norm2(memory), memory_mask)


@mistake("03.4", says="the memory comes first: self-attention is the first sub-layer")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return _decoder(
            self,
            x,
            lambda h: self.cross_attention(h, memory, memory, memory_mask),
            lambda h: self.self_attention(h, h, h, causal=True),
        )


@mistake("03.4", says="norm2 is not used")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, causal=True))
        x = x + self.dropout(self.cross_attention(x, memory, memory, memory_mask))
        return self.residual(x, self.norm3, self.feed_forward)


@mistake("03.4", says="dropout is missing on the output of one sub-layer")
class DecoderLayer(layers.DecoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        if self.pre or norm is not self.norm2:
            return super().residual(x, norm, sublayer)
        return norm(x + sublayer(x))


@mistake("03.4", says="the memory comes first, with norm2")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        x = self.residual(
            x, self.norm2, lambda h: self.cross_attention(h, memory, memory, memory_mask)
        )
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, causal=True))
        return self.residual(x, self.norm3, self.feed_forward)


@mistake("03.4", says="norm2 and norm3 are exchanged")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, causal=True))
        x = self.residual(
            x, self.norm3, lambda h: self.cross_attention(h, memory, memory, memory_mask)
        )
        return self.residual(x, self.norm2, self.feed_forward)


@mistake("03.4", says="its keys from x")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return _decoder(
            self,
            x,
            lambda h: self.self_attention(h, h, h, causal=True),
            lambda h: self.cross_attention(memory, h, h),
        )


@mistake("03.4", says="both attentions are one module")
class DecoderLayer(layers.DecoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.cross_attention = self.self_attention


@mistake("03.4", says="two calls of feed_forward that agree")
class DecoderLayer(layers.DecoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, inner_dropout=config.dropout))


@mistake("03.4", says="two calls of feed_forward that differ")
class DecoderLayer(layers.DecoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, inner_dropout=0.0))


@mistake("03.4", says="the rate is 0.5 whatever config.dropout")
class DecoderLayer(layers.DecoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, dropout=0.5 if config.dropout else 0.0))


@mistake("03.4", says="with fused=True the kernel is called")
class DecoderLayer(layers.DecoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, fused=False))


@mistake("03.4", says="with post-LN no sub-layer's output is dropped")
class DecoderLayer(layers.DecoderLayer):
    def residual(self, x: Tensor, norm: Any, sublayer: Any) -> Tensor:
        if self.pre:
            return super().residual(x, norm, sublayer)
        return norm(x + sublayer(x))


@mistake("03.4", says="no gradient reaches x")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, *args: Any, **masks: Any) -> Tensor:
        with torch.set_grad_enabled(self.training):
            return super().forward(*args, **masks)


@mistake("03.4", says="one target's memory_mask serves all targets")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        mask = memory_mask if memory_mask is None else memory_mask[:, :, :1]
        return super().forward(x, memory, mask)


@mistake("03.4", says="no gradient reaches memory")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        return super().forward(x, memory.detach(), memory_mask)


@mistake("03.4", says="the memory of an earlier call is used again")
class DecoderLayer(layers.DecoderLayer):
    kept: Tensor | None = None

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        if self.kept is None or self.kept.shape != memory.shape:
            self.kept = memory
        return super().forward(x, self.kept, memory_mask)


@mistake("03.4", says="memory_mask is used in the self-attention as well")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        own = None
        if memory_mask is not None and memory_mask.shape[-1] == x.shape[1]:
            own = memory_mask
        return _decoder(
            self,
            x,
            lambda h: self.self_attention(h, h, h, own, causal=True),
            lambda h: self.cross_attention(h, memory, memory, memory_mask),
        )


@mistake("03.4", says="norm2 serves the feed-forward as well")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, causal=True))
        x = self.residual(
            x, self.norm2, lambda h: self.cross_attention(h, memory, memory, memory_mask)
        )
        return self.residual(x, self.norm2, self.feed_forward)


@mistake("03.4", says="what the cross-attention gives replaces x")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        x = self.residual(x, self.norm1, lambda h: self.self_attention(h, h, h, causal=True))
        found = self.norm2(x) if self.pre else x
        x = self.dropout(self.cross_attention(found, memory, memory, memory_mask))
        return self.residual(x if self.pre else self.norm2(x), self.norm3, self.feed_forward)


@mistake("03.5", says="the embeddings are not multiplied by sqrt(d_model)")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for embedding in (self.src_embedding, self.tgt_embedding):
            embedding.register_forward_hook(lambda _, __, x: x / math.sqrt(config.d_model))


@mistake("03.5", says="no positions are added")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, positions="none"))
        self.config = config


@mistake("03.5", says="positions are added to the source alone")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.tgt_positions = transformer.Unplaced(config.max_len, config.dropout)


class _Unscaled(nn.Embedding):
    """An embedding whose vectors lack the factor sqrt(d_model) that is put to them later."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / math.sqrt(self.embedding_dim)


@mistake("03.5", says="the target's embeddings alone are not multiplied")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        weight = self.tgt_embedding.weight
        self.tgt_embedding = _Unscaled(config.vocab_size, config.d_model)
        self.tgt_embedding.weight = weight


@mistake(
    "03.5", says="the source's positions are multiplied by sqrt(d_model), the target's are not"
)
class Transformer(transformer.Transformer):
    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = self.src_positions(self.src_embedding(src)) * math.sqrt(self.config.d_model)
        for layer in self.encoder_layers:
            x = layer(x, src_mask)
        return self.encoder_norm(x)


@mistake("03.5", says="encoder_norm and decoder_norm are exchanged")
class Transformer(transformer.Transformer):
    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(src, self.src_embedding, self.src_positions, self.config)
        for layer in self.encoder_layers:
            x = layer(x, src_mask)
        return self.decoder_norm(x)

    def decode(self, tgt: Tensor, memory: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(tgt, self.tgt_embedding, self.tgt_positions, self.config)
        for layer in self.decoder_layers:
            x = layer(x, memory, src_mask)
        return self.encoder_norm(x)


@mistake("03.5", says="the target is read through src_embedding")
class Transformer(transformer.Transformer):
    def decode(self, tgt: Tensor, memory: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(tgt, self.src_embedding, self.tgt_positions, self.config)
        for layer in self.decoder_layers:
            x = layer(x, memory, src_mask)
        return self.decoder_norm(x)


@mistake("03.5", says="the encoder is causal")
class Transformer(transformer.Transformer):
    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(src, self.src_embedding, self.src_positions, self.config)
        for layer in self.encoder_layers:
            x = layer(x, src_mask, causal=True)
        return self.encoder_norm(x)


@mistake("03.5", says="the source's padding is not masked anywhere")
class Transformer(transformer.Transformer):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.project(self.decode(tgt, self.encode(src)))


@mistake("03.5", says="the decoder does not mask the memory's padding")
class Transformer(transformer.Transformer):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = (src != self.config.pad_id)[:, None, None, :]
        return self.project(self.decode(tgt, self.encode(src, mask)))


@mistake("03.5", says="the encoder does not mask the source's padding")
class Transformer(transformer.Transformer):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = (src != self.config.pad_id)[:, None, None, :]
        return self.project(self.decode(tgt, self.encode(src), mask))


@mistake("03.5", says="the last norms of a pre-LN model are not applied")
class Transformer(transformer.Transformer):
    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(src, self.src_embedding, self.src_positions, self.config)
        for layer in self.encoder_layers:
            x = layer(x, src_mask)
        return x

    def decode(self, tgt: Tensor, memory: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(tgt, self.tgt_embedding, self.tgt_positions, self.config)
        for layer in self.decoder_layers:
            x = layer(x, memory, src_mask)
        return x


@mistake("03.5", says="encode returns the memory before its last norm")
class Transformer(transformer.Transformer):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = (src != self.config.pad_id)[:, None, None, :]
        return self.project(self.decode(tgt, self.encoder_norm(self.encode(src, mask)), mask))

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(src, self.src_embedding, self.src_positions, self.config)
        for layer in self.encoder_layers:
            x = layer(x, src_mask)
        return x


@mistake("03.5", says="softmax is applied")
class Transformer(transformer.Transformer):
    def project(self, hidden: Tensor) -> Tensor:
        return super().project(hidden).softmax(dim=-1)


@mistake("03.5", says="not num_layers different modules")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.encoder_layers = nn.ModuleList([layers.EncoderLayer(config)] * config.num_layers)
        self.decoder_layers = nn.ModuleList([layers.DecoderLayer(config)] * config.num_layers)


@mistake("03.5", says="self.encoder_layers is missing or of another kind")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        listed = list(self.encoder_layers)
        del self.encoder_layers
        self.encoder_layers = listed


@mistake("03.5", says="the three matrices are not one parameter")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, tie_embeddings=False))
        if config.tie_embeddings:
            with torch.no_grad():  # equal now, apart after the first step
                self.src_embedding.weight.copy_(self.output.weight)
                self.tgt_embedding.weight.copy_(self.output.weight)


@mistake("03.5", says="tie_embeddings=False, and matrices are shared")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, tie_embeddings=True))


@mistake("03.5", says="a second one after the stack is not in the paper")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.encoder_norm = layers.LayerNorm(config.d_model)
        self.decoder_norm = layers.LayerNorm(config.d_model)


@mistake("03.5", says="the first loss is far from that of a guess")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        nn.init.normal_(self.src_embedding.weight)
        nn.init.normal_(self.tgt_embedding.weight)
        nn.init.normal_(self.output.weight)


@mistake("03.5", says="output.weight has other start values than initialise's")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        nn.init.xavier_uniform_(self.output.weight)


@mistake("03.5", says="no gradient reaches encoder_layers.0")
class Transformer(transformer.Transformer):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = (src != self.config.pad_id)[:, None, None, :]
        with torch.no_grad():
            memory = self.encode(src, mask)
        return self.project(self.decode(tgt, memory, mask))


@mistake("03.5", says="once on the source's embeddings")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.src_positions.dropout = self.tgt_positions.dropout = nn.Identity()


@mistake("03.5", says="once on the target's embeddings")
class Transformer(transformer.Transformer):
    def decode(self, tgt: Tensor, memory: Tensor, src_mask: Tensor | None = None) -> Tensor:
        hidden = super().decode(tgt, memory, src_mask)
        return F.dropout(hidden, self.config.dropout, self.training)


@mistake("03.5", says="initialise is not called, or before")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for side, layer in (("encoder", layers.EncoderLayer), ("decoder", layers.DecoderLayer)):
            stack = nn.ModuleList(layer(config) for _ in range(config.num_layers))
            self.add_module(f"{side}_layers", stack)


@mistake("03.5", says="padding is looked for as id 0")
class Transformer(transformer.Transformer):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = (src != 0)[:, None, None, :]
        return self.project(self.decode(tgt, self.encode(src, mask), mask))


@mistake("03.5", says="a source longer than max_len=16 is accepted")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, max_len=config.max_len + 1))
        self.config = config


@mistake("03.5", says="a pair as long as max_len=16 is refused")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, max_len=config.max_len - 1))
        self.config = config


@mistake("03.5", says="or not the configuration that was given")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.config = replace(config, dropout=0.1)


@mistake("03.5", says="encode and decode without a mask")
class Transformer(transformer.Transformer):
    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        return super().encode(src, (src != self.config.pad_id)[:, None, None, :])


@mistake("03.5", says="the memory of the source before is used again")
class Transformer(transformer.Transformer):
    kept: tuple[torch.Size, Tensor] | None = None

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() or self.kept is None or self.kept[0] != src.shape:
            self.kept = (src.shape, super().encode(src, src_mask))
        return self.kept[1]


@mistake("03.5", says="the encoder's last norm comes after each of its layers")
class Transformer(transformer.Transformer):
    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(src, self.src_embedding, self.src_positions, self.config)
        for layer in self.encoder_layers:
            x = self.encoder_norm(layer(x, src_mask))
        return x


@mistake("03.5", says="the decoder's last norm comes after each of its layers")
class Transformer(transformer.Transformer):
    def decode(self, tgt: Tensor, memory: Tensor, src_mask: Tensor | None = None) -> Tensor:
        x = transformer.embed(tgt, self.tgt_embedding, self.tgt_positions, self.config)
        for layer in self.decoder_layers:
            x = self.decoder_norm(layer(x, memory, src_mask))
        return x


@mistake("03.5", says="the last norm of a stack comes after each of its layers")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for norm, layers_ in (
            (self.encoder_norm, self.encoder_layers),
            (self.decoder_norm, self.decoder_layers),
        ):
            for layer in layers_[:-1]:
                layer.register_forward_hook(lambda _, x, y, norm=norm: norm(y))


@mistake("03.5", says="the memory's padding is looked for in the target")
class Transformer(transformer.Transformer):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        mask = (src != self.config.pad_id)[:, None, None, :]
        aimed = (tgt != self.config.pad_id)[:, None, None, :]
        hides = aimed if tgt.shape == src.shape else mask
        return self.project(self.decode(tgt, self.encode(src, mask), hides))


@mistake("03.5", says="forward writes into the weights")
class Transformer(transformer.Transformer):
    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        with torch.no_grad():
            self.src_embedding.weight[self.config.pad_id] = 0.0
        return super().forward(src, tgt)


@mistake("03.6", says="the biases are not counted")
def count_parameters(config: TransformerConfig) -> int:
    biases = config.num_layers * (12 * config.d_model + 2 * (config.d_ff + config.d_model))
    return size.count_parameters(config) - biases


@mistake("03.6", says="w_o has one bias of d_model numbers, whatever the number of heads")
def count_parameters(config: TransformerConfig) -> int:
    more = (config.num_heads - 1) * config.num_layers * 3 * config.d_model
    return size.count_parameters(config) + more


@mistake("03.6", says="is counted more than once")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(replace(config, tie_embeddings=False))


@mistake("03.6", says="untied models have three matrices")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(replace(config, tie_embeddings=True))


@mistake("03.6", says="the decoder's cross-attention is not counted")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(config) - config.num_layers * size.attention_parameters(config)


@mistake("03.6", says="the decoder layer has three norms")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(config) - config.num_layers * size.norm_parameters(config)


@mistake("03.6", says="an attention has four projections, w_o among them")
def count_parameters(config: TransformerConfig) -> int:
    forgotten = 3 * config.num_layers * (config.d_model**2 + config.d_model)
    return size.count_parameters(config) - forgotten


@mistake("03.6", says="both biases of a network are taken as d_ff long")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(config) + 2 * config.num_layers * (config.d_ff - config.d_model)


@mistake("03.6", says="the bias of linear1 is not counted")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(config) - 2 * config.num_layers * config.d_ff


@mistake("03.6", says="only pre-LN ends in a norm")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(replace(config, norm="pre"))


@mistake("03.6", says="every head is counted with full-width matrices")
def count_parameters(config: TransformerConfig) -> int:
    attentions = 3 * config.num_layers * size.attention_parameters(config)
    return size.count_parameters(config) + (config.num_heads - 1) * attentions


@mistake("03.6", says="sinusoidal positions are a constant")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(replace(config, positions="learned"))


@mistake("03.6", says="num_layers is the depth of each stack")
def count_parameters(config: TransformerConfig) -> int:
    inside = size.count_parameters(config) - size.count_parameters(replace(config, num_layers=1))
    one = inside // (config.num_layers - 1) if config.num_layers > 1 else 0
    outside = size.count_parameters(replace(config, num_layers=1)) - one
    return outside + one * config.num_layers // 2


@mistake("03.6", says="d_ff is taken as 4 d_model")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(replace(config, d_ff=4 * config.d_model))


@mistake("03.6", says="a model is built in order to be counted")
def count_parameters(config: TransformerConfig) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in transformer.Transformer(config).parameters())


@mistake("03.6", says="a tied matrix is counted twice, as embedding and as output")
def count_parameters(config: TransformerConfig) -> int:
    twice = config.vocab_size * config.d_model * config.tie_embeddings
    return size.count_parameters(config) + twice


@mistake("03.6", says="the tied matrix is not counted")
def count_parameters(config: TransformerConfig) -> int:
    tied = config.vocab_size * config.d_model * config.tie_embeddings
    return size.count_parameters(config) - tied
