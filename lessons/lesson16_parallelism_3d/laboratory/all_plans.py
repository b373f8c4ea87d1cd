"""Lesson 16: every plan of a small cluster, one after the other."""

import functools
import itertools
import random
from dataclasses import dataclass, replace

from shared.exercises.seeds import fresh_seed
from shared.planner.memory import gathered_bytes, memory_per_rank
from shared.planner.outcomes import Memory
from shared.planner.seconds import exposed_seconds, step_time
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.planner.variants import USABLE, variants

KINDS = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Tried:
    """A plan that can be, with its seconds and its bytes."""

    plan: Plan
    seconds: float  # with nothing hidden behind compute, by which plans are ranked
    hidden: float  # as the plan has it
    memory: Memory  # of the fullest rank
    gathered: int

    @property
    def needed(self) -> int:
        """Bytes at the worst moment."""
        return self.memory.total + self.gathered


@dataclass(frozen=True)
class Question:
    """What is asked."""

    model: ModelSpec
    cluster: Cluster
    batch: int

    def __str__(self) -> str:
        return (
            f"{self.model.num_layers} layers of {self.model.d_model} with {self.model.num_heads} "
            f"heads on {self.cluster.gpus} GPUs ({self.cluster.gpus_per_node} a node, "
            f"{self.cluster.memory:,.0f} bytes) with {self.batch} sequences"
        )


def layouts(question: Question) -> list[Plan]:
    """Every dp x tp x pp that this model, the nodes and the batch can be cut by."""
    model, gpus = question.model, question.cluster.gpus
    cut = (model.num_heads, model.kv_heads, model.d_ff, model.vocab_size)
    found = []
    for dp in range(1, gpus + 1):
        for tp in range(1, gpus + 1):
            pp = gpus // (dp * tp)
            if dp * tp * pp != gpus or pp > model.num_layers or question.batch % dp:
                continue
            if tp <= question.cluster.gpus_per_node and all(size % tp == 0 for size in cut):
                found.append(Plan(dp=dp, tp=tp, pp=pp))
    return found


def exposed(model: ModelSpec, plan: Plan, cluster: Cluster) -> float:
    """Seconds of a step with nothing hidden behind compute."""
    return step_time(model, replace(plan, overlap=False), cluster).total


def equally_fast(model: ModelSpec, plans: tuple[Plan, Plan], cluster: Cluster) -> bool:
    """Whether two plans take the same time in whichever order its kinds are added up.

    Many plans take the same time but for the last bit, which rounding decides: no order of these
    is wrong.
    """
    sums = [exposed(model, plan, cluster) for plan in plans]
    others = [
        exposed_seconds(model, plan, cluster, step_time(model, plan, cluster)) for plan in plans
    ]
    return sums[0] == sums[1] and others[0] == others[1]


@functools.cache
def every_plan(question: Question) -> list[Tried]:
    """All plans, the fastest first."""
    found, model = [], question.model
    for layout in layouts(question):
        for plan in variants(model, layout, question.batch):
            seconds = exposed(model, plan, question.cluster)
            hidden = step_time(model, plan, question.cluster).total
            needed = memory_per_rank(model, plan), gathered_bytes(model, plan)
            found.append(Tried(plan, seconds, hidden, *needed))
    return sorted(found, key=lambda each: (each.seconds, each.memory.total))


def fitting(question: Question) -> list[Tried]:
    """Those that fit."""
    limit = USABLE * question.cluster.memory
    return [each for each in every_plan(question) if each.needed <= limit]


def some_cannot_be(question: Question) -> bool:
    """Whether a layout that nodes and batch allow cannot be, by the model's sizes."""
    gpus, can_be = question.cluster.gpus, layouts(question)
    sizes = itertools.product(range(1, gpus + 1), repeat=3)
    return any(
        dp * tp * pp == gpus
        and tp <= question.cluster.gpus_per_node
        and question.batch % dp == 0
        and Plan(dp=dp, tp=tp, pp=pp) not in can_be
        for dp, tp, pp in sizes
    )


@functools.cache
def to_the_last_byte() -> Question:
    """A question in which one plan needs exactly what can be used, and no other one nearly."""
    for each in every_plan(SIXES):
        alone = not any(
            0 < abs(other.needed - each.needed) < 2e-3 * each.needed for other in every_plan(SIXES)
        )
        memory = each.needed * 10 // 9
        if each.plan.zero == 0 and each.needed % 9 == 0 and alone:
            return replace(SIXES, cluster=replace(SIXES.cluster, memory=float(memory)))
    raise AssertionError("no plan's bytes can be divided by nine")


def most(tried: Tried) -> str:
    """The kind of bytes that a plan needs most of."""
    return max(KINDS, key=lambda kind: getattr(tried.memory, kind))


SMALL = ModelSpec(6, 48, 6, 96, 132, 24)
WIDE = ModelSpec(4, 96, 12, 192, 2400, 48, dropout=True, fused_attention=False, tied=False)
NODES = Cluster(8, 7.2e5, 3e9, 4, 4e7, 9e6, 2e8, latency=1e-5)
ROOMY = Question(SMALL, NODES, 24)
TIGHT = Question(WIDE, Cluster(4, 5e6, 3e9, 2, 4e8, 4e7, 2e9, latency=1e-6), 8)
SIXES = Question(SMALL, Cluster(6, 4.9e5, 3e9, 3, 2e7, 9e6, 2e8, latency=1e-5), 6)
LARGE = Question(WIDE, replace(NODES, memory=1e9), 8)
LONE = Question(SMALL, Cluster(4, 1e9, 1e9, 1, 4e8, 4e8, 2e9, latency=1e-6), 6)
FULL = replace(TIGHT, cluster=replace(TIGHT.cluster, memory=3e6))  # nothing fits
LONG = replace(  # what the nearest plan needs most is not what the fastest does
    FULL, model=ModelSpec(4, 96, 12, 192, 24, 480), cluster=replace(FULL.cluster, memory=1.9e6)
)
LONGER = replace(
    FULL, model=ModelSpec(2, 48, 6, 96, 24, 384), cluster=replace(FULL.cluster, memory=4e5)
)
GATHERED = Question(  # by memory_per_rank alone another plan would be the nearest
    ModelSpec(3, 48, 6, 120, 480, 384), replace(FULL.cluster, memory=8e5), 8
)
NO_WAY = Question(SMALL, replace(NODES, gpus=7, gpus_per_node=8), 5)  # nothing can be cut by 7


def drawn() -> Question:
    """Four GPUs whose numbers are drawn; everything fits."""
    draw = random.Random(fresh_seed())
    peak, inner, outer = (10 ** draw.uniform(*each) for each in ((9, 10), (7, 8), (6, 7)))
    return Question(SMALL, Cluster(4, 1e9, peak, 2, inner, outer, 10 ** draw.uniform(8, 9)), 4)
