"""Lesson 16: seconds of a step by kind, and what they are where one thing is overlooked."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shared.exercises.seeds import fresh_seed
from shared.planner.specs import Cluster

Seconds = float | tuple[float, ...]
Case = dict[str, Any]  # the arguments of an answer


@dataclass(frozen=True)
class Kind:
    """A formula, the names of its numbers, and what comes out where it is mistaken."""

    names: tuple[str, ...]
    right: Callable[..., Seconds]
    mistakes: Mapping[str, Callable[..., Seconds]]


def pipeline(
    layers: Sequence[int],
    layer: float,
    head: float,
    num_micro_batches: int,
    chunks: int = 1,
    recompute: bool = False,
    *,
    passes: float = 3,
    again: float = 1,
    head_passes: float = 3,
    head_again: float = 0,
    pace: Callable[[Sequence[float]], float] = max,
    waits: Callable[[int, int, int], float] = lambda p, m, v: (p - 1) / (v * m),
    head_on: int | None = -1,
) -> Seconds:
    """Compute and bubble of a step; the keywords are what may be overlooked."""
    forwards = passes + again * recompute
    ranks = [forwards * layer * count for count in layers]
    place = ranks.index(max(ranks)) if head_on is None else head_on
    ranks[place] += (head_passes + head_again * recompute) * head
    compute = num_micro_batches * pace(ranks)
    return compute, compute * waits(len(layers), num_micro_batches, chunks)


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


PIPELINE = Kind(
    ("compute", "the bubble"),
    pipeline,
    {
        "backward is left out: it takes twice the forward": partial(
            pipeline, passes=1, head_passes=1
        ),
        "backward counts as one forward: it takes two": partial(pipeline, passes=2, head_passes=2),
        "what is computed again costs nothing": partial(pipeline, again=0),
        "the head is computed again: it is no layer": partial(pipeline, head_again=1),
        "the head is left out": partial(pipeline, head_passes=0),
        "the head counts in forward alone": partial(pipeline, head_passes=1),
        "the head is on the first rank: it is on the last": partial(pipeline, head_on=0),
        "the head is added to the rank with the most layers: it is on the last": partial(
            pipeline, head_on=None
        ),
        "the mean rank sets the pace: it is the slowest": partial(pipeline, pace=mean),
        "all ranks are added up: they work side by side": partial(pipeline, pace=sum),
        "the first rank sets the pace: it is the slowest": partial(pipeline, pace=lambda x: x[0]),
        "the last rank sets the pace: it is the slowest": partial(pipeline, pace=lambda x: x[-1]),
        "interleaving is left out: v stages a rank make the bubble smaller": partial(
            pipeline, waits=lambda p, m, v: (p - 1) / m
        ),
        "the bubble is taken as a share of the whole step: it is one of the work": partial(
            pipeline, waits=lambda p, m, v: (p - 1) / (v * m + p - 1)
        ),
        "the bubble has one slot too many: p - 1 ranks are waited for": partial(
            pipeline, waits=lambda p, m, v: p / (v * m)
        ),
        "more micro-batches make the bubble no longer": partial(
            pipeline, waits=lambda p, m, v: (p - 1) / v
        ),
    },
)


def pipeline_cases() -> list[Case]:
    """Pipelines of one to four ranks, with numbers that are drawn."""
    draw = random.Random(fresh_seed())
    names = ("layers", "num_micro_batches", "chunks", "recompute")
    shapes = [
        ((4,), 1, 1, False),
        ((3,), 2, 1, True),
        ((2, 2), 4, 1, False),
        ((3, 1), 3, 1, False),
        ((1, 3), 5, 1, True),
        ((2, 4, 2, 3), 8, 2, False),
        ((6, 2), 6, 2, True),
        ((1, 1, 1, 1), 12, 1, False),
    ]
    cases = []
    for shape in shapes:
        for head in (0.3, draw.uniform(0.5, 3.0)):
            times = {"layer": draw.uniform(0.5, 2.0), "head": head}
            cases.append(dict(zip(names, shape, strict=True)) | times)
    return cases


def tensor(
    vectors: float,
    layers: int,
    tp: int,
    num_micro_batches: int,
    cluster: Cluster,
    recompute: bool = False,
    *,
    messages: tuple[int, int] = (4, 6),
    ring: Callable[[int], float] = lambda t: 2 * (t - 1) / t,
    rate: Callable[[Cluster, int], float] = lambda cluster, t: cluster.link(t, 1),
    latencies: Callable[[int], float] = lambda messages: messages,
    alone: float = 0.0,
) -> float:
    """Seconds of a step's all-reduces; the keywords are what may be overlooked."""
    if tp == 1 and not alone:
        return 0.0
    count = num_micro_batches * layers * messages[recompute]
    return count * ring(tp) * vectors / rate(cluster, tp) + latencies(count) * cluster.latency


