"""Wrong answers to lesson 17, each with the words that the check must say to it."""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shared.exercises.mistakes import mistake
from shared.long_context.online import merge
from shared.long_context.ring import PassedOn, chunk_pairs
from shared.long_context.tiles import tiled_backward
from solutions import lesson17_long_context as right

# 17.1 online_softmax


def online(
    tiles, rescale_sum=True, rescale_output=True, subtract=True, safe=True, log=True, whole=True,
    top: Any = None,
):  # fmt: skip
    """The recurrence, with one thing left out; `top` is the first maximum."""
    total: Any = None
    output: Any = None
    for scores, values in tiles:
        best = scores.amax(-1, keepdim=True)
        new = best if top is None else torch.maximum(top, best)
        level = new.masked_fill(new == -torch.inf, 0.0) if safe else new
        level = level if subtract else torch.zeros_like(level)
        weights = (scores - level).exp()
        shrink = 1.0 if top is None else (top - level).exp() if subtract else 1.0
        total = weights.sum(-1, keepdim=True) + (
            0 if total is None else total * (shrink if rescale_sum else 1)
        )
        output = weights @ values + (
            0 if output is None else output * (shrink if rescale_output else 1)
        )
        top = new
        del scores, values, weights
    if total is None:
        raise ValueError("no tile")
    base = top if subtract else torch.zeros_like(top)
    logsumexp = total.log() + (base if log else 0)
    logsumexp = logsumexp.masked_fill(top == -torch.inf, -torch.inf) if safe else logsumexp
    divisor = total.masked_fill(total == 0, 1.0) if safe else total
    return (output / divisor if whole else output), logsumexp.squeeze(-1)


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


@mistake("17.1", says="the sum is rescaled and the output is not")
def online_softmax(tiles):
    return online(tiles, rescale_output=False)


@mistake("17.1", says="exp of a large score overflows")
def online_softmax(tiles):
    return online(tiles, subtract=False)


@mistake("17.1", says="all tiles are collected first")
def online_softmax(tiles):
    return right.online_softmax(list(tiles))


# 17.2 tiled_forward


def by_tiles(
    q, k, v, is_causal, tile, scale=True, local=False, skip=True, shift=0, mask=True, work=None
):
    """Tiles of queries against tiles of keys, with one thing mistaken."""
    work = work or torch.promote_types(q.dtype, torch.float32)
    parts = []
    for i in range(0, q.shape[-2], tile):
        rows = q[..., i : i + tile, :].to(work)
        rows = rows / math.sqrt(q.shape[-1]) if scale else rows
        places = torch.arange(i, i + rows.shape[-2]) + shift

        def tiles(rows=rows, places=places):
            for j in range(0, k.shape[-2], tile):
                keys = k[..., j : j + tile, :].to(work)
                scores = rows @ keys.mT
                later = torch.arange(j, j + keys.shape[-2]) > places[:, None]
                if local:
                    later = torch.arange(keys.shape[-2]) > torch.arange(len(places))[:, None]
                if is_causal and skip and j > int(places[-1]):
                    return
                if is_causal and mask:
                    scores = scores.masked_fill(later, -torch.inf)
                yield scores, v[..., j : j + tile, :].to(work)

        parts.append(right.online_softmax(tiles()))
    outputs, logsumexps = zip(*parts, strict=True)
    return torch.cat(outputs, -2).to(q.dtype), torch.cat(logsumexps, -1)


@mistake("17.2", says="the scores are not divided by the root of d")
def tiled_forward(q, k, v, is_causal=False, tile=64):
    return by_tiles(q, k, v, is_causal, tile, scale=False)


@mistake("17.2", says="the positions are counted inside of the tile")
def tiled_forward(q, k, v, is_causal=False, tile=64):
    return by_tiles(q, k, v, is_causal, tile, local=True, skip=False)


@mistake("17.2", says="tiles above the diagonal are computed")
def tiled_forward(q, k, v, is_causal=False, tile=64):
    return by_tiles(q, k, v, is_causal, tile, skip=False)


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
    return by_tiles(q, k, v, is_causal, tile, work=q.dtype)


# 17.2b TiledAttention


