"""Train a translator under data parallelism, by hand or torch's; or compare what each costs.

torchrun --nproc_per_node=2 lessons/lesson06_ddp/train.py --engine bucketed  train, score, save
torchrun --nproc_per_node=2 lessons/lesson06_ddp/train.py                    compare the six engines
torchrun --nproc_per_node=2 lessons/lesson06_ddp/train.py --curve            repeat 04's curve
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lessons.lesson06_ddp.experiments import engine_comparisons as comparisons
from lessons.lesson06_ddp.experiments.engine_runs import draw_losses
from shared.data.batching import Batch
from shared.data.loading import batch_loader
from shared.ddp.engines import ENGINES, bucket_options
from shared.measuring.timing import synchronized_now
from shared.model.transformer import Transformer
from shared.ranks.group import Rank, process_group
from shared.results import speed, write_results
from shared.script import autocast, lesson_parser, positive_int, prepare, progress, run_script
from shared.training.decoding import greedy_decode, translate_together
from shared.training.engine import DataParallelEngine, train_step
from shared.training.loss import label_smoothed_loss
from shared.training.reference_run import loss_of
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


def wrap(
    name: str,
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    world_size: int,
    bucket_mb: float | None = None,
    loss: Callable[[nn.Module, Batch, int], Tensor] = loss_of,
) -> DataParallelEngine:
    """The model under an engine, which first gives all ranks the weights of rank 0."""
    size, finish, optimizer = bucket_options(bucket_mb), None, make_optimizer([*model.parameters()])
    if name == "single":  # every rank computes the whole batch, and nothing travels
        world_size = 1
    elif name in ("naive", "flat"):  # after backward: a message a parameter, or a single one
        broadcast_parameters(model)
        finish = partial(average_gradients if name == "naive" else average_gradients_flat, model)
    elif name == "overlapped":
        model = OverlappedDDP(model)
    elif name == "bucketed":
        model = BucketedDDP(model, **size)
    else:
        assert name == "ddp", f"there is no engine {name!r}"
        model = DistributedDataParallel(model, **size)  # waits at the end of backward by itself
    return DataParallelEngine(model, optimizer, world_size, finish, loss, name)


def smoothed_loss(
    args: argparse.Namespace, model: nn.Module, batch: Batch, num_tokens: int
) -> Tensor:
    """This rank's part of the global batch's mean loss per token, of which a step begins.

    A part is the sum over this rank's tokens, divided by the number of tokens of *all* ranks: the
    parts add up to the loss of the whole batch, however unequal they are.
    """
    with autocast(args, batch.src.device):  # backward follows in the types that forward had
        logits = model(batch.src, batch.tgt_in)  # (B, T, V)
        loss = label_smoothed_loss(logits, batch.tgt_out)
    return loss * (batch.num_tokens / num_tokens)


def train(args: argparse.Namespace, rank: Rank) -> None:
    """Train with one engine to the end, save the translator, score it on the test sentences."""
    task = comparisons.load_task(args, rank)
    # Other weights and another dropout on every rank: the first broadcast gives all rank 0's
    # weights. Ranks that work alone ("single") do the same, each by itself.
    own = 0 if args.engine == "single" else rank.rank
    torch.manual_seed(args.seed + own)
    model = Transformer(task.config).to(rank.device)
    adam = partial(torch.optim.Adam, betas=(0.9, 0.98), eps=1e-9)
    loss = partial(smoothed_loss, args)
    engine = wrap(args.engine, model, adam, rank.world_size, args.bucket_mb, loss)
    torch.manual_seed(args.seed + 1 + own)

    part, num_parts = engine.share  # of every global batch
    loader = batch_loader(task.data, task.batches, rank=part, world_size=num_parts)
    steps = zip(loader, task.num_tokens, strict=True)
    parts, began = [], synchronized_now(rank.device)
    for step, (batch, num_tokens) in enumerate(
        progress(steps, rank, "training", total=args.steps), start=1
    ):
        set_learning_rate(engine.optimizer, task.recipe.learning_rate(step, args.steps))
        batch = batch.to(rank.device)
        # zero_grad, forward, backward, finish_gradient_sync, clip, step
        parts.append(train_step(engine, batch, num_tokens, args.max_norm).part)
    seconds = synchronized_now(rank.device) - began

    if rank.is_main:  # first of all: what training took hours for
        save_translator(args.out / "translator.pt", model, task.tokenizer, steps=args.steps)
    losses = engine.global_loss(torch.stack(parts)).tolist()
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
    parser = lesson_parser(__file__, __doc__, dataset="grammar", precision=True, clip=True)
    parser.add_argument("--engine", choices=("all", *ENGINES), default="all", help="(all)")
    parser.add_argument("--bucket-mb", type=float, help="bucket size in MiB (25, the first 1)")
    parser.add_argument("--max-tokens", type=positive_int, help="padded tokens a step, all ranks")
    parser.add_argument("--weak", action="store_true", help="weak scaling: so many on each rank")
    parser.add_argument("--curve", action="store_true", help="the reference run of lesson 04")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        if args.curve:
            comparisons.follow_curve(args, rank, wrap)
        elif args.engine == "all":
            comparisons.compare_engines(args, rank, wrap, partial(smoothed_loss, args))
        else:
            train(args, rank)


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
