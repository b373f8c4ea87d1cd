"""A plan, run: forked ranks take two steps of it, and what they keep and send is counted."""

import functools
from dataclasses import dataclass

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist

from shared.capstone.config import ModelTable
from shared.capstone.keeping import Keeping
from shared.capstone.tasks import build_model, model_spec
from shared.data.rows import Text
from shared.measuring.traffic import Traffic, count_traffic
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import build_mesh, make_groups
from shared.planner.specs import ModelSpec, Plan
from shared.ranks.forked import run_ranks
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


@functools.cache
def run_plan(table: ModelTable, plan: Plan) -> Counted:
    """Train two steps by a plan on forked ranks; the second is counted."""

    def work(rank: int) -> tuple[int, int]:
        keeping = Keeping()
        torch.manual_seed(0)
        model = build_model(table, VOCABULARY)
        mesh = make_groups(build_mesh(plan.dp, plan.tp, plan.pp, dist.get_world_size()))
        micro = {"num_micro_batches": plan.num_micro_batches, "zero": plan.zero}
        engine = Parallel3D(model, mesh, torch.optim.AdamW, **micro)
        keeping.watch(engine)
        draw = torch.Generator().manual_seed(1)
        rows = torch.randint(VOCABULARY, (2, plan.batch, table.length), generator=draw)
        batch = Text(rows[0], rows[1])
        train_step(engine, batch)
        with count_traffic() as traffic:
            train_step(engine, batch)
        return keeping.most, sent_bytes(traffic)

    seen = run_ranks(work, plan.num_gpus, timeout=120)
    return Counted(max(kept for kept, _ in seen), max(sent for _, sent in seen))
