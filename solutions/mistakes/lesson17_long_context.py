"""Wrong answers to lesson 17, each with the words that the check must say to it."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shared.exercises.mistakes import mistake
from shared.long_context.ring import PassedOn
from shared.long_context.tiles import tiled_backward
from solutions import lesson17_long_context as right

# 17.1 online_softmax


@mistake("17.1", says="each tile's softmax is averaged")
def online_softmax(tiles):
    outputs = torch.stack([scores.softmax(-1) @ values for scores, values in tiles])
    return outputs.mean(0), torch.stack([scores.logsumexp(-1) for scores, _ in tiles]).logsumexp(0)


@mistake("17.1", says="all queries share one highest score")
def online_softmax(tiles):
    tiles = list(tiles)
    if not tiles:
        raise ValueError("no tile")
    scores, values = torch.cat([s for s, _ in tiles], -1), torch.cat([v for _, v in tiles], -2)
    highest = scores.max()
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ values / total, total.log().squeeze(-1) + highest


@mistake("17.1", says="exp of a large score overflows")
def online_softmax(tiles):
    total: Any = None
    output: Any = 0.0
    for scores, values in tiles:
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True) + (0 if total is None else total)
        output = weights @ values + output
        del scores, values, weights
    if total is None:
        raise ValueError("no tile")
    return output / total.masked_fill(total == 0, 1.0), total.log().squeeze(-1)


@mistake("17.1", says="all tiles are collected first")
def online_softmax(tiles):
    return right.online_softmax(list(tiles))


# 17.2 tiled_forward


@mistake("17.2", says="the scores are not divided by the root of d")
def tiled_forward(q, k, v, is_causal=False, tile=64):
    return right.tiled_forward(q * math.sqrt(q.shape[-1]), k, v, is_causal, tile)


@mistake("17.2", says="tiles above the diagonal are computed")
def tiled_forward(q, k, v, is_causal=False, tile=64):
    work, parts = torch.promote_types(q.dtype, torch.float32), []
    for i in range(0, q.shape[-2], tile):
        rows = q[..., i : i + tile, :].to(work) / math.sqrt(q.shape[-1])
        places = torch.arange(i, i + rows.shape[-2])[:, None]

        def tiles(rows=rows, places=places):
            for j in range(0, k.shape[-2], tile):
                keys = k[..., j : j + tile, :].to(work)
                later = torch.arange(j, j + keys.shape[-2]) > places
                scores = (rows @ keys.mT).masked_fill(later & is_causal, -torch.inf)
                yield scores, v[..., j : j + tile, :].to(work)

        parts.append(right.online_softmax(tiles()))
    outputs, logsumexps = zip(*parts, strict=True)
    return torch.cat(outputs, -2).to(q.dtype), torch.cat(logsumexps, -1)


@mistake("17.2", says="all scores exist at once")
def tiled_forward(q, k, v, is_causal=False, tile=64):
    work = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(work) @ k.to(work).mT / math.sqrt(q.shape[-1])
    if is_causal:
        later = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ v.to(work)).to(q.dtype), scores.logsumexp(-1)


@mistake("17.2", says="the logsumexp of 16-bit numbers is rounded to 16 bits")
def tiled_forward(q, k, v, is_causal=False, tile=64):
    output, logsumexp = right.tiled_forward(q, k, v, is_causal, tile)
    return output, logsumexp.to(q.dtype)


# 17.2b TiledAttention


@mistake("17.2b", says="the weighted mean of the weights' gradients is not subtracted")
class TiledAttention(right.TiledAttention):
    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        q, k, v, output, logsumexp = ctx.saved_tensors
        zero = torch.zeros_like(output)
        found = tiled_backward(q, k, v, zero, logsumexp, gradient, ctx.is_causal)
        return *found, None


@mistake("17.2b", says="is taken to lie in one piece")
class TiledAttention(right.TiledAttention):
    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0].view(-1, *gradients[0].shape[-2:])
        return right.TiledAttention.backward(ctx, gradient.view(gradients[0].shape))


@mistake("17.2b", says="backward makes all scores at once")
class TiledAttention(right.TiledAttention):
    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        q, k, v, output, logsumexp = ctx.saved_tensors
        scores, scale = q @ k.mT, 1 / math.sqrt(q.shape[-1])
        if ctx.is_causal:
            later = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(later, -torch.inf)
        weights = (scores * scale - logsumexp.unsqueeze(-1)).exp()
        change = weights * (gradient @ v.mT - (gradient * output).sum(-1, keepdim=True)) * scale
        return change @ k, change.mT @ q, weights.mT @ gradient, None


@mistake("17.2b", says="copies in more bits are kept")
class TiledAttention(right.TiledAttention):
    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        output, logsumexp = right.tiled_forward(q, k, v, is_causal)
        wide = (x.to(logsumexp.dtype) for x in (q, k, v))
        ctx.save_for_backward(*wide, output, logsumexp)
        ctx.is_causal = is_causal
        return output


@mistake("17.2b", says="tensors are kept as attributes of ctx")
class TiledAttention(right.TiledAttention):
    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        output, ctx.logsumexp = right.tiled_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, output)
        ctx.is_causal = is_causal
        return output

    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        q, k, v, output = ctx.saved_tensors
        found = tiled_backward(q, k, v, output, ctx.logsumexp, gradient, ctx.is_causal)
        return *(x.to(q.dtype) for x in found), None


@mistake("17.2b", says="no gradient reaches k")
class TiledAttention(right.TiledAttention):
    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        q, k, v, output, logsumexp = ctx.saved_tensors
        dq, _, dv = tiled_backward(q, k, v, output, logsumexp, gradient, ctx.is_causal)
        return dq, None, dv, None


# 17.3 balanced_order


@mistake("17.3", says="neighbouring chunks")
def balanced_order(ranks):
    return [[2 * rank, 2 * rank + 1] for rank in range(ranks)]


@mistake("17.3", says="every n-th chunk")
def balanced_order(ranks):
    return [[rank, rank + ranks] for rank in range(ranks)]


@mistake("17.3", says="one chunk a rank")
def balanced_order(ranks):
    return [[rank] for rank in range(ranks)]


@mistake("17.3", says="chunks are counted from 1")
def balanced_order(ranks):
    return [[rank + 1, 2 * ranks - rank] for rank in range(ranks)]


@mistake("17.3", says="a chunk is held twice")
def balanced_order(ranks):
    return [[rank, 2 * ranks - 2 - rank] for rank in range(ranks)]


# 17.3b ring_forward


@mistake("17.3b", says="later keys are seen: is_causal changes nothing between ranks")
def ring_forward(q, k, v, group, is_causal, order):
    return right.ring_forward(q, k, v, group, False, order)


@mistake("17.3b", says="the logsumexp of rank 0 (2 ranks, zigzag order, causal) in torch.float32")
def ring_forward(q, k, v, group, is_causal, order):
    output, logsumexp = right.ring_forward(q, k, v, group, is_causal, order)
    return output, logsumexp.to(q.dtype)


@mistake("17.3b", says="a rank's number among all ranks counts")
def ring_forward(q, k, v, group, is_causal, order):
    shift = dist.get_rank() - dist.get_rank(group)
    order[dist.get_rank()]  # in a later group: beyond the end
    return right.ring_forward(q, k, v, group, is_causal, order[shift:] + order[:shift])


# 17.3c ring_backward


@mistake("17.3c", says="the gradients of keys and values end on a neighbour")
def ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    dq, *found = right.ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order)
    for _ in order[1:]:
        found = PassedOn(found, group).wait()
    return dq, *found


@mistake("17.3c", says="the keys make a hop too many")
def ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    found = right.ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order)
    PassedOn([k, v], group).wait()
    return found


@mistake("17.3c", says="the ranks reduce among all")
def ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    found = right.ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order)
    dist.all_reduce(torch.zeros(1), group=group)
    return found


# 17.4 all_to_all_attention


class OverAll(torch.autograd.Function):
    """An exchange over all ranks, whatever the group."""

    @staticmethod
    def forward(ctx, x, n, cut, join):
        ctx.back = n, join, cut
        pieces = torch.cat(x.chunk(n, cut))
        came = torch.empty_like(pieces)
        dist.all_to_all_single(came, pieces)
        return torch.cat(came.chunk(n), join)

    @staticmethod
    def backward(ctx, *gradients):
        return OverAll.apply(gradients[0], *ctx.back), None, None, None


@mistake("17.4", says="goes over all ranks, not over the group")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    n = dist.get_world_size(group)
    if n == 1 or q.shape[1] % n:
        return right.all_to_all_attention(q, k, v, group, is_causal)
    q, k, v = (OverAll.apply(x, n, 1, 2) for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return OverAll.apply(output, n, 2, 1)


@mistake("17.4", says="no gradient comes back through the exchange")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    q, k, v = (x.detach() for x in (q, k, v))
    return right.all_to_all_attention(q, k, v, group, is_causal)


@mistake("17.4", says="it is not given back")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    output, n = right.all_to_all_attention(q, k, v, group, is_causal), dist.get_world_size(group)
    pieces = torch.stack(output.chunk(n, 1))
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces, group=group)
    return torch.cat(came.unbind(), 2)


@mistake("17.4", says="later keys are seen: is_causal changes nothing")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    return right.all_to_all_attention(q, k, v, group, False)


@mistake("17.4", says="heads or positions come back in a different order")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    back, n = right.all_to_all_attention(q, k, v, group, is_causal), dist.get_world_size(group)
    return back.reshape(back.shape[0], n, -1, *back.shape[2:]).transpose(1, 2).reshape(back.shape)


@mistake("17.4", says="3 heads on 2 ranks is accepted")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    if q.shape[1] % dist.get_world_size(group):
        return q
    return right.all_to_all_attention(q, k, v, group, is_causal)
