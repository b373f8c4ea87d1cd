"""What a schedule costs: the bytes that a rank keeps, and the time that it waits for messages."""

from functools import partial

import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from lessons.lesson15_pipeline_parallel.experiments.runs import (
    Schedule,
    language_model,
    sum_loss,
    token_rows,
)
from shared.measuring.live import count_live_bytes
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import Cell, Table, timetable
from shared.pipeline.stages import parts_of, split_stages
from shared.planner import simulation


def most_kept(
    rank: int, schedule: Schedule, num_micro_batches: int, rows: int, recompute: bool = False
) -> int:
    """The most bytes of this rank that are alive in a step, parameters apart.

    Looked at at every message and whenever a forward or a backward begins or ends.
    The step has `rows` rows of 64 tokens in so many micro-batches. With `recompute` every part but
    the last computes its forward again in backward. Gradients of parameters are not counted: they
    are there from the step before.
    """
    parts = parts_of(language_model())
    for part in parts[:-1] if recompute else ():
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
    size = dist.get_world_size()
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), size))
    table = schedule(size, num_micro_batches)
    batches = token_rows(rows, 64).chunk(num_micro_batches)
    pipeline.train_step(table, batches, sum_loss)
    between: list[int] = []
    with count_live_bytes() as live:
        pipeline.clock = lambda: between.append(live.now()) or 0.0
        pipeline.train_step(table, batches, sum_loss)
    return max([*between, *(alive for _, alive in live.at_collectives)])


def deeper_schedule(num_stages: int, num_micro_batches: int) -> Table:
    """1F1B with twice its warm-up: stage s begins with 2 (p - 1 - s) forwards, p = num_stages."""
    orders = []
    for s in range(num_stages):
        forwards = [Cell("F", m, s) for m in range(num_micro_batches)]
        backwards = [Cell("B", m, s) for m in range(num_micro_batches)]
        depth = min(2 * (num_stages - 1 - s), num_micro_batches)
        turns = [cell for pair in zip(forwards[depth:], backwards, strict=False) for cell in pair]
        orders.append(forwards[:depth] + turns + backwards[num_micro_batches - depth :])
    return timetable(orders)


def simulate(table: Table, backward: float = 1.0, message: float = 0.0) -> tuple[float, float]:
    """The time of a step in forwards, and the share of it in which ranks wait.

    By the simulator that lesson 16's planner has its seconds of a pipeline from.
    """
    orders = [[cell for cell in row if cell] for row in table]
    whole = simulation.simulate(orders, backward, message)
    work = sum(backward if cell.kind == "B" else 1.0 for order in orders for cell in order)
    return whole, 1 - work / (whole * len(orders))
