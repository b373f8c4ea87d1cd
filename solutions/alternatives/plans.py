"""Lesson 16 in another style: bytes, seconds and plans by arithmetic."""

import dataclasses
import heapq
import itertools
import math
import operator

from shared.planner.activations import (
    embedding_bytes,
    head_bytes,
    in_flight,
    kept_and_again,
    layer_bytes,
    score_bytes,
)
from shared.planner.limits import check_shape, misfits
from shared.planner.memory import gathered_bytes
from shared.planner.outcomes import FITTED, Choice, Memory, StepTime
from shared.planner.specs import Plan
from shared.planner.variants import USABLE, variants

# 16.3


def memory_by_stage(model, plan):
    """From lists, a stage after the other."""
    check_shape(model, plan)
    last = plan.pp - 1
    own = [sum(layers) * model.layer.on(plan.tp) for layers in plan.layers(model)]
    own[0] += model.embeddings.on(plan.tp)
    own[last] += model.head.whole
    if last > 0 or not model.tied:
        own[last] += model.head.cut // plan.tp
    weight, gradient, state = (2, 2, 12) if plan.precision == "mixed" else (4, 4, 8)

    def share(number, stage):
        return math.ceil(number / plan.dp) if plan.zero >= stage else number

    per_layer, again = kept_and_again(model, plan)
    stages = []
    for s, layers in enumerate(plan.layers(model)):
        pieces = [n * per_layer for n in layers]
        pieces[0] += embedding_bytes(model, plan) if s == 0 else 0
        head = head_bytes(model, plan) if s == last else 0
        peaks = []
        for moment in in_flight(plan, s):
            alive, turn = moment[:-1], moment[-1]
            there = sum(map(operator.mul, alive, pieces)) + alive[-1] * head
            peaks += [there, there + again * (layers[turn] > 0) - head * (turn == len(alive) - 1)]
        stages.append(
            Memory(
                parameters=weight * share(own[s], 3),
                gradients=gradient * share(own[s], 2),
                optimizer=state * share(own[s], 1),
                activations=max(peaks),
                rank=s,
            )
        )
    top = sorted(stages, key=lambda each: each.total)[-1]
    kinds = top.parameters, top.gradients, top.optimizer, top.activations
    return Memory(*kinds, rank=top.rank, stages=tuple(stages))


