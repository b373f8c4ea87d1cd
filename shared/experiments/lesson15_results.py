"""Lesson 15's script: sizes of the model, what its parts cost, the table and the timeline."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib.pyplot as plt
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from shared.experiments.lesson10_text import Recipe
from shared.experiments.lesson15_drawing import draw_events, draw_table, legend
from shared.experiments.lesson15_runs import measured_bubble
from shared.pipeline.executor import Event, Pipeline
from shared.pipeline.schedules import Table, bubble
from shared.plots import use_style
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results

# Ten layers and two ends make stages for six ranks, two for each.
RECIPES = {
    "tiny": Recipe(32, 10, 2, 400, 24, 16, 6, 60_000),
    "small": Recipe(96, 10, 4, 2000, 48, 24, 40, 1_000_000),
    "large": Recipe(768, 12, 12, 16_384, 1024, 64, 500, 50_000_000),
}


@dataclass
class Seen:
    """A run: the seconds of its steps, this rank's parts of the losses, its last step's events."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add(
        self, seconds: float, losses: Sequence[Tensor], events: Sequence[Event], began: float
    ) -> None:
        """A step. Its events count from `began`, which ranks of several machines have in common."""
        self.seconds.append(seconds)
        self.losses.append(float(sum(losses)))
        self.events = [replace(e, start=e.start - began, end=e.end - began) for e in events]


def costs_of(recipe: Recipe, vocab_size: int) -> list[float]:
    """Multiplications of each part for a token: embedding, layers, output matrix."""
    layer = 12 * recipe.d_model**2 + 2 * recipe.length * recipe.d_model
    return [0.0, *[float(layer)] * recipe.num_layers, float(vocab_size * recipe.d_model)]


def conclude(
    args: argparse.Namespace,
    rank: Rank,
    recipe: Recipe,
    table: Table,
    pipeline: Pipeline,
    seen: Seen,
) -> None:
    """Bring losses and events together; rank 0 writes the table and the figure."""
    training = of_all_ranks(rank, seen.losses, seen.seconds, mean=False)
    runs: list[Any] = [None] * rank.world_size
    dist.all_gather_object(runs, seen.events)
    if not rank.is_main:
        return
    row: dict[str, Any] = {
        "schedule": args.schedule,
        "ranks": rank.world_size,
        "stages": pipeline.num_stages,
        "micro-batches": args.micro_batches,
        **training.row(recipe.batch * recipe.length),
        "bubble by formula, %": round(
            100 * bubble(rank.world_size, args.micro_batches, args.chunks), 1
        ),
        "measured, %": round(100 * measured_bubble(runs), 1),
        "alive on rank 0": pipeline.stages[0].most_alive,
    }
    words = (
        f"{args.schedule} on {rank.world_size} ranks: they wait {row['measured, %']} % of a step"
    )
    words += f" (formula {row['bubble by formula, %']} %), loss {row['last loss']}"
    figures = {"timeline.png": draw_run(args.schedule, table, runs)}
    write_results(args, rank, headline=words, table=[row], figures=figures, losses=training.losses)


def draw_run(schedule: str, table: Table, runs: Sequence[Sequence[Event]]) -> Figure:
    """Above the plan, below the last step as it ran."""
    use_style()
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 2 + 0.6 * len(runs)))
    draw_table(above, table)
    above.set_title(f"{schedule}, as planned")
    draw_events(below, runs)
    below.set_title("The last step, as it ran")
    legend(above)
    return figure
