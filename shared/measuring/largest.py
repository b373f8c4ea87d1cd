"""The largest of some differences; the largest number that fits into memory, found by trying."""

import gc
import math
from collections.abc import Callable, Iterable

import torch


def largest(numbers: Iterable[float]) -> float:
    """The largest of one or more numbers, NaN where one is: max() may pass over it."""
    return max(numbers, key=lambda number: (math.isnan(number), number))


def largest_that_fits(fits: Callable[[int], None], most: int = 4096) -> tuple[int, str]:
    """The largest number from 1 to `most` that fits, found by doubling and halving; 0 if none.

    `fits` raises torch.OutOfMemoryError where the GPU is full, MemoryError where the CPU's memory
    is. Behind the number: which was full at the next, "GPU" or "CPU"; "" where `most` fits.
    """
    full: dict[int, str] = {}

    def tried(number: int) -> bool:
        try:
            fits(number)
        except torch.OutOfMemoryError:
            full[number] = "GPU"
        except MemoryError:
            full[number] = "CPU"
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        return number not in full

    low, high = 0, 1
    while high <= most and tried(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle) else (low, middle)
    return low, full.get(high, "")


def until(full: str) -> str:
    """What a headline adds about the end of `largest_that_fits`, unless the GPU was full."""
    return {"GPU": "", "CPU": " (until the CPU's memory was full)", "": " (or more)"}[full]
