"""Lesson 16's script: what is kept of a run, the table and the figure."""

import argparse
import itertools
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from lessons.lesson16_parallelism_3d.experiments.choosing import AXES
from shared.data.rows import Text
from shared.measuring.kept import KeptBytes, counting_kept
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import Traffic, count_traffic
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import Mesh3D
from shared.parallel3d.sharded_replicas import ShardedParameters, ShardedStates
from shared.pipeline.drawing import draw_events, legend
from shared.pipeline.executor import Event
from shared.pipeline.measuring import measured_bubble
from shared.pipeline.schedules import bubble
from shared.planner.outcomes import Memory
from shared.planner.specs import Plan
from shared.plots import MEANING, use_style
from shared.ranks.agreement import gathered, refused_by_any
from shared.ranks.group import Rank
from shared.results import of_all_ranks, write_results

KINDS = ("parameters", "gradients", "optimizer", "activations")


@dataclass
class Seen:
    """A run: losses, norms and seconds of its steps; of the last one what was sent and kept."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    saved: KeptBytes = field(default_factory=KeptBytes)
    gradients: int = 0  # bytes around their averaging

    @contextmanager
    def watching(self, engine: Parallel3D, last: bool) -> Generator[None]:
        """Time a step; count the last one instead, which takes time of its own."""
        device = next(engine.pipeline.parameters()).device
        with ExitStack() as stack:
            if last:
                self.saved = stack.enter_context(counting_kept(engine_weights(engine)))
                self.traffic = stack.enter_context(count_traffic())
            else:
                dist.barrier()
            began = synchronized_now(device)
            yield
            seconds, events = synchronized_now(device) - began, engine.pipeline.events
        if not last or not self.seconds:
            self.seconds.append(seconds)
            # From `began`, which the ranks of several machines have in common.
            self.events = [replace(e, start=e.start - began, end=e.end - began) for e in events]


def engine_weights(engine: Parallel3D) -> list[Tensor]:
    """This rank's parameters, and what they are views of while they are gathered (ZeRO 3)."""
    weights: list[Tensor] = list(engine.pipeline.parameters())
    if isinstance(engine.replicas, ShardedParameters):
        weights += [unit.flat for unit in engine.replicas.sharded.units]
    return weights


def gradient_bytes(engine: Parallel3D) -> int:
    """Bytes of this rank's gradients, whole ones and pieces."""
    owners = [*engine.pipeline.parameters(), *_trained(engine)]
    pieces = [p.grad for p in owners]
    if isinstance(engine.replicas, ShardedStates):
        pieces += [bucket.grad for bucket in engine.replicas.optimizer.buckets]
    return _bytes(x for x in pieces if x is not None)


def kept(engine: Parallel3D, seen: Seen) -> Memory:
    """Bytes by kind that this rank kept in the last step, counted over distinct storages.

    Parameters and states after it, gradients around their averaging, activations at their peak.
    """
    trained = _trained(engine)
    state = _optimizer(engine).state
    states = [x for p in trained for x in state[p].values() if isinstance(x, Tensor) and x.dim()]
    parameters = _bytes([*engine.pipeline.parameters(), *trained])
    return Memory(parameters, seen.gradients, _bytes(states), seen.saved.peak)


def kept_in_a_step(engine: Parallel3D, batch: Text) -> Memory:
    """Bytes by kind that this rank keeps in a step on a batch, counted."""
    seen = Seen()
    engine.optimizer.zero_grad()
    with counting_kept([*engine_weights(engine), batch.tokens, batch.targets]) as seen.saved:
        engine.forward_backward(batch)
    seen.gradients = gradient_bytes(engine)
    engine.average_gradients()
    engine.optimizer.step()
    return kept(engine, seen)


def _optimizer(engine: Parallel3D) -> torch.optim.Optimizer:
    replicas = engine.replicas
    return replicas.optimizer.inner if isinstance(replicas, ShardedStates) else replicas.optimizer


def _trained(engine: Parallel3D) -> list[nn.Parameter]:
    """What the optimizer updates: parameters, or the pieces of them that this rank has."""
    return [p for group in _optimizer(engine).param_groups for p in group["params"]]


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def by_axis(traffic: Traffic, mesh: Mesh3D) -> dict[str, list[int]]:
    """Messages of a step on this rank, and the bytes that it handed in for them, by axis."""
    found = {axis: [0, 0] for axis in AXES}
    for call in traffic.calls:
        for axis in AXES:
            if len(call.ranks) > 1 and {*call.ranks} <= {*getattr(mesh, axis).ranks}:
                found[axis][0] += 1
                found[axis][1] += 0 if call.op == "recv" else call.num_bytes
                break
    return found


