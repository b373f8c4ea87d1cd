"""Attention by tiles: no more of the scores exists at a time than one tile, forward and backward.

The mathematics of FlashAttention (Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4), in plain
torch. What it does not bring is the speed: each tile here is several kernels, which hand it on
through memory.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.long_context.online import Tile, online_softmax

TILE = 64  # queries and keys of a tile
Rows = Float[Tensor, "*batch queries d"]
Keys = Float[Tensor, "*batch keys d"]


def tiled_forward(
    q: Rows, k: Keys, v: Keys, is_causal: bool = False, tile: int = TILE
) -> tuple[Rows, Float[Tensor, "*batch queries"]]:
    """Return softmax(q k^T / sqrt(d)) v and the logsumexp of each query's scores.

    Causal as torch's `F.scaled_dot_product_attention` has it: query i sees the keys 0 to i, also
    where there are more keys than queries. Tiles that no query sees are not computed. Scores are
    at least float32; the output has q's dtype, the logsumexp the scores'.
    """
    with torch.autocast(q.device.type, enabled=False):  # it would round each product to 16 bits
        parts = [
            online_softmax(_score_tiles(q[..., i : i + tile, :], i, k, v, is_causal, tile))
            for i in range(0, q.shape[-2], tile)
        ]
    outputs, logsumexps = zip(*parts, strict=True)
    return torch.cat(outputs, -2).to(q.dtype), torch.cat(logsumexps, -1)


def tiled_backward(
    q: Rows,
    k: Keys,
    v: Keys,
    output: Rows,
    logsumexp: Float[Tensor, "*batch queries"],
    gradient: Rows,
    is_causal: bool = False,
    tile: int = TILE,
) -> tuple[Rows, Keys, Keys]:
    """Return the gradients of q, k and v, at least float32, from what forward left.

    exp(score - logsumexp) is a weight as it was, so nothing has to be saved of the weights. If
    output and logsumexp are over more keys than k and v, these are those keys' parts of the
    gradients: that of q is their sum.
    """
    return _gradients(q, k, v, output, logsumexp, gradient, is_causal, tile)


def _gradients(
    q: Rows,
    k: Keys,
    v: Keys,
    output: Rows,
    logsumexp: Float[Tensor, "*batch queries"],
    gradient: Rows,
    is_causal: bool,
    tile: int,
) -> tuple[Rows, Keys, Keys]:
    work = _work(q)
    # Each weight's gradient is compared with their weighted mean, which is one number a query.
    mean = (gradient.to(work) * output.to(work)).sum(-1, keepdim=True)  # (..., T, 1)
    dq, dk, dv = (torch.zeros_like(x, dtype=work) for x in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1])
    for i in range(0, q.shape[-2], tile):
        rows = slice(i, i + tile)
        queries, upstream = q[..., rows, :].to(work), gradient[..., rows, :].to(work)
        for j in _starts(queries, i, k, is_causal, tile):
            keys = slice(j, j + tile)
            values = v[..., keys, :].to(work)
            scores = _scores(queries, i, k[..., keys, :].to(work), j, is_causal)
            weights = (scores - logsumexp[..., rows, None]).exp()
            dv[..., keys, :] += weights.mT @ upstream
            change = weights * (upstream @ values.mT - mean[..., rows, :]) * scale
            dq[..., rows, :] += change @ k[..., keys, :].to(work)
            dk[..., keys, :] += change.mT @ queries
    return dq, dk, dv


class TiledAttention(torch.autograd.Function):
    """Attention that keeps q, k, v, its output and one number a query for backward, no weights."""

    @staticmethod
    def forward(ctx: Any, q: Rows, k: Keys, v: Keys, is_causal: bool) -> Rows:
        """Return softmax(q k^T / sqrt(d)) v; causal: query i sees the keys 0 to i."""
        output, logsumexp = tiled_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.is_causal = is_causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Rows, Keys, Keys, None]:
        """Compute the weights again, tile by tile, from the logsumexp of their row."""
        q, k, v, output, logsumexp = ctx.saved_tensors
        found = _gradients(q, k, v, output, logsumexp, gradients[0], ctx.is_causal, TILE)
        dq, dk, dv = (x.to(like.dtype) for x, like in zip(found, (q, k, v), strict=True))
        return dq, dk, dv, None


def _score_tiles(
    queries: Tensor, start: int, k: Tensor, v: Tensor, is_causal: bool, tile: int
) -> Iterator[Tile]:
    """The tiles of keys that these queries see, from query number `start` on."""
    queries = queries.to(_work(queries))
    for j in _starts(queries, start, k, is_causal, tile):
        keys = k[..., j : j + tile, :].to(queries.dtype)
        yield _scores(queries, start, keys, j, is_causal), v[..., j : j + tile, :]


def _starts(queries: Tensor, start: int, k: Tensor, is_causal: bool, tile: int) -> range:
    """Where the tiles of keys begin that at least one of these queries sees."""
    last = start + queries.shape[-2]
    return range(0, min(k.shape[-2], last) if is_causal else k.shape[-2], tile)


def _scores(queries: Tensor, i: int, keys: Tensor, j: int, is_causal: bool) -> Tensor:
    """The scores of a tile whose first query is number i and whose first key is number j."""
    scores = (queries / math.sqrt(queries.shape[-1])) @ keys.mT  # (..., tile, tile)
    if is_causal and j + keys.shape[-2] - 1 > i:  # only tiles on the diagonal need a mask
        scores = scores.masked_fill(_later(scores, i, j), -torch.inf)
    return scores


def _later(scores: Tensor, i: int, j: int) -> Bool[Tensor, "queries keys"]:
    """True where a key comes after the query."""
    queries, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return (keys + j) > (queries + i).unsqueeze(-1)


def _work(x: Tensor) -> torch.dtype:
    """Sums over many keys are rounded in float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)
