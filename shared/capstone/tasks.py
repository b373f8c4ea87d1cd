"""What a run trains: the model by its table, its batches by step, its held-out batches, its rate.

A batch is drawn by seed and step alone. So the place in the data is the number of steps, and
together the ranks see the same rows whatever their number and mode.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shared.capstone.config import Config, ModelTable
from shared.data.batching import Batch, EncodedPair, collate
from shared.data.corpora import ParallelCorpus
from shared.data.rows import Rows, Text, own_rows
from shared.data.text import TextCorpus
from shared.data.tokenizer import Tokenizer
from shared.errors import InputError
from shared.model.attention import Kernel
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.model.modern import ModernConfig, ModernModel
from shared.model.transformer import Transformer
from shared.planner.models import spec_of
from shared.planner.specs import ModelSpec
from shared.training.schedules import cosine_schedule

MULTIPLE = 64  # what a vocabulary is padded to, so that tensor parallelism can cut it
HELD_OUT = 20  # one row in so many is never trained on


class Task(Protocol):
    """Batches by step, and those that are kept apart."""

    vocab_size: int

    def batch(self, step: int) -> Rows:
        """The whole batch of a step, the same on every rank."""
        ...

    def held_out(self, count: int) -> list[Rows]:
        """So many batches that are never trained on."""
        ...


def padded(vocab_size: int) -> int:
    """The vocabulary with rows that no token uses, up to a multiple."""
    return -(-vocab_size // MULTIPLE) * MULTIPLE


class LanguageTask:
    """Windows of a text and the tokens that follow."""

    def __init__(self, corpus: TextCorpus, config: Config, seed: int) -> None:
        lines = corpus.train[: config.data.size].splitlines()
        tokenizer = Tokenizer.train(lines, config.model.vocab_size)
        self.vocab_size = padded(tokenizer.vocab_size)
        ids = torch.tensor([id for line in tokenizer.encode_batch(lines) for id in line])
        cut = len(ids) - max(len(ids) // HELD_OUT, config.model.length + 2)
        self.own, self.other = ids[:cut], ids[cut:]
        self.length, self.rows, self.seed = config.model.length, config.training.batch, seed
        if len(self.own) < self.length + 2:
            need = f"{2 * (self.length + 2)} are needed: raise data.size or shorten model.length"
            given = f"data.size {config.data.size} of {corpus.name}"
            raise InputError(f"{given} gives {len(ids)} tokens, held-out ones included; {need}")

    def batch(self, step: int) -> Text:
        """Windows of the training part."""
        return self._windows(self.own, 1_000_003 * self.seed + step)

    def held_out(self, count: int) -> list[Rows]:
        """Windows of the last part of the text, the same ones always."""
        return [self._windows(self.other, -1 - i) for i in range(count)]

    def _windows(self, ids: Tensor, number: int) -> Text:
        draw = torch.Generator().manual_seed(number)
        starts = torch.randint(len(ids) - self.length, (self.rows,), generator=draw)
        windows = torch.stack([ids[s : s + self.length + 1] for s in starts.tolist()])
        return Text(windows[:, :-1], windows[:, 1:])


class TranslationTask:
    """Pairs of sentences, drawn at random, padded to the longest of their batch."""

    def __init__(self, corpus: ParallelCorpus, config: Config, seed: int) -> None:
        pairs = corpus.train[: config.data.size]
        tokenizer = Tokenizer.train((text for p in pairs for text in p), config.model.vocab_size)
        self.vocab_size = padded(tokenizer.vocab_size)
        sides = [tokenizer.encode_batch(list(side)) for side in zip(*pairs, strict=True)]
        fits = config.model.length - 1  # and one more at the beginning or the end
        all_pairs = [p for p in zip(*sides, strict=True) if max(map(len, p)) <= fits]
        cut = len(all_pairs) // HELD_OUT
        self.own, self.other = all_pairs[cut:], all_pairs[:cut]
        self.rows, self.seed = config.training.batch, seed
        if not self.other:
            raise InputError(f"{corpus.name} has {len(all_pairs)} pairs of {fits} tokens or fewer")

    def batch(self, step: int) -> Batch:
        """Pairs of the training part."""
        return self._pairs(self.own, 1_000_003 * self.seed + step)

    def held_out(self, count: int) -> list[Rows]:
        """Pairs of the part that is kept apart, the same ones always."""
        return [self._pairs(self.other, -1 - i) for i in range(count)]

    def _pairs(self, pairs: list[EncodedPair], number: int) -> Batch:
        draw = torch.Generator().manual_seed(number)
        return collate([pairs[i] for i in torch.randint(len(pairs), (self.rows,), generator=draw)])


def model_config(table: ModelTable, vocab_size: int) -> TransformerConfig:
    """The course's description of the model in a table."""
    given: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": table.d_model,
        "num_heads": table.num_heads,
        "num_layers": table.num_layers,
        "d_ff": table.d_ff,
        "dropout": 0.0,  # its random numbers would differ by mode and number of ranks
        "max_len": table.length,
        "fused": table.fused,
        "tie_embeddings": table.tied,
    }
    if table.kind == "modern":
        return ModernConfig(**given, num_kv_heads=table.num_kv_heads or table.num_heads)
    if table.num_kv_heads:
        raise InputError(f"model.num_kv_heads is of modern models, not of kind {table.kind!r}")
    return TransformerConfig(**given, positions="learned" if table.kind == "gpt" else "sinusoidal")


def build_model(
    table: ModelTable, vocab_size: int, kernel: Kernel | None = None
) -> LanguageModel | Transformer:
    """The model of a table; `kernel` attends in a modern model that is not fused."""
    config = model_config(table, vocab_size)
    if isinstance(config, ModernConfig):
        return ModernModel(config, None if table.fused else kernel)
    return Transformer(config) if table.kind == "translator" else LanguageModel(config)


def model_spec(table: ModelTable, vocab_size: int) -> ModelSpec | None:
    """The planner's description of the model; None for a translator, which it does not know."""
    if table.kind == "translator":
        return None
    return spec_of(model_config(table, vocab_size), table.length)


def own_share(batch: Rows, index: int, count: int) -> Rows:
    """A rank's rows of a global batch, with its own number of tokens; raises InputError for none.

    The counts may differ by one row, and by tokens: a part of the loss is a sum over tokens.
    """
    if count == 1:
        return batch
    rows = len(batch.src if isinstance(batch, Batch) else batch.tokens)
    if rows < count:
        raise InputError(f"training.batch {rows} has no row for each of {count} ranks")
    (own,) = own_rows(batch, index, count, 1)
    return own


def learning_rate(config: Config, step: int, steps: int) -> float:
    """The rate of a step, from 1: up to the peak, then half a cosine."""
    warmup = min(config.training.warmup, steps - 1)
    return cosine_schedule(step, warmup, steps, config.training.peak)


@dataclass(frozen=True)
class Flops:
    """Arithmetic of a training step for a token, and how it is known."""

    per_token: float
    source: str


def flops_of(spec: ModelSpec | None, num_parameters: int) -> Flops:
    """By the planner's formula, or six for each parameter where it does not know the model."""
    if spec is None:
        return Flops(6.0 * num_parameters, "6 a parameter (rule of thumb)")
    return Flops(float(spec.flops), "planner")