TENSOR = Kind(
    ("seconds",),
    tensor,
    {
        "backward's all-reduces are left out": partial(tensor, messages=(2, 4)),
        "a layer has one all-reduce in forward and one in backward: attention and feed-forward "
        "have one each": partial(tensor, messages=(2, 3)),
        "what is computed again sends nothing: it repeats forward's messages": partial(
            tensor, messages=(4, 4)
        ),
        "everything is sent once more where a layer is computed again: it is forward alone": (
            partial(tensor, messages=(4, 8))
        ),
        "an all-reduce sends everything twice: a rank keeps its own part": partial(
            tensor, ring=lambda t: 2
        ),
        "an all-reduce sends everything once": partial(tensor, ring=lambda t: 1),
        "one direction of an all-reduce is counted: a reduce-scatter, then an all-gather": partial(
            tensor, ring=lambda t: (t - 1) / t
        ),
        "every group has the link inside a node": partial(tensor, rate=lambda c, t: c.inner),
        "every group has the link between nodes": partial(tensor, rate=lambda c, t: c.outer),
        "a group that leaves its node has one card: it has those of all its GPUs there": partial(
            tensor, rate=lambda c, t: c.inner if t <= c.gpus_per_node else c.outer
        ),
        "the cards of a node are faster together than the link inside it": partial(
            tensor, rate=lambda c, t: c.inner if t <= c.gpus_per_node else c.outer * c.gpus_per_node
        ),
        "the latency is left out": partial(tensor, latencies=lambda count: 0),
        "the latency counts once a step: each message has it": partial(
            tensor, latencies=lambda count: 1
        ),
        "a group of one sends": partial(tensor, alone=1.0),
    },
)
NODE = Cluster(64, 1, 1, 8, inner=100.0, outer=5.0, memory_bandwidth=1)


def tensor_cases() -> list[Case]:
    """Groups of one to sixteen ranks, in a node and over two or more."""
    draw = random.Random(fresh_seed())
    names = ("tp", "layers", "num_micro_batches", "recompute")
    wide = replace(NODE, outer=60.0)  # eight cards are more than the link inside
    shapes: list[tuple[int, int, int, bool, Cluster]] = [
        (1, 2, 2, False, NODE),
        (2, 1, 1, False, NODE),
        (4, 3, 2, True, NODE),
        (8, 2, 4, False, NODE),
        (16, 2, 1, False, NODE),
        (16, 1, 3, True, wide),
        (8, 1, 2, False, replace(NODE, gpus_per_node=4)),
    ]
    cases = []
    for *shape, cluster in shapes:
        cluster = replace(cluster, latency=draw.uniform(0.001, 0.1))
        case = {"vectors": draw.uniform(20.0, 200.0), "cluster": cluster}
        cases.append(dict(zip(names, shape, strict=True)) | case)
    return cases


def data(
    size: float,
    dp: int,
    link: float,
    compute: float,
    num_micro_batches: int,
    zero: int = 0,
    overlap: bool = True,
    *,
    sent: Callable[[int], float] = lambda n: (n - 1) / n,
    messages: tuple[int, int, int] = (2, 1, 3),  # of ZeRO-0, ZeRO-1's gradients, ZeRO-3
    behind: tuple[float, float] = (2 / 3, 1.0),  # of compute: gradients, ZeRO-3's messages
    all_batches: bool = False,
    gathered_too: bool = False,
    below_0: bool = False,
    always: bool = False,
    often: bool = False,
    zero3_once: bool = False,
) -> float:
    """Seconds that compute does not hide; the keywords are what may be overlooked."""
    m, one = num_micro_batches, sent(dp) * size / link
    hidden = compute if overlap or always else 0.0
    last = behind[0] * hidden * (m if all_batches else 1)
    least = -float("inf") if below_0 else 0.0
    if zero == 3:
        return (1 if zero3_once else m) * max(least, messages[2] * one - behind[1] * hidden)
    times = m if often else 1
    if zero == 1 and gathered_too:
        return max(least, 2 * one - last)
    after = one if zero == 1 else 0.0
    return times * max(least, messages[zero] * one - last) + after


DATA = Kind(
    ("seconds",),
    data,
    {
        "an all-reduce counts as one message: a reduce-scatter, then an all-gather": partial(
            data, messages=(1, 1, 3)
        ),
        "a rank sends its own part as well": partial(data, sent=lambda n: 1),
        "what one message does is counted twice": partial(data, sent=lambda n: 2 * (n - 1) / n),
        "gradients hide behind a whole micro-batch: backward is 2/3 of it": partial(
            data, behind=(1.0, 1.0)
        ),
        "gradients hide behind a forward: backward is 2/3 of a micro-batch": partial(
            data, behind=(1 / 3, 1.0)
        ),
        "gradients hide behind all backwards of a step: they are whole in the last alone": partial(
            data, all_batches=True
        ),
        "ZeRO-1's gather is hidden as well: it comes when nothing is computed": partial(
            data, gathered_too=True
        ),
        "ZeRO-3's messages hide behind backward alone: they travel in forward as well": partial(
            data, behind=(2 / 3, 2 / 3)
        ),
        "ZeRO-3 gathers once a micro-batch: it does in forward and in backward": partial(
            data, messages=(2, 1, 2)
        ),
        "ZeRO-3's messages travel once a step: they do with every micro-batch": partial(
            data, zero3_once=True
        ),
        "gradients travel with every micro-batch: they do so with ZeRO-3 alone": partial(
            data, often=True
        ),
        "nothing is hidden": partial(data, behind=(0.0, 0.0)),
        "overlap is not asked for: without it nothing is hidden": partial(data, always=True),
        "what is left can be below 0: no more is hidden than there is": partial(data, below_0=True),
    },
)


def data_cases() -> list[Case]:
    """Two to eight replicas, with compute that hides nothing, a part, and all."""
    draw = random.Random(fresh_seed())
    cases = []
    for dp in (1, 2, 4, 8):
        for zero in (0, 1, 3):
            for overlap in (False, True):
                for share in (0.3, 1.2, 5.0):  # of one message's seconds
                    size, link = draw.uniform(10, 100), draw.uniform(5, 50)
                    compute = share * size / link * draw.uniform(0.9, 1.1)
                    case = {"size": size, "dp": dp, "link": link, "compute": compute}
                    more = {"zero": zero, "overlap": overlap}
                    cases.append(case | {"num_micro_batches": draw.randint(2, 6)} | more)
    return cases
