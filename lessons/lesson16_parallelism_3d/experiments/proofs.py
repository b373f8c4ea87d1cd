"""Lesson 16's proofs: the one curve on a mesh, checkpoints that move, bytes that a rank keeps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons.lesson16_parallelism_3d.experiments.choosing import as_cut
from lessons.lesson16_parallelism_3d.experiments.results import kept_in_a_step
from shared.data.rows import Text
from shared.measuring.largest import largest
from shared.measuring.traffic import count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.parallel3d.checkpoint import OnMesh
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import Groups, Mesh3D, make_groups
from shared.planner.models import spec_of
from shared.planner.outcomes import Memory
from shared.planner.specs import ModelSpec, Plan
from shared.sharding.checkpoint import ShardedByRows
from shared.sharding.fully_shard import FullyShard
from shared.sharding.zero_reference import SETTINGS
from shared.tensor_parallel.checkpoint import CutModel
from shared.training.engine import (
    Curve,
    DataParallelEngine,
    Engine,
    reference_curve,
    train_step,
)
from shared.training.named_checkpoint import Layout, load_named, save_named
from shared.training.reference_run import reference_model, reference_optimizer

Group = dist.ProcessGroup | None
Clip = Callable[[Iterable[nn.Parameter], float, Group, Group], Tensor]


def curves(
    rank: int, groups: Groups, steps: int, limits: Sequence[float | None], clip: Clip
) -> list[Curve]:
    """The first steps of lesson 04's reference run on a mesh, for each of these limits.

    Clipped by `clip`; a limit of None is a run without.
    """
    mesh = make_groups(groups)
    engines = [(mesh_engine(reference_model(), mesh), limit) for limit in limits]
    return [clipped_curve(engine, steps, limit, clip) for engine, limit in engines]


def clipped_curve(engine: Parallel3D, steps: int, limit: float | None, clip: Clip) -> Curve:
    """The reference run's first steps under an engine that clips by `clip`."""
    engine.clip = partial(clipped, engine, clip)  # ty: ignore[invalid-assignment]
    return reference_curve(engine, range(steps), limit)


def clipped(engine: Parallel3D, clip: Clip, limit: float) -> Tensor:
    """Clip an engine's gradients by a function of its parameters; the norm that it returns."""
    mesh = engine.mesh
    return clip(engine.pipeline.parameters(), limit, mesh.tp.group, mesh.pp.group)


def mesh_engine(model: Any, mesh: Groups | Mesh3D, **options: Any) -> Parallel3D:
    """A model of the reference run on a mesh, two micro-batches a replica if nobody says."""
    given: dict[str, Any] = {"num_micro_batches": 2, **options}
    mesh = mesh if isinstance(mesh, Mesh3D) else make_groups(mesh)
    return Parallel3D(model, mesh, torch.optim.AdamW, **given, **SETTINGS)


def twin_curve(steps: int, limit: float) -> Curve:
    """The same in one process, clipped by torch.nn.utils.clip_grad_norm_."""
    return reference_curve(one_process(0)[1], range(steps), limit)


def differences(found: Curve, wanted: Curve) -> tuple[float, float]:
    """The largest difference of a loss, and of a norm relative to it (0 without norms)."""
    losses = largest(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True))
    norms = [abs(a / b - 1) for a, b in zip(found.norms, wanted.norms, strict=True)]
    return losses, largest(norms or [0.0])


# Checkpoints

Make = Callable[[int], tuple[Layout, Engine]]


def one_process(rank: int) -> tuple[Layout, Engine]:
    """The plain process of the record."""
    model = reference_model()
    optimizer = reference_optimizer(list(model.parameters()))
    return CutModel(model), DataParallelEngine(model, optimizer)


def sharded(rank: int) -> tuple[Layout, Engine]:
    """Lesson 13's FullyShard over all ranks."""
    model = FullyShard(reference_model())
    optimizer = reference_optimizer(list(model.parameters()))
    return ShardedByRows(model), DataParallelEngine(model, optimizer, dist.get_world_size())


