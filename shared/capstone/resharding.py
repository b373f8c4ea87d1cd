"""A flat tensor that some ranks wrote, read by others: only what is needed, wherever it lies."""

from collections.abc import Callable

import torch
from jaxtyping import Shaped
from torch import Tensor

Read = Callable[[int, int, int], Tensor]  # (file, begin, end) -> its numbers from begin to end


def read_part(
    read: Read, numel: int, saved: int, ranks: int, rank: int, dtype: torch.dtype = torch.float32
) -> Shaped[Tensor, "part"]:
    """This rank's part of a tensor of `numel` numbers, out of the files that `saved` ranks wrote.

    File f holds the f-th ceil(numel / saved) numbers, the last ones filled up behind the end.
    Rank r of `ranks` now has the r-th ceil(numel / ranks), filled up with zeros. Of each file that
    the part touches, one piece is read, and no number that is not needed.
    """
    old, new = -(-numel // saved), -(-numel // ranks)
    part = torch.zeros(new, dtype=dtype)
    begin = rank * new
    end = min(begin + new, numel)
    for file in range(begin // old, -(-end // old)) if begin < end else ():
        low, high = max(begin, file * old), min(end, (file + 1) * old)
        part[low - begin : high - begin] = read(file, low - file * old, high - file * old)
    return part
