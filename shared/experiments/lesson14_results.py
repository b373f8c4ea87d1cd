"""Lesson 14's script: sizes of the model, how ranks are shared out, the table and the figure."""

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shared.ddp.averaging import average_flat
from shared.errors import InputError
from shared.experiments.lesson10_text import Recipe
from shared.measuring.traffic import Traffic
from shared.plots import MEANING, use_style
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results

# 12 heads, 60 rows and lengths that 1, 2, 3, 4 and 6 divide.
RECIPES = {
    "tiny": Recipe(48, 2, 12, 400, 24, 60, 6, 60_000),
    "small": Recipe(96, 4, 12, 2000, 48, 60, 60, 1_000_000),
    "large": Recipe(768, 12, 12, 16_384, 1020, 60, 500, 50_000_000),
}
VOCABULARY = 60  # the vocabulary is padded to a multiple of this, whatever the number of ranks


@dataclass
class Seen:
    """A run: its losses, the seconds of its steps, and what one step sent."""

    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


def padded(size: int) -> int:
    """A vocabulary's size, rounded up so that up to six ranks have equal parts."""
    return math.ceil(size / VOCABULARY) * VOCABULARY


def ranks_a_model(args: argparse.Namespace, recipe: Recipe, rank: Rank) -> int:
    """How many ranks share one copy of the model: `--tp`, or as many as its heads allow.

    Raises InputError where rows, heads or the ranks themselves cannot be shared out evenly.
    """
    fits = [n for n in range(1, rank.world_size + 1) if rank.world_size % n == 0]
    fits = [n for n in fits if recipe.num_heads % n == 0]
    tp = args.tp or fits[-1]
    if rank.world_size % tp:
        raise InputError(
            f"--tp {tp} on {rank.world_size} ranks: a mesh of dp x tp has a place for every rank; "
            f"take a --tp that divides {rank.world_size}"
        )
    dp = rank.world_size // tp
    if recipe.batch % dp:
        raise InputError(f"{recipe.batch} rows a step cannot be shared out evenly over dp {dp}")
    if rank.is_main and not args.tp and dp > 1:
        heads = f"{recipe.num_heads} heads cannot be cut over {rank.world_size} ranks"
        print(f"note: tp {tp} x dp {dp}, since {heads}", flush=True)
    return tp


def average_over(group: dist.ProcessGroup, model: nn.Module) -> None:
    """Average the gradients over a data-parallel group, in one message."""
    average_flat((_local(p.grad) for p in model.parameters() if p.grad is not None), group)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def conclude(
    args: argparse.Namespace,
    rank: Rank,
    mesh: DeviceMesh,
    recipe: Recipe,
    model: nn.Module,
    seen: Seen,
) -> None:
    """Average the losses over the copies of the model; rank 0 writes the table and the figure."""
    training = of_all_ranks(rank, seen.losses, seen.seconds)
    if not rank.is_main:
        return
    held = sum(_local(p).numel() for p in model.parameters())
    row: dict[str, Any] = {
        "engine": args.engine + ", sequence parallel" * args.sequence_parallel,
        "tp": mesh["tp"].size(),
        "dp": mesh["dp"].size(),
        "parameters a rank": held,
        **training.row(recipe.batch * recipe.length),
        "messages a step": len(seen.traffic.calls),
        "MiB handed in": round(sum(call.num_bytes for call in seen.traffic.calls) / 2**20, 3),
    }
    words = f"{row['engine']} on tp {row['tp']} x dp {row['dp']}: {row['messages a step']} messages"
    words += f" and {row['ms a step']} ms a step, loss {row['last loss']}"
    figures = {"tensor_parallel.png": draw_run(training.losses, seen.traffic)}
    write_results(args, rank, headline=words, table=[row], figures=figures, losses=training.losses)


def draw_run(losses: list[float], traffic: Traffic) -> Figure:
    """Left: the loss; right: the messages of one step by kind."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    left.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    left.set(xlabel="step", ylabel="loss (nats per token)", title="Training")
    counts = {op: traffic.count(op) for op in dict.fromkeys(traffic.ops)} or {"none": 0}
    bars = right.barh(list(counts), list(counts.values()), color=MEANING["communication"])
    right.bar_label(bars)
    right.set(xlabel="messages that rank 0 takes part in", title="What one step sends")
    return figure
