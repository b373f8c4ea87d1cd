"""Engines compared: in turns on one task, and each on lesson 04's reference run.

`train.py` without `--engine`, and with `--curve`.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.lesson06_ddp.experiments.engine_runs import (
    ROUNDING,
    Run,
    draw_runs,
    headline,
    largest_gap,
    tabulate,
)
from shared.data.corpora import ParallelCorpus
from shared.data.loading import PairDataset, batch_loader
from shared.data.tokenizer import Tokenizer
from shared.ddp.engines import ENGINES
from shared.errors import InputError
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.ranks.group import Rank
from shared.results import write_results
from shared.script import choose_preset, load_same_corpus, progress
from shared.training.engine import DataParallelEngine, reference_curve, train_step
from shared.training.loop import global_batches
from shared.training.recipes import TRANSLATION, Recipe
from shared.training.reference_run import (
    GLOBAL_BATCH,
    TOLERANCE,
    checksum,
    compare_with_record,
    read_record,
    reference_model,
    reference_optimizer,
)
from shared.training.schedules import set_learning_rate

# Of the script: (name, model, what makes its optimizer, ranks, size of buckets, loss) -> engine.
Wrap = Callable[..., DataParallelEngine]
MOST_STEPS = 10  # unless --steps says how many


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
    if args.weak:  # that was one rank's part
        args.max_tokens *= rank.world_size
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


def compare_engines(
    args: argparse.Namespace, rank: Rank, wrap: Wrap, loss: Callable[..., Tensor]
) -> None:
    """Train under every engine, with the script's own loss; write what each costs."""
    task = load_task(args, rank, MOST_STEPS)
    adam = partial(torch.optim.Adam, betas=(0.9, 0.98), eps=1e-9)
    runs = []
    for name in ENGINES:
        # Every rank draws other weights, and the engine's first broadcast puts that right.
        torch.manual_seed(args.seed + (0 if name == "single" else rank.rank))
        model = Transformer(task.config).to(rank.device)
        runs.append(Run(wrap(name, model, adam, rank.world_size, args.bucket_mb, loss)))
    take_turns(args, rank, runs, task)
    curves = {}
    for run in runs:
        curves[run.engine.name] = run.engine.global_loss(torch.stack(run.losses)).tolist()
        run.share_slowest(rank.device)
    if rank.is_main:
        table = tabulate(runs, curves, rank.world_size)
        words = headline(table, largest_gap(curves))
        figures = {"engines.png": draw_runs(table, curves)}
        write_results(args, rank, headline=words, table=table, figures=figures, losses=curves)


def take_turns(args: argparse.Namespace, rank: Rank, runs: list[Run], task: Task) -> None:
    """Train every engine on the same batches; losses, seconds and traffic go into `runs`.

    The engines take turns at each batch: a machine is faster in one minute than in the next.
    """
    ours = batch_loader(task.data, task.batches, rank=rank.rank, world_size=rank.world_size)
    both = zip(ours, batch_loader(task.data, task.batches), task.num_tokens, strict=True)
    counted = progress(both, rank, "six engines", total=args.steps)
    for step, (mine, whole, num_tokens) in enumerate(counted, start=1):
        turn = step % len(runs)
        for run in runs[turn:] + runs[:turn]:
            rate = task.recipe.learning_rate(step, args.steps)
            set_learning_rate(run.engine.optimizer, rate)
            batch = (whole if run.engine.num_replicas == 1 else mine).to(rank.device)
            dist.barrier()
            began = synchronized_now(rank.device)
            # torch's DDP rebuilds its buckets after the first step: count in the second.
            with count_traffic() if step == 2 else nullcontext(run.traffic) as run.traffic:
                part = train_step(run.engine, batch, num_tokens, args.max_norm).part
            if step > 2:
                run.seconds.append(synchronized_now(rank.device) - began)
                run.tokens += num_tokens
            run.losses.append(part)


def follow_curve(args: argparse.Namespace, rank: Rank, wrap: Wrap) -> None:
    """Train the reference run under each engine, or the one that is named.

    Raises AssertionError where a loss lies beyond the tolerance, and InputError where the run is
    another one: in bf16, or with ranks that cannot share its batches.
    """
    if args.precision == "bf16":
        raise InputError("--curve compares in float32, to the last digits: leave --precision out")
    if GLOBAL_BATCH % rank.world_size:
        raise InputError(
            f"--curve shares out batches of {GLOBAL_BATCH} pairs, which {rank.world_size} ranks do"
            " not divide: start 1, 2, 4 or 8"
        )
    args.preset = args.preset or "reference run"
    table = []
    for name in progress(ENGINES if args.engine == "all" else [args.engine], rank, "engines"):
        model = reference_model().to(rank.device)
        engine = wrap(name, model, reference_optimizer, rank.world_size, args.bucket_mb)
        table.append(curve_row(name, reference_curve(engine).losses, checksum(model)))
    if rank.is_main:
        words = f"largest difference: {max(row['largest difference'] for row in table):.1e}"
        write_results(args, rank, headline=words, table=table)


def curve_row(name: str, losses: list[float], checksum: str) -> dict[str, Any]:
    """How far an engine's reference run lies from lesson 04's record.

    Raises AssertionError where it lies beyond the tolerance.
    """
    record = read_record()
    return {
        "engine": name,
        "last loss": round(losses[-1], 6),
        "largest difference": compare_with_record(losses),
        "rounding": ROUNDING,
        "tolerance": TOLERANCE,
        "weights": "bit for bit" if checksum == record["checksum_final"] else "within rounding",
    }
