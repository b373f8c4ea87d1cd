"""Lesson 16 in another style: seconds and plans by arithmetic."""

import dataclasses
import heapq
import itertools

from shared.planner.limits import check_shape, misfits
from shared.planner.memory import gathered_bytes, memory_per_rank
from shared.planner.outcomes import Choice
from shared.planner.seconds import step_time
from shared.planner.specs import Plan
from shared.planner.variants import USABLE, variants

# 16.4a


def work_then_waiting(layers, layer, head, num_micro_batches, chunks=1, recompute=False):
    """Forward, backward and what is made again, each a list by rank."""
    p = len(layers)
    heads = [0.0] * (p - 1) + [head]
    forward = [n * layer + h for n, h in zip(layers, heads, strict=True)]
    again = [n * layer if recompute else 0.0 for n in layers]
    slowest = max(f * 3 + a for f, a in zip(forward, again, strict=True))
    return slowest * num_micro_batches, slowest * (p - 1) / chunks


def pace_in_a_loop(layers, layer, head, num_micro_batches, chunks=1, recompute=False):
    """The slowest rank by comparison; the bubble as the share of a step that is left."""
    pace = 0
    for rank, count in enumerate(layers):
        seconds = count * layer * 3
        if recompute:
            seconds += count * layer
        if rank + 1 == len(layers):
            seconds += head + 2 * head
        if seconds > pace:
            pace = seconds
    slots = chunks * num_micro_batches + len(layers) - 1
    compute = pace * num_micro_batches
    return compute, compute * slots / (chunks * num_micro_batches) - compute


# 16.4b


def reduces_by_kind(vectors, layers, tp, num_micro_batches, cluster, recompute=False):
    """Reduce-scatters and all-gathers apart; the rate worked out from the cards of a node."""
    rate = cluster.inner
    if tp > cluster.gpus_per_node:
        rate = min(rate, cluster.outer * cluster.gpus_per_node)
    half = vectors / rate * (1 - 1 / tp)
    passes = ["forward", "backward"] + (["forward"] if recompute else [])
    times = 2 * len(passes) * layers * num_micro_batches
    return times * (half + half + (cluster.latency if tp > 1 else 0))


def reduces_one_by_one(vectors, layers, tp, num_micro_batches, cluster, recompute=False):
    """Message after message."""
    total = 0.0
    for _ in range(num_micro_batches * layers if tp != 1 else 0):
        for _ in range(6 if recompute else 4):
            total += cluster.latency + 2 * vectors * (tp - 1) / (tp * cluster.link(tp, 1))
    return total


# 16.4c


def left_by_stage(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    """A branch for each stage."""
    message = size / link * (1 - 1 / dp)
    match zero:
        case 0:
            free = compute * 2 / 3 if overlap else 0
            return max(message * 2 - free, 0)
        case 1:
            free = compute * 2 / 3 if overlap else 0
            return message + max(message - free, 0)
        case _:
            return sum(max(3 * message - compute * overlap, 0) for _ in range(num_micro_batches))


def left_from_a_table(size, dp, link, compute, num_micro_batches, zero=0, overlap=True):
    """Times, messages that can hide, what they hide behind, messages that cannot."""
    times, can, behind, cannot = {
        0: (1, 2, 2 / 3, 0),
        1: (1, 1, 2 / 3, 1),
        3: (num_micro_batches, 3, 1, 0),
    }[zero]
    one = size * (dp - 1) / (dp * link)
    shown = can * one - (behind * compute if overlap else 0.0)
    return times * (shown if shown > 0 else 0.0) + cannot * one


# 16.5


def plans_by_products(model, cluster, batch, count=5):
    """All triples, and a heap."""
    if batch <= 0:
        raise ValueError(f"{batch} sequences are no batch")
    sizes = range(1, cluster.gpus + 1)
    fitting, short = [], []
    for dp, tp, pp in itertools.product(sizes, repeat=3):
        layout = Plan(dp=dp, tp=tp, pp=pp) if dp * tp * pp == cluster.gpus else None
        if layout is None or tp > cluster.gpus_per_node or batch % dp:
            continue
        try:
            check_shape(model, layout)
        except ValueError:
            continue
        for plan in variants(model, layout, batch):
            memory = memory_per_rank(model, plan)
            time = step_time(model, plan, cluster)
            worst = step_time(model, dataclasses.replace(plan, overlap=False), cluster)
            missing = memory.total + gathered_bytes(model, plan) - USABLE * cluster.memory
            choice = Choice(plan, memory, time)
            if missing > 0:
                short.append((missing, choice))
            else:
                fitting.append((worst.total, memory.total, len(fitting), choice))
    if not fitting:
        raise ValueError(f"nothing fits; most of the nearest are {most_of(short)}")
    return [choice for *_, choice in heapq.nsmallest(count, fitting)]


def most_of(short):
    """The kind of bytes that the nearest plan has most of."""
    if not short:
        return "no layouts"
    _, near = min(short, key=lambda each: each[0])
    kinds = dataclasses.asdict(near.memory)
    return max(("parameters", "gradients", "optimizer", "activations"), key=kinds.__getitem__)


def plans_from_a_generator(model, cluster, batch, count=5):
    """Layouts by divisors; sorted twice, which keeps the order of what is equal."""
    if batch < 1:
        raise ValueError(f"batch {batch}")

    def tried():
        for tp in range(1, min(cluster.gpus, cluster.gpus_per_node) + 1):
            for pp in range(1, model.num_layers + 1):
                dp, rest = divmod(cluster.gpus, tp * pp)
                if rest or dp == 0 or batch % dp:
                    continue
                layout = Plan(dp=dp, tp=tp, pp=pp)
                if next(misfits(model, layout), None) is None:
                    yield from variants(model, layout, batch)

    choices = [
        Choice(plan, memory_per_rank(model, plan), step_time(model, plan, cluster))
        for plan in tried()
    ]
    sizes = {c.plan: c.memory.total + gathered_bytes(model, c.plan) for c in choices}
    good = [c for c in choices if sizes[c.plan] <= USABLE * cluster.memory]
    if not good:
        most_of_it = most_of([(sizes[c.plan], c) for c in choices])
        raise ValueError(f"no plan for {cluster.gpus} GPUs: too much of {most_of_it}")
    good.sort(key=lambda c: c.memory.total)
    bare = {c.plan: dataclasses.replace(c.plan, overlap=False) for c in good}
    good.sort(key=lambda c: step_time(model, bare[c.plan], cluster).total)
    return good[:count]
