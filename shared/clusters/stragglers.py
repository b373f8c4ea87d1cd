"""The rank that the others wait for, found in seconds that were taken *before* the collective.

The seconds of whole steps are equal on all ranks: whoever is early waits in the all-reduce.
"""

import torch

from shared.clusters.verdicts import OwnSeconds, Straggler
from shared.errors import InputError


def find_straggler(seconds: OwnSeconds, factor: float = 2.0) -> Straggler | None:
    """The rank that is late in more than half of the steps; None where there is none.

    `seconds[s, r]` is what rank r did in step s before it waited for others. In a step it is late
    when it took more than `factor` times the median of the other ranks (of an even number, the
    mean of the two in the middle). Of several, the one that cost most: `lost` adds up, over all
    steps, by how much it was behind the slowest of the others, where it was. A rank alone is none.

    Raises InputError unless there are steps and ranks, and for seconds that are negative or no
    numbers.
    """
    if seconds.ndim != 2 or 0 in seconds.shape:
        raise InputError(f"seconds have a row a step, a column a rank; got {tuple(seconds.shape)}")
    if not (seconds.isfinite() & (seconds >= 0)).all():
        raise InputError("seconds of a step are finite and not negative: was every rank timed?")
    seconds = seconds.double()  # also of whole numbers there is a median
    steps, ranks = seconds.shape
    found = []
    for rank in range(ranks if ranks > 1 else 0):
        own = seconds[:, rank]
        others = seconds[:, torch.arange(ranks) != rank]
        late = int((own > factor * others.quantile(0.5, dim=1)).sum())
        if 2 * late > steps:
            lost = (own - others.amax(1)).clamp(min=0).sum().item()
            found.append(Straggler(rank, late, steps, lost))
    return max(found, key=lambda straggler: straggler.lost, default=None)
