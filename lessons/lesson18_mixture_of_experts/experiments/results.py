"""The script's sizes, its table, and the lesson's figures."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shared.errors import InputError
from shared.measuring.traffic import Traffic
from shared.mixture_of_experts.models import expert_layers
from shared.planner.models import spec_of
from shared.plots import MEANING, VARIANTS, use_style
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results
from shared.training.language_recipes import Recipe, shared_out

# 60 rows, which 1 to 6 ranks divide, and 48 for 8 GPUs; the experts of a layer are in SIZES.
RECIPES = {
    "tiny": Recipe(32, 2, 2, 400, 24, 60, 6, 60_000),
    "small": Recipe(64, 2, 4, 2000, 32, 60, 40, 1_000_000),
    "large": Recipe(768, 12, 12, 16_384, 1024, 48, 500, 50_000_000),
}
SIZES = {"tiny": 12, "small": 12, "large": 24}


@dataclass
class Seen:
    """A run: losses, seconds of the steps, what one step sent, loads of the first layer."""

    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    fullest: list[Tensor] = field(default_factory=list)  # load of the fullest expert, mean is 1


def ranks_an_expert_group(args: argparse.Namespace, rank: Rank) -> int:
    """How many ranks share the experts: `--ep`, or as many as divide ranks and experts.

    Raises InputError where the ranks, the experts or the rows cannot be shared out evenly.
    """
    fits = [n for n in range(1, rank.world_size + 1) if rank.world_size % n == 0]
    ep = args.ep or next(n for n in reversed(fits) if args.experts % n == 0)
    if rank.world_size % ep:
        raise InputError(
            f"--ep {ep} on {rank.world_size} ranks: a mesh of dp x ep has a place for every rank; "
            f"take an --ep that divides {rank.world_size}"
        )
    if args.experts % ep:
        raise InputError(
            f"--experts {args.experts} cannot be shared out evenly over --ep {ep} ranks: take a "
            f"number of experts that {ep} divides"
        )
    if not 1 <= args.k <= args.experts:
        raise InputError(f"--k {args.k} of {args.experts} experts: take a k from 1 up to that")
    return ep


def check_rows(recipe: Recipe, rank: Rank) -> int:
    """The rows of a step that this rank has; InputError where they cannot be shared evenly."""
    if recipe.batch % rank.world_size:
        raise InputError(
            f"{recipe.batch} rows a step cannot be shared out evenly over {rank.world_size} ranks"
        )
    return recipe.batch // rank.world_size


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on each rank: see `check_room`.

    A model with one expert a layer, and what the others and each further choice add to it.
    """
    name = next(name for name, each in RECIPES.items() if each == recipe)
    experts, d, layers = args.experts or SIZES[name], recipe.d_model, recipe.num_layers
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 == experts % n]
    more = layers * (experts // (args.ep or fits[-1]) - 1) * (8 * d * d + 5 * d)  # parameters
    rows = layers * math.ceil(recipe.batch / ranks) * recipe.length
    size = 2 if half else 4
    begin = recipe.most_bytes(shared_out(recipe, ranks), half, logits=14 if half else 16)
    begin += rows * size * ((2 * args.k - 1) * d + (args.k - 1) * 4 * d)
    whole = more + sum(spec_of(recipe.config(recipe.vocab_size), 1).layer) * layers
    return max(begin + (14 if half else 12) * more, 20 * whole)


def conclude(
    args: argparse.Namespace,
    rank: Rank,
    mesh: DeviceMesh,
    recipe: Recipe,
    model: nn.Module,
    seen: Seen,
) -> None:
    """Average the losses over the ranks; rank 0 writes the table and the figure."""
    training = of_all_ranks(rank, seen.losses, seen.seconds)
    if not rank.is_main:
        return
    calls = [call for call in seen.traffic.calls if call.op == "all_to_all"]
    fullest = torch.stack(seen.fullest).tolist()
    row: dict[str, Any] = {
        "dp": mesh["dp"].size(),
        "ep": mesh["ep"].size(),
        "experts": args.experts,
        "k": args.k,
        "parameters a rank": sum(p.numel() for p in model.parameters()),
        **training.row(recipe.batch * recipe.length),
        "all_to_alls a step": len(calls),
        "their MiB": round(sum(call.num_bytes for call in calls) / 2**20, 3),
        "fullest expert": round(fullest[-1], 2),
        "kept": round(sum(each.kept for each in expert_layers(model)) / recipe.num_layers, 3),
    }
    words = f"{args.experts} experts, k {args.k}, on dp {row['dp']} x ep {row['ep']}: loss "
    words += f"{row['last loss']}, the fullest expert has {row['fullest expert']} times the mean"
    figures = {"experts.png": draw_run(training.losses, fullest)}
    write_results(args, rank, headline=words, table=[row], figures=figures, losses=training.losses)


def draw_run(losses: Sequence[float], fullest: Sequence[float]) -> Figure:
    """The loss over the steps, and beside it the load of the fullest expert."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2))
    steps = range(1, len(losses) + 1)
    left.plot(steps, losses, color=MEANING["by hand"])
    left.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
    right.plot(steps, fullest, color=VARIANTS[1])
    right.axhline(1, color=MEANING["theory"], linewidth=1)
    right.set(xlabel="step", ylabel="load / mean load", title="Fullest expert, first layer")
    right.set_ylim(0, None)
    return figure


NAMES = {
    "nothing": "nothing",
    "loss 0.01": "Switch's loss, 0.01",
    "loss 0.1": "Switch's loss, 0.1",
    "bias": "bias alone",
}


def draw_loads(runs: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Loads by expert, sorted, of every seed; one panel for each way of balancing."""
    figure, axes = plt.subplots(1, len(runs), figsize=(10, 2.8), sharey=True)
    for ax, colour, (name, seeds) in zip(axes, VARIANTS, runs.items(), strict=False):
        for loads in seeds:
            ordered = sorted(loads, reverse=True)
            ax.plot(range(1, len(ordered) + 1), ordered, "o-", color=colour, alpha=0.6, ms=3, lw=1)
        ax.axhline(1, color=MEANING["theory"], linewidth=1)
        ax.set(xlabel="expert, by load", title=NAMES[name])
    axes[0].set_ylabel("load / mean load")
    axes[0].set_ylim(0, None)
    return figure


def draw_dropped(shares: Mapping[str, Mapping[float, Sequence[float]]]) -> Figure:
    """The share of choices beyond an expert's capacity, over the capacity factor; all seeds."""
    figure, ax = plt.subplots(figsize=(6.5, 3.2))
    for colour, (name, by_factor) in zip(VARIANTS, shares.items(), strict=False):
        for number, (factor, seeds) in enumerate(by_factor.items()):
            label = NAMES[name] if number == 0 else None
            ax.plot(
                [factor] * len(seeds),
                [100 * s for s in seeds],
                "o",
                color=colour,
                ms=4,
                label=label,
            )
        middle = [100 * sorted(seeds)[len(seeds) // 2] for seeds in by_factor.values()]
        ax.plot(list(by_factor), middle, color=colour, linewidth=1)
    ax.legend(title="balanced by", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.set(xlabel="capacity factor", ylabel="choices dropped (%)", xticks=list(by_factor))
    ax.set_title("Balanced routers drop less at every factor (lines: median of five seeds)")
    return figure


def draw_way() -> Figure:
    """Two ranks, four experts: rows by token, by expert, on the experts' ranks, and back."""
    figure, ax = plt.subplots(figsize=(9.5, 2.9))
    colours = {0: VARIANTS[0], 1: VARIANTS[5], 2: VARIANTS[1], 3: VARIANTS[4]}
    chosen = [[2, 0, 3, 0, 2], [1, 2, 0, 1]]
    by_expert = [sorted(each) for each in chosen]
    came = [sorted(e for each in chosen for e in each if e // 2 == r) for r in range(2)]
    columns = {"tokens, by place": chosen, "sorted by expert": by_expert, "at the experts": came}
    columns |= {"back, sorted": by_expert, "added to tokens": chosen}
    for place, (name, by_rank) in enumerate(columns.items()):
        for rank, rows in enumerate(by_rank):
            for i, expert in enumerate(rows):
                box = (2.6 * place + 0.3 * i, 1.2 - 1.2 * rank)
                ax.add_patch(plt.Rectangle(box, 0.26, 0.6, color=colours[expert], alpha=0.8))
                ax.text(box[0] + 0.13, box[1] + 0.3, str(expert), ha="center", va="center",
                        fontsize=8, color="black" if expert % 2 else "white")  # fmt: skip
        ax.text(2.6 * place, 2.05, name, fontsize=9)
        if place in (1, 2):
            ax.annotate("all-to-all", (2.6 * place + 2.5, 1.0), (2.6 * place + 1.75, 0.94),
                        fontsize=8, color=MEANING["communication"])  # fmt: skip
    for rank in range(2):
        ax.text(-0.25, 1.5 - 1.2 * rank, f"rank {rank}", ha="right", va="center", fontsize=9)
    ax.set(xlim=(-1.2, 12.6), ylim=(-0.2, 2.4))
    ax.set_axis_off()
    ax.set_title("Numbers are experts: 0 and 1 live on rank 0, 2 and 3 on rank 1 (k = 1)")
    return figure
