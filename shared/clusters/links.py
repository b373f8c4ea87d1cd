"""Every pair of ranks, measured by sending; and the ranks whose links are unlike the others'.

One pair at a time, so that no message waits for another pair's: n (n - 1) measurements. A time can
only be lengthened by what else happens, so the fastest of some repeats is kept.
"""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from shared.errors import InputError

Seconds = Float[Tensor, "sender receiver"]


@dataclass(frozen=True)
class LinkTable:
    """Seconds from each rank (row) to each rank (column), zeros on the diagonal.

    `small` are those of a message of one number; half of there and back, so the two directions of
    a pair are equal. `large` are those of `num_bytes`, each direction by itself.
    """

    small: Seconds
    large: Seconds
    num_bytes: int

    @property
    def bandwidth(self) -> Float[Tensor, "sender receiver"]:
        """Bytes a second; infinite on the diagonal."""
        return self.num_bytes / self.large


def measure_links(
    device: torch.device | str = "cpu", num_bytes: int = 1 << 20, repeats: int = 5
) -> LinkTable:
    """Measure all pairs of the default group's ranks; every rank calls it and gets the table."""
    rank, n = dist.get_rank(), dist.get_world_size()
    one = torch.zeros(1, device=device)
    much = torch.zeros(max(1, num_bytes // 4), device=device)
    table = torch.zeros(2, n, n)
    for sender in range(n):
        for receiver in range(n):
            if sender != receiver and rank in (sender, receiver):
                for kind, message in enumerate((one, much)):
                    taken = _fastest(sender, receiver, message, one, repeats)
                    table[kind, sender, receiver] = taken if rank == sender else 0
            dist.barrier()  # the next pair has the machine to itself
    small, large = _of_all(table)
    small = torch.minimum(small, small.T) / 2
    return LinkTable(small, (large - small).clamp(min=1e-9).fill_diagonal_(0), 4 * much.numel())


def _fastest(sender: int, receiver: int, message: Tensor, answer: Tensor, repeats: int) -> float:
    """Seconds until the receiver's one number says that the message has come; one not counted."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        if dist.get_rank() == sender:
            dist.send(message, receiver)
            dist.recv(answer, receiver)
            answer.sum().item()  # on a GPU: it has come
        else:
            dist.recv(message, sender)
            dist.send(answer, sender)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


def _of_all(table: Tensor) -> Tensor:
    """Every rank's rows, on every rank."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    whole = table.to(device)
    dist.all_reduce(whole)
    return whole.cpu()


@dataclass(frozen=True)
class Odd:
    """A rank whose links are unlike the others': `slow` is "sending", "receiving" or "both".

    `ratio` is its fastest link in that direction over the typical link among the others.
    """

    rank: int
    slow: str
    ratio: float


def find_odd(seconds: Seconds, factor: float = 4.0) -> list[Odd]:
    """The ranks all of whose links in a direction are slow, the worst first.

    Row i has the seconds from rank i, the diagonal is not looked at. A rank sends slowly when even
    its fastest link out takes more than `factor` times the median of the links among the others
    (those that neither begin nor end at it; of an even number, the mean of the two in the middle);
    so with its links in. A single slow cable, or ranks
    that share out over nodes evenly, make nobody odd. `ratio` is the larger of the two. With fewer
    than three ranks there are no others, and nobody is odd.

    Raises InputError unless the table is square with finite numbers that are not negative.
    """
    _check(seconds)
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


def describe_odd(odd: Odd) -> str:
    """One line about it."""
    way = {"both": "both directions", "sending": "sending", "receiving": "receiving"}[odd.slow]
    return f"rank {odd.rank}'s links are {odd.ratio:.1f} times as slow as the others' ({way})"
