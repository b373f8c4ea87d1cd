"""Right answers to lesson 15 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import functools
import itertools

import torch
import torch.distributed as dist

from shared.pipeline.schedules import Cell, timetable


def refuse(costs, num_stages):
    if num_stages < 1 or num_stages > len(costs):
        raise ValueError(f"cannot make {num_stages} stages of {len(costs)} parts")
    if negative := [x for x in costs if x < 0]:
        raise ValueError(f"costs below 0: {negative}")


def smallest_limit(costs, num_stages):
    """Every sum of neighbours as a limit, from the smallest, each filled from the front."""
    refuse(costs, num_stages)
    n = len(costs)
    for limit in sorted({sum(costs[i:j]) for i in range(n) for j in range(i + 1, n + 1)}):
        ends = [0]
        while ends[-1] < n and len(ends) <= num_stages:
            end, left = ends[-1] + 1, num_stages - len(ends)
            if sum(costs[ends[-1] : end]) > limit:
                break
            while end < n - left and sum(costs[ends[-1] : end + 1]) <= limit:
                end += 1
            ends.append(end)
        if ends[-1] == n and len(ends) == num_stages + 1:
            return [range(a, b) for a, b in itertools.pairwise(ends)]
    raise AssertionError("the whole is a limit for one stage")


def from_behind(costs, num_stages):
    """The last stage first, by recursion."""
    refuse(costs, num_stages)

    @functools.cache
    def cut(end, k):
        if k == 1:
            return sum(costs[:end]), (0, end)
        tries = []
        for a in range(k - 1, end):
            slowest, ends = cut(a, k - 1)
            tries.append((max(slowest, sum(costs[a:end])), (*ends, end)))
        return min(tries, key=lambda each: each[0])

    return [range(a, b) for a, b in itertools.pairwise(cut(len(costs), num_stages)[1])]


def keep(link, x, group):
    """Send with torch's own function; the link keeps the message."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    link.pending.append((dist.isend(x, link.peer, group=group), x))


def send_with_a_hook(link, *tensors):
    """A number made of all tensors, in whose backward the gradients are exchanged."""
    for x in tensors:
        keep(link, x, link.activations)

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            ctx.shapes = [(x.shape, x.dtype, x.device) for x in given]
            return torch.ones((1,))

        @staticmethod
        def backward(ctx, *_):
            found = []
            for shape, dtype, device in ctx.shapes:
                buffer = torch.zeros(shape, dtype=dtype, device=device)
                dist.recv(buffer, link.peer, group=link.gradients)
                found.append(buffer)
            return tuple(found)

    return Exchange.apply(*tensors)


def wait_for(works):
    """Begin all, then wait for each."""
    for work in list(works):
        if work is not None:
            work.wait()


