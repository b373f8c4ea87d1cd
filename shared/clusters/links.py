"""Every pair of ranks, measured by sending; and the ranks whose links are unlike the others'.

One pair at a time, so that no message waits for another pair's: n (n - 1) measurements. A time can
only be lengthened by what else happens, so the fastest of some repeats is kept.
"""

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

Seconds = Float[Tensor, "sender receiver"]
NO_TIME = 1e-9  # a large message's seconds where it was no slower than a small one


class NoAnswer(RuntimeError):
    """A message of a measurement did not come; the words name the link."""


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
    device: torch.device | str = "cpu",
    num_bytes: int = 1 << 20,
    repeats: int = 5,
    seconds: float = 300.0,
) -> LinkTable:
    """Measure all pairs of the default group's ranks; every rank calls it and gets the table.

    A small message is sent four times as often: it is short, and a few microseconds disturb it. One
    that takes longer than `seconds` raises NoAnswer on the ranks of its pair, which ends the group:
    over gloo the others get torch's RuntimeError for a peer that is gone.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    one = torch.zeros(1, device=device)
    much = torch.zeros(max(1, num_bytes // 4), device=device)
    table = torch.zeros(2, n, n)
    for sender in range(n):
        for receiver in range(n):
            if sender != receiver and rank in (sender, receiver):
                for kind, (message, times) in enumerate(((one, 4 * repeats), (much, repeats))):
                    taken = _fastest(sender, receiver, message, one, times, seconds)
                    table[kind, sender, receiver] = taken if rank == sender else 0
            dist.barrier()  # the next pair has the machine to itself
    small, large = _of_all(table)
    small = torch.minimum(small, small.T) / 2
    return LinkTable(small, (large - small).clamp(min=NO_TIME).fill_diagonal_(0), 4 * much.numel())


def _fastest(
    sender: int, receiver: int, message: Tensor, answer: Tensor, repeats: int, seconds: float
) -> float:
    """Seconds until the receiver's one number says that the message has come; one not counted."""
    taken, limit = [], timedelta(seconds=seconds)
    mine, other = dist.get_rank() == sender, receiver if dist.get_rank() == sender else sender
    for _ in range(repeats + 1):
        began = time.perf_counter()
        try:
            for out, sent in ((mine, message), (not mine, answer)):
                work = (dist.isend if out else dist.irecv)(sent, other)
                assert work is not None, "both ranks are in the default group"
                while sent.is_cuda and not work.is_completed() and _since(began) < seconds:
                    pass  # NCCL's wait sleeps for milliseconds between two looks
                work.wait(limit)
            answer.sum().item()  # on a GPU: it has come
        except RuntimeError as error:
            if _since(began) < seconds:
                raise  # somebody is gone, who says why
            words = (
                f"a message of {4 * message.numel():,} bytes from rank {sender} to rank {receiver}"
            )
            raise NoAnswer(f"{words} was not answered within {seconds:g} s") from error
        taken.append(_since(began))
    return min(taken[1:])


def _since(began: float) -> float:
    return time.perf_counter() - began


def _of_all(table: Tensor) -> Tensor:
    """Every rank's rows, on every rank."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    whole = table.to(device)
    dist.all_reduce(whole)
    return whole.cpu()
