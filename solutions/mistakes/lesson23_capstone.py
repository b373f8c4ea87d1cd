"""Wrong answers to lesson 23, each with the words that the check must say to it."""

import math

import torch

from shared.capstone.budgets import BARE, Promise, candidates
from shared.errors import InputError
from shared.exercises.mistakes import mistake
from shared.model.attention import causal_mask
from shared.planner.memory import memory_per_rank
from shared.planner.outcomes import FITTED
from shared.planner.seconds import step_time
from solutions import lesson23_capstone as right

# 23.1 grouped_attention


def attending(key_of, value_of=None, scale=None, last=True, causal_counts=True, mask_of=None):
    """The answer by copies, with what is to go wrong."""

    def grouped_attention(query, key, value, mask=None, causal=False):
        repeats, length, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        wide, values = key_of(key, repeats), (value_of or key_of)(value, repeats)
        divisor = math.sqrt(query.shape[-1]) if scale is None else scale(query)
        scores = query @ wide.transpose(-2, -1) / divisor
        if mask is not None and mask_of is not None:
            mask = mask_of(mask)
        if causal and causal_counts:
            past = causal_mask(keys)[:, :, keys - length :] if last else None
            past = causal_mask(max(keys, length))[:, :, :length, :keys] if past is None else past
            mask = past if mask is None else mask & past
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e30)
        return scores.softmax(-1) @ values

    return grouped_attention


def neighbours(x, repeats):
    return x.repeat_interleave(repeats, 1)


def in_turn(x, repeats):
    return x.repeat(1, repeats, 1, 1)


GROUPED = {
    "head h reads head h % kv_heads": attending(in_turn),
    "the scores are not divided": attending(neighbours, scale=lambda q: 1.0),
    "keys are grouped, values are not": attending(neighbours, in_turn),
    "scaled by sqrt(heads x head_dim)": attending(
        neighbours, scale=lambda q: math.sqrt(q.shape[1] * q.shape[-1])
    ),
    "causal hides nothing": attending(neighbours, causal_counts=False),
    "queries are taken to be the first positions": attending(neighbours, last=False),
    "True in a mask hides": attending(neighbours, mask_of=lambda mask: ~mask),
    "keys or values are copied for every head": attending(neighbours),
}
for says, answer in GROUPED.items():
    mistake("23.1", says=says)(answer)


@mistake("23.1", says="the mask is not looked at")
def grouped_attention(query, key, value, mask=None, causal=False):
    return right.grouped_attention(query, key, value, None, causal)


# 23.2 read_part


@mistake("23.2", says="the part is not filled up")
def read_part(read, numel, saved, ranks, rank, dtype=torch.float32):
    old, new = -(-numel // saved), -(-numel // ranks)
    begin, end = rank * new, min((rank + 1) * new, numel)
    found = [torch.zeros(0, dtype=dtype)]
    for file in range(saved):
        low, high = max(begin, file * old), min(end, (file + 1) * old)
        if low < high:
            found.append(read(file, low - file * old, high - file * old))
    return torch.cat(found)


@mistake("23.2", says="the filling behind the end is taken for numbers")
def read_part_with_filling(read, numel, saved, ranks, rank, dtype=torch.float32):
    old, new = -(-numel // saved), -(-numel // ranks)
    part = torch.zeros(new, dtype=dtype)
    begin = rank * new
    for file in range(saved):
        low, high = max(begin, file * old), min(begin + new, (file + 1) * old)
        if low < high:
            part[low - begin : high - begin] = read(file, low - file * old, high - file * old)
    return part


@mistake("23.2", says="more of a file is read than is needed")
def read_part_by_files(read, numel, saved, ranks, rank, dtype=torch.float32):
    old, new = -(-numel // saved), -(-numel // ranks)
    part = torch.zeros(new, dtype=dtype)
    begin, end = rank * new, min((rank + 1) * new, numel)
    for file in range(saved):
        low, high = max(begin, file * old), min(end, (file + 1) * old)
        if low < high:
            whole = read(file, 0, old)
            part[low - begin : high - begin] = whole[low - file * old : high - file * old]
    return part


@mistake("23.2", says="the whole tensor is read, by every rank")
def read_part_of_all(read, numel, saved, ranks, rank, dtype=torch.float32):
    old, new = -(-numel // saved), -(-numel // ranks)
    whole = torch.cat([read(file, 0, old) for file in range(saved)])[:numel]
    padded = torch.cat([whole, whole.new_zeros(new * ranks - numel)])
    return padded[rank * new : (rank + 1) * new].to(dtype)


@mistake("23.2", says="every number is read by itself")
def read_part_singly(read, numel, saved, ranks, rank, dtype=torch.float32):
    old, new = -(-numel // saved), -(-numel // ranks)
    part = torch.zeros(new, dtype=dtype)
    for i in range(rank * new, min((rank + 1) * new, numel)):
        part[i - rank * new] = read(i // old, i % old, i % old + 1)[0]
    return part


@mistake("23.2", says="the part has another dtype")
def read_part_in_float32(read, numel, saved, ranks, rank, dtype=torch.float32):
    return right.read_part(read, numel, saved, ranks, rank, torch.float32)


@mistake("23.2", says="every rank gets the first part")
def read_part_of_rank_0(read, numel, saved, ranks, rank, dtype=torch.float32):
    return right.read_part(read, numel, saved, ranks, 0, dtype)


# 23.3 choose_plan


def choosing(
    kept_of=lambda m: m.parameters + m.gradients + m.optimizer,
    seconds_of=lambda t: t.tensor_parallel + t.pipeline + t.data_parallel,
    fits=lambda p, b: p.kept <= b.memory,
    best=lambda found: min(found, key=lambda p: (round(p.seconds, 9), p.kept)),
    fitted=BARE,
    deadline=True,
    words=True,
):
    """The answer, with what is to go wrong."""

    def choose_plan(model, budget):
        every = []
        for plan in candidates(model, budget):
            time = step_time(model, plan, budget.cluster, fitted)
            memory = memory_per_rank(model, plan)
            every.append(Promise(plan, kept_of(memory), seconds_of(time)))
        fitting = [p for p in every if fits(p, budget)]
        if not fitting:
            least = min(p.kept for p in every) if words else "too much"
            raise InputError(f"no plan fits: the leanest keeps {least}")
        found = best(fitting)
        if deadline and found.seconds > budget.deadline:
            raise InputError(f"the fastest sends for {found.seconds:.3g} s")
        return found

    return choose_plan


@mistake("23.3", says="activations are counted")
def choose_plan_with_activations(model, budget):
    return choosing(kept_of=lambda memory: memory.total)(model, budget)


CHOSEN = {
    "of plans that send the same": choosing(best=lambda found: min(found, key=lambda p: p.seconds)),
    "seconds with FITTED": choosing(fitted=FITTED),
    "the bubble is no message": choosing(seconds_of=lambda t: t.total),
    "the plan does not fit": choosing(fits=lambda p, b: True),
    "the plan that keeps the least": choosing(best=lambda found: min(found, key=lambda p: p.kept)),
    "the first plan that fits": choosing(best=lambda found: found[0]),
    "a deadline that no plan meets is accepted": choosing(deadline=False),
    "does not say which value was seen": choosing(words=False),
}
for says, answer in CHOSEN.items():
    mistake("23.3", says=says)(answer)