def send_all_at_once(link, *tensors):
    """All receives begin before the first is waited for."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            ctx.metas = [(x.shape, x.dtype) for x in given]
            for x in given:
                link.send(x, link.activations)
            return given[0].new_zeros(()).float()

        @staticmethod
        def backward(ctx, *_):
            found = [torch.empty(shape, dtype=dtype) for shape, dtype in ctx.metas]
            wait_for(dist.irecv(x, link.peer, group=link.gradients) for x in found)
            return tuple(found)

    return Exchange.apply(*tensors)


def receive_as_inputs(link, shapes, dtype=torch.float32, device="cpu"):
    """The tensors are received first and pass through a Function that sends in backward."""
    found = [torch.zeros(tuple(shape), dtype=dtype, device=device) for shape in shapes]
    for x in found:
        dist.recv(x, link.peer, group=link.activations)

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            return tuple(x.view_as(x) for x in given)

        @staticmethod
        def backward(ctx, *gradients):
            for x in gradients:
                keep(link, x, link.gradients)
            return gradients

    return Back.apply(*(x.requires_grad_() for x in found))


def receive_all_at_once(link, shapes, dtype=torch.float32, device="cpu"):
    """All receives begin before the first is waited for; what is not used is filled by hand."""

    class Way(torch.autograd.Function):
        @staticmethod
        def forward(ctx, start):
            ctx.set_materialize_grads(False)
            found = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
            wait_for(dist.irecv(x, link.peer, group=link.activations) for x in found)
            return tuple(found)

        @staticmethod
        def backward(ctx, *gradients):
            for x, shape in zip(gradients, shapes, strict=True):
                x = torch.zeros(shape, dtype=dtype, device=device) if x is None else x
                link.send(x, link.gradients)

    return Way.apply(torch.ones(1, requires_grad=True))


def positive(**numbers):
    for name, number in numbers.items():
        if number <= 0:
            raise ValueError(f"{name} = {number} should be positive")


def gpipe_by_slots(num_stages, num_micro_batches):
    """Slots by formula, into a table of None."""
    positive(stages=num_stages, micro_batches=num_micro_batches)
    p, m = num_stages, num_micro_batches
    table = [[None] * (2 * (m + p - 1)) for _ in range(p)]
    for s in range(p):
        for i in range(m):
            table[s][s + i] = Cell("F", i, s)
            table[s][(m + p - 1) + (p - 1 - s) + (m - 1 - i)] = Cell("B", i, s)
    return table


def gpipe_from_orders(num_stages, num_micro_batches):
    """Orders with plain loops."""
    positive(stages=num_stages, micro_batches=num_micro_batches)
    orders = []
    for s in range(num_stages):
        order = []
        for i in range(num_micro_batches):
            order.append(Cell("F", i, s))
        while len(order) < 2 * num_micro_batches:
            order.append(Cell("B", 2 * num_micro_batches - 1 - len(order), s))
        orders.append(order)
    return timetable(orders)


def one_f_one_b_by_counting(num_stages, num_micro_batches):
    """A forward while fewer than p - s are alive, a backward otherwise."""
    positive(stages=num_stages, micro_batches=num_micro_batches)
    orders = []
    for s in range(num_stages):
        order, f, b = [], 0, 0
        while b < num_micro_batches:
            if f < num_micro_batches and f - b < num_stages - s:
                order.append(Cell("F", f, s))
                f += 1
            else:
                order.append(Cell("B", b, s))
                b += 1
        orders.append(order)
    return timetable(orders)


def one_f_one_b_by_slots(num_stages, num_micro_batches):
    """Slot after slot: a backward if one can be done, else a forward if it may be kept."""
    positive(stages=num_stages, micro_batches=num_micro_batches)
    p, m = num_stages, num_micro_batches
    forward, backward = [0] * p, [0] * p
    table = [[] for _ in range(p)]
    while min(backward) < m:
        f, b = list(forward), list(backward)
        for s in range(p):
            behind = b[s + 1] if s + 1 < p else f[s]
            if b[s] < behind and b[s] < f[s]:
                table[s].append(Cell("B", b[s], s))
                backward[s] += 1
            elif f[s] < (m if s == 0 else f[s - 1]) and f[s] - b[s] < p - s:
                table[s].append(Cell("F", f[s], s))
                forward[s] += 1
            else:
                table[s].append(None)
    return table


def groups(p, m, v):
    positive(ranks=p, micro_batches=m, stages_a_rank=v)
    if m % p != 0:
        raise ValueError(f"{m} micro-batches do not come in groups of {p}")
    return [range(g * p, g * p + p) for g in range(m // p)]


def interleaved_by_lists(num_ranks, num_micro_batches, num_chunks):
    """Two lists a rank, taken from in turns."""
    p, m, v = num_ranks, num_micro_batches, num_chunks
    found, orders = groups(p, m, v), []
    for r in range(p):
        f = [Cell("F", i, c * p + r) for g in found for c in range(v) for i in g]
        b = [Cell("B", i, c * p + r) for g in found for c in reversed(range(v)) for i in g]
        ahead = p - r if v == 1 else (v - 1) * p + 2 * (p - r) - 1
        order = [f.pop(0) for _ in range(min(ahead, len(f)))]
        while b:
            order.append(b.pop(0))
            if f:
                order.append(f.pop(0))
        orders.append(order)
    return timetable(orders)


def interleaved_by_numbers(num_ranks, num_micro_batches, num_chunks):
    """As Megatron counts: the stage and the micro-batch of a rank's k-th piece of work."""
    p, m, v = num_ranks, num_micro_batches, num_chunks
    groups(p, m, v)

    def piece(k, r, kind):
        group, rest = divmod(k, p * v)
        chunk, place = divmod(rest, p)
        chunk = chunk if kind == "F" else v - 1 - chunk
        return Cell(kind, group * p + place, chunk * p + r)

    orders, total = [], m * v
    for r in range(p):
        warmup = min(total, (p - r - 1) * (1 if v == 1 else 2) + (v - 1) * p)
        order = [piece(k, r, "F") for k in range(warmup)]
        for k in range(total - warmup):
            order += [piece(k + warmup, r, "F"), piece(k, r, "B")]
        orders.append(order + [piece(k, r, "B") for k in range(total - warmup, total)])
    return timetable(orders)


def interleaved_with_fewer_alive(num_ranks, num_micro_batches, num_chunks):
    """Half of the extra warm-up: as many slots, and fewer forwards that wait."""
    p, m, v = num_ranks, num_micro_batches, num_chunks
    found, orders = groups(p, m, v), []
    for r in range(p):
        f = [Cell("F", i, c * p + r) for g in found for c in range(v) for i in g]
        b = [Cell("B", i, c * p + r) for g in found for c in reversed(range(v)) for i in g]
        order, f_next = f[: v * p - r], v * p - r
        for k, cell in enumerate(b):
            order += [cell, *f[f_next + k : f_next + k + 1]]
        orders.append(order)
    return timetable(orders)


def as_pairs():
    """In another order."""
    return {"D": "gpipe", "C": "1f1b", "B": "none", "A": "interleaved"}


def by_letters():
    """From two strings."""
    return dict(zip("ABCD", ["interleaved", "none", "1f1b", "gpipe"], strict=True))


ALTERNATIVES = {
    "15.1": [smallest_limit, from_behind],
    "15.2": [send_with_a_hook, send_all_at_once],
    "15.2b": [receive_as_inputs, receive_all_at_once],
    "15.3": [gpipe_by_slots, gpipe_from_orders],
    "15.4": [one_f_one_b_by_counting, one_f_one_b_by_slots],
    "15.5": [interleaved_by_lists, interleaved_by_numbers, interleaved_with_fewer_alive],
    "15.6": [as_pairs, by_letters],
}
