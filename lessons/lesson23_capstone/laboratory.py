"""A plan, run: forked ranks take two steps of it, and what they keep and send is counted."""

import functools
import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist

from shared.capstone.budgets import BARE, Budget, Promise, candidates
from shared.capstone.config import ModelTable
from shared.capstone.keeping import Keeping
from shared.capstone.tasks import build_model, model_spec
from shared.data.rows import Text
from shared.measuring.timing import repetitions
from shared.measuring.traffic import Traffic, count_traffic
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import build_mesh, make_groups
from shared.planner.memory import memory_per_rank
from shared.planner.outcomes import StepTime
from shared.planner.seconds import step_time
from shared.planner.specs import ModelSpec, Plan
from shared.ranks.forked import run_ranks
from shared.ranks.links import sent_by_card, throttled_links
from shared.sharding.counting import ring_bytes
from shared.training.engine import train_step

VOCABULARY = 512
TOY = ModelTable("gpt", d_model=64, num_layers=4, num_heads=4, d_ff=256, length=32)
SLIM = ModelTable("modern", 32, 4, 4, 2, 96, length=16)


def spec_of_table(table: ModelTable) -> ModelSpec:
    """The planner's description of a language model here."""
    spec = model_spec(table, VOCABULARY)
    assert spec is not None, "the planner knows language models"
    return spec


def kept_and_sent(spec: ModelSpec, budget: Budget) -> list[dict[str, Any]]:
    """A table's rows: of each candidate the MB of states, and the seconds of its messages."""
    return [
        {
            "dp x tp x pp": f"{each.plan.dp} x {each.plan.tp} x {each.plan.pp}",
            "ZeRO": each.plan.zero,
            "MB kept": round(each.kept / 1e6, 3),
            "fits": "yes" if each.kept <= budget.memory else "",
            "s of messages": round(each.seconds, 3),
        }
        for each in promises(spec, budget)
    ]


def promises(spec: ModelSpec, budget: Budget) -> list[Promise]:
    """What the planner says of every candidate."""
    found = []
    for plan in candidates(spec, budget):
        memory, spans = memory_per_rank(spec, plan), step_time(spec, plan, budget.cluster, BARE)
        kept = memory.parameters + memory.gradients + memory.optimizer
        found.append(Promise(plan, kept, messages(spans)))
    return found


def messages(spans: StepTime) -> float:
    """Seconds of a step's messages."""
    return spans.tensor_parallel + spans.pipeline + spans.data_parallel


@dataclass(frozen=True)
class Counted:
    """What the fullest rank kept, and what the busiest sent in a step on rings, in bytes."""

    kept: int
    sent: int


def sent_bytes(traffic: Traffic) -> int:
    """Bytes that a rank sends: its messages to one other rank, and its part of every ring."""
    total = 0.0
    for call in traffic.calls:
        if call.op == "send":
            total += call.num_bytes
        elif call.op != "recv":
            total += ring_bytes(Traffic([call]))
    return round(total)


def engine_of(table: ModelTable, plan: Plan) -> tuple[Parallel3D, Text]:
    """On a rank: the engine of a plan, and a batch for it."""
    torch.manual_seed(0)
    mesh = make_groups(build_mesh(plan.dp, plan.tp, plan.pp, dist.get_world_size()))
    model, micro = build_model(table, VOCABULARY), plan.num_micro_batches
    adam = torch.optim.AdamW
    engine = Parallel3D(model, mesh, adam, num_micro_batches=micro, zero=plan.zero)
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (2, plan.batch, table.length), generator=draw)
    return engine, Text(rows[0], rows[1])


@functools.cache
def run_plan(table: ModelTable, plan: Plan) -> Counted:
    """Train two steps by a plan on forked ranks; the second is counted."""

    def work(rank: int) -> tuple[int, int]:
        gc.freeze()  # what the parent made is not looked through
        keeping = Keeping()
        engine, batch = engine_of(table, plan)
        keeping.watch(engine)
        train_step(engine, batch)
        with count_traffic() as traffic:
            train_step(engine, batch)
        return keeping.most, sent_bytes(traffic)

    seen = run_ranks(work, plan.num_gpus, timeout=120)
    return Counted(max(kept for kept, _ in seen), max(sent for _, sent in seen))


def step_seconds(
    table: ModelTable, plan: Plan, mbit: float | None, steps: int = 3
) -> tuple[float, float]:
    """The median step of the slowest rank, and the most bytes that a rank's card sends in a step.

    With `mbit` every rank is a node on such a link; without, no card is counted.
    """

    def work(rank: int) -> tuple[float, float]:
        engine, batch = engine_of(table, plan)
        taken, sent = [], []
        for _ in range(repetitions(steps + 1)):
            dist.barrier()
            began = time.perf_counter()
            train_step(engine, batch)
            taken.append(time.perf_counter() - began)
            sent.append(0 if mbit is None else sent_by_card())
        return (  # the first step has what later ones find ready
            statistics.median(taken[-steps:]),
            (sent[-1] - sent[0]) / max(1, len(sent) - 1),
        )

    if mbit is None:
        seen = run_ranks(work, plan.num_gpus, timeout=120)
    else:
        with throttled_links(plan.num_gpus, mbit) as slow:
            seen = run_ranks(work, plan.num_gpus, before=slow.enter, timeout=120)
    seconds, cards = zip(*seen, strict=True)
    return max(seconds), max(cards)
