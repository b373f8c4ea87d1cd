"""A model as a list of parts, and how it is cut into stages."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from shared.errors import InputError
from shared.model.attention import padding_mask
from shared.model.language_model import LanguageModel
from shared.model.transformer import Transformer, embed

Activations = tuple[Tensor, ...]  # what a part hands to the next, and a stage sends to the next


class Tokens(Protocol):
    """A batch of a translation model: the tokens that every stage looks at."""

    @property
    def src(self) -> Tensor: ...

    @property
    def tgt_in(self) -> Tensor: ...


Shapes = Callable[[Any], list[tuple[int, ...]]]


def one_tensor(d_model: int, tokens: Tensor) -> list[tuple[int, ...]]:
    """The shapes that travel in a language model, (B, T, D)."""
    return [(*tokens.shape, d_model)]


def source_alone(d_model: int, batch: Tokens) -> list[tuple[int, ...]]:
    """The shapes that travel in the encoder, (B, S, D)."""
    return [(*batch.src.shape, d_model)]


def memory_and_target(d_model: int, batch: Tokens) -> list[tuple[int, ...]]:
    """The shapes that travel in the decoder, (B, S, D) and (B, T, D)."""
    return [(*batch.src.shape, d_model), (*batch.tgt_in.shape, d_model)]


class Part(nn.Module):
    """One piece of a model: computes its output from that of the previous part and from the batch.

    Every rank has the tokens of a batch, so that only vectors travel. `shapes(batch)` are the
    shapes of the part's output, which the next stage has to know before it receives. It must not
    refer to the part itself: the next stage may be on a different rank, which frees the part.
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.shapes = shapes

    def forward(self, activations: Activations, batch: Any) -> Activations:
        """The input of the next part."""
        raise NotImplementedError


class EmbedTokens(Part):
    """Tokens to vectors; `batch` are the tokens themselves."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(partial(one_tensor, model.config.d_model))
        self.config, self.embedding, self.positions = model.config, model.embedding, model.positions

    def forward(self, activations: Activations, batch: Tensor) -> Activations:
        """The tokens' vectors; the first part has no input."""
        return (embed(batch, self.embedding, self.positions, self.config),)


class Block(Part):
    """One layer of a language model."""

    def __init__(self, layer: nn.Module, d_model: int) -> None:
        super().__init__(partial(one_tensor, d_model))
        self.layer = layer

    def forward(self, activations: Activations, batch: Tensor) -> Activations:
        """The layer on its one input."""
        return (self.layer(activations[0], causal=True),)


class Head(Part):
    """Norm and output matrix: vectors to logits. The last part: it sends nothing."""

    def __init__(self, norm: nn.Module, output: nn.Module) -> None:
        super().__init__(lambda _: [])
        self.norm, self.output = norm, output

    def forward(self, activations: Activations, batch: Any) -> Activations:
        """The logits, from the last tensor of its input."""
        return (self.output(self.norm(activations[-1])),)


class EmbedSource(Part):
    """Source tokens to vectors."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(partial(source_alone, model.config.d_model))
        self.config = model.config
        self.embedding, self.positions = model.src_embedding, model.src_positions

    def forward(self, activations: Activations, batch: Tokens) -> Activations:
        """The source's vectors."""
        return (embed(batch.src, self.embedding, self.positions, self.config),)


class EncoderBlock(Part):
    """One encoder layer."""

    def __init__(self, model: Transformer, number: int) -> None:
        super().__init__(partial(source_alone, model.config.d_model))
        self.config, self.layer = model.config, model.encoder_layers[number]

    def forward(self, activations: Activations, batch: Tokens) -> Activations:
        """The layer on the source's vectors."""
        return (self.layer(activations[0], padding_mask(batch.src, self.config.pad_id)),)


class EmbedTarget(Part):
    """The encoder's norm, and target tokens to vectors: from here on two tensors travel."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(partial(memory_and_target, model.config.d_model))
        self.config, self.norm = model.config, model.encoder_norm
        self.embedding, self.positions = model.tgt_embedding, model.tgt_positions

    def forward(self, activations: Activations, batch: Tokens) -> Activations:
        """The encoder output and the target's vectors."""
        target = embed(batch.tgt_in, self.embedding, self.positions, self.config)
        return self.norm(activations[0]), target


class DecoderBlock(Part):
    """One decoder layer; the encoder output is passed through unchanged."""

    def __init__(self, model: Transformer, number: int) -> None:
        super().__init__(partial(memory_and_target, model.config.d_model))
        self.config, self.layer = model.config, model.decoder_layers[number]

    def forward(self, activations: Activations, batch: Tokens) -> Activations:
        """The encoder output, and the layer on the target's vectors."""
        memory, target = activations
        return memory, self.layer(target, memory, padding_mask(batch.src, self.config.pad_id))


def parts_of(model: nn.Module) -> list[Part]:
    """A language model or a Transformer as parts, which together compute what it does.

    The parts hold the model's own modules. Raises InputError for another model.
    """
    if isinstance(model, LanguageModel):
        blocks = [Block(layer, model.config.d_model) for layer in model.layers]
        return [EmbedTokens(model), *blocks, Head(model.norm, model.output)]
    if isinstance(model, Transformer):
        layers = range(model.config.num_layers)
        return [
            EmbedSource(model),
            *(EncoderBlock(model, i) for i in layers),
            EmbedTarget(model),
            *(DecoderBlock(model, i) for i in layers),
            Head(model.decoder_norm, model.output),
        ]
    raise InputError(
        f"a {type(model).__name__} has no list of parts here: a LanguageModel and a Transformer do"
    )


def split_stages(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut parts with these costs into stages of neighbours, the slowest as fast as can be.

    Returns the parts of each stage as a range, at least one part in each, which together make up
    range(len(costs)); of several best cuts any will do. A pipeline takes the time of its slowest
    stage: an equal number of layers is not an equal time where the last stage has the output
    matrix. Raises InputError, which says the number, for stages that are fewer than 1 or more than
    the parts, and for a cost below 0.
    """
    if not 1 <= num_stages <= len(costs):
        raise InputError(f"{len(costs)} parts make 1 to {len(costs)} stages, got {num_stages}")
    if min(costs) < 0:
        raise InputError(f"a cost cannot be below 0, got {min(costs)}")
    # slowest[k][i]: the slowest of k stages over the parts from i on, and where the first ends.
    count = len(costs)
    slowest = [{i: (sum(costs[i:]), count) for i in range(count)}]
    for k in range(2, num_stages + 1):
        rest = slowest[-1]  # one stage fewer, over the parts from j on
        slowest.append(
            {
                i: min((max(sum(costs[i:j]), rest[j][0]), j) for j in range(i + 1, count - k + 2))
                for i in range(count - k + 1)
            }
        )
    starts = [0]
    for k in range(num_stages - 1, -1, -1):
        starts.append(slowest[k][starts[-1]][1])
    return [range(a, b) for a, b in itertools.pairwise(starts)]
