"""The largest of some differences; the largest number that fits into memory, found by trying."""

import gc
import math
from collections.abc import Callable, Iterable

import torch


def largest(numbers: Iterable[float]) -> float:
    """The largest of one or more numbers, NaN where one is: max() may pass over it."""
    return max(numbers, key=lambda number: (math.isnan(number), number))


def largest_that_fits(fits: Callable[[int], bool], most: int = 4096) -> int:
    """The largest number from 1 to `most` that fits, found by doubling and halving; 0 if none.

    `fits` may raise torch.OutOfMemoryError for no.
    """

    def tried(number: int) -> bool:
        try:
            return fits(number)
        except torch.OutOfMemoryError:
            return False
        finally:
            gc.collect()
            torch.cuda.empty_cache()

    low, high = 0, 1
    while high <= most and tried(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle) else (low, middle)
    return low
