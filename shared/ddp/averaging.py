"""The plainest sums and averages of gradients: one message, after backward."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def average_flat(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Average tensors of one dtype over a group's ranks, in place, by one message.

    Every rank gives the same shapes in the same order. In a group of one nothing is sent.
    """
    _reduce_flat(tensors, group, dist.get_world_size(group))


def sum_flat(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """The sum in place of the mean."""
    _reduce_flat(tensors, group, 1)


@torch.no_grad()
def _reduce_flat(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, divisor: int) -> None:
    tensors = list(tensors)
    if dist.get_world_size(group) == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= divisor
    pieces = flat.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))
