"""The script's sizes and table, and the lesson's figures."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shared.errors import InputError
from shared.measuring.traffic import Traffic
from shared.planner.specs import Plan
from shared.plots import MEANING, VARIANTS, measured, theory, use_style
from shared.ranks.agreement import refused_by_any
from shared.ranks.collectives import local_part
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results
from shared.tensor_parallel.vocabulary import padded_vocabulary
from shared.training.language_recipes import Recipe

# 12 heads, 60 rows and lengths that 1, 2, 3, 4 and 6 divide.
RECIPES = {
    "tiny": Recipe(48, 2, 12, 400, 24, 60, 6, 60_000),
    "small": Recipe(96, 4, 12, 2000, 48, 60, 60, 1_000_000),
    "large": Recipe(768, 12, 12, 16_384, 1020, 60, 500, 50_000_000),
}


@dataclass
class Seen:
    """A run: its losses, the seconds of its steps, and what one step sent."""

    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)


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
    if rank.is_main and args.sequence_parallel and tp == 1:
        print("note: --sequence-parallel cuts nothing on tp 1: there is one part", flush=True)
    if rank.is_main and not args.tp and dp > 1:
        heads = f"{recipe.num_heads} heads cannot be cut over {rank.world_size} ranks"
        print(f"note: tp {tp} x dp {dp}, since {heads}", flush=True)
    return tp


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on each rank: see `check_room`."""
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 == recipe.num_heads % n]
    tp = 1 if args.engine == "single" else args.tp or fits[-1]
    dp = max(1, ranks // tp)
    rows = math.ceil(recipe.batch / dp)
    plan = Plan(dp=dp, tp=tp, micro_batch=rows, sequence_parallel=args.sequence_parallel)
    return recipe.most_bytes(plan, half, padded_vocabulary(recipe.vocab_size))


@refused_by_any()  # what comes after it waits for all
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
    held = sum(local_part(p).numel() for p in model.parameters())
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
    """The loss; above it the messages of one step by kind, which need no bars."""
    use_style()
    figure, ax = plt.subplots(figsize=(7, 3.2))
    ax.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    kinds = [f"{traffic.count(op)} {op}" for op in dict.fromkeys(traffic.ops)]
    sent = f"one step sends {', '.join(kinds)}" if kinds else "nothing is sent"
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training: {sent}")
    return figure


RANK_COLOURS = VARIANTS[:2]
WHOLE = "#d9d9d9"


def _matrix(
    ax: Axes, at: tuple[float, float], size: tuple[float, float], name: str, cut: str = ""
) -> None:
    """A matrix as a box; `cut` is "columns", "rows", "sums", or nothing for one that is whole."""
    (x, y), (width, height) = at, size
    for rank, colour in enumerate(RANK_COLOURS if cut else [WHOLE]):
        n = 2 if cut else 1
        wide, high = (width / n, height) if cut == "columns" else (width, height / n)
        corner = x + (wide * rank if cut == "columns" else 0), y
        if cut != "columns":
            corner = x, y + height - high * (rank + 1)
        ax.add_patch(Rectangle(corner, wide, high, facecolor=colour, edgecolor="white", alpha=0.75))
    ax.text(x + width / 2, y - 0.35, name, ha="center", va="top", fontsize=9)


def _message(ax: Axes, x: float, name: str, forward: str, backward: str) -> None:
    """A place where something is sent: an arrow each way, with what happens on it."""
    for y, to_the_right, words in ((1.25, True, forward), (0.75, False, backward)):
        ends = ((x - 0.6, y), (x + 0.6, y))
        start, end = ends if to_the_right else ends[::-1]
        ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": MEANING["theory"]})
        ax.text(x, y + (0.1 if to_the_right else -0.12), words, fontsize=7, ha="center",
                va="bottom" if to_the_right else "top")  # fmt: skip
    ax.text(x, 2.15, name, fontsize=13, ha="center", style="italic")


def draw_pair() -> Figure:
    """Y = relu(X A), Z = Y B: columns first, rows second, and where something is sent."""
    figure, ax = plt.subplots(figsize=(10, 2.6))
    _matrix(ax, (0.0, 0.0), (1.2, 2.0), "X\nwhole on both")
    _message(ax, 2.0, "f", "forward:\nnothing", "backward:\nall-reduce")
    _matrix(ax, (2.8, 0.2), (2.4, 1.6), "A by columns", "columns")
    ax.text(5.5, 0.9, "relu →", fontsize=8, ha="center")
    _matrix(ax, (5.8, 0.0), (2.4, 2.0), "Y = relu(XA)\neach has its columns", "columns")
    ax.text(8.4, 0.9, "·", fontsize=14, ha="center")
    _matrix(ax, (8.6, -0.2), (1.2, 2.4), "B by rows", "rows")
    ax.text(10.05, 0.9, "=", fontsize=12, ha="center")
    _matrix(ax, (10.3, 0.0), (0.9, 2.0), "part 0\nof the sum")
    ax.patches[-1].set_facecolor(RANK_COLOURS[0])
    ax.text(11.42, 0.9, "+", fontsize=12, ha="center")
    _matrix(ax, (11.65, 0.0), (0.9, 2.0), "part 1\nof the sum")
    ax.patches[-1].set_facecolor(RANK_COLOURS[1])
    _message(ax, 13.3, "g", "forward:\nall-reduce", "backward:\nnothing")
    _matrix(ax, (14.1, 0.0), (0.9, 2.0), "Z\nwhole on both")
    ax.set(xlim=(-0.2, 15.2), ylim=(-1.4, 2.7))
    ax.set_axis_off()
    ax.set_title("Columns, then rows: nothing is sent between the two (blue rank 0, orange rank 1)")
    return figure


def draw_bytes(
    tokens: Sequence[int], tensor: Mapping[int, Sequence[int]], data: Mapping[int, int], ranks: int
) -> Figure:
    """Bytes that a rank sends for one layer and step, over the tokens of a step, by width."""
    figure, ax = plt.subplots(figsize=(7.5, 3.6))
    # not blue and orange, which are ranks in the figure of the two matrices
    for colour, (width, sent) in zip(VARIANTS[2:], tensor.items(), strict=False):
        slope = 4 * 8 * width * (ranks - 1) / ranks
        theory(ax, tokens, [slope * each for each in tokens], "8 b s h (t-1)/t x 4 bytes")
        measured(ax, tokens, sent, f"tensor parallel, h = {width}", colour)
        ax.axhline(data[width], color=colour, linewidth=1, alpha=0.6)
        ax.annotate(
            f"data parallel, h = {width}", (tokens[0], data[width]), xytext=(0, 3),
            textcoords="offset points", ha="left", fontsize=8, color=colour,
        )  # fmt: skip
        ax.plot(3 * width, data[width], "x", color=MEANING["theory"], markersize=8)
    handles, labels = ax.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    ax.legend(unique.values(), unique.keys(), fontsize=8, loc="lower right")
    ax.set(xscale="log", yscale="log", xlabel="tokens in a step (b s)", ylabel="bytes a rank sends")
    _plain_ticks(ax, tokens)
    ax.set_title("Tensor parallelism sends less below 3 h tokens a step (crosses)")
    return figure


def draw_kept(ranks: Sequence[int], kept: Mapping[str, Sequence[float]], square: float) -> Figure:
    """Bytes that a rank keeps of one layer, in units of s b h, over the number of ranks."""
    figure, ax = plt.subplots(figsize=(7, 3.4))
    many = [1 + 0.05 * i for i in range(61)]
    formulas = {
        "tensor parallel": [12.125 + (16 + 6 * square) / t for t in many],
        "and sequence parallel": [(28.125 + 6 * square) / t for t in many],
    }
    for colour, (name, seen) in zip(VARIANTS, kept.items(), strict=False):
        ax.plot(many, formulas[name], color=colour, linewidth=1, linestyle="--")
        measured(ax, ranks, seen, f"{name}, counted (dashed: its formula)", colour)
    ax.axhline(12.125, color=MEANING["idle"], linewidth=1)
    ax.annotate("12.125: not divided without sequence parallelism", (1, 12.125), xytext=(0, 4),
                textcoords="offset points", ha="left", fontsize=8)  # fmt: skip
    ax.legend(fontsize=8)
    ax.set(xlabel="ranks t", ylabel="bytes kept / (s b h)", xticks=list(ranks), ylim=(0, None))
    ax.set_title("With the sequence in parts as well, all that is kept is divided by t")
    return figure


def draw_ratios(ratios: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Figure:
    """Time of tensor-parallel messages over that of the products, by link, model and ranks."""
    figure, axes = plt.subplots(1, len(ratios), figsize=(9, 3.2), sharey=True)
    for ax, (link, by_model) in zip(axes, ratios.items(), strict=True):
        for colour, (model, by_ranks) in zip(VARIANTS[2:], by_model.items(), strict=False):
            ax.plot(list(by_ranks), list(by_ranks.values()), "o-", color=colour, label=model)
        ax.axhline(1, color=MEANING["theory"], linewidth=1)
        ticks = list(next(iter(by_model.values())))
        ax.set(xscale="log", yscale="log", xlabel="ranks t", title=link)
        _plain_ticks(ax, ticks)
    axes[0].set_ylabel("messages / products")
    axes[0].set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    axes[0].annotate("as long as the products", (2, 1), xytext=(0, 3),
                     textcoords="offset points", fontsize=8)  # fmt: skip
    axes[0].legend(fontsize=8, loc="lower right")
    return figure


def _plain_ticks(ax: Axes, tokens: Sequence[int]) -> None:
    """Numbers, not powers of ten, at the measured points."""
    ax.set_xticks(tokens, [str(each) for each in tokens])
    ax.set_xticks([], minor=True)
