"""Runs of a pipeline: work that takes a fixed time, trained models, and the script's last table."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.pipeline.drawing import draw_events, draw_table, legend
from shared.pipeline.engine import PipelineEngine
from shared.pipeline.executor import Event, Pipeline
from shared.pipeline.schedules import Table, bubble
from shared.pipeline.sleeping import SleepingPart
from shared.pipeline.stages import parts_of, split_stages
from shared.pipeline.waiting import split_waiting
from shared.planner.specs import Plan
from shared.plots import use_style
from shared.ranks.agreement import refused_by_any
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results
from shared.training.engine import reference_curve
from shared.training.language_recipes import Recipe
from shared.training.reference_run import reference_model, reference_optimizer

Schedule = Callable[[int, int], Table]  # ranks, micro-batches


@dataclass(frozen=True)
class Case:
    """A schedule of stages whose work takes `seconds[stage]`, forward and backward each."""

    schedule: Schedule
    num_micro_batches: int
    seconds: Sequence[float]


def padded_runs(rank: int, cases: Sequence[Case]) -> list[list[Event]]:
    """What this rank did in each case, after a short step to warm up."""
    found = []
    for case in cases:
        torch.manual_seed(0)
        parts = [SleepingPart(each) for each in case.seconds]
        pipeline = Pipeline(parts, split_stages([1.0] * len(parts), len(parts)))
        size = dist.get_world_size()
        for count in (size, case.num_micro_batches):
            batches = [torch.ones(1, 8) for _ in range(count)]
            dist.barrier()
            pipeline.train_step(case.schedule(size, count), batches, lambda y, _: y.sum())
        found.append(pipeline.events)
    return found


def step_seconds(runs: Sequence[Sequence[Event]]) -> float:
    """Seconds from the first start to the last end."""
    events = [event for each in runs for event in each]
    return max(e.end for e in events) - min(e.start for e in events)


def language_model(tie: bool = True, num_layers: int = 6) -> LanguageModel:
    """The lesson's small language model, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(15)
        return LanguageModel(
            TransformerConfig(
                400, 64, 4, num_layers, 256, dropout=0.0, max_len=64, tie_embeddings=tie
            )
        )


def token_rows(rows: int, length: int, seed: int = 0) -> Tensor:
    """Random tokens of the small model's vocabulary, (rows, length)."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 400, (rows, length), generator=draw)


def sum_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The sum over all positions of the cross-entropy of the token that follows."""
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )


def gradients(
    rank: int, schedule: Schedule, num_stages: int, batches: Sequence[Tensor], tie: bool = True
) -> tuple[dict[str, Tensor], dict[int, int]]:
    """This rank's gradients by name after a step, and the most micro-batches alive by stage."""
    model = language_model(tie)
    names = {parameter: name for name, parameter in model.named_parameters()}
    parts = parts_of(model)
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), num_stages))
    pipeline.train_step(schedule(dist.get_world_size(), len(batches)), batches, sum_loss)
    grads = {names[p]: p.grad for p in pipeline.parameters() if p.grad is not None}
    return grads, {s: stage.peak_in_flight for s, stage in pipeline.stages.items()}


def largest_difference(
    found: Sequence[tuple[dict[str, Tensor], Any]], batches: Sequence[Tensor], tie: bool = True
) -> float:
    """The largest difference of any rank's gradients from the whole model's, over their largest."""
    model = language_model(tie)
    for batch in batches:
        sum_loss(model(batch), batch).backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen = {name for grads, _ in found for name in grads}
    assert seen == whole.keys(), f"gradients of {seen ^ whole.keys()} on one side only"
    off = [
        float((grad - whole[name]).abs().max() / whole[name].abs().max())
        for grads, _ in found
        for name, grad in grads.items()
    ]
    return max(off)


def curve(
    rank: int, schedule: Schedule, num_stages: int, num_micro_batches: int, steps: int
) -> list[float]:
    """The first losses of lesson 04's reference run under a schedule."""
    parts = parts_of(reference_model())
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), num_stages))
    return train(pipeline, schedule(dist.get_world_size(), num_micro_batches), steps)


def train(pipeline: Pipeline, table: Table, steps: int) -> list[float]:
    """The same for a pipeline of the reference run's model."""
    optimizer = reference_optimizer(list(pipeline.parameters()))
    return reference_curve(PipelineEngine(pipeline, table, optimizer), range(steps)).losses


# Ten layers and two ends make stages for six ranks, two for each.
RECIPES = {
    "tiny": Recipe(32, 10, 2, 400, 24, 16, 6, 60_000),
    "small": Recipe(96, 10, 4, 2000, 48, 24, 40, 1_000_000),
    "large": Recipe(768, 12, 12, 16_384, 1024, 64, 500, 50_000_000),
}


def bytes_needed(args: argparse.Namespace, recipe: Recipe, ranks: int, half: bool) -> int:
    """The most bytes on a rank: see `check_room`. GPipe has all micro-batches in flight.

    The executor holds the last stage's logits as well, until their backward.
    """
    count = args.micro_batches or ranks * math.ceil(8 / ranks)
    count = 1 if args.schedule == "gpipe" else count
    rows = math.ceil(recipe.batch / count)
    plan = Plan(pp=ranks, chunks=args.chunks, micro_batch=rows, num_micro_batches=count)
    return recipe.most_bytes(plan, half, logits=14 if half else 16)


@dataclass
class Seen:
    """A run: the seconds of its steps, this rank's parts of the losses, its last step's events."""

    seconds: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add(self, seconds: float, loss: Tensor, events: Sequence[Event], began: float) -> None:
        """A step. Its events count from `began`, which ranks of several machines have in common."""
        self.seconds.append(seconds)
        self.losses.append(loss)
        self.events = [replace(e, start=e.start - began, end=e.end - began) for e in events]


def costs_of(recipe: Recipe, vocab_size: int) -> list[float]:
    """Multiplications of each part for a token: embedding, layers, output matrix."""
    layer = 12 * recipe.d_model**2 + 2 * recipe.length * recipe.d_model
    return [0.0, *[float(layer)] * recipe.num_layers, float(vocab_size * recipe.d_model)]


@refused_by_any()  # what comes after it waits for all
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
    formula = bubble(rank.world_size, args.micro_batches, args.chunks)
    waiting = split_waiting(runs, formula)
    row: dict[str, Any] = {
        "schedule": args.schedule,
        "ranks": rank.world_size,
        "stages": pipeline.num_stages,
        "micro-batches": args.micro_batches,
        **training.row(recipe.batch * recipe.length),
        "bubble by formula, %": round(100 * formula, 1),
        "measured, %": round(100 * waiting.total, 1),
        "of it schedule": round(100 * waiting.schedule, 1),
        "unequal stages": round(100 * waiting.unequal, 1),
        "messages": round(100 * waiting.messages, 1),
        "alive on rank 0": pipeline.stages[0].peak_in_flight,
    }
    words = (
        f"{args.schedule} on {rank.world_size} ranks: they wait {row['measured, %']} % of a step, "
        f"{row['of it schedule']} for the schedule, {row['unequal stages']} for unequal stages, "
        f"{row['messages']} for messages and a core; loss {row['last loss']}"
    )
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
