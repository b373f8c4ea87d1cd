"""What one start of a run took: seconds, steps and tokens, with a bar on rank 0's terminal."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.fault_tolerance.state import TakeStep
from shared.ranks.group import Rank
from shared.results import speed
from shared.script import progress


class Meter:
    """Counts the steps of this start; saving is not in their seconds.

    `tokens` are those of all ranks, added by the step itself.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.began_at, self.steps, self.tokens, self.seconds = 0, 0, 0, 0.0
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
        return speed(self.seconds, self.steps, self.tokens, self.rank.device)