class Tiled(torch.autograd.Function):
    """Right; the mistakes change one method of it."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        output, logsumexp = right.tiled_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.is_causal = is_causal
        return output

    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        q, k, v, output, logsumexp = ctx.saved_tensors
        found = tiled_backward(q, k, v, output, logsumexp, gradient, ctx.is_causal)
        return *(x.to(q.dtype) for x in found), None


def whole_weights(q, k, logsumexp, is_causal):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf
        )
    return (scores - logsumexp.unsqueeze(-1)).exp()


def from_weights(q, k, v, weights, mean, gradient, scale):
    change = weights * (gradient @ v.mT - mean) * scale
    return change @ k, change.mT @ q, weights.mT @ gradient


@mistake("17.2b", says="the weighted mean of the weights' gradients is not subtracted")
class TiledAttention(Tiled):
    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        q, k, v, output, logsumexp = ctx.saved_tensors
        zero = torch.zeros_like(output)
        found = tiled_backward(q, k, v, zero, logsumexp, gradient, ctx.is_causal)
        return *found, None


@mistake("17.2b", says="is taken to lie in one piece")
class TiledAttention(Tiled):
    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0].view(-1, *gradients[0].shape[-2:])
        return Tiled.backward(ctx, gradient.view(gradients[0].shape))


@mistake("17.2b", says="the scores' scale is missing in backward")
class TiledAttention(Tiled):
    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        q, k, v, output, logsumexp = ctx.saved_tensors
        dq, dk, dv = tiled_backward(q, k, v, output, logsumexp, gradient, ctx.is_causal)
        root = math.sqrt(q.shape[-1])
        return dq * root, dk * root, dv, None


@mistake("17.2b", says="backward makes all scores at once")
class TiledAttention(Tiled):
    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        q, k, v, output, logsumexp = ctx.saved_tensors
        weights = whole_weights(q, k, logsumexp, ctx.is_causal)
        mean = (gradient * output).sum(-1, keepdim=True)
        scale = 1 / math.sqrt(q.shape[-1])
        return *from_weights(q, k, v, weights, mean, gradient, scale), None


@mistake("17.2b", says="copies in more bits are kept")
class TiledAttention(Tiled):
    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        output, logsumexp = right.tiled_forward(q, k, v, is_causal)
        wide = (x.to(logsumexp.dtype) for x in (q, k, v))
        ctx.save_for_backward(*wide, output, logsumexp)
        ctx.is_causal = is_causal
        return output


@mistake("17.2b", says="tensors are kept as attributes of ctx")
class TiledAttention(Tiled):
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
class TiledAttention(Tiled):
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


def ring(
    q, k, v, group, is_causal, order, hops=None, owner=-1, pairs=None, average=False, n=None,
    rank=None,
):  # fmt: skip
    """The ring, with one thing mistaken."""
    n = n or dist.get_world_size(group)
    rank = dist.get_rank(group) if rank is None else rank
    mine, here = order[rank], [k, v]
    done = [[] for _ in mine]
    for step in range(n):
        coming = PassedOn(here, group) if step < (n - 1 if hops is None else hops) else None
        theirs = order[(rank + owner * step) % n]
        keys, values = (x.chunk(len(theirs), -2) for x in here)
        for i, j, diagonal in (pairs or chunk_pairs)(mine, theirs, is_causal):
            queries = q.chunk(len(mine), -2)[i]
            output, logsumexp = right.tiled_forward(queries, keys[j], values[j], diagonal)
            done[i].append((output.to(logsumexp.dtype), logsumexp))
        here = coming.wait() if coming else here
    merged = []
    for parts in done:
        total = parts[0]
        for each in parts[1:]:
            total = merge(total, each)
        if average:
            total = sum(output for output, _ in parts) / len(parts), total[1]
        merged.append(total)
    outputs, logsumexps = zip(*merged, strict=True)
    return torch.cat(outputs, -2).to(q.dtype), torch.cat(logsumexps, -1)


@mistake("17.3b", says="what the keys of each rank give is averaged")
def ring_forward(q, k, v, group, is_causal, order):
    return ring(q, k, v, group, is_causal, order, average=True)


@mistake("17.3b", says="the logsumexp of rank 0 (2 ranks, zigzag order, causal) in torch.float32")
def ring_forward(q, k, v, group, is_causal, order):
    output, logsumexp = ring(q, k, v, group, is_causal, order)
    return output, logsumexp.to(q.dtype)


@mistake("17.3b", says="later keys are seen: is_causal changes nothing between ranks")
def ring_forward(q, k, v, group, is_causal, order):
    return ring(q, k, v, group, False, order)


@mistake("17.3b", says="one hop too many")
def ring_forward(q, k, v, group, is_causal, order):
    return ring(q, k, v, group, is_causal, order, hops=len(order))


@mistake("17.3b", says="a rank's number among all ranks counts")
def ring_forward(q, k, v, group, is_causal, order):
    return ring(q, k, v, group, is_causal, order, rank=dist.get_rank())


# 17.3c ring_backward


def ring_back(
    q, k, v, output, logsumexp, gradient, group, is_causal, order, hops=0, keys_too=0, apart=False
):  # fmt: skip
    """The ring's backward, whose gradients make n + `hops` hops and keys n - 1 + `keys_too`."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    mine, here = order[rank], [k, v]
    dq, *found = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (q, k, v))
    for step in range(n):
        coming = PassedOn(here, group) if step < n - 1 + keys_too else None
        theirs = order[(rank - step) % n]
        cut = [x.chunk(len(theirs), -2) for x in (*here, *found)]
        for i, j, diagonal in chunk_pairs(mine, theirs, is_causal):
            own = [x.chunk(len(mine), -2)[i] for x in (q, output, gradient)]
            rows = logsumexp.chunk(len(mine), -1)[i]
            if apart:
                own[1], rows = right.tiled_forward(own[0], cut[0][j], cut[1][j], diagonal)
            each = tiled_backward(own[0], cut[0][j], cut[1][j], own[1], rows, own[2], diagonal)
            places = dq.chunk(len(mine), -2)[i], cut[2][j], cut[3][j]
            for total, part in zip(places, each, strict=True):
                total += part
        if step < n + hops:
            found = PassedOn(found, group).wait()
        here = coming.wait() if coming else here
    for _ in range(hops):
        found = PassedOn(found, group).wait()
    return dq.to(q.dtype), *(x.to(k.dtype) for x in found)