@refused_by_any()  # what comes after it waits for all
def conclude(
    args: argparse.Namespace,
    rank: Rank,
    plan: Plan,
    predicted: Memory,
    engine: Parallel3D,
    seen: Seen,
    tokens: int,
) -> None:
    """Bring together what the ranks have seen; rank 0 writes table and figure. Call on all ranks.

    `predicted` is what the planner says of the fullest rank, `tokens` are those of a step.
    """
    training = of_all_ranks(rank, seen.losses, seen.seconds)
    measured = max(gathered(kept(engine, seen)), key=lambda memory: memory.total)
    runs, sent = gathered(seen.events), by_axis(seen.traffic, engine.mesh)
    if not rank.is_main:
        return
    row: dict[str, Any] = {
        "mesh": str(engine.mesh),
        "zero": plan.zero,
        "micro-batches": plan.num_micro_batches,
        **training.row(tokens),
        "last norm": round(float(seen.norms[-1]), 3),
        "MiB, predicted": round(predicted.total / 2**20, 3),
        "measured": round(measured.total / 2**20, 3),
        **{f"{axis} messages": sent[axis][0] for axis in AXES},
        "bubble by formula, %": round(
            100 * bubble(plan.pp, plan.num_micro_batches, plan.chunks), 1
        ),
        "measured, %": round(100 * waiting(runs, engine.mesh), 1),
    }
    memory = {"predicted": _by_kind(predicted), "measured": _by_kind(measured)}
    figures = {"parallel3d.png": draw(training.losses, memory, runs)}
    given: dict[str, Any] = {"table": [row], "figures": figures}
    given["headline"] = headline(row, args.schedule, args.precision)
    given["bytes_sent"] = {axis: size for axis, (_, size) in sent.items()}
    write_results(args, rank, losses=training.losses, memory=memory, **given)


def headline(row: dict[str, Any], schedule: str, precision: str = "fp32") -> str:
    """What the row says in a line."""
    words = f"{row['mesh']}: {row['measured']:g} MiB on the fullest rank, predicted "
    words += f"{row['MiB, predicted']:g}"
    if precision != "fp32":
        words += " in float32"
    if schedule == "gpipe":
        words += " for 1F1B (GPipe keeps all micro-batches of a step)"
    words += "; messages of rank 0 a step: "
    words += ", ".join(f"{axis} {row[f'{axis} messages']}" for axis in AXES)
    return f"{words}; loss {row['last loss']}"


def waiting(runs: Sequence[Sequence[Event]], mesh: Mesh3D) -> float:
    """The share of a step in which a rank waited for its pipeline, the mean of all pipelines."""
    return mean(measured_bubble([runs[rank] for rank in ranks]) for ranks in mesh.groups["pp"])


def _by_kind(memory: Memory) -> dict[str, int]:
    return {kind: getattr(memory, kind) for kind in KINDS}


def draw(
    losses: list[float], memory: dict[str, dict[str, int]], runs: Sequence[Sequence[Event]]
) -> Figure:
    """Loss, bytes of the fullest rank by kind, and what the ranks did in a step."""
    use_style()
    figure, axes = plt.subplot_mosaic(
        [["loss", "bytes"], ["step", "step"]],
        figsize=(10, 3.8 + 0.35 * len(runs)),
        height_ratios=[2.6, 0.6 + 0.35 * len(runs)],
    )
    axes["loss"].plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    axes["loss"].set(xlabel="step", ylabel="loss (nats per token)", title="Training")
    draw_bytes(axes["bytes"], memory)
    draw_events(axes["step"], runs)
    axes["step"].set_title("A step, as it ran")
    legend(axes["step"])
    return figure


def draw_bytes(ax: Axes, memory: dict[str, dict[str, int]]) -> None:
    """The kinds of bytes on top of each other, predicted and measured."""
    colors = {kind: MEANING["optimizer states" if kind == "optimizer" else kind] for kind in KINDS}
    for name, sizes in memory.items():
        ends = [0, *itertools.accumulate(sizes[kind] / 2**20 for kind in KINDS)]
        for kind, begin, end in zip(KINDS, ends, ends[1:], strict=False):
            label = kind if name == "measured" else None
            ax.barh(name, end - begin, left=begin, color=colors[kind], label=label)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.1), ncol=4, fontsize=7)
    ax.set(xlabel="MiB on the fullest rank", title="The most of a step, by kind")