def on_mesh(groups: Groups, **options: Any) -> Make:
    """The 3D engine."""

    def make(rank: int) -> tuple[Layout, Engine]:
        engine = mesh_engine(reference_model(), groups, **options)
        return OnMesh(engine), engine

    return make


def continued(
    rank: int, make: Make, steps: range, begin: Path | None = None, end: Path | None = None
) -> list[float]:
    """Losses of these steps of the reference run (from 0), loaded from `begin`, saved to `end`."""
    layout, engine = make(rank)
    optimizer = getattr(
        layout, "optimizer", engine.optimizer
    )  # what ZeRO has around it is not saved
    if begin is not None:
        load_named(layout, optimizer, begin)
    losses = reference_curve(engine, steps).losses
    if end is not None:
        save_named(layout, optimizer, end)
    return losses


# Bytes

CONFIG = TransformerConfig(96, 48, 4, 4, 96, dropout=0.0, max_len=32, tie_embeddings=False)
LENGTH, ROWS = 24, 16


def spec() -> ModelSpec:
    """The small language model whose bytes are counted, as the planner sees it."""
    return spec_of(CONFIG, LENGTH)


def plans_of(ranks: int) -> list[Plan]:
    """Every dp x tp x pp of these ranks with every stage of ZeRO, and interleaved where it can be.

    Four micro-batches a replica; float32.
    """
    found = []
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            dp, rest = divmod(ranks, tp * pp)
            if rest or not dp:
                continue
            plan = Plan(dp, tp, pp, 1, ROWS // (4 * dp), 4, precision="float32")
            zeros = range(4) if dp > 1 else range(1)
            found += [replace(plan, zero=zero) for zero in zeros]
            if pp == 2:
                found.append(replace(plan, chunks=2))
    return found


def bytes_of(rank: int, plans: Sequence[tuple[Plan, Groups]]) -> list[Memory]:
    """What this rank kept in a step of each plan, counted."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(1, CONFIG.vocab_size, (ROWS, LENGTH + 1), generator=draw)
    batch = Text(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    found, meshes = [], dict[str, Mesh3D]()
    for plan, groups in plans:
        torch.manual_seed(0)
        if str(groups) not in meshes:  # making groups takes longer than a step
            meshes[str(groups)] = make_groups(groups)
        engine = Parallel3D(
            LanguageModel(CONFIG),
            meshes[str(groups)],
            torch.optim.AdamW,
            num_micro_batches=plan.num_micro_batches,
            schedule="interleaved" if plan.chunks > 1 else "1f1b",
            chunks=plan.chunks,
            zero=plan.zero,
        )
        assert as_cut(plan, engine, CONFIG.num_layers).layers(spec()) == plan.layers(spec())
        found.append(replace(kept_in_a_step(engine, batch), rank=engine.mesh.pp.index))
    return found


def fullest(memories: Sequence[Memory]) -> Memory:
    """Of the ranks' bytes those of the rank with the most."""
    return max(memories, key=lambda each: each.total)


def across_nodes(rank: int, layouts: Sequence[Groups], per_node: int) -> list[tuple[int, int]]:
    """By layout, bytes that this rank handed in during a step: inside a node, and between nodes."""
    return [_across_nodes(groups, per_node) for groups in layouts]


def _across_nodes(groups: Groups, per_node: int) -> tuple[int, int]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(1, CONFIG.vocab_size, (ROWS, LENGTH + 1), generator=draw)
    engine = mesh_engine(LanguageModel(CONFIG), groups, num_micro_batches=4)
    with count_traffic() as traffic:
        train_step(engine, Text(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    inside = outside = 0
    for call in traffic.calls:
        size = 0 if call.op == "recv" or len(call.ranks) < 2 else call.num_bytes
        if len({each // per_node for each in call.ranks}) > 1:
            outside += size
        else:
            inside += size
    return inside, outside
