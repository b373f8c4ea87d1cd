"""Rings of attention in another style, for lesson 17's alternatives."""

from typing import Any

import torch
import torch.distributed as dist

from shared.long_context.online import merge
from shared.long_context.ring import PassedOn
from shared.long_context.tiles import tiled_backward
from solutions import lesson17_long_context as right


def ring_of_rows(q, k, v, group, is_causal, order):
    """One message for keys and values together, and a mask for each pair by whole positions."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    here, partial = torch.stack([k, v]), {}
    for step in range(n):
        passing = PassedOn([here], group) if step + 1 < n else None
        theirs = order[(rank - step) % n]
        for place, chunk in enumerate(order[rank]):
            queries = q.chunk(len(order[rank]), -2)[place]
            for other, keys in zip(theirs, here.chunk(len(theirs), -2), strict=True):
                if is_causal and other > chunk:
                    continue
                output, logsumexp = right.tiled_forward(
                    queries, *keys, is_causal and other == chunk
                )
                new = output.to(logsumexp.dtype), logsumexp
                partial[place] = merge(partial[place], new) if place in partial else new
        if passing:
            (here,) = passing.wait()
    parts = [partial[place] for place in range(len(order[rank]))]
    return (
        torch.cat([output for output, _ in parts], -2).to(q.dtype),
        torch.cat([logsumexp for _, logsumexp in parts], -1),
    )


def ring_of_requests(q, k, v, group, is_causal, order):
    """isend and irecv, and all that has come is attended to after each wait."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    keys, values, results = k.contiguous(), v.contiguous(), [[] for _ in order[rank]]
    for step in range(n):
        if step:
            works, fresh = [], []
            for x in (keys, values):
                fresh.append(torch.empty_like(x))
                works.append(dist.isend(x, group=group, group_dst=(rank + 1) % n))
                works.append(dist.irecv(fresh[-1], group=group, group_src=(rank - 1) % n))
            for work in works:
                work.wait()
            keys, values = fresh
        owner = order[(rank + n - step) % n]
        parts = zip(owner, keys.chunk(len(owner), -2), values.chunk(len(owner), -2), strict=True)
        for other, *kv in parts:
            for result, chunk, own in zip(
                results, order[rank], q.chunk(len(order[rank]), -2), strict=True
            ):
                if not is_causal or other <= chunk:
                    result.append(right.tiled_forward(own, *kv, is_causal and other == chunk))
    done = []
    for result in results:
        logs = torch.stack([log for _, log in result])
        total = logs.logsumexp(0)
        shares = (logs - total).exp().unsqueeze(-1)
        done.append((sum(s * o for s, (o, _) in zip(shares, result, strict=True)), total))
    return torch.cat([o for o, _ in done], -2).to(q.dtype), torch.cat([t for _, t in done], -1)


def backward_in_one(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    """Keys, values and their gradients leave in one go, after the work."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    mine, dq = order[rank], torch.zeros_like(q, dtype=logsumexp.dtype)
    here = [k, v, *(torch.zeros_like(x, dtype=logsumexp.dtype) for x in (k, v))]
    for step in range(n):
        theirs = order[(rank - step) % n]
        size, other = k.shape[-2] // len(theirs), q.shape[-2] // len(mine)
        for i, own in enumerate(mine):
            for j, their in enumerate(theirs):
                if is_causal and their > own:
                    continue
                a = slice(i * other, (i + 1) * other)
                b = slice(j * size, (j + 1) * size)
                found = tiled_backward(
                    q[..., a, :], here[0][..., b, :], here[1][..., b, :], output[..., a, :],
                    logsumexp[..., a], gradient[..., a, :], is_causal and own == their,
                )  # fmt: skip
                dq[..., a, :] += found[0]
                here[2][..., b, :] += found[1]
                here[3][..., b, :] += found[2]
        if step < n - 1:
            here = PassedOn(here, group).wait()
    home = PassedOn(here[2:], group).wait()
    return dq.to(q.dtype), home[0].to(k.dtype), home[1].to(v.dtype)


def backward_by_parts(q, k, v, output, logsumexp, gradient, group, is_causal, order):
    """Each visitor's gradients are made apart, then added to those that came with it."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    work, mine, here = logsumexp.dtype, order[rank], [k, v]
    carried: list = []
    dq = torch.zeros_like(q, dtype=work)
    own = [torch.stack(x.chunk(len(mine), -2)) for x in (q, output, gradient)]
    rows, lots = torch.stack(logsumexp.chunk(len(mine), -1)), dq.chunk(len(mine), -2)
    for step in range(n):
        theirs, added = order[(rank - step) % n], [[], []]
        for number, chunk in enumerate(theirs):
            kv = [x.chunk(len(theirs), -2)[number] for x in here]
            new = [torch.zeros_like(x, dtype=work) for x in kv]
            for i, lies in enumerate(mine):
                if is_causal and chunk > lies:
                    continue
                diagonal: Any = is_causal and lies == chunk
                left = own[1][i], rows[i], own[2][i]
                each, *found = tiled_backward(own[0][i], kv[0], kv[1], *left, diagonal)
                lots[i].add_(each)
                new = [a + b for a, b in zip(new, found, strict=True)]
            for parts, x in zip(added, new, strict=True):
                parts.append(x)
        both = [torch.cat(parts, -2) for parts in added]
        carried = both if not carried else [a + b for a, b in zip(both, carried, strict=True)]
        going = [*carried, *here] if step < n - 1 else carried
        came = PassedOn(going, group).wait()
        carried, here = came[:2], came[2:]
    return dq.to(q.dtype), carried[0].to(k.dtype), carried[1].to(v.dtype)
