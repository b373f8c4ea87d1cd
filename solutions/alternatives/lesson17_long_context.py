"""Right answers to lesson 17 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shared.long_context.online import merge
from solutions import lesson17_long_context as right
from solutions.alternatives.rings import (
    backward_by_parts,
    backward_in_one,
    ring_of_requests,
    ring_of_rows,
)


def softmax_by_merging(tiles):
    """Each tile's own softmax and logsumexp, merged two by two."""
    total = None
    for scores, values in tiles:
        logsumexp = scores.logsumexp(-1)
        safe = torch.nan_to_num(logsumexp, neginf=0.0)
        mine = (scores - safe.unsqueeze(-1)).exp() @ values, logsumexp
        total = mine if total is None else merge(total, mine)
        del scores, values
    if total is None:
        raise ValueError("no tiles")
    return total


def softmax_with_floor(tiles):
    """A maximum that starts at the lowest finite number, so that no -inf meets another."""
    top = None
    for scores, values in tiles:
        floor = torch.finfo(scores.dtype).min / 4
        if top is None:
            top = scores.new_full((*scores.shape[:-1], 1), floor)
            total, output = torch.zeros_like(top), values.new_zeros(1)
        higher = scores.amax(-1, keepdim=True).clamp(min=top)
        weights, shrink = torch.exp(scores - higher), torch.exp(top - higher)
        total = total * shrink + weights.sum(-1, keepdim=True)
        output = output * shrink + weights @ values
        top = higher
        del scores, values, weights
    if top is None:
        raise ValueError("a softmax over nothing")
    seen = total > 0
    return torch.where(seen, output / total, 0 * output), torch.where(
        seen, top + total.log(), -torch.inf
    ).squeeze(-1)


def forward_by_keys(q, k, v, is_causal=False, tile=64):
    """Keys outside, queries inside: every tile of queries carries its partial result along."""
    work = torch.promote_types(q.dtype, torch.float32)
    starts = range(0, q.shape[-2], tile)
    partial: list = [None] * len(starts)
    for j in range(0, k.shape[-2], tile):
        keys, values = (x[..., j : j + tile, :].to(work) for x in (k, v))
        for number, i in enumerate(starts):
            rows = q[..., i : i + tile, :].to(work)
            if is_causal and j >= i + rows.shape[-2]:
                continue
            scores = (rows @ keys.mT) * (1 / math.sqrt(q.shape[-1]))
            if is_causal:
                ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
                scores = scores.masked_fill(ones.triu(1 + i - j), -torch.inf)
            new = softmax_by_merging([(scores, values)])
            partial[number] = new if partial[number] is None else merge(partial[number], new)
    outputs, logsumexps = zip(*partial, strict=True)
    return torch.cat(outputs, -2).to(q.dtype), torch.cat(logsumexps, -1)


def forward_into_buffers(q, k, v, is_causal=False, tile=64):
    """Results written into tensors that were made before."""
    work = torch.promote_types(q.dtype, torch.float32)
    output, logsumexp = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=work)
    for i in range(0, q.shape[-2], tile):
        rows = slice(i, min(i + tile, q.shape[-2]))

        def tiles(rows=rows):
            last = rows.stop if is_causal else k.shape[-2]
            for j in range(0, min(last, k.shape[-2]), tile):
                end = min(j + tile, k.shape[-2])
                scores = torch.einsum("...td,...sd->...ts", q[..., rows, :].to(work),
                                      k[..., j:end, :].to(work)) / q.shape[-1] ** 0.5  # fmt: skip
                if is_causal:
                    places = torch.arange(rows.start, rows.stop).unsqueeze(1)
                    scores = scores.where(torch.arange(j, end) <= places, -torch.inf)
                yield scores, v[..., j:end, :].to(work)

        output[..., rows, :], logsumexp[..., rows] = right.online_softmax(tiles())
    return output, logsumexp


