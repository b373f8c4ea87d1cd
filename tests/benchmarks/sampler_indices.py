"""Our DistributedSampler against torch's, index for index, on a grid of settings and at random.

python tests/benchmarks/sampler_indices.py [--random 2000]

Prints how many combinations of (length, ranks, shuffle, drop_last, seed, epoch) were compared, each
on every rank; ends with status 1 at the first that differs.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch.utils.data

from shared.data.sampling import DistributedSampler

Setting = tuple[int, int, bool, bool, int, int]


def settings(num_random: int) -> Iterator[Setting]:
    """A grid of edges, then random ones with larger numbers."""
    yield from itertools.product(
        (0, 1, 2, 5, 16, 37, 41), range(1, 9), (False, True), (False, True), (0, 1, 1234), (0, 1, 7)
    )
    draw = random.Random(0)
    for _ in range(num_random):
        shuffle, drop_last = draw.random() < 0.7, draw.random() < 0.5
        seed, epoch = draw.randrange(2**31), draw.randrange(1000)
        yield draw.randint(0, 2000), draw.randint(1, 64), shuffle, drop_last, seed, epoch


def differs(setting: Setting) -> int | None:
    """The first rank whose indices, or whose length, are not torch's."""
    length, ranks, shuffle, drop_last, seed, epoch = setting
    for rank in range(ranks):
        arguments: tuple[Any, ...] = (range(length), ranks, rank, shuffle, seed, drop_last)
        ours = DistributedSampler(*arguments)
        theirs = torch.utils.data.DistributedSampler(*arguments)
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        if list(ours) != list(theirs) or len(ours) != len(theirs):
            return rank
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=2000, help="random settings (2000)")
    combinations = ranks = 0
    for setting in settings(parser.parse_args().random):
        rank = differs(setting)
        if rank is not None:
            print(f"rank {rank} differs from torch's at {setting}")
            return 1
        combinations, ranks = combinations + 1, ranks + setting[1]
    print(f"{combinations:,} combinations, {ranks:,} ranks: every index is torch's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
