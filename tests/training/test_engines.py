"""Every engine of lessons 06, 10, 13 to 17, 20 and 22 gives the reference curve, clipped as well.

Three steps of all of them, and all 50 of one of each kind.

Not here: lesson 18's experts, which are another model, lesson 20's local SGD and lossy hooks, whose
curve is another one, and lesson 23's modes, which are these engines around its own models
(tests/lesson23_capstone/test_modes.py).
"""

import os
import runpy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lessons.lesson11_gradient_checkpointing.experiments.layers import checkpoint_layers
from shared.ddp.engines import ENGINES
from shared.ecosystem.engines import accelerate_engine, fabric_engine
from shared.exercises.lessons import ROOT
from shared.less_communication.hierarchical import hierarchical_hook, two_levels
from shared.less_communication.hooks import topk_with_error_feedback
from shared.less_communication.reference import hooked_reference
from shared.less_communication.states import TopK
from shared.long_context.models import context_parallel, sum_gradients
from shared.long_context.orders import cut_sequence
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import build_mesh, make_groups
from shared.pipeline.engine import PipelineEngine
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import one_f_one_b_schedule
from shared.pipeline.stages import parts_of, split_stages
from shared.ranks.forked import run_ranks
from shared.sharding.fully_shard import FullyShard
from shared.sharding.hybrid import hybrid_shard
from shared.sharding.prefetch import PrefetchingShard
from shared.sharding.zero_reference import SETTINGS, build_zero
from shared.tensor_parallel.engine import reference_engine
from shared.training.engine import Curve, DataParallelEngine, Engine, reference_curve
from shared.training.reference_run import (
    CONFIG,
    checksum,
    compare_with_record,
    read_record,
    reference_model,
    reference_optimizer,
)
from solutions.lesson11_gradient_checkpointing import checkpoint

STEPS, RANKS = range(3), 2
ROUNDING = 5e-6  # what another order of additions does to a loss, at most
LIMIT = 0.5  # below the norms of the first steps, which are 2 to 6
wrap = runpy.run_path(str(ROOT / "lessons" / "lesson06_ddp" / "train.py"))["wrap"]


def averaging(name: str, bucket_mb: float | None = None) -> Engine:
    ranks = dist.get_world_size()
    return wrap(name, reference_model(), reference_optimizer, ranks, bucket_mb)


def zero(stage: int, model: nn.Module | None = None) -> Engine:
    model = model or reference_model()
    optimizer = build_zero(stage, model, **SETTINGS)
    return DataParallelEngine(model, optimizer, dist.get_world_size())


def sharded(make: Callable) -> Engine:
    model = make(reference_model())
    optimizer = reference_optimizer(list(model.parameters()))
    return DataParallelEngine(model, optimizer, dist.get_world_size())


def pipelined() -> Engine:
    parts = parts_of(reference_model())
    pipeline = Pipeline(parts, split_stages([1.0] * len(parts), RANKS))
    optimizer = reference_optimizer(list(pipeline.parameters()))
    return PipelineEngine(pipeline, one_f_one_b_schedule(RANKS, 4), optimizer)


def by_framework(make: Callable) -> Engine:
    rank, ranks = str(dist.get_rank()), str(RANKS)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= place  # where frameworks look, and torchrun writes
    model = reference_model()
    return make(model, reference_optimizer(list(model.parameters())))


def on_mesh(dp: int, tp: int, pp: int, zero: int = 0) -> Engine:
    mesh = make_groups(build_mesh(dp, tp, pp, dist.get_world_size()))
    more = {"num_micro_batches": 2, "zero": zero, **SETTINGS}
    return Parallel3D(reference_model(), mesh, torch.optim.AdamW, **more)


