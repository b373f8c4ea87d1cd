"""Six engines take the same steps in turns: `train.py` without `--engine`."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist

from shared.data.loading import batch_loader
from shared.ddp.engines import ENGINES, TrainStep, Wrap, global_losses
from shared.experiments.lesson06_engines import Run, draw_runs, headline, largest_gap, tabulate
from shared.experiments.lesson06_task import Task, load_task
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.model.transformer import Transformer
from shared.ranks.group import Rank
from shared.results import write_results
from shared.script import autocast, progress
from shared.training.schedules import set_learning_rate

MOST_STEPS = 10  # unless --steps says how many


def compare_engines(
    args: argparse.Namespace, rank: Rank, wrap: Wrap, train_step: TrainStep
) -> None:
    """Train under every engine, by the script's own step; write what each costs."""
    task = load_task(args, rank, MOST_STEPS)
    runs = []
    for name in ENGINES:
        # Every rank draws other weights, and the engine's first broadcast puts that right.
        torch.manual_seed(args.seed + (0 if name == "single" else rank.rank))
        model = Transformer(task.config).to(rank.device)
        engine = wrap(name, model, rank.world_size, args.bucket_mb)
        runs.append(Run(engine, torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)))
    take_turns(args, rank, runs, task, train_step)
    curves = {run.engine.name: global_losses(run.engine, run.losses) for run in runs}
    for run in runs:
        run.share_slowest(rank.device)
    if rank.is_main:
        table = tabulate(runs, curves, rank.world_size)
        words = headline(table, largest_gap(curves))
        figures = {"engines.png": draw_runs(table, curves)}
        write_results(args, rank, headline=words, table=table, figures=figures, losses=curves)


def take_turns(
    args: argparse.Namespace, rank: Rank, runs: list[Run], task: Task, train_step: TrainStep
) -> None:
    """Train every engine on the same batches; losses, seconds and traffic go into `runs`.

    The engines take turns at each batch: a machine is faster in one minute than in the next.
    """
    ours = batch_loader(task.data, task.batches, rank=rank.rank, world_size=rank.world_size)
    both = zip(ours, batch_loader(task.data, task.batches), task.num_tokens, strict=True)
    counted = progress(both, rank, "six engines", total=args.steps)
    for step, (mine, whole, num_tokens) in enumerate(counted, start=1):
        turn = step % len(runs)
        for run in runs[turn:] + runs[:turn]:
            set_learning_rate(run.optimizer, task.recipe.learning_rate(step, args.steps))
            batch = (whole if run.engine.replicas == 1 else mine).to(rank.device)
            how = {"cast": autocast(args, rank.device), "max_norm": args.max_norm}
            dist.barrier()
            began = synchronized_now(rank.device)
            # torch's DDP rebuilds its buckets after the first step: count in the second.
            with count_traffic() if step == 2 else nullcontext(run.traffic) as run.traffic:
                part = train_step(run.engine, run.optimizer, batch, num_tokens, **how)
            if step > 2:
                run.seconds.append(synchronized_now(rank.device) - began)
                run.tokens += num_tokens
            run.losses.append(part)