def memory_from_the_planner(model, plan):
    """By units, with what the course has for micro-batches in flight."""
    check_shape(model, plan)
    t, found = plan.tp, []
    for rank, layers in enumerate(plan.layers(model)):
        units = [model.layer.cut // t + model.layer.whole] * sum(layers)
        if rank == 0:
            units += [model.embeddings.cut // t, model.embeddings.whole]
        if rank == plan.pp - 1:
            units += [model.head.whole]
            units += [] if rank == 0 and model.tied else [model.head.cut // t]
        number = sum(units)
        part = -(-number // plan.dp)
        sizes = {"mixed": (2, 2, 12), "float32": (4, 4, 8)}[plan.precision]
        cut = [plan.zero >= 3, plan.zero >= 2, plan.zero >= 1]
        states = [n * (part if c else number) for n, c in zip(sizes, cut, strict=True)]
        each, again = kept_and_again(model, plan)
        first = embedding_bytes(model, plan) * (rank == 0)
        end = head_bytes(model, plan) * (rank == plan.pp - 1)
        most = 0
        for *alive, chunk in in_flight(plan, rank):
            now = each * sum(n * k for n, k in zip(alive, layers, strict=True))
            now += alive[0] * first + alive[-1] * end
            more = again if layers[chunk] else 0
            most = max(most, now + max(0, more - (end if chunk + 1 == plan.chunks else 0)))
        found.append(Memory(*states, activations=most, rank=rank))
    top = max(range(plan.pp), key=lambda rank: found[rank].total)
    return dataclasses.replace(found[top], stages=tuple(found))


# 16.4


def time_by_messages(model, plan, cluster, fitted=FITTED):
    """A list of what happens, each with its seconds."""
    check_shape(model, plan)
    if cluster.gpus < plan.num_gpus:
        raise ValueError(f"{plan.num_gpus} GPUs are more than {cluster.gpus}")
    m, t, p, n = plan.num_micro_batches, plan.tp, plan.pp, plan.micro_batch * model.seq_len
    number = {"mixed": 2, "float32": 4}[plan.precision]
    forward, moved = n * model.layer_flops, layer_bytes(model, plan)
    tasks = [("forward", forward, moved), ("backward", 2 * forward, moved)]
    if plan.checkpoint == "full":
        tasks.append(("again", forward, moved))
    if plan.checkpoint == "selective" and not model.fused_attention:
        tasks.append(("again", n * model.attention_flops, score_bytes(model, plan)))
    rate = cluster.peak_flops * cluster.achievable * fitted.matmul * t
    layer = sum(
        flops / rate + fitted.traffic * bytes_ / cluster.memory_bandwidth
        for _, flops, bytes_ in tasks
    )
    stages = [sum(k) * layer for k in plan.layers(model)]
    stages[p - 1] += 3 * n * model.head_flops / rate
    one = max(stages)
    within = between = 0.0
    if t > 1:
        sent = 2 * (t - 1) / t * n * model.d_model * number
        each = sent / (cluster.link(t, 1) * fitted.link) + cluster.latency
        within = (6 if plan.checkpoint == "full" else 4) * each * max(map(sum, plan.layers(model)))
    if p > 1:
        speed = cluster.link(p, plan.num_gpus // p) * fitted.link
        each = n * model.d_model * number / t / speed + cluster.latency
        between = 2 * each * plan.chunks
    return StepTime(
        compute=m * one,
        tensor_parallel=m * within,
        pipeline=m * between,
        bubble=(p - 1) / plan.chunks * (one + within + between),
        data_parallel=replicas_wait(model, plan, cluster, fitted, one),
        model_flops=model.flops * plan.batch * model.seq_len / plan.num_gpus,
        peak_flops=cluster.peak_flops,
    )


def replicas_wait(model, plan, cluster, fitted, one):
    """Messages of gradients, then of parameters."""
    n = plan.dp
    if n == 1:
        return 0.0
    weight, gradient = (2, 2) if plan.precision == "mixed" else (4, 4)
    size = max(rank.parameters for rank in bytes_of(model, plan).stages) / weight
    a_byte = size * (n - 1) / n / (cluster.link(n, plan.tp) * fitted.link)
    m, free = plan.num_micro_batches, one if plan.overlap else 0.0
    match plan.zero:
        case 0:
            return max(2 * gradient * a_byte - free / 1.5, 0.0)
        case 1:
            return max(gradient * a_byte - free / 1.5, 0.0) + weight * a_byte
        case 2:
            return m * max(gradient * a_byte - free / 1.5, 0.0) + weight * a_byte
        case _:
            return m * max((2 * weight + gradient) * a_byte - free, 0.0)


def bytes_of(model, plan):
    """What every rank has where nothing is cut over dp."""
    return memory_by_stage(model, dataclasses.replace(plan, zero=0))


def time_from_rates(model, plan, cluster, fitted=FITTED):
    """Rates first, then a sum for each kind; the dp messages from a table."""
    check_shape(model, plan)
    if not plan.num_gpus <= cluster.gpus:
        raise ValueError(f"no room for {plan.num_gpus} GPUs")
    flop = 1 / (cluster.peak_flops * cluster.achievable * fitted.matmul * plan.tp)
    byte = fitted.traffic / cluster.memory_bandwidth
    tokens, width = plan.micro_batch * model.seq_len, 2 if plan.precision == "mixed" else 4
    again = {"none": 0, "full": 1, "selective": 0}[plan.checkpoint]
    a_layer = (3 + again) * tokens * model.layer_flops * flop
    a_layer += (2 + again) * layer_bytes(model, plan) * byte
    if plan.checkpoint == "selective" and score_bytes(model, plan):
        a_layer += tokens * model.attention_flops * flop + score_bytes(model, plan) * byte
    per_rank = [sum(layers) for layers in plan.layers(model)]
    busy = [k * a_layer for k in per_rank]
    busy[-1] += tokens * 3 * model.head_flops * flop
    stream, m = tokens * model.d_model * width, plan.num_micro_batches
    tensor = pipe = 0.0
    if plan.tp > 1:
        ring = 2 - 2 / plan.tp
        seconds = ring * stream / cluster.link(plan.tp, 1) / fitted.link + cluster.latency
        tensor = m * max(per_rank) * (4 + 2 * again) * seconds
    if plan.pp > 1:
        link = cluster.link(plan.pp, plan.dp * plan.tp) * fitted.link
        pipe = m * plan.chunks * 2 * (stream / (plan.tp * link) + cluster.latency)
    compute = m * max(busy)
    return StepTime(
        compute,
        tensor,
        pipe,
        plan.bubble * (compute + tensor + pipe),
        replicas_wait(model, plan, cluster, fitted, max(busy)),
        3
        * (model.num_layers * model.layer_flops + model.head_flops)
        * (model.seq_len * plan.micro_batch * m / (plan.tp * plan.pp)),
        cluster.peak_flops,
    )


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
            memory = memory_by_stage(model, plan)
            time = time_by_messages(model, plan, cluster)
            missing = memory.total + gathered_bytes(model, plan) - USABLE * cluster.memory
            (short if missing > 0 else fitting).append((missing, Choice(plan, memory, time)))
    if not fitting:
        raise ValueError(f"nothing fits; most of the nearest are {most_of(short)}")
    choices = [choice for _, choice in fitting]
    return heapq.nsmallest(count, choices, key=lambda c: (c.time.total, c.memory.total))


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
        Choice(plan, memory_from_the_planner(model, plan), time_from_rates(model, plan, cluster))
        for plan in tried()
    ]
    sizes = {c.plan: c.memory.total + gathered_bytes(model, c.plan) for c in choices}
    good = [c for c in choices if sizes[c.plan] <= USABLE * cluster.memory]
    if not good:
        most_of_it = most_of([(sizes[c.plan], c) for c in choices])
        raise ValueError(f"no plan for {cluster.gpus} GPUs: too much of {most_of_it}")
    good.sort(key=lambda c: c.memory.total)
    good.sort(key=lambda c: c.time.total)
    return good[:count]
