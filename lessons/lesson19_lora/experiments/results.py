"""The script's sizes, flags and table, and the lesson's figures."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from lessons.lesson19_lora.experiments.adapting import WINDOWS, Texts, held_loss
from shared.lora.adapter import check_rank
from shared.lora.counting import KINDS, Tuning
from shared.lora.layers import places_meant
from shared.measuring.traffic import Traffic
from shared.plots import BLUE, MEANING, ORANGE, VARIANTS, VERMILION, use_style
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results
from shared.training.language_recipes import Recipe, bytes_of_replicas

# Rows that 1, 2, 3, 4 and 6 ranks share evenly; the vocabulary is the 256 bytes.
RECIPES = {
    "tiny": Recipe(32, 2, 2, 256, 32, 12, 6, 60_000),
    "small": Recipe(64, 2, 4, 256, 64, 24, 150, 1_000_000, peak=3e-3),
    "large": Recipe(768, 12, 12, 256, 1024, 48, 500, 50_000_000),
}


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on each rank: see `check_room`. A step of the whole model, or an evaluation.

    That is of all windows on every rank, in float32: the residual stream before and after, a norm's
    result, and at an adapted matrix the feed-forward's features four times.
    """
    d, tokens = recipe.d_model, WINDOWS * recipe.length
    evaluated = 4 * tokens * (3 * d + 4 * 4 * d)
    return max(evaluated, bytes_of_replicas(args, recipe, ranks, half))


@dataclass
class Fit:
    """A training: who trains and how, and what was seen."""

    rank: Rank
    seed: int
    cast: torch.autocast
    label: str
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    optimizer: Any = None


def check_flags(args: argparse.Namespace, model: nn.Module) -> Tuning:
    """What is tuned and how, before hours of training; fills in `--alpha` and `--peak`.

    Raises InputError for a name that matches no layer, and for a rank that a layer cannot have.
    """
    args.peak = args.peak or (1e-3 if args.method == "full" else 1e-2)
    args.alpha = args.alpha or 2.0 * args.rank
    if args.method == "full":
        return Tuning("full")
    for _, linear in places_meant(model, args.names):
        check_rank(args.rank, linear.in_features, linear.out_features)
    return Tuning(args.method, tuple(args.names), args.rank)


def loss_on(
    model: nn.Module, texts: Texts, recipe: Recipe, device: torch.device
) -> dict[str, float]:
    """The held-out losses in nats a byte; every rank takes part, since a model may be sharded."""
    return {
        name: held_loss(model, held, recipe.length, device)
        for name, held in (("source", texts.base_held), ("target", texts.new_held))
    }


def conclude(
    args: argparse.Namespace,
    recipe: Recipe,
    job: Fit,
    memory: Mapping[str, Mapping[str, int]],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> None:
    """Write table and figure on rank 0: losses, and rank 0's bytes, predicted and counted."""
    training = of_all_ranks(job.rank, job.losses, job.seconds)
    if not job.rank.is_main:
        return
    predicted, counted = memory["predicted"], memory["counted"]
    sent = {op: job.traffic.bytes_of(op) for op in dict.fromkeys(job.traffic.ops)}
    row: dict[str, Any] = {
        "method": args.method + (f" r {args.rank}" if args.method != "full" else ""),
        "engine": args.engine,
        "source before": round(before["source"], 3),
        "source after": round(after["source"], 3),
        "target before": round(before["target"], 3),
        "target after": round(after["target"], 3),
        "KiB predicted": round(sum(predicted.values()) / 1024, 1),
        "KiB counted": round(sum(counted.values()) / 1024, 1),
        "KiB handed in a step": round(sum(sent.values()) / 1024, 1),
        **training.row(recipe.batch * recipe.length),
    }
    words = (
        f"{row['method']} under {args.engine} on {job.rank.world_size} ranks: target loss "
        f"{row['target before']} to {row['target after']}, source {row['source before']} to "
        f"{row['source after']}, {row['KiB counted']} KiB a rank"
    )
    figures = {"lora.png": draw_run(training.losses, counted)}
    more = {"memory": dict(memory), "handed_in": sent, "losses": training.losses}
    write_results(args, job.rank, headline=words, table=[row], figures=figures, **more)


COLOURS = dict(
    zip(KINDS, (BLUE, VERMILION, ORANGE, MEANING["optimizer states"]), strict=True)
)  # what is trained in a colour of its own


def draw_run(losses: Sequence[float], counted: Mapping[str, int]) -> Figure:
    """The loss of the tuning, and rank 0's bytes by kind."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    left.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    left.set(xlabel="step of the tuning", ylabel="loss (nats a byte)", title="On the target")
    for place, (kind, nbytes) in enumerate(counted.items()):
        right.barh(place, nbytes / 1024, color=COLOURS[kind])
    right.set(yticks=range(len(counted)), yticklabels=list(counted), xlabel="KiB on rank 0")
    right.invert_yaxis()
    right.set_title("Kept between steps")
    return figure


def draw_bytes(columns: Mapping[str, Mapping[str, float]]) -> Figure:
    """Gigabytes a GPU by kind, for each way to tune one model."""
    figure, ax = plt.subplots(figsize=(8, 3.4))
    left = [0.0] * len(columns)
    for kind in KINDS:
        sizes = [each[kind] / 1e9 for each in columns.values()]
        ax.barh(list(columns), sizes, left=left, color=COLOURS[kind], label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for place, end in enumerate(left):
        ax.text(end, place, f" {end:.1f}", va="center", fontsize=8)
    ax.axvline(80, color=MEANING["theory"], linewidth=1, linestyle="--")
    ax.annotate("80 GB", (80, -0.45), xytext=(3, 0), textcoords="offset points", fontsize=8)
    ax.invert_yaxis()
    ax.legend(fontsize=8, loc="lower right")
    ax.set(xlabel="GB a GPU, by formula (without activations)")
    ax.set_title("Full tuning of an 8B needs two GPUs of 80 GB, LoRA one")
    return figure


def draw_trade(
    best: Mapping[str, Sequence[tuple[float, float]]],
    every: Mapping[str, Sequence[tuple[float, float]]],
) -> Figure:
    """Losses on both languages, a point a seed: large at each way's best rate, pale at others."""
    figure, ax = plt.subplots(figsize=(7, 4.4))
    for colour, (name, points) in zip(VARIANTS, best.items(), strict=False):
        ax.plot(*zip(*points, strict=True), "o", markersize=6, color=colour, label=name)
        if name in every:
            others = zip(*every[name], strict=True)
            ax.plot(*others, "o", markersize=4, color=colour, alpha=0.3, zorder=1)
    ax.set(xlabel="German, just learned: loss (nats a byte)")
    ax.set(ylabel="English, learned before: loss (nats a byte)")
    ax.legend(fontsize=8)
    ax.set_title("Learned and forgotten; lower left is better, pale points are the other rates")
    return figure
