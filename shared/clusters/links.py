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
    """Measure all pairs of the default group's ranks; every rank calls it and gets the table.

    A small message is sent four times as often: it is short, and a few microseconds disturb it.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    one = torch.zeros(1, device=device)
    much = torch.zeros(max(1, num_bytes // 4), device=device)
    table = torch.zeros(2, n, n)
    for sender in range(n):
        for receiver in range(n):
            if sender != receiver and rank in (sender, receiver):
                for kind, (message, times) in enumerate(((one, 4 * repeats), (much, repeats))):
                    taken = _fastest(sender, receiver, message, one, times)
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
