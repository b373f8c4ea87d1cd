"""Collectives of one tensor, under torch's newer names or its older ones."""

import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None: all ranks of the world, as in torch

# torch 2.13 renamed both and warns about the old names, torch 2.11 has the old names alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor, part: Tensor, group: Group = None) -> dist.Work:
    """Start to fill `whole` with every rank's part, in the order of ranks; `part` may lie in it."""
    return _started(_all_gather(whole, part, group=group, async_op=True))


def reduce_scatter(part: Tensor, whole: Tensor, group: Group = None) -> dist.Work:
    """Start to add up the ranks' wholes; each rank gets the part of the sum that is its own."""
    return _started(_reduce_scatter(part, whole, group=group, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


def local_part(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor; any other tensor as it is."""
    to_local = getattr(x, "to_local", None)  # no import of DTensor for those without
    return x if to_local is None else to_local()
