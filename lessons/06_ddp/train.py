"""Train a translator under data parallelism, by hand or torch's; or compare what each costs.

torchrun --nproc_per_node=2 lessons/06_ddp/train.py --engine bucketed   train, score, save
torchrun --nproc_per_node=2 lessons/06_ddp/train.py                     compare the six engines
torchrun --nproc_per_node=2 lessons/06_ddp/train.py --curve             repeat lesson 04's curve
"""

import argparse
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.data.batching import Batch
from shared.data.loading import batch_loader
from shared.ddp.engines import ENGINES, Engine, bucket_options, global_losses
from shared.experiments.lesson06_compare import compare_engines
from shared.experiments.lesson06_curve import follow_curve
from shared.experiments.lesson06_engines import draw_losses
from shared.experiments.lesson06_task import load_task
from shared.measuring.timing import synchronized_now
from shared.model.transformer import Transformer
from shared.ranks.group import Rank, process_group
from shared.results import speed, write_results
from shared.script import autocast, lesson_parser, positive_int, prepare, progress, run_script
from shared.training.decoding import greedy_decode, translate_together
from shared.training.loss import label_smoothed_loss
from shared.training.schedules import set_learning_rate
from shared.training.scoring import score_table
from shared.training.translator_files import save_translator
from solutions.lesson06_ddp import (
    BucketedDDP,
    OverlappedDDP,
    average_gradients,
    average_gradients_flat,
    broadcast_parameters,
)


def wrap(name: str, model: nn.Module, world_size: int, bucket_mb: float | None = None) -> Engine:
    """The model under an engine, which first gives all ranks the weights of rank 0."""
    size = bucket_options(bucket_mb)
    if name == "single":  # every rank computes the whole batch, and nothing travels
        return Engine(name, model, lambda: None, 1)
    if name in ("naive", "flat"):  # after backward: a message a parameter, or a single one
        broadcast_parameters(model)
        average = average_gradients if name == "naive" else average_gradients_flat
        return Engine(name, model, partial(average, model), world_size)
    if name == "overlapped":
        ddp = OverlappedDDP(model)
        return Engine(name, ddp, ddp.finish_gradient_sync, world_size)
    if name == "bucketed":
        ddp = BucketedDDP(model, **size)
        return Engine(name, ddp, ddp.finish_gradient_sync, world_size)
    assert name == "ddp", f"there is no engine {name!r}"
    ddp = DistributedDataParallel(model, **size)
    return Engine(name, ddp, lambda: None, world_size)  # it waits at the end of backward by itself


def train_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    num_tokens: int,
    cast: AbstractContextManager,
    smoothing: float = 0.1,
    max_norm: float = 1.0,
) -> Tensor:
    """Take one step; return this rank's part of the global batch's mean loss per token.

    A part is the sum over this rank's tokens, divided by the number of tokens of *all* ranks: the
    parts add up to the loss of the whole batch, however unequal they are.
    """
    optimizer.zero_grad()
    with cast:  # forward and loss; backward follows in the types that forward had
        logits = engine.model(batch.src, batch.tgt_in)  # (B, T, V)
        loss = label_smoothed_loss(logits, batch.tgt_out, smoothing)
    part = loss * (batch.num_tokens / num_tokens)
    # Engines average, and parts are to be added: times the number of ranks. Hooks send each
    # gradient as it is complete, while backward goes on.
    (part * engine.replicas).backward()
    engine.finish_gradient_sync()  # wait: from here on all ranks hold the same gradients,
    # and only now their norm is that of the whole batch, and the same on every rank.
    nn.utils.clip_grad_norm_(engine.model.parameters(), max_norm)
    optimizer.step()
    return part.detach()


def train(args: argparse.Namespace, rank: Rank) -> None:
    """Train with one engine to the end, save the translator, score it on the test sentences."""
    task = load_task(args, rank)
    # Other weights and another dropout on every rank: the first broadcast gives all rank 0's
    # weights. Ranks that work alone ("single") do the same, each by itself.
    own = 0 if args.engine == "single" else rank.rank
    torch.manual_seed(args.seed + own)
    model = Transformer(task.config).to(rank.device)
    engine = wrap(args.engine, model, rank.world_size, args.bucket_mb)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    torch.manual_seed(args.seed + 1 + own)

    part, num_parts = engine.share(rank)  # of every global batch
    loader = batch_loader(task.data, task.batches, rank=part, world_size=num_parts)
    steps = zip(loader, task.num_tokens, strict=True)
    parts, began = [], synchronized_now(rank.device)
    for step, (batch, num_tokens) in enumerate(
        progress(steps, rank, "training", total=args.steps), start=1
    ):
        set_learning_rate(optimizer, task.recipe.learning_rate(step, args.steps))
        cast, max_norm = autocast(args, rank.device), args.max_norm
        batch = batch.to(rank.device)
        parts.append(train_step(engine, optimizer, batch, num_tokens, cast, max_norm=max_norm))
    seconds = synchronized_now(rank.device) - began

    if rank.is_main:  # first of all: what training took hours for
        save_translator(args.out / "translator.pt", model, task.tokenizer, steps=args.steps)
    losses = global_losses(engine, parts)
    sources, references = task.sentences
    translations = translate_together(model, task.tokenizer, sources, greedy_decode)
    if rank.is_main:
        scores = score_table(translations, references)
        row = {"engine": args.engine, "last loss": round(losses[-1], 4)}
        row |= {"BLEU": scores[0]["value"], "exact, %": scores[-1]["value"]}
        row |= speed(seconds, args.steps, sum(task.num_tokens), rank.device)
        words = f"{args.engine}: BLEU {row['BLEU']:.1f}, loss {losses[-1]:.3f}"
        figures = {"training.png": draw_losses({args.engine: losses}, "Training")}
        results = {"table": [row], "figures": figures, "losses": {args.engine: losses}}
        write_results(args, rank, headline=words, **results, scores=scores)


def main() -> None:
    parser = lesson_parser("06_ddp", __doc__, dataset="grammar", precision=True, clip=True)
    parser.add_argument("--engine", choices=("all", *ENGINES), default="all")
    parser.add_argument("--bucket-mb", type=float, help="bucket size in MiB (25, the first 1)")
    parser.add_argument("--max-tokens", type=positive_int, help="padded tokens a step, all ranks")
    parser.add_argument("--curve", action="store_true", help="the reference run of lesson 04")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        if args.curve:
            follow_curve(args, rank, wrap, train_step)
        elif args.engine == "all":
            compare_engines(args, rank, wrap, train_step)
        else:
            train(args, rank)


if __name__ == "__main__":
    run_script(main)
