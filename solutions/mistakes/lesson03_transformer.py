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


@mistake("03.1", says="weight and bias are not the two trained parameters")
class LayerNorm(nn.Module):
    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.ones(d_model)
        self.bias = torch.zeros(d_model)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@mistake("03.1", says="E[x^2] - E[x]^2 loses all digits")
class LayerNorm(_Norm):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.square().mean(dim=-1, keepdim=True) - mean.square()
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@mistake("03.2", says="two linear maps are one")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.dropout(self.linear1(x)))


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


@mistake("03.2", says="all positions lose the same hidden units")
class PositionwiseFeedForward(layers.PositionwiseFeedForward):
    def forward(self, x: Tensor) -> Tensor:
        units = self.linear1(x).relu()
        return self.linear2(units * self.dropout(torch.ones_like(units[..., :1, :])))


@mistake("03.3", says="config.norm is 'pre', and the layer computes the other kind")
class EncoderLayer(layers.EncoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, norm="post"))


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


@mistake("03.3", says="no gradient reaches x")
class EncoderLayer(layers.EncoderLayer):
    def forward(self, *args: Any, **masks: Any) -> Tensor:
        with torch.set_grad_enabled(self.training):
            return super().forward(*args, **masks)


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


@mistake("03.4", says="both attentions are one module")
class DecoderLayer(layers.DecoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.cross_attention = self.self_attention


@mistake("03.4", says="two calls of feed_forward that differ")
class DecoderLayer(layers.DecoderLayer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(replace(config, inner_dropout=0.0))


@mistake("03.4", says="no gradient reaches x")
class DecoderLayer(layers.DecoderLayer):
    def forward(self, *args: Any, **masks: Any) -> Tensor:
        with torch.set_grad_enabled(self.training):
            return super().forward(*args, **masks)


@mistake("03.5", says="the embeddings are not multiplied by sqrt(d_model)")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for embedding in (self.src_embedding, self.tgt_embedding):
            embedding.register_forward_hook(lambda _, __, x: x / math.sqrt(config.d_model))


@mistake("03.5", says="a source's memory is kept, and the weights have moved since")
class Transformer(transformer.Transformer):
    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        key = f"{src.tolist()} {src_mask if src_mask is None else src_mask.tolist()}"
        if getattr(self, "key", None) != key:
            self.key, self.memory = key, super().encode(src, src_mask)
        return self.memory


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


@mistake("03.5", says="not num_layers different modules")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.encoder_layers = nn.ModuleList([layers.EncoderLayer(config)] * config.num_layers)
        self.decoder_layers = nn.ModuleList([layers.DecoderLayer(config)] * config.num_layers)


@mistake("03.5", says="the first loss is far from that of a guess")
class Transformer(transformer.Transformer):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        nn.init.normal_(self.src_embedding.weight)
        nn.init.normal_(self.tgt_embedding.weight)
        nn.init.normal_(self.output.weight)


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


@mistake("03.6", says="the biases are not counted")
def count_parameters(config: TransformerConfig) -> int:
    biases = config.num_layers * (12 * config.d_model + 2 * (config.d_ff + config.d_model))
    return size.count_parameters(config) - biases


@mistake("03.6", says="untied models have three matrices")
def count_parameters(config: TransformerConfig) -> int:
    return size.count_parameters(replace(config, tie_embeddings=True))


@mistake("03.6", says="an attention has four projections, w_o among them")
def count_parameters(config: TransformerConfig) -> int:
    forgotten = 3 * config.num_layers * (config.d_model**2 + config.d_model)
    return size.count_parameters(config) - forgotten
