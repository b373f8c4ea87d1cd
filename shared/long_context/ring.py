"""Attention over a ring of ranks: each keeps its queries, keys and values travel round.

Forward sends the keys and values of a rank n - 1 times, backward sends them n - 1 times again, with
the gradients that are added up on the way, and these once more, home to their rank. No rank ever
has more than two ranks' keys and values.
Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers" (arXiv 2310.01889).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.errors import InputError
from shared.long_context.online import merge
from shared.long_context.orders import Order, check_order, plain_order
from shared.long_context.tiles import tiled_backward, tiled_forward
from shared.ranks.collectives import Group

Part = Float[Tensor, "*batch part d"]


class PassedOn:
    """Tensors on their way to the next rank, while those of the previous one come in.

    In a group of one nothing is sent, and the tensors come back as they are.
    """

    def __init__(self, tensors: Sequence[Tensor], group: Group = None) -> None:
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        self._sent = [x.contiguous() for x in tensors]  # alive until they have left
        self._works: list[dist.Work] = []
        self._got = self._sent
        if n > 1:
            self._got = [torch.empty_like(x) for x in self._sent]
            there, back = (rank + 1) % n, (rank - 1) % n
            ops = [dist.P2POp(dist.isend, x, group=group, group_peer=there) for x in self._sent]
            ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=back) for x in self._got]
            self._works = dist.batch_isend_irecv(ops)

    def wait(self) -> list[Tensor]:
        """Return what the previous rank sent, once it is there and ours has left."""
        for work in self._works:
            work.wait()
        return self._got


def chunk_pairs(
    mine: Sequence[int], theirs: Sequence[int], is_causal: bool
) -> list[tuple[int, int, bool]]:
    """The pairs of chunks of which one sees the other: places in either list, and if causal.

    Of a chunk that lies before ours we see all keys, of our own those up to each query, of one
    that lies after ours nothing.
    """
    pairs = [(i, j) for i in range(len(mine)) for j in range(len(theirs))]
    seen = [(i, j) for i, j in pairs if not is_causal or theirs[j] <= mine[i]]
    return [(i, j, is_causal and theirs[j] == mine[i]) for i, j in seen]


def ring_forward(
    q: Part, k: Part, v: Part, group: Group, is_causal: bool, order: Order
) -> tuple[Part, Float[Tensor, "*batch part"]]:
    """Return this rank's output and logsumexp over the keys of all ranks, by n - 1 messages.

    Each rank holds the chunks that `order` names, one after the other. While a rank computes with
    the keys and values that it has, these are on their way to the next.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    mine, visiting = order[rank], [k, v]
    queries = q.chunk(len(mine), -2)
    done: list[Any] = [None] * len(mine)
    for step in range(n):
        coming = PassedOn(visiting, group) if step < n - 1 else None
        theirs = order[(rank - step) % n]
        keys, values = (x.chunk(len(theirs), -2) for x in visiting)
        for i, j, diagonal in chunk_pairs(mine, theirs, is_causal):
            new = tiled_forward(queries[i], keys[j], values[j], diagonal)
            new = new[0].to(new[1].dtype), new[1]  # sums are kept in the logsumexp's dtype
            done[i] = new if done[i] is None else merge(done[i], new)
        visiting = coming.wait() if coming else visiting
    outputs, logsumexps = zip(*done, strict=True)
    return torch.cat(outputs, -2).to(q.dtype), torch.cat(logsumexps, -1)


def ring_backward(
    q: Part,
    k: Part,
    v: Part,
    output: Part,
    logsumexp: Float[Tensor, "*batch part"],
    gradient: Part,
    group: Group,
    is_causal: bool,
    order: Order,
) -> tuple[Part, Part, Part]:
    """Return the gradients of this rank's q, k and v.

    Keys and values go round once more, and their gradients with them: every rank adds what its
    own queries give, and the last step brings them home.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    mine, visiting = order[rank], [k, v]
    ours = [x.chunk(len(mine), -2) for x in (q, output, gradient)]
    rows = logsumexp.chunk(len(mine), -1)
    dq, *found = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (q, k, v))
    for step in range(n):
        # Keys and values can leave before we compute with them, their gradients only after it.
        coming = PassedOn(visiting, group) if step < n - 1 else None
        theirs = order[(rank - step) % n]
        keys, values, dk, dv = (x.chunk(len(theirs), -2) for x in (*visiting, *found))
        for i, j, diagonal in chunk_pairs(mine, theirs, is_causal):
            queries, out, upstream = (x[i] for x in ours)
            parts = tiled_backward(queries, keys[j], values[j], out, rows[i], upstream, diagonal)
            for total, part in zip((dq.chunk(len(mine), -2)[i], dk[j], dv[j]), parts, strict=True):
                total += part
        found = PassedOn(found, group).wait()
        visiting = coming.wait() if coming else visiting
    dk, dv = found
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class RingAttention(torch.autograd.Function):
    """Keeps this rank's q, k, v, output and logsumexp; what visited is not kept."""

    @staticmethod
    def forward(
        ctx: Any, q: Part, k: Part, v: Part, group: Group, is_causal: bool, order: Order
    ) -> Part:
        """Return this rank's output."""
        output, logsumexp = ring_forward(q, k, v, group, is_causal, order)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.ring = group, is_causal, order
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Part, Part, Part, None, None, None]:
        """Go round the ring again."""
        q, k, v, output, logsumexp = ctx.saved_tensors
        left = output, logsumexp, gradients[0]
        return *ring_backward(q, k, v, *left, *ctx.ring), None, None, None


def ring_attention(
    q: Part,
    k: Part,
    v: Part,
    group: Group = None,
    is_causal: bool = False,
    order: Order | None = None,
) -> Part:
    """Attention of this rank's queries over the keys of all ranks, with gradients.

    q, k, v (*batch, part, d): this rank's chunks of the sequence by `order`; None is the plain
    one. Each of several ranks sends 2 (n - 1) parts in forward and 4 n - 2 in backward, a part
    being the bytes of k; gradients travel in float32 at least.

    Raises InputError for an order that is no partition over this number of ranks, and for a part
    that cannot be cut into the order's chunks.
    """
    n = dist.get_world_size(group)
    order = plain_order(n) if order is None else order
    check_order(order, n)
    chunks = len(order[dist.get_rank(group)])
    for name, x in (("queries", q), ("keys", k)):
        if x.shape[-2] % chunks:
            raise InputError(
                f"{x.shape[-2]} {name} on a rank cannot be cut into {chunks} equal chunks"
            )
    return RingAttention.apply(q, k, v, group, is_causal, order)
