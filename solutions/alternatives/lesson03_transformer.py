"""Right answers to lesson 03 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import collections
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

from shared.model.embeddings import PositionalEncoding
from shared.model.transformer import initialise
from solutions.alternatives.layers import (
    DecoderLayerInLine,
    DecoderLayerOfClosures,
    EncoderLayerInLine,
    EncoderLayerOfClosures,
    FeedForwardByFunctions,
    FeedForwardInOrder,
    NormByLengths,
    NormByVarMean,
)

# 03.2


class FeedForwardInSequence(nn.Sequential):
    """A Sequential with the contract's names; dropout and ReLU, both by a factor, commute."""

    def __init__(self, d_model, d_ff, dropout=0.0):
        super().__init__()
        self.add_module("linear1", nn.Linear(d_model, d_ff))
        self.add_module("dropout", nn.Dropout(dropout))
        self.add_module("relu", nn.ReLU(inplace=True))
        self.add_module("linear2", nn.Linear(d_ff, d_model))


# 03.5


class TransformerOfStacks(nn.Module):
    """One module of positions for both sides, tied from the source's side."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.src_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.tgt_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = PositionalEncoding(config.d_model, config.max_len, config.dropout)
        self.encoder_layers, self.decoder_layers = nn.ModuleList(), nn.ModuleList()
        for _ in range(config.num_layers):
            self.encoder_layers.append(EncoderLayerOfClosures(config))
            self.decoder_layers.append(DecoderLayerOfClosures(config))
        last = nn.LayerNorm if config.norm == "pre" else nn.Identity
        self.encoder_norm, self.decoder_norm = last(config.d_model), last(config.d_model)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        initialise(self)
        if config.tie_embeddings:
            self.tgt_embedding.weight = self.output.weight = self.src_embedding.weight

    def forward(self, src, tgt):
        """Padding is found by where."""
        seen = torch.where(src == self.config.pad_id, False, True)[:, None, None, :]
        return self.output(self.decode(tgt, self.encode(src, seen), src_mask=seen))

    def encode(self, src, src_mask=None):
        """Embed and go through the layers."""
        x = self.positions(self.src_embedding(src) * self.config.d_model**0.5)
        for layer in self.encoder_layers:
            x = layer(x, mask=src_mask)
        return self.encoder_norm(x)

    def decode(self, tgt, memory, src_mask=None):
        """The same with memory."""
        x = self.positions(self.tgt_embedding(tgt) * self.config.d_model**0.5)
        for layer in self.decoder_layers:
            x = layer(x, memory, memory_mask=src_mask)
        return self.decoder_norm(x)


class TransformerByFunctions(nn.Module):
    """Embeddings as products with one-hot rows, layers folded by reduce, dropout of positions."""

    def __init__(self, config):
        super().__init__()
        V, D = config.vocab_size, config.d_model
        self.config, self.scale = config, math.sqrt(D)
        self.output = nn.Linear(D, V, bias=False)
        self.src_embedding, self.tgt_embedding = nn.Embedding(V, D), nn.Embedding(V, D)
        self.place_src = PositionalEncoding(D, config.max_len, config.dropout)
        self.place_tgt = PositionalEncoding(D, config.max_len, config.dropout)
        layers = range(config.num_layers)
        self.encoder_layers = nn.ModuleList([EncoderLayerInLine(config) for _ in layers])
        self.decoder_layers = nn.ModuleList([DecoderLayerInLine(config) for _ in layers])
        self.encoder_norm = NormByVarMean(D) if config.norm == "pre" else nn.Identity()
        self.decoder_norm = NormByLengths(D) if config.norm == "pre" else nn.Identity()
        initialise(self)
        if config.tie_embeddings:
            self.src_embedding.weight = self.tgt_embedding.weight
            self.output.weight = self.tgt_embedding.weight

    def embed(self, tokens, embedding, place):
        """One-hot rows times the table."""
        rows = F.one_hot(tokens, self.config.vocab_size).to(embedding.weight.dtype)
        return place(torch.einsum("blv,vd->bld", rows, embedding.weight * self.scale))

    def encode(self, src, src_mask=None):
        """Fold."""
        x = self.embed(src, self.src_embedding, self.place_src)
        x = functools.reduce(lambda y, layer: layer(y, src_mask), self.encoder_layers, x)
        return self.encoder_norm(x)

    def decode(self, tgt, memory, src_mask=None):
        """Fold."""
        x = self.embed(tgt, self.tgt_embedding, self.place_tgt)
        x = functools.reduce(lambda y, layer: layer(y, memory, src_mask), self.decoder_layers, x)
        return self.decoder_norm(x)

    def forward(self, src, tgt):
        """Logits by einsum."""
        seen = src.ne(self.config.pad_id)[:, None, None]
        hidden = self.decode(tgt, self.encode(src, seen), seen)
        return torch.einsum("btd,vd->btv", hidden, self.output.weight)


# 03.6


def counted_shapes(config):
    """All shapes in a counter, then one sum."""
    D, F_, V, L = config.d_model, config.d_ff, config.vocab_size, config.num_layers
    shapes = collections.Counter()
    attentions, forwards, norms = 3 * L, 2 * L, 5 * L + 2 * (config.norm == "pre")
    shapes.update({(D, D): 4 * attentions, (D,): 4 * attentions + forwards + 2 * norms})
    for shape in ((D, F_), (F_, D), (F_,)):
        shapes[shape] += forwards
    shapes[V, D] += 1 if config.tie_embeddings else 3
    shapes[config.max_len, D] += 2 * (config.positions == "learned")
    return sum(math.prod(shape) * number for shape, number in shapes.items())


def one_polynomial(config):
    """The sum worked out on paper."""
    L, D, F_ = config.num_layers, config.d_model, config.d_ff
    layers = L * (12 * D * D + 4 * D * F_ + 2 * F_ + 24 * D)
    tables = (3 - 2 * config.tie_embeddings) * config.vocab_size
    if config.positions == "learned":
        tables += config.max_len * 2
    return layers + D * (tables + {"pre": 4, "post": 0}[config.norm])


ALTERNATIVES = {
    "03.1": [NormByVarMean, NormByLengths],
    "03.2": [FeedForwardInOrder, FeedForwardByFunctions, FeedForwardInSequence],
    "03.3": [EncoderLayerOfClosures, EncoderLayerInLine],
    "03.4": [DecoderLayerOfClosures, DecoderLayerInLine],
    "03.5": [TransformerOfStacks, TransformerByFunctions],
    "03.6": [counted_shapes, one_polynomial],
}
