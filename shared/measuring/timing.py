"""Seconds that mean something on a CPU and on a GPU."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def fastest_seconds(run: Callable[[], Any], repeats: int, device: torch.device | str) -> float:
    """The fastest of `repeats` calls, after one that is not counted.

    A GPU works on after the call has returned, so its own clock is read: CUDA events, recorded
    before and after, and waited for. The fastest call is the one least disturbed by others.
    """
    cuda = torch.device(device).type == "cuda"
    taken = [_cuda_seconds(run) if cuda else _cpu_seconds(run) for _ in range(repeats + 1)]
    return min(taken[1:])


def repetitions(count: int) -> int:
    """`count`; 1 where the course is tested and nobody reads the seconds (TORCH_HANDLE_QUICK=1).

    For cells whose output is not compared. `./run_all.sh test` sets the variable.
    """
    return 1 if os.environ.get("TORCH_HANDLE_QUICK") == "1" else count


def _cuda_seconds(run: Callable[[], Any]) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _cpu_seconds(run: Callable[[], Any]) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def synchronized_now(device: torch.device) -> float:
    """The clock in seconds, read once a GPU has done what it was given; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def slowest_of(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank's seconds of each step, from the seconds of every rank."""
    return [max(step) for step in zip(*by_rank, strict=True)]


def compare_seconds(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Columns of a table: the ratio of two engines' steps that took turns, median and quartiles."""
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "median ratio": round(middle, 3),
        "quarter": round(low, 3),
        "three quarters": round(high, 3),
        "fastest / fastest": round(min(mine) / min(theirs), 3),
    }


def median_ms(seconds: Sequence[float]) -> float:
    """The median in milliseconds."""
    return round(1000 * statistics.median(seconds), 1)
