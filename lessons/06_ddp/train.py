"""Train the translator under data parallelism, by hand or torch's; compare what each costs.

--engine bucketed trains with one engine, to the end; --curve repeats lesson 04's loss curve.
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shared.data.corpora import load_corpus
from shared.data.loading import PairDataset, batch_loader
from shared.data.tokenizer import Tokenizer
from shared.ddp.engines import ENGINES, build_engine, engine_step, reference_step
from shared.exercises.answers import lesson_answers
from shared.experiments.lesson06_engines import Run, curve_row, draw_runs, headline, tabulate
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.model.transformer import Transformer
from shared.plots import save_figure
from shared.ranks.agreement import agree_on, fingerprint
from shared.ranks.group import Rank, process_group
from shared.script import (
    checked_out,
    choose_preset,
    lesson_parser,
    positive_int,
    progress,
    run_script,
    write_metrics,
)
from shared.training.decoding import greedy_decode, translate_together
from shared.training.loop import batch_plan
from shared.training.recipes import TRANSLATION, Recipe
from shared.training.reference_run import checksum, reference_model, run_reference
from shared.training.scoring import score_table
from shared.training.translator_files import save_translator


def train(
    runs: list[Run], data: PairDataset, recipe: Recipe, rank: Rank, args: argparse.Namespace
) -> None:
    """Train every engine on the same batches; losses, seconds and traffic go into `runs`.

    The engines take turns at each batch: a machine is faster in one minute than in the next.
    """
    lengths, world_size = data.lengths(), rank.world_size
    planned = (lengths, args.max_tokens, args.steps, args.seed)
    plans = [batch_plan(*planned, each, world_size) for each in range(world_size)]
    whole = [list(chain(*parts)) for parts in zip(*plans, strict=True)]
    tokens = [sum(lengths[index][1] for index in batch) for batch in whole]
    both = zip(batch_loader(data, plans[rank.rank]), batch_loader(data, whole), strict=True)
    for step, batches in enumerate(progress(both, rank, "training"), start=1):
        rate = recipe.learning_rate(step, args.steps)
        turn = step % len(runs)
        for run in runs[turn:] + runs[:turn]:
            batch = batches[run.engine.name == "single"].to(rank.device)
            dist.barrier()
            began = synchronized_now(rank.device)
            # torch's DDP rebuilds its buckets after the first step: count in the second.
            with count_traffic() if step == 2 else nullcontext(run.traffic) as run.traffic:
                part = engine_step(run.engine, run.optimizer, batch, tokens[step - 1], rate)
            run.losses.append(part)
            if step > 2:
                run.seconds.append(synchronized_now(rank.device) - began)


def build(name: str, recipe: Recipe, vocab_size: int, rank: Rank, args, parts) -> Run:
    """An engine around a new model, whose first weights are rank 0's whatever the others drew."""
    config = recipe.config(vocab_size)
    if args.engine == "all":  # dropout is drawn anew on every rank: no two curves would be equal
        config = replace(config, dropout=0.0)
    torch.manual_seed(args.seed + (0 if name == "single" else rank.rank))
    model = Transformer(config).to(rank.device)
    engine = build_engine(name, model, parts, rank.world_size, args.bucket_mb)
    return Run(engine, model, torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9))


def follow_curve(
    names: Sequence[str], rank: Rank, args: argparse.Namespace, parts: SimpleNamespace
) -> None:
    """Lesson 04's reference run under each engine; AssertionError beyond the tolerance."""
    table = []
    for name in progress(names, rank, "reference runs"):
        model = reference_model().to(rank.device)
        engine = build_engine(name, model, parts, rank.world_size, args.bucket_mb)
        losses = run_reference(reference_step(engine, rank))
        table.append(curve_row(engine, losses, checksum(model)))
    if rank.is_main:
        words = f"largest difference: {max(row['largest difference'] for row in table):.1e}"
        write_metrics(args.out, rank, headline=words, table=table)


def translate_and_compare(
    names: Sequence[str], rank: Rank, args: argparse.Namespace, parts: SimpleNamespace
) -> None:
    """Train with the engines that are named; with a single one also translate and score."""
    recipe = choose_preset(args, rank.device, TRANSLATION)
    alone = len(names) == 1  # to the end; several are compared over a few steps
    args.steps = args.steps or (recipe.steps if alone else min(recipe.steps, 10))
    args.max_tokens = args.max_tokens or recipe.max_tokens
    corpus = load_corpus(args.dataset, empty=args.empty, max_train=recipe.num_train)
    texts = [text for pair in corpus.train for text in pair]
    agree_on("their training data", fingerprint(texts), "give every machine the same files")
    tokenizer = Tokenizer.train(texts, recipe.vocab_size)
    runs = [build(name, recipe, tokenizer.vocab_size, rank, args, parts) for name in names]
    data = PairDataset.encode(corpus.train, tokenizer, runs[0].model.config.max_len)
    torch.manual_seed(args.seed + 1 + rank.rank)  # dropout of its own on every rank
    train(runs, data, recipe, rank, args)
    curves = {run.engine.name: run.curve() for run in runs}
    for run in runs:
        run.share_slowest(rank.device)
    extra: dict[str, Any] = {}
    if alone:
        sources, references = map(list, zip(*corpus.test[: recipe.num_test], strict=True))
        translations = translate_together(runs[0].model, tokenizer, sources, greedy_decode)
        extra["scores"] = score_table(translations, references)
        if rank.is_main:
            save_translator(args.out / "translator.pt", runs[0].model, tokenizer, steps=args.steps)
    if rank.is_main:
        table = tabulate(runs, curves, rank.world_size)
        save_figure(draw_runs(table, curves), args.out / "engines.png")
        extra |= {"headline": headline(table, extra.get("scores")), "losses": curves}
        write_metrics(args.out, rank, table=table, **extra)


def main() -> None:
    parser = lesson_parser("06_ddp", __doc__, dataset="grammar")
    parser.add_argument("--engine", choices=("all", *ENGINES), default="all")
    parser.add_argument("--bucket-mb", type=float, help="bucket size in MiB (25, the first 1)")
    parser.add_argument("--max-tokens", type=positive_int, help="padded tokens a step, all ranks")
    parser.add_argument("--curve", action="store_true", help="the reference run of lesson 04")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        names = ENGINES if args.engine == "all" else (args.engine,)
        by_hand = set(names) - {"single", "ddp"}  # these two need no answer of this lesson
        parts = lesson_answers("06", mine=args.mine) if by_hand else SimpleNamespace()
        checked_out(args.out)
        (follow_curve if args.curve else translate_and_compare)(names, rank, args, parts)


if __name__ == "__main__":
    run_script(main)
