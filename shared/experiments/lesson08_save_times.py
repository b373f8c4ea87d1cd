"""For how long a checkpoint stops training, by the way it is written."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shared.errors import InputError
from shared.fault_tolerance.background import BackgroundSaver
from shared.fault_tolerance.checkpoints import save_checkpoint
from shared.fault_tolerance.elastic import elastic_content, save_elastic
from shared.fault_tolerance.state import TrainingState

WAYS = (
    "one file, written by rank 0",
    "the same, in the background",
    "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.async_save",
)


def time_saves(folder: Path, state: TrainingState, repeats: int = 3) -> list[dict[str, object]]:
    """Save `repeats` times in each way; a row each, the same on all ranks.

    "stops training" is the time until the call returns, "on the disk" until the checkpoint is
    complete; rank 0's clock, in milliseconds, of the save that others disturbed least. Needs a
    process group.
    """
    rows: list[dict[str, object]] = []
    for number, way in enumerate(WAYS):
        save, finish = _prepare(way, folder / str(number), state)
        stopped, complete = [], []
        for attempt in range(repeats + 1):
            dist.barrier()
            began = time.perf_counter()
            save()
            returned = time.perf_counter() - began
            finish()
            if attempt > 0:  # the first one starts threads and meets cold caches
                stopped.append(1000 * returned)
                complete.append(1000 * (time.perf_counter() - began))
        rows.append(
            {
                "way": way,
                "stops training, ms": round(min(stopped), 1),
                "on the disk after, ms": round(min(complete), 1),
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
