"""Lesson 16: bytes by kind on every rank, as measured and by formula, for every plan of 4 ranks."""

from collections.abc import Sequence

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist

from lessons.lesson16_parallelism_3d.experiments.results import kept_in_a_step
from shared.data.rows import Text
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import Mesh3D, build_mesh, make_groups
from shared.planner.memory import memory_per_rank
from shared.planner.models import spec_of
from shared.planner.outcomes import Memory
from shared.planner.specs import Plan
from shared.ranks.forked import run_ranks

MESHES = ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4))  # dp, tp, pp
LENGTH, ROWS = 8, 2  # of a micro-batch
CONFIG = TransformerConfig(24, 16, 4, 4, 32, dropout=0.1, max_len=16, positions="learned")


def all_plans() -> list[Plan]:
    """Every plan of 4 ranks: each mesh, stage of ZeRO, recomputation and sequence parallelism."""
    return [
        Plan(
            *(dp, tp, pp),
            micro_batch=ROWS,
            num_micro_batches=max(2, pp),
            zero=zero,
            checkpoint="full" if again else "none",
            sequence_parallel=in_parts,
            precision="float32",
        )
        for dp, tp, pp in MESHES
        for zero in (range(4) if dp > 1 else (0,))
        for again in (False, True)
        for in_parts in ((False, True) if tp > 1 else (False,))
    ]


def one_step(rank: int, plans: Sequence[Plan]) -> list[tuple[int, Memory]]:
    """Under each plan: this rank's stage, and the bytes that it kept in a step."""
    size = dist.get_world_size()
    meshes = {
        mesh: make_groups(build_mesh(*mesh, size)) for mesh in dict.fromkeys(map(_mesh, plans))
    }
    return [_one_step(plan, meshes[_mesh(plan)]) for plan in plans]


def _mesh(plan: Plan) -> tuple[int, int, int]:
    return plan.dp, plan.tp, plan.pp


def _one_step(plan: Plan, mesh: Mesh3D) -> tuple[int, Memory]:
    torch.manual_seed(16)
    engine = Parallel3D(
        LanguageModel(CONFIG),
        mesh,
        torch.optim.AdamW,
        num_micro_batches=plan.num_micro_batches,
        zero=plan.zero,
        checkpoint=plan.checkpoint == "full",
        sequence_parallel=plan.sequence_parallel,
    )
    ids = torch.randint(0, CONFIG.vocab_size, (plan.batch, LENGTH + 1))
    return mesh.pp.index, kept_in_a_step(engine, Text(ids[:, :-1], ids[:, 1:]))


def measured(plans: Sequence[Plan]) -> list[list[tuple[int, Memory]]]:
    """What `one_step` returns on each of 4 ranks, by plan."""
    ranks = run_ranks(one_step, 4, plans, timeout=200)
    return [[rank[i] for rank in ranks] for i in range(len(plans))]


def by_formula(plan: Plan) -> Memory:
    """What `memory_per_rank` says of the model."""
    return memory_per_rank(spec_of(CONFIG, LENGTH), plan)
