"""The script's sizes and table, and the lesson's figures."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from shared.long_context.orders import Order, positions_of
from shared.measuring.traffic import Traffic
from shared.planner.specs import Plan
from shared.plots import MEANING, VARIANTS, measured, theory, use_style
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results
from shared.training.language_recipes import Recipe

# 12 heads, and lengths that the chunks of 1 to 6 ranks divide; 24 and 8 GPUs for large.
RECIPES = {
    "tiny": Recipe(48, 2, 12, 400, 120, 4, 6, 60_000),
    "small": Recipe(96, 2, 12, 2000, 240, 6, 40, 1_000_000),
    "large": Recipe(768, 12, 24, 16_384, 7680, 8, 500, 50_000_000),
}


@dataclass
class Seen:
    """A run: its losses, the seconds of its steps, and what one step sent."""

    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


def with_length(recipe: Recipe, length: int | None, order: Order) -> Recipe:
    """The recipe with that context; InputError where it cannot be cut by the order."""
    recipe = replace(recipe, length=length or recipe.length)
    positions_of(order, 0, recipe.length)
    return recipe


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on each rank, which has a part of every sequence: see `check_room`.

    The logits stay until the step has ended; outside of autocast their loss is in bf16 as well.
    """
    recipe = replace(recipe, length=args.length or recipe.length)
    plan = Plan(cp=ranks, micro_batch=recipe.batch)
    return recipe.most_bytes(plan, half, logits=8 if half else 16)


def ring_bytes(part: int, ranks: int, itemsize: int = 4) -> int:
    """Bytes that a rank sends for one attention and step; a part has so many numbers."""
    wide = max(itemsize, 4)  # gradients travel in float32 at least
    return part * (4 * (ranks - 1) * itemsize + 2 * ranks * wide) if ranks > 1 else 0


def exchange_bytes(part: int, ranks: int, itemsize: int = 4) -> int:
    """Bytes that a rank hands in for one attention and step; 1/n of them are for itself."""
    return 8 * part * itemsize if ranks > 1 else 0


def conclude(args: argparse.Namespace, rank: Rank, recipe: Recipe, seen: Seen) -> None:
    """Add up the ranks' parts of the losses; rank 0 writes the table and the figure."""
    training = of_all_ranks(rank, seen.losses, seen.seconds, mean=False)
    if not rank.is_main:
        return
    part = recipe.batch * recipe.d_model * recipe.length // rank.world_size
    formula = ring_bytes if args.engine == "ring" else exchange_bytes
    itemsize = 2 if args.precision == "bf16" else 4
    predicted = recipe.num_layers * formula(part, rank.world_size, itemsize)
    counted = seen.traffic.bytes_of("send") + seen.traffic.bytes_of("all_to_all")
    row: dict[str, Any] = {
        "engine": args.engine,
        "ranks": rank.world_size,
        "context": recipe.length,
        "positions a rank": recipe.length // rank.world_size,
        **training.row(recipe.batch * recipe.length),
        "attention MiB": round(counted / 2**20, 3),
        "predicted": round(predicted / 2**20, 3),
    }
    words = f"{args.engine} on {rank.world_size}: a context of {recipe.length}, "
    words += f"{row['positions a rank']} a rank; attention hands in {row['attention MiB']} MiB a "
    words += f"step ({row['predicted']} predicted), loss {row['last loss']}"
    write_results(
        args,
        rank,
        headline=words,
        table=[row],
        figures={"long_context.png": draw_run(training.losses, row)},
        losses=training.losses,
        bytes_a_rank={"predicted": predicted, "measured": counted},
    )


def draw_run(losses: list[float], row: Mapping[str, Any]) -> Figure:
    """The loss; above it the context, whole and on a rank."""
    use_style()
    figure, ax = plt.subplots(figsize=(7, 3.2))
    ax.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    parts = f"a context of {row['context']} tokens, {row['positions a rank']} on each rank"
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training: {parts}")
    return figure


def draw_kept(
    lengths: Sequence[int], kept: Mapping[str, Sequence[float]], formulas: Mapping[str, Any]
) -> Figure:
    """Bytes kept for backward over the length: counted points on their formulas' lines."""
    figure, ax = plt.subplots(figsize=(7, 3.4))
    for colour, (name, seen) in zip(VARIANTS, kept.items(), strict=False):
        ax.plot(lengths, [formulas[name](n) / 2**20 for n in lengths], "--", color=colour, lw=1)
        measured(ax, lengths, [n / 2**20 for n in seen], f"{name} (dashed: its formula)", colour)
    ax.set(xscale="log", yscale="log", xlabel="length L", ylabel="MiB kept for backward")
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.set_xticks([], minor=True)
    ax.legend(fontsize=8)
    ax.set_title("Plain attention keeps L x L weights, tiles keep a number a row")
    return figure


def draw_work(work: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Pairs of positions that each rank computes, step by step, one panel an order."""
    figure, axes = plt.subplots(1, len(work), figsize=(8, 3.0), sharey=True)
    for ax, (name, by_step) in zip(axes, work.items(), strict=True):
        bottom = [0.0] * len(by_step[0])
        for number, (colour, row) in enumerate(zip(VARIANTS, by_step, strict=False)):
            ax.bar(range(len(row)), row, bottom=bottom, color=colour, label=f"step {number}")
            bottom = [a + b for a, b in zip(bottom, row, strict=True)]
        ax.axhline(sum(bottom) / len(bottom), color=MEANING["theory"], linewidth=1, linestyle="--")
        ax.set(xlabel="rank", title=name, xticks=range(len(bottom)))
    axes[0].set_ylabel("% of all seen pairs")
    axes[0].legend(fontsize=8, loc="upper left", reverse=True)
    return figure


def draw_seconds(lengths: Sequence[int], seconds: Mapping[str, Sequence[float]]) -> Figure:
    """Milliseconds of forward and backward over the length, with a line of slope two."""
    figure, ax = plt.subplots(figsize=(7, 3.4))
    for colour, (name, seen) in zip(VARIANTS, seconds.items(), strict=False):
        measured(ax, lengths, [1000 * each for each in seen], name, colour)
    # Through the longest length, where costs that do not grow with L weigh least.
    last = 1000 * next(iter(seconds.values()))[-1]
    square = [last * (n / lengths[-1]) ** 2 for n in lengths]
    theory(ax, lengths, square, f"L squared, through {next(iter(seconds))} at {lengths[-1]}")
    ax.set(xscale="log", yscale="log", xlabel="length L", ylabel="ms, forward and backward")
    ax.set_xticks(lengths, [str(n) for n in lengths])
    ax.set_xticks([], minor=True)
    ax.legend(fontsize=8)
    ax.set_title("Forward and backward of attention, one thread")
    return figure
