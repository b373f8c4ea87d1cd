"""What a start of a run took, and for how long each way of saving stops it."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from shared.errors import InputError
from shared.fault_tolerance.background import BackgroundSaver
from shared.fault_tolerance.checkpoints import save_checkpoint
from shared.fault_tolerance.elastic import elastic_content, save_elastic
from shared.fault_tolerance.state import TakeStep, TrainingState
from shared.measuring.timing import repetitions
from shared.ranks.group import Rank
from shared.results import speed
from shared.script import progress


class Meter:
    """Counts the steps of this start; saving is not in their seconds.

    `tokens` are those of all ranks, added by the step itself, on its device.
    """

    tokens: int | Tensor = 0

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.began_at, self.steps, self.seconds = 0, 0, 0.0
        self._bar: Iterator[int] = iter(())

    def begin(self, step: int, num_steps: int, path: Path | None) -> None:
        """Say where this start begins, and from which file."""
        self.began_at = step
        if self.rank.is_main and path is not None:
            print(f"resuming from step {step} of {num_steps}: {path}", flush=True)
        left = range(step, num_steps)
        self._bar = iter(progress(left, self.rank, "training", total=len(left)))

    def timed(self, take_step: TakeStep) -> TakeStep:
        """`take_step`, which ends with the loss on the CPU, with its seconds counted."""

        def take_and_count(indices: list[int]) -> float:
            next(self._bar, None)
            began = time.perf_counter()
            loss = take_step(indices)
            self.seconds += time.perf_counter() - began
            self.steps += 1
            return loss

        return take_and_count

    def columns(self) -> dict[str, Any]:
        """Return tokens/s, step time and peak memory; nothing where no step was taken."""
        next(self._bar, None)  # to its end
        if not self.steps:
            return {}
        return speed(self.seconds, self.steps, int(self.tokens), self.rank.device)


WAYS = (
    "one file, written by rank 0",
    "the same, in the background",
    "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.async_save",
)


def time_saves(folder: Path, state: TrainingState, repeats: int = 3) -> list[dict[str, object]]:
    """Save `repeats` times in each way; a row each, by this rank's own clock.

    "stops training" is the time until the call returns, "on the disk" until the checkpoint is
    complete (in the background only rank 0 writes, and knows); the shortest of each, in
    milliseconds. Needs a process group.
    """
    rows: list[dict[str, object]] = []
    for number, way in enumerate(WAYS):
        save, finish = _prepare(way, folder / str(number), state)
        stopped, complete = [], []
        for _ in range(repetitions(repeats + 1)):
            dist.barrier()
            began = time.perf_counter()
            save()
            returned = time.perf_counter() - began
            finish()
            stopped.append(1000 * returned)
            complete.append(1000 * (time.perf_counter() - began))
        rows.append(
            {  # the first one starts threads and meets cold caches
                "way": way,
                "stops training, ms": round(min(stopped[1:] or stopped), 1),
                "on the disk after, ms": round(min(complete[1:] or complete), 1),
            }
        )
    return rows


def _prepare(
    way: str, folder: Path, state: TrainingState
) -> tuple[Callable[[], object], Callable[[], object]]:
    """How to save in this way, and how to wait until it is done; each save in its own folder."""
    folders = (folder / str(count) for count in itertools.count())
    if way == WAYS[0]:
        return lambda: save_checkpoint(next(folders), state), lambda: None
    if way == WAYS[1]:
        saver = BackgroundSaver(folder)
        return lambda: saver.save(state), saver.wait
    if way == WAYS[2]:
        return lambda: save_elastic(next(folders), state), lambda: None
    # Its thread talks to the other ranks while training does, so it needs a group of its own.
    group = dist.new_group(backend="gloo")
    pending = []

    def start() -> None:
        content = elastic_content(state)
        pending.append(dcp.async_save(content, checkpoint_id=next(folders), process_group=group))

    def finish() -> None:
        try:
            pending.pop().result()
        except (CheckpointException, OSError) as error:
            raise InputError(f"checkpoint in {folder} cannot be written: {error}") from error

    return start, finish
