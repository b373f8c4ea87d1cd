"""Attention over ranks by an exchange: parts of the sequence of all heads for all of it of some.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509).
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from shared.errors import InputError
from shared.ranks.collectives import Group

Part = Float[Tensor, "batch heads part d"]


def all_to_all_attention(
    q: Part,
    k: Part,
    v: Part,
    group: Group = None,
    is_causal: bool = False,
) -> Part:
    """Attention of this rank's positions, with gradients, by four exchanges.

    q, k, v (B, H, L / n, d): rank r has the r-th part of the sequence, of every head. In between it
    has the whole sequence of H / n heads, on which torch's own attention works as it does in one
    process. Backward is four exchanges as well. In a group of one nothing
    is sent.

    Raises InputError where the ranks cannot have equal numbers of heads.
    """
    n = dist.get_world_size(group)
    for name, x in (("query", q), ("key", k)):
        if x.shape[1] % n:
            heads, most = x.shape[1], max(d for d in range(1, n + 1) if x.shape[1] % d == 0)
            raise InputError(
                f"{heads} {name} heads cannot be shared out evenly over {n} ranks: "
                f"{most} ranks would do, or ring_attention, which cuts no heads"
            )
    whole = (_Exchange.apply(x, group, 1, 2) for x in (q, k, v))  # (B, H / n, L, d)
    attended = F.scaled_dot_product_attention(*whole, is_causal=is_causal, enable_gqa=True)
    return _Exchange.apply(attended, group, 2, 1)  # (B, H, L / n, d)


class _Exchange(torch.autograd.Function):
    """Cut along one dim, one piece to each rank; join what comes along the other.

    Every number has one place before and one after, so backward is the way back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, cut: int, join: int) -> Tensor:
        ctx.way = group, cut, join
        return exchanged(x, group, cut, join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        group, cut, join = ctx.way
        return _Exchange.apply(gradients[0], group, join, cut), None, None, None


def exchanged(x: Tensor, group: Group, cut: int, join: int) -> Tensor:
    """Send the i-th piece of x along `cut` to rank i; join what came along `join`, by ranks."""
    n = dist.get_world_size(group)
    if n == 1:
        return x.view_as(x)
    pieces = torch.stack(x.chunk(n, cut))  # (n, ...): the exchange cuts along dim 0
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces, group=group)
    return torch.cat(came.unbind(), join)
