"""The course's language model from lesson 10 on: its sizes, its text as windows of tokens."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from shared.data.text import TextCorpus
from shared.data.tokenizer import Tokenizer
from shared.errors import InputError
from shared.model.config import TransformerConfig
from shared.planner.models import spec_of
from shared.planner.peak import DDP, LOGITS, peak_bytes
from shared.planner.specs import Plan
from shared.ranks.group import Rank
from shared.training.schedules import cosine_schedule


@dataclass(frozen=True)
class Recipe:
    """A language model and how it is trained; `batch` rows of `length` tokens a step, all ranks."""

    d_model: int
    num_layers: int
    num_heads: int
    vocab_size: int
    length: int
    batch: int
    steps: int
    characters: int  # of the text, from its beginning
    peak: float = 1e-3

    def config(self, vocab_size: int) -> TransformerConfig:
        """The model's description; the tokenizer may have found fewer merges than asked for."""
        return TransformerConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            d_ff=4 * self.d_model,
            dropout=0.0,  # its random numbers would differ by the number of ranks
            max_len=self.length,
        )

    def most_bytes(
        self,
        plan: Plan,
        half: bool,
        vocab_size: int | None = None,
        logits: int = LOGITS,
        beside: int = 0,
    ) -> int:
        """`peak_bytes` of a step, in bf16 by autocast (`half`) or in float32."""
        spec = spec_of(self.config(vocab_size or self.vocab_size), self.length)
        return peak_bytes(spec, plan, "autocast" if half else "float32", logits, beside)

    def learning_rate(self, step: int, steps: int, peak: float) -> float:
        """A tenth of the run up to the peak, then half a cosine."""
        return cosine_schedule(step, min(steps // 10 + 1, steps - 1), steps, peak)


RECIPES = {
    "tiny": Recipe(32, 2, 2, 400, 32, 16, 6, 60_000),
    "small": Recipe(128, 4, 4, 2000, 64, 16, 60, 1_000_000),
    "large": Recipe(768, 12, 12, 16_384, 1024, 64, 500, 50_000_000),  # GPT-2's shape
}


def load_tokens(corpus: TextCorpus, recipe: Recipe) -> tuple[Int[Tensor, "tokens"], int]:
    """The first part of a text as token ids, and the size of the vocabulary.

    Raises InputError where the text has fewer tokens than `rows` needs: two more than a row has.
    """
    lines = corpus.train[: recipe.characters].splitlines()
    tokenizer = Tokenizer.train(lines, recipe.vocab_size)
    ids = torch.tensor([id for line in tokenizer.encode_batch(lines) for id in line])
    if len(ids) <= recipe.length + 1:
        raise InputError(f"{corpus.name} has {len(ids)} tokens; a row needs {recipe.length + 2}")
    return ids, tokenizer.vocab_size


def shared_out(recipe: Recipe, ranks: int, zero: int = 0) -> Plan:
    """Ranks that share out the rows alone, as the planner says it."""
    return Plan(dp=ranks, micro_batch=math.ceil(recipe.batch / ranks), zero=zero)


def bytes_of_replicas(args: object, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on each of `ranks` that have whole models in DDP: see `check_room`."""
    return recipe.most_bytes(shared_out(recipe, ranks), half, beside=DDP)


def rows_a_rank(recipe: Recipe, rank: Rank) -> int:
    """This rank's rows of a step: the recipe's shared out, rounded up where it does not divide."""
    share = math.ceil(recipe.batch / rank.world_size)
    if rank.is_main and share * rank.world_size != recipe.batch:
        ranks = f"{rank.world_size} ranks share {recipe.batch} unevenly"
        print(f"note: {share * rank.world_size} rows a step, since {ranks}", flush=True)
    return share


def rows(
    ids: Int[Tensor, "tokens"], step: int, seed: int, batch: int, length: int, mine: slice
) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
    """This rank's rows of a step, and the tokens that follow each: the step's rows are the same.

    Whatever the number of ranks, together they see the same `batch` rows.
    """
    draw = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(ids) - length - 1, (batch,), generator=draw)[mine]
    windows = torch.stack([ids[start : start + length + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]
