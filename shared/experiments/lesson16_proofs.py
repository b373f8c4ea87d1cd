"""Lesson 16's proofs: the one curve on a mesh, checkpoints that move, bytes that a rank keeps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.experiments.lesson13_proofs import reference_step
from shared.experiments.lesson16_run import as_cut, kept_in_a_step
from shared.fsdp.checkpoint import ShardedByRows
from shared.fsdp.fully_shard import FullyShard
from shared.measuring.traffic import count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.parallel3d.batches import Text
from shared.parallel3d.checkpoint import CutModel, OnMesh
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import Groups, Mesh3D, make_groups
from shared.planner.models import spec_of
from shared.planner.outcomes import Memory
from shared.planner.specs import ModelSpec, Plan
from shared.training import reference_run
from shared.training.named_checkpoint import Layout, load_named, save_named
from shared.training.reference_run import (
    Step,
    loss_of,
    plain_step,
    reference_batches,
    reference_model,
    reference_optimizer,
)
from shared.training.schedules import set_learning_rate
from shared.zero.reference import SETTINGS

Group = dist.ProcessGroup | None
Clip = Callable[[Iterable[nn.Parameter], float, Group, Group], Tensor]
Curve = list[tuple[float, float | None]]  # loss and norm of each step
batches = cache(reference_batches)  # half of a short run's time; forks have what the parent made


def curves(
    rank: int, groups: Groups, steps: int, limits: Sequence[float | None], clip: Clip
) -> list[Curve]:
    """The first steps of lesson 04's reference run on a mesh, for each of these limits.

    Clipped by `clip`; a limit of None is a run without.
    """
    mesh = make_groups(groups)
    return [train(mesh_engine(reference_model(), mesh), steps, limit, clip) for limit in limits]


def train(engine: Parallel3D, steps: int, limit: float | None, clip: Clip) -> Curve:
    """The first steps of the reference run's batches under an engine, clipped by `clip`."""
    found: Curve = []
    for number, batch in enumerate(batches()[:steps], start=1):
        set_learning_rate(engine.optimizer, reference_run.learning_rate(number))
        engine.optimizer.zero_grad()
        loss = engine.forward_backward(batch).item()
        engine.average_gradients()
        norm = None if limit is None else clipped(engine, clip, limit).item()
        engine.optimizer.step()
        found.append((loss, norm))
    return found


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
    model = reference_model()
    optimizer = reference_optimizer(list(model.parameters()))
    found: Curve = []
    for number, batch in enumerate(batches()[:steps], start=1):
        set_learning_rate(optimizer, reference_run.learning_rate(number))
        optimizer.zero_grad()
        loss = loss_of(model, batch, batch.num_tokens)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def differences(found: Curve, wanted: Curve) -> tuple[float, float]:
    """The largest difference of a loss, and of a norm relative to it (0 without norms)."""
    pairs = list(zip(found, wanted, strict=True))
    losses = max(abs(a[0] - b[0]) for a, b in pairs)
    norms = [abs(a[1] / b[1] - 1) for a, b in pairs if a[1] is not None and b[1] is not None]
    return losses, max(norms, default=0.0)


# Checkpoints

Engine = Callable[[int], tuple[Layout, torch.optim.Optimizer, Step]]


def one_process(rank: int) -> tuple[Layout, torch.optim.Optimizer, Step]:
    """The plain process of the record."""
    model = reference_model()
    optimizer = reference_optimizer(list(model.parameters()))
    return CutModel(model), optimizer, plain_step(model, optimizer)


def sharded(rank: int) -> tuple[Layout, torch.optim.Optimizer, Step]:
    """Lesson 13's FullyShard over all ranks."""
    engine = FullyShard(reference_model())
    optimizer = reference_optimizer(list(engine.parameters()))
    return ShardedByRows(engine), optimizer, reference_step(engine, optimizer)


def on_mesh(groups: Groups, **options: Any) -> Engine:
    """The 3D engine."""

    def make(rank: int) -> tuple[Layout, torch.optim.Optimizer, Step]:
        engine = mesh_engine(reference_model(), groups, **options)

        def step(batch: Any, rate: float) -> float:
            set_learning_rate(engine.optimizer, rate)
            return engine.train_step(batch).loss

        layout = OnMesh(engine)
        return layout, layout.optimizer, step

    return make


def continued(
    rank: int, engine: Engine, steps: range, begin: Path | None = None, end: Path | None = None
) -> list[float]:
    """Losses of these steps of the reference run (from 0), loaded from `begin`, saved to `end`."""
    layout, optimizer, step = engine(rank)
    if begin is not None:
        load_named(layout, optimizer, begin)
    losses = [step(batches()[i], reference_run.learning_rate(i + 1)) for i in steps]
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
        engine.train_step(Text(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    inside = outside = 0
    for call in traffic.calls:
        size = 0 if call.op == "recv" or len(call.ranks) < 2 else call.num_bytes
        if len({each // per_node for each in call.ranks}) > 1:
            outside += size
        else:
            inside += size
    return inside, outside
