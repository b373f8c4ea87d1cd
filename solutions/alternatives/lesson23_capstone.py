"""Right answers to lesson 23 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import torch

from shared.capstone.budgets import BARE, Promise, candidates
from shared.errors import InputError
from shared.planner.memory import memory_per_rank
from shared.planner.seconds import step_time


def by_groups(query, key, value, mask=None, causal=False):
    """A loop over the heads of keys: each with the queries that share it, as einsum has them."""
    (batch, heads, length, width), (groups, keys) = query.shape, key.shape[1:3]
    allowed = torch.ones(1, 1, length, keys, dtype=torch.bool, device=query.device)
    allowed = allowed.tril(keys - length) if causal else allowed
    allowed = allowed if mask is None else allowed & mask
    allowed = allowed.expand(batch, heads, length, keys)
    found, each = [], heads // groups
    for g in range(groups):
        mine = slice(g * each, (g + 1) * each)
        rows = query[:, mine].reshape(batch, each * length, width) * width**-0.5
        scores = torch.bmm(rows, key[:, g].transpose(1, 2)).view(batch, each, length, keys)
        scores = scores.masked_fill(~allowed[:, mine], float("-inf"))
        weights = torch.softmax(scores, dim=-1).view(batch, each * length, keys)
        found.append(torch.bmm(weights, value[:, g]).view(batch, each, length, width))
    return torch.cat(found, dim=1)


def by_additive_mask(query, key, value, mask=None, causal=False):
    """What is hidden by adding minus infinity, the shared queries as rows."""
    groups, length, keys = key.shape[1], query.shape[2], key.shape[2]
    share = query.shape[1] // groups
    rows = query.reshape(query.shape[0], groups, share * length, query.shape[3])
    scores = (rows @ key.mT).mul(query.shape[-1] ** -0.5)
    scores = scores.reshape(query.shape[0], groups * share, length, keys)
    if causal:
        late = torch.full((length, keys), float("-inf"), dtype=query.dtype)
        scores = scores + late.triu(keys - length + 1)
    if mask is not None:
        scores = scores.where(mask, float("-inf"))
    weights = torch.softmax(scores, -1).reshape(query.shape[0], groups, share * length, keys)
    return (weights @ value).reshape(query.shape)


def piece_by_piece(read, numel, saved, ranks, rank, dtype=torch.float32):
    """From the part's first number on, to the end of a file or of the part."""
    old, new = -(-numel // saved), -(-numel // ranks)
    at, end, pieces = rank * new, min(rank * new + new, numel), []
    while at < end:
        file, inside = divmod(at, old)
        stop = min(old, inside + end - at)
        pieces.append(read(file, inside, stop).to(dtype))
        at += stop - inside
    have = sum(map(len, pieces))
    return torch.cat([*pieces, torch.zeros(new - have, dtype=dtype)])


def by_ranges(read, numel, saved, ranks, rank, dtype=torch.float32):
    """Ranges that are intersected."""
    old, new = -(-numel // saved), -(-numel // ranks)
    mine = range(min(rank * new, numel), min(rank * new + new, numel))
    part = torch.zeros(new, dtype=dtype)
    for file in range(saved):
        theirs = range(file * old, file * old + old)
        both = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
        if len(both):
            got = read(file, both.start - theirs.start, both.stop - theirs.start)
            part[both.start - rank * new :][: len(both)] = got
    return part


def one_at_a_time(model, budget):
    """The best so far, without a list."""
    best, least = None, None
    for plan in candidates(model, budget):
        memory = memory_per_rank(model, plan)
        kept = memory.total - memory.activations
        least = kept if least is None else min(least, kept)
        if kept > budget.memory:
            continue
        time = step_time(model, plan, budget.cluster, BARE)
        sent = time.total - time.compute - time.bubble
        if best is None or (round(sent, 9), kept) < (round(best.seconds, 9), best.kept):
            best = Promise(plan, kept, sent)
    if best is None:
        raise InputError(f"nothing fits {budget.memory} bytes; {least} would be the fewest")
    if best.seconds > budget.deadline:
        raise InputError(f"{best.seconds:.3g} s of messages, more than {budget.deadline} s")
    return best


def by_sorting(model, budget):
    """All promises, sorted; the first that fits."""

    def promise(plan):
        memory = memory_per_rank(model, plan)
        time = step_time(model, plan, budget.cluster, BARE)
        kept = memory.parameters + memory.gradients + memory.optimizer
        return Promise(plan, kept, time.data_parallel + time.pipeline + time.tensor_parallel)

    every = sorted(
        map(promise, candidates(model, budget)), key=lambda p: (round(p.seconds, 9), p.kept)
    )
    fits = [p for p in every if p.kept <= budget.memory]
    if not fits:
        raise InputError(f"the leanest of {len(every)} plans keeps {min(p.kept for p in every)}")
    if fits[0].seconds > budget.deadline:
        raise InputError(f"too slow by the deadline: {fits[0].seconds:.3g} s")
    return fits[0]


ALTERNATIVES = {
    "23.1": [by_groups, by_additive_mask],
    "23.2": [piece_by_piece, by_ranges],
    "23.3": [one_at_a_time, by_sorting],
}
