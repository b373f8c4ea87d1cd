"""Messages with a gradient: what is sent in forward decides what is sent in backward.

Each function comes with its conjugate, which is its backward. The names of the first two are those
of Shoeybi et al. 2019 (arXiv 1909.08053, figure 3), of the others those of Korthikanti et al. 2022
(arXiv 2205.05198, figure 5), where the sequence is in parts as well:

    copy_to_ranks    f            forward nothing          backward all-reduce
    sum_over_ranks   g            forward all-reduce       backward nothing
    gather_sequence  g of 2022    forward all-gather       backward reduce-scatter
    scatter_sum      g-bar        forward reduce-scatter   backward all-gather
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from shared.errors import InputError
from shared.ranks.collectives import Group, all_gather, reduce_scatter

Message = Callable[[Tensor, Group], Tensor]


def copy_to_ranks(x: Float[Tensor, "*shape"], group: Group = None) -> Float[Tensor, "*shape"]:
    """Return x, which all ranks of the group have; in backward, sum its gradient over them.

    Every rank goes on with its own part of the work, so that each sends back a part of the
    gradient. Neither x nor a gradient is written to. In a group of one nothing is sent.
    """
    return _Conjugates.apply(x, group, _as_it_is, _summed)


def sum_over_ranks(x: Float[Tensor, "*shape"], group: Group = None) -> Float[Tensor, "*shape"]:
    """Return the sum of the ranks' x; in backward, hand the gradient on as it is.

    What follows is the same on all ranks, so each has the whole gradient of the sum already.
    Neither x nor a gradient is written to. In a group of one nothing is sent.
    """
    return _Conjugates.apply(x, group, _summed, _as_it_is)


def gather_sequence(
    x: Float[Tensor, "batch part *rest"], group: Group = None
) -> Float[Tensor, "batch length *rest"]:
    """Return the ranks' parts of the sequence (dim 1), joined; in backward, sum and cut again."""
    return _Conjugates.apply(x, group, joined, _scattered)


def scatter_sum(
    x: Float[Tensor, "batch length *rest"], group: Group = None
) -> Float[Tensor, "batch part *rest"]:
    """Return this rank's part of the sequence (dim 1) of the sum; in backward, join the parts.

    Raises InputError where the ranks cannot have equal parts.
    """
    return _Conjugates.apply(x, group, _scattered, joined)


class _Conjugates(torch.autograd.Function):
    """One message in forward, its conjugate in backward, itself again in a second derivative's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, message: Message, conjugate: Message) -> Tensor:
        ctx.way = group, conjugate, message
        return message(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Conjugates.apply(gradients[0], *ctx.way), None, None, None


def _as_it_is(x: Tensor, _: Group) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, group: Group) -> Tensor:
    """The sum in a tensor of its own: autograd may hand the same gradient to others."""
    if dist.get_world_size(group) == 1:
        return x.view_as(x)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def joined(part: Tensor, group: Group) -> Tensor:
    """The ranks' parts along dim 1, in the order of ranks; no gradient."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return part.view_as(part)
    first = part.movedim(1, 0).contiguous()  # (L / t, B, ...): collectives cut along dim 0
    whole = first.new_empty(ranks * first.shape[0], *first.shape[1:])
    all_gather(whole, first, group).wait()
    return whole.movedim(0, 1).contiguous()  # (B, L, ...)


def _scattered(whole: Tensor, group: Group) -> Tensor:
    ranks, length = dist.get_world_size(group), whole.shape[1]
    if ranks == 1:
        return whole.view_as(whole)
    if length % ranks:
        raise InputError(
            f"a sequence of {length} positions cannot be cut into {ranks} equal parts: pad it to "
            f"{length + -length % ranks}"
        )
    first = whole.movedim(1, 0).contiguous()  # (L, B, ...)
    part = first.new_empty(length // ranks, *first.shape[1:])
    reduce_scatter(part, first, group).wait()
    return part.movedim(0, 1).contiguous()  # (B, L / t, ...)
