"""What lesson 06's script trains on, with one engine or with five."""

import argparse
from dataclasses import dataclass, replace

from shared.data.corpora import ParallelCorpus
from shared.data.loading import PairDataset
from shared.data.tokenizer import Tokenizer
from shared.model.config import TransformerConfig
from shared.ranks.group import Rank
from shared.script import choose_preset, load_same_corpus
from shared.training.loop import global_batches
from shared.training.recipes import TRANSLATION, Recipe


@dataclass(frozen=True)
class Task:
    """The data and what is made of it, equal on all ranks.

    `batches` are the global batch of each step, as indices; `num_tokens` counts the target tokens
    of each, which is what its loss is divided by.
    """

    recipe: Recipe
    config: TransformerConfig
    corpus: ParallelCorpus
    tokenizer: Tokenizer
    data: PairDataset
    batches: list[list[int]]
    num_tokens: list[int]

    @property
    def sentences(self) -> tuple[list[str], list[str]]:
        """The test's sources and references."""
        sources, references = zip(*self.corpus.test[: self.recipe.num_test], strict=True)
        return list(sources), list(references)


def load_task(args: argparse.Namespace, rank: Rank, most_steps: int | None = None) -> Task:
    """Read the data and plan the steps: as many as asked for, else the preset's."""
    recipe = choose_preset(args, rank.device, TRANSLATION)
    args.steps = args.steps or min(recipe.steps, most_steps or recipe.steps)
    args.max_tokens = args.max_tokens or recipe.max_tokens
    corpus = load_same_corpus(args, recipe.num_train)
    texts = [text for pair in corpus.train for text in pair]
    tokenizer = Tokenizer.train(texts, recipe.vocab_size)
    config = recipe.config(tokenizer.vocab_size)
    if args.engine == "all":  # dropout is drawn anew on every rank: no two curves would be equal
        config = replace(config, dropout=0.0)
    data = PairDataset.encode(corpus.train, tokenizer, config.max_len)
    lengths = data.lengths()
    planned = (args.max_tokens, args.steps, args.seed, rank.world_size)
    batches = global_batches(lengths, *planned)
    num_tokens = [sum(lengths[index][1] for index in batch) for batch in batches]
    return Task(recipe, config, corpus, tokenizer, data, batches, num_tokens)