class BackwardByQueries(torch.autograd.Function):
    """Tiles of queries outside in backward; each tile's forward is differentiated by autograd."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        output, logsumexp = right.tiled_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.causal = is_causal
        return output

    @staticmethod
    def backward(ctx, *grads):
        dtype = grads[0].dtype
        q, k, v, output, logsumexp = (x.to(ctx.saved_tensors[4].dtype) for x in ctx.saved_tensors)
        grad = grads[0].to(logsumexp.dtype)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (grad * output).sum(-1)
        for i in range(0, q.shape[-2], 64):
            rows = slice(i, i + 64)
            for j in range(0, k.shape[-2], 64):
                if ctx.causal and j > i + 63:
                    break
                keys = slice(j, j + 64)
                with torch.enable_grad():
                    own = [x.detach().requires_grad_() for x in (q[..., rows, :], k[..., keys, :])]
                    scores = own[0] @ own[1].mT / q.shape[-1] ** 0.5
                weights = (scores.detach() - logsumexp[..., rows].unsqueeze(-1)).exp()
                if ctx.causal:
                    weights = weights.tril(i - j)
                dv[..., keys, :] += weights.mT @ grad[..., rows, :]
                inner = grad[..., rows, :] @ v[..., keys, :].mT - delta[..., rows].unsqueeze(-1)
                found = torch.autograd.grad(scores, own, weights * inner)
                dq[..., rows, :] += found[0]
                dk[..., keys, :] += found[1]
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None


class BackwardByKeys(torch.autograd.Function):
    """Tiles of keys outside, in smaller tiles than forward's."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal):
        ctx.is_causal = is_causal
        output, logsumexp = forward_by_keys(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx, *grads):
        dtype, wide = grads[0].dtype, ctx.saved_tensors[4].dtype
        q, k, v, output, logsumexp = (x.to(wide) for x in ctx.saved_tensors)
        grad = grads[0].to(wide)
        gives, scale = grad * output, q.shape[-1] ** -0.5
        dq, columns = torch.zeros_like(q), ([], [])
        for j in range(0, k.shape[-2], 32):
            keys, values = k[..., j : j + 32, :], v[..., j : j + 32, :]
            dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
            for i in range(0, q.shape[-2], 32):
                rows = slice(i, i + 32)
                if ctx.is_causal and j > i + 31:
                    continue
                scores = torch.einsum("...td,...sd->...ts", q[..., rows, :] * scale, keys)
                weights = torch.exp(scores - logsumexp[..., rows, None])
                weights = weights.tril(i - j) if ctx.is_causal else weights
                dv = dv + torch.einsum("...ts,...td->...sd", weights, grad[..., rows, :])
                inner = torch.einsum("...td,...sd->...ts", grad[..., rows, :], values)
                change = scale * weights * (inner - gives[..., rows, :].sum(-1, keepdim=True))
                dq[..., rows, :] += change @ keys
                dk = dk + change.mT @ q[..., rows, :]
            columns[0].append(dk)
            columns[1].append(dv)
        dk, dv = (torch.cat(each, -2).to(dtype) for each in columns)
        return dq.to(dtype), dk, dv, None


def order_from_both_ends(ranks):
    """Chunks dealt from both ends."""
    left = list(range(2 * ranks))
    return [(left.pop(0), left.pop()) for _ in range(ranks)]


def order_backwards(ranks):
    """The last rank has the outermost pair, the late chunk first."""
    return [[ranks + r, ranks - 1 - r] for r in range(ranks)]


class Swapped(torch.autograd.Function):
    """The exchange of heads for sequence, by lists."""

    @staticmethod
    def forward(ctx, x, group, to_heads):
        ctx.group, ctx.to_heads = group, to_heads
        n = dist.get_world_size(group)
        if n == 1:
            return x.clone()
        b, h, t, d = x.shape
        if to_heads:  # (B, H, L / n, d) -> (n, B, H / n, L / n, d)
            out = x.view(b, n, h // n, t, d).transpose(0, 1).contiguous()
            came = torch.empty_like(out)
            dist.all_to_all_single(came, out, group=group)
            return came.permute(1, 2, 0, 3, 4).reshape(b, h // n, n * t, d)
        out = x.view(b, h, n, t // n, d).permute(2, 0, 1, 3, 4).contiguous()
        came = torch.empty_like(out)
        dist.all_to_all_single(came, out, group=group)
        return came.transpose(0, 1).reshape(b, n * h, t // n, d)

    @staticmethod
    def backward(ctx, *grads):
        grad = grads[0]
        return Swapped.apply(grad.contiguous(), ctx.group, not ctx.to_heads), None, None


def attention_by_reshapes(q, k, v, group=None, is_causal=False):
    """Four exchanges by view and permute."""
    n = dist.get_world_size(group)
    if q.shape[1] % n or k.shape[1] % n:
        raise ValueError(f"{q.shape[1]} heads cannot be dealt out to {n} ranks")
    heads = [Swapped.apply(x.contiguous(), group, True) for x in (q, k, v)]
    y = F.scaled_dot_product_attention(*heads, is_causal=is_causal)
    return Swapped.apply(y.contiguous(), group, False)


def attention_by_functional(q, k, v, group=None, is_causal=False):
    """torch's functional exchange, which has a gradient."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd as exchange

    n = dist.get_world_size(group)
    if q.shape[1] % n:
        raise ValueError(f"{n} ranks for {q.shape[1]} heads")
    if n == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    wire: Any = group or dist.group.WORLD

    def swap(x, cut, join):
        pieces = torch.stack(x.chunk(n, cut)).contiguous()
        came = exchange(pieces.flatten(0, 1), None, None, wire)
        return torch.cat(came.view_as(pieces).unbind(), join)

    y = F.scaled_dot_product_attention(*(swap(x, 1, 2) for x in (q, k, v)), is_causal=is_causal)
    return swap(y, 2, 1)


ALTERNATIVES = {
    "17.1": [softmax_by_merging, softmax_with_floor],
    "17.2": [forward_by_keys, forward_into_buffers],
    "17.2b": [BackwardByQueries, BackwardByKeys],
    "17.3": [order_from_both_ends, order_backwards],
    "17.3b": [ring_of_rows, ring_of_requests],
    "17.3c": [backward_in_one, backward_by_parts],
    "17.4": [attention_by_reshapes, attention_by_functional],
}
