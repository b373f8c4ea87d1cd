"""The encoder-decoder Transformer, for training in parallel and for decoding token by token."""

import math
from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from shared.errors import InputError
from shared.model.attention import padding_mask
from shared.model.config import TransformerConfig
from shared.model.embeddings import LearnedPositions, PositionalEncoding, check_length
from shared.model.layers import DecoderLayer, EncoderLayer, LayerCache, make_norm


@dataclass
class DecoderCache:
    """Every layer's keys and values, and the source mask: what decoding keeps between steps."""

    layers: list[LayerCache]
    src_mask: Bool[Tensor, "batch 1 1 source"] | None
    length: int = 0

    def select(self, rows: Int[Tensor, "new_batch"]) -> "DecoderCache":
        """The cache whose row i is this one's row rows[i].

        Beam search reorders with it (a row may be taken twice); finished rows are left out.
        """
        mask = self.src_mask
        if mask is not None and mask.shape[0] > 1:
            mask = mask.index_select(0, rows)
        return DecoderCache([layer.select(rows) for layer in self.layers], mask, self.length)


class Transformer(nn.Module):
    """The model of "Attention Is All You Need" (Vaswani et al. 2017), pre-LN or post-LN.

    Source and target share a vocabulary and, with `tie_embeddings`, one matrix with the output
    projection (section 3.4). A pre-LN stack ends in a norm of its own, because nothing has normed
    the sum of its residual stream.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.src_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.tgt_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.src_positions = make_positions(config)
        self.tgt_positions = make_positions(config)
        self.encoder_layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.decoder_layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        pre = config.norm == "pre"
        self.encoder_norm = make_norm(config) if pre else nn.Identity()
        self.decoder_norm = make_norm(config) if pre else nn.Identity()
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        initialise(self)
        if config.tie_embeddings:
            self.src_embedding.weight = self.output.weight
            self.tgt_embedding.weight = self.output.weight

    def forward(
        self, src: Int[Tensor, "batch source"], tgt: Int[Tensor, "batch target"]
    ) -> Float[Tensor, "batch target vocab_size"]:
        """Logits of the token that follows each target position; padded sources are not seen.

        Raises InputError for a token id outside the vocabulary (checked on the CPU: on a GPU it
        would cost a wait in every step) and for a sequence longer than `max_len`.
        """
        src_mask = padding_mask(src, self.config.pad_id)
        return self.project(self.decode(tgt, self.encode(src, src_mask), src_mask))

    def encode(
        self,
        src: Int[Tensor, "batch source"],
        src_mask: Bool[Tensor, "#batch 1 #source source"] | None = None,
    ) -> Float[Tensor, "batch source d_model"]:
        """Return the memory: the source's vectors, each of which has seen the whole source."""
        x = embed(src, self.src_embedding, self.src_positions, self.config)
        for layer in self.encoder_layers:
            x = layer(x, src_mask)
        return self.encoder_norm(x)

    def decode(
        self,
        tgt: Int[Tensor, "batch target"],
        memory: Float[Tensor, "batch source d_model"],
        src_mask: Bool[Tensor, "#batch 1 #target source"] | None = None,
    ) -> Float[Tensor, "batch target d_model"]:
        """Return the target's vectors; position t has seen targets 0 .. t and the memory."""
        x = embed(tgt, self.tgt_embedding, self.tgt_positions, self.config)
        for layer in self.decoder_layers:
            x = layer(x, memory, src_mask)
        return self.decoder_norm(x)

    def project(
        self, hidden: Float[Tensor, "*batch d_model"]
    ) -> Float[Tensor, "*batch vocab_size"]:
        """Return logits over the vocabulary."""
        return self.output(hidden)

    def start_cache(
        self,
        memory: Float[Tensor, "batch source d_model"],
        src_mask: Bool[Tensor, "batch 1 1 source"] | None = None,
    ) -> DecoderCache:
        """A cache for decoding from `memory`, before the first target token."""
        layers = cast(list[DecoderLayer], self.decoder_layers)
        return DecoderCache([layer.start_cache(memory) for layer in layers], src_mask)

    def step(
        self, token: Int[Tensor, "batch"], cache: DecoderCache
    ) -> Float[Tensor, "batch vocab_size"]:
        """Logits of the token after `token`, which stands at position `cache.length`.

        The same numbers as forward's at that position, for the price of one position. The cache
        grows in place.
        """
        x = embed(
            token[:, None], self.tgt_embedding, self.tgt_positions, self.config, start=cache.length
        )  # (B, 1, D)
        layers = cast(list[DecoderLayer], self.decoder_layers)
        for layer, layer_cache in zip(layers, cache.layers, strict=True):
            x = layer.step(x, layer_cache, cache.src_mask)
        cache.length += 1
        return self.project(self.decoder_norm(x)).squeeze(1)  # (B, V)


def make_positions(config: TransformerConfig) -> nn.Module:
    """The module that adds positions to embeddings and then applies dropout."""
    if config.positions == "sinusoidal":
        return PositionalEncoding(config.d_model, config.max_len, config.dropout)
    if config.positions == "learned":
        return LearnedPositions(config.d_model, config.max_len, config.dropout)
    return Unplaced(config.max_len, config.dropout)


class Unplaced(nn.Module):
    """Adds no positions: attention layers know them (rotary), or nobody does; applies dropout."""

    def __init__(self, max_len: int, dropout: float) -> None:
        super().__init__()
        self.max_len = max_len
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """Return x after dropout; raises InputError beyond `max_len`, as the other kinds do."""
        check_length(start + x.shape[-2], self.max_len)
        return self.dropout(x)


def embed(
    tokens: Int[Tensor, "batch length"],
    embedding: nn.Embedding,
    positions: nn.Module,
    config: TransformerConfig,
    start: int = 0,
) -> Float[Tensor, "batch length d_model"]:
    """Return embeddings times sqrt(D), which makes them as large as the positions, plus these."""
    check_tokens(tokens, config.vocab_size)
    return positions(embedding(tokens) * math.sqrt(config.d_model), start)


def check_tokens(tokens: Int[Tensor, "*batch"], vocab_size: int) -> None:
    """Raise InputError if an id lies outside the vocabulary; free on a GPU, which is not asked."""
    if tokens.device.type != "cpu" or torch.compiler.is_compiling() or not tokens.numel():
        return
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"token id {low if low < 0 else high} is outside the vocabulary, whose {vocab_size} "
            f"ids run from 0 to {vocab_size - 1}: encode the text with the model's own tokenizer"
        )


def initialise(model: nn.Module) -> None:
    """Xavier for matrices, zero for biases; embeddings so that logits start with variance 1.

    Embeddings have standard deviation D^-1/2: times sqrt(D) on the way in they have variance 1,
    and their products with a normed vector on the way out have variance 1 as well.
    """
    for name, parameter in model.named_parameters():
        if "embedding" in name or name == "output.weight":
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif parameter.dim() > 1 and "positions" not in name:
            nn.init.xavier_uniform_(parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
