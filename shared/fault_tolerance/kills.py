"""Faults on purpose: a process that ends as `kill -9` ends it, at a moment that was chosen.

SIGKILL cannot be caught: no `finally`, no `atexit`, no flush. What has not reached the operating
system by then is gone, which is what a checkpoint has to survive.
"""

import contextlib
import io
import os
import signal
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist

from shared.errors import InputError
from shared.fault_tolerance.state import TakeStep, TrainingState


def die() -> NoReturn:
    """End this process like `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived its SIGKILL")


@dataclass(frozen=True)
class Kill:
    """Where a rank dies: before it takes step `step` + 1, or within the first save from there on.

    `share` is how much of the file is written by then, from 0 to 1; None: not in a save. Only rank
    0 writes; another rank dies while it waits for it.
    """

    step: int
    rank: int
    share: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Kill":
        """STEP:RANK, or STEP:RANK:SHARE for a death within a save; InputError for anything else."""
        parts = text.split(":")
        try:
            share = float(parts[2]) if len(parts) == 3 else None
            kill = cls(int(parts[0]), int(parts[1]), share)
        except (ValueError, IndexError):
            kill = None
        if kill is None or len(parts) > 3 or not 0.0 <= (kill.share or 0.0) <= 1.0:
            raise InputError(
                f"--kill {text}: give STEP:RANK, such as 37:1, or STEP:RANK:SHARE with a share "
                "from 0 to 1 of the file, such as 40:0:0.5"
            )
        return kill

    def refuse_unless_it_comes(self, world_size: int, num_steps: int) -> None:
        """Raise InputError where no such rank or step will ever be: nobody would die."""
        last = num_steps - (self.share is None)  # a save comes after the last step as well
        if not 0 <= self.rank < world_size or not 0 <= self.step <= last:
            raise InputError(
                f"--kill {self.step}:{self.rank} would kill nobody: it can be a step from 0 to "
                f"{last} and a rank from 0 to {world_size - 1}"
            )

    def in_step(self, take_step: TakeStep, state: TrainingState) -> TakeStep:
        """`take_step`, in which the chosen rank dies when its step has come."""

        def take_or_die(indices: list[int]) -> float:
            if self.share is None and state.step == self.step and dist.get_rank() == self.rank:
                die()
            return take_step(indices)

        return take_or_die

    def in_save(self, save: Callable[[TrainingState], Any]) -> Callable[[TrainingState], Any]:
        """`save`, in which the chosen rank dies while the file is being written."""

        def save_or_die(state: TrainingState) -> Any:
            due = self.share is not None and state.step >= self.step
            if not due or dist.get_rank() != self.rank:
                return save(state)
            with dying_while_writing(self.share or 0.0):
                save(state)
            die()  # a rank that writes nothing: it waited for rank 0

        return save_or_die


@contextlib.contextmanager
def dying_while_writing(share: float) -> Generator[None]:
    """Within, torch.save writes this share of the bytes, lets them reach the disk, and dies."""
    whole = torch.save

    def torn(content: Any, file: Any, *args: Any, **options: Any) -> None:
        if isinstance(file, io.BytesIO):  # a tensor on its way to another rank is pickled so
            return whole(content, file, *args, **options)
        buffer = io.BytesIO()
        whole(content, buffer, *args, **options)
        data = buffer.getvalue()
        file.write(data[: round(share * len(data))])
        file.flush()
        os.fsync(file.fileno())  # the worst case: what is there is on the disk, and is not whole
        die()

    with mock.patch.object(torch, "save", torn):
        yield