class InParts(DataParallelEngine):
    """Ranks that share every sequence and no rows: each knows the loss of its own positions."""

    def global_loss(self, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total


def in_parts(way: str) -> Engine:
    model = reference_model()
    order = context_parallel(model, way=way)
    chunks = sum(len(each) for each in order)

    def mine(tokens: Tensor) -> Tensor:
        padded = F.pad(tokens, (0, -tokens.shape[1] % chunks), value=CONFIG.pad_id)
        return cut_sequence(padded, order, dist.get_rank(), 1)

    def loss(model, batch, num_tokens: int) -> Tensor:
        logits, follow = model(mine(batch.src), mine(batch.tgt_in)), mine(batch.tgt_out)
        return F.cross_entropy(
            logits.flatten(0, 1), follow.flatten(), ignore_index=CONFIG.pad_id, reduction="sum"
        ) / num_tokens  # fmt: skip

    optimizer = reference_optimizer(list(model.parameters()))
    return InParts(model, optimizer, finish=partial(sum_gradients, model), loss=loss)


MAKE: dict[str, Callable[[], Engine]] = {
    **{name: partial(averaging, name) for name in ENGINES},
    **{f"zero {stage}": partial(zero, stage) for stage in (1, 2, 3)},
    "full sharding": partial(sharded, FullyShard),
    "with prefetch": partial(sharded, PrefetchingShard),
    "hybrid": partial(sharded, partial(hybrid_shard, mesh=(2, 1))),
    "FSDP2": partial(sharded, fully_shard),
    "Accelerate": partial(by_framework, accelerate_engine),
    "Fabric": partial(by_framework, fabric_engine),
    "tensor parallel": reference_engine,
    "sequence parallel": partial(reference_engine, sequence_parallel=True),
    "pipeline": pipelined,
    "dp 2, zero 3": partial(on_mesh, 2, 1, 1, zero=3),
    "tp 2": partial(on_mesh, 1, 2, 1),
    "pp 2": partial(on_mesh, 1, 1, 2),
    "ring attention": partial(in_parts, "ring"),
    "heads for sequence": partial(in_parts, "all_to_all"),
    "two levels": lambda: hooked_reference(two_levels(2), hierarchical_hook),
    "top-k, density 1": lambda: hooked_reference(TopK(1.0), topk_with_error_feedback),
}


@pytest.fixture(scope="module")
def curves() -> list[dict[str, tuple[Curve, Curve]]]:
    """By rank and engine, the first steps as they are, and clipped.

    In a process that Accelerate was told of before, as by TrainingArguments.
    """
    PartialState(cpu=True)

    def work(rank: int) -> dict[str, tuple[Curve, Curve]]:
        return {
            name: (reference_curve(make(), STEPS), reference_curve(make(), STEPS, LIMIT))
            for name, make in MAKE.items()
        }

    try:
        return run_ranks(work, RANKS, timeout=250)
    finally:
        PartialState._reset_state()


@pytest.fixture(scope="module")
def clipped_alone() -> Curve:
    """One process, whose gradients are clipped by torch."""
    model = reference_model()
    optimizer = reference_optimizer(list(model.parameters()))
    return reference_curve(DataParallelEngine(model, optimizer), STEPS, LIMIT)


@pytest.mark.parametrize("name", MAKE)
def test_every_engine_has_the_one_curve_and_the_norms_of_one_process(name, curves, clipped_alone):
    assert min(clipped_alone.norms) > LIMIT
    for rank in curves:
        plain, clipped = rank[name]
        assert plain.losses == pytest.approx(read_record()["losses"][: len(STEPS)], abs=ROUNDING)
        assert clipped.losses == pytest.approx(clipped_alone.losses, abs=ROUNDING)
        assert clipped.norms == pytest.approx(clipped_alone.norms, rel=1e-5)
        assert rank[name] == curves[0][name]


@pytest.mark.full
def test_one_of_each_kind_has_the_whole_curve():
    """An error of a little in every step is within rounding in three of them."""

    def work(rank: int) -> tuple[dict[str, list[float]], str]:
        engines = {
            "bucketed": averaging("bucketed", 0.1),  # several messages
            "zero 3": zero(3),
            "zero 3, recomputed": zero(3, checkpoint_layers(reference_model(), checkpoint)),
            "full sharding": sharded(FullyShard),
            "mesh": on_mesh(2, 2, 1),
        }
        curves = {name: reference_curve(engine).losses for name, engine in engines.items()}
        return curves, checksum(engines["bucketed"].model)

    by_rank = run_ranks(work, 4, timeout=280)
    for curves, _ in by_rank:
        gaps = {name: compare_with_record(losses) for name, losses in curves.items()}
        assert max(gaps.values()) <= ROUNDING, gaps
    assert len({weights for _, weights in by_rank}) == 1, "by hand, all ranks end with equal bits"
