"""The pipeline beside torch.distributed.pipelining: its gradients, its orders, its step time."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from lessons.lesson15_pipeline_parallel.experiments.runs import language_model, sum_loss
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import (
    Table,
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
)
from shared.pipeline.stages import Part, parts_of, split_stages

SCHEDULES: dict[str, tuple[Any, Callable[..., Table], int]] = {
    "GPipe": (ScheduleGPipe, gpipe_schedule, 1),
    "1F1B": (Schedule1F1B, one_f_one_b_schedule, 1),
    "interleaved": (ScheduleInterleaved1F1B, interleaved_schedule, 2),
}

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Chain(nn.Module):
    """A stage as torch wants it: one tensor in, one tensor out."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """The parts one after the other; the first of all gets the tokens themselves."""
        activations = (x,)
        for part in self.parts:
            activations = part(activations, x)
        return activations[0]


def torch_stages(parts: Sequence[Part], num_stages: int) -> list[PipelineStage]:
    """This rank's stages for torch's schedules: stage s on rank s % world_size."""
    cuts, rank, size = split_stages([1.0] * len(parts), num_stages), *_place()
    return [
        PipelineStage(Chain([parts[i] for i in cut]), s, num_stages, torch.device("cpu"))
        for s, cut in enumerate(cuts)
        if s % size == rank
    ]


def _place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def torch_step(schedule: Any, rows: Tensor, is_first: bool, is_last: bool) -> None:
    """One step of torch's: tokens go in where the first stage is, and are the targets, too."""
    given = (rows,) if is_first else ()
    schedule.step(*given, **({"target": rows, "losses": []} if is_last else {}))


def beside_torch(
    rank: int, name: str, num_micro_batches: int, rows: Tensor, repeats: int = 0
) -> tuple[float, float, float]:
    """The largest difference of gradients (over the largest), and both fastest steps in seconds.

    The seconds are those of `repeats` steps of each, in turns; 0 without any.
    """
    kind, plan, chunks = SCHEDULES[name]
    size = dist.get_world_size()
    ours, theirs = (language_model(tie=False) for _ in range(2))
    parts = parts_of(ours)
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), size * chunks))
    table = plan(size, num_micro_batches, *([chunks] if chunks > 1 else []))
    stages = torch_stages(parts_of(theirs), size * chunks)
    schedule = kind(
        stages if chunks > 1 else stages[0], num_micro_batches, sum_loss, scale_grads=False
    )
    batches = rows.chunk(num_micro_batches)

    def by_hand() -> None:
        pipeline.train_step(table, batches, sum_loss)

    def by_torch() -> None:
        torch_step(schedule, rows, rank == 0, rank == size - 1)

    by_hand()
    by_torch()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    off = [_off(a.grad, b.grad) for a, b in pairs if a.grad is not None]
    fastest = [[0.0], [0.0]]
    for _ in range(repeats):
        for place, step in enumerate((by_hand, by_torch)):
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            fastest[place].append(time.perf_counter() - began)
    mine, torchs = (min(each[1:], default=0.0) for each in fastest)
    return max(off), mine, torchs


def _off(mine: Tensor | None, other: Tensor | None) -> float:
    assert mine is not None, "no gradient by hand"
    assert other is not None, "no gradient of torch's"
    return float((mine - other).abs().max() / other.abs().max())


def torch_orders(rank: int, zero_bubble: bool, num_micro_batches: int) -> list[list[str]]:
    """What torch plans for each rank with two stages a rank, slot by slot, "" where it waits.

    "F3" is the forward of micro-batch 3, "B3" its backward; the zero-bubble schedule has "I3" for
    the gradients of the inputs and "W3" for those of the weights.
    """
    size = dist.get_world_size()
    parts, count = parts_of(language_model(tie=False)), 2 * size
    cuts = split_stages([1.0] * len(parts), count)
    # In the zero-bubble schedule the stages go down the ranks and up again, like a V.
    own = (rank, count - 1 - rank) if zero_bubble else (rank, rank + size)
    stages: list[Any] = [
        PipelineStage(Chain([parts[i] for i in cuts[s]]), s, count, torch.device("cpu"))
        for s in own
    ]
    kind = ScheduleZBVZeroBubble if zero_bubble else ScheduleInterleaved1F1B
    planned = kind(stages, num_micro_batches, sum_loss).pipeline_order
    return [
        [
            "" if a is None else f"{LETTERS[a.computation_type.name]}{a.microbatch_index}"
            for a in row
        ]
        for row in (planned[r] for r in range(size))
    ]