@mistake("17.3c", says="the gradients of keys and values end on a neighbour")
def ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    return ring_back(q, k, v, output, logsumexp, gradient, group, is_causal, order, hops=-1)


@mistake("17.3c", says="the gradients travel against the keys, or one hop too far")
def ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    return ring_back(q, k, v, output, logsumexp, gradient, group, is_causal, order, hops=1)


@mistake("17.3c", says="the keys make a hop too many")
def ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    n = len(order)
    extra = 1 if n > 1 else 0
    return ring_back(q, k, v, output, logsumexp, gradient, group, is_causal, order, keys_too=extra)


@mistake("17.3c", says="the ranks reduce among all")
def ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    found = right.ring_backward(q, k, v, output, logsumexp, gradient, group, is_causal, order)
    dist.all_reduce(torch.zeros(1), group=group)
    return found


# 17.4 all_to_all_attention


def swapped(x, group, cut, join):
    """One exchange; no gradient."""
    n = dist.get_world_size(group)
    if n == 1:
        return x
    pieces = torch.stack(x.chunk(n, cut))
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces, group=group)
    return torch.cat(came.unbind(), join)


class Swap(torch.autograd.Function):
    """An exchange whose backward is what it is given."""

    @staticmethod
    def forward(ctx, x, group, cut, join, back):
        ctx.back = group, cut, join, back
        return swapped(x, group, cut, join)

    @staticmethod
    def backward(ctx, *gradients):
        gradient = gradients[0]
        group, cut, join, back = ctx.back
        return back(gradient, group, cut, join), None, None, None, None


def way_back(gradient, group, cut, join):
    return swapped(gradient, group, join, cut)


def checked_heads(q, group):
    n = dist.get_world_size(group)
    if q.shape[1] % n:
        raise ValueError(f"{q.shape[1]} heads on {n} ranks")


def exchange(q, k, v, group, is_causal, give_back=True, back=way_back, heads=True):
    """Three exchanges, attention, one exchange."""
    if heads:
        checked_heads(q, group)
    q, k, v = (Swap.apply(x, group, 1, 2, back) for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return Swap.apply(output, group, 2, 1, back) if give_back else output


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
    checked_heads(q, group)
    n = dist.get_world_size(group)
    if n == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    q, k, v = (OverAll.apply(x, n, 1, 2) for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return OverAll.apply(output, n, 2, 1)


@mistake("17.4", says="no gradient comes back through the exchange")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    checked_heads(q, group)
    q, k, v = (swapped(x, group, 1, 2).detach() for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return swapped(output, group, 2, 1)


@mistake("17.4", says="it is not given back")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    return exchange(q, k, v, group, is_causal, give_back=False)


@mistake("17.4", says="later keys are seen: is_causal changes nothing")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    return exchange(q, k, v, group, False)


@mistake("17.4", says="each rank attends to its own part of the sequence alone")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    checked_heads(q, group)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


@mistake("17.4", says="heads or positions come back in a different order")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    checked_heads(q, group)
    n = dist.get_world_size(group)
    if n == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    q, k, v = (Swap.apply(x, group, 1, 2, way_back) for x in (q, k, v))
    output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    back = Swap.apply(output, group, 2, 1, way_back)
    return back.reshape(back.shape[0], n, -1, *back.shape[2:]).transpose(1, 2).reshape(back.shape)


@mistake("17.4", says="3 heads on 2 ranks is accepted")
def all_to_all_attention(q, k, v, group=None, is_causal=False):
    n = dist.get_world_size(group)
    if q.shape[1] % n:
        return q
    return exchange(q, k, v, group, is_causal, heads=False)
