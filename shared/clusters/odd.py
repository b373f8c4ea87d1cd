"""The ranks whose links are unlike the others'."""

import torch

from shared.clusters.links import Seconds
from shared.clusters.verdicts import Odd
from shared.errors import InputError


def find_odd(seconds: Seconds, factor: float = 4.0) -> list[Odd]:
    """The ranks all of whose links in a direction are slow, the worst first.

    Row i has the seconds from rank i, the diagonal is not looked at. A rank sends slowly when even
    its fastest link out takes more than `factor` times the median of the links among the others
    (those that neither begin nor end at it; of an even number, the mean of the two in the middle);
    so with its links in. `ratio` is the larger of its two fastest links over that median. A single
    slow cable, or ranks that share out over nodes evenly, make nobody odd. With fewer than three
    ranks there are no others, and nobody is odd.

    Raises InputError unless the table is square with finite numbers that are not negative.
    """
    _check(seconds)
    seconds = seconds.double()  # also of whole numbers there is a median
    n = len(seconds)
    apart = ~torch.eye(n, dtype=torch.bool)
    found = []
    for rank in range(n if n > 2 else 0):
        others = torch.arange(n) != rank
        typical = seconds[others][:, others][apart[:-1, :-1]].quantile(0.5).item()
        out = seconds[rank, others].min().item() / max(typical, 1e-12)
        into = seconds[others, rank].min().item() / max(typical, 1e-12)
        slow = {(True, True): "both", (True, False): "sending", (False, True): "receiving"}
        words = slow.get((out > factor, into > factor))
        if words is not None:
            found.append(Odd(rank, words, max(out, into)))
    return sorted(found, key=lambda odd: -odd.ratio)


def _check(seconds: Seconds) -> None:
    if seconds.ndim != 2 or seconds.shape[0] != seconds.shape[1]:
        raise InputError(
            f"a table of links is square, a row and a column a rank; this is {tuple(seconds.shape)}"
        )
    links = seconds[~torch.eye(len(seconds), dtype=torch.bool)]
    if not (links.isfinite() & (links >= 0)).all():
        bad = next(x for x in links.tolist() if not 0 <= x < float("inf"))
        raise InputError(f"a link of {bad} seconds: was that pair measured?")
