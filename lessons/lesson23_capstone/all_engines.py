"""Every engine of the course by its name: the one loss curve, and bytes predicted and counted."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel

from lessons.lesson23_capstone.laboratory import TOY, VOCABULARY, spec_of_table
from shared.capstone.keeping import Keeping, predicted_states
from shared.capstone.modes import import_for, shard_by_layer, start_deepspeed
from shared.capstone.tasks import build_model, own_share
from shared.data.rows import Text
from shared.less_communication.hierarchical import hierarchical_hook, two_levels
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import build_mesh, make_groups
from shared.pipeline.engine import PipelineEngine
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import one_f_one_b_schedule
from shared.pipeline.stages import parts_of, split_stages
from shared.planner.specs import Plan
from shared.plots import MEANING, use_style
from shared.ranks.forked import run_ranks
from shared.sharding.fully_shard import FullyShard
from shared.sharding.hybrid import hybrid_shard
from shared.sharding.prefetch import PrefetchingShard
from shared.sharding.zero_reference import SETTINGS, build_zero
from shared.tensor_parallel.engine import TensorParallelEngine
from shared.tensor_parallel.models import parallel_model
from shared.training.deepspeed_engine import DeepSpeedEngine
from shared.training.engine import DataParallelEngine, Engine, reference_curve, train_step
from shared.training.reference_run import reference_model, reference_optimizer

RANKS = 2
BUCKET = 20_000  # elements that DeepSpeed sends at once
FLAT = Plan(precision="float32", overlap=False)


@dataclass(frozen=True)
class Kind:
    """An engine: the lesson that built it, how it is made of a model, and its plan's fields."""

    lesson: str
    make: Callable[[Any], Engine]
    plan: dict[str, Any]


def plain(model: Any) -> Engine:
    """One process."""
    return DataParallelEngine(model, reference_optimizer(list(model.parameters())))


def replicated(model: Any, levels: bool = False) -> Engine:
    """torch's DDP, with two levels of sums or without."""
    ddp = DistributedDataParallel(model)
    if levels:
        ddp.register_comm_hook(two_levels(1), hierarchical_hook)
    return DataParallelEngine(ddp, reference_optimizer(list(ddp.parameters())), RANKS)


def zero(stage: int, model: Any) -> Engine:
    """ZeRO by hand."""
    return DataParallelEngine(model, build_zero(stage, model, **SETTINGS), RANKS)


def sharded(wrap: Callable[[Any], Any], model: Any) -> Engine:
    """Full sharding, by hand or torch's."""
    model = wrap(model)
    return DataParallelEngine(model, reference_optimizer(list(model.parameters())), RANKS)


def deepspeed(stage: int, model: Any) -> Engine:
    """DeepSpeed's ZeRO."""
    optimizer = reference_optimizer(list(model.parameters()))
    return DeepSpeedEngine(start_deepspeed(model, optimizer, stage, bucket=BUCKET))


def tensor_parallel(model: Any, sequence_parallel: bool = False) -> Engine:
    """Layers cut over the ranks."""
    everyone: Any = dist.group.WORLD
    parallel_model(model, everyone, sequence_parallel)
    optimizer = reference_optimizer(list(model.parameters()))
    return TensorParallelEngine(model, optimizer, sequence_parallel=sequence_parallel)


def pipelined(model: Any) -> Engine:
    """Stages, one after the other."""
    parts = parts_of(model)
    half = len(parts) // 2
    cuts = [range(half), range(half, len(parts))]
    pipeline = Pipeline(parts, cuts if len(parts) == 6 else split_stages([1.0] * len(parts), RANKS))
    optimizer = reference_optimizer(list(pipeline.parameters()))
    return PipelineEngine(pipeline, one_f_one_b_schedule(RANKS, 4), optimizer)


def on_mesh(dp: int, tp: int, pp: int, zero: int, model: Any) -> Engine:
    """Three axes."""
    mesh = make_groups(build_mesh(dp, tp, pp, RANKS))
    more: dict[str, Any] = {"num_micro_batches": 2, "zero": zero, **SETTINGS}
    return Parallel3D(model, mesh, torch.optim.AdamW, **more)


def _zero(stage: int) -> dict[str, Any]:
    return {"dp": RANKS, "zero": stage}


ENGINES = {
    "one process": Kind("04", plain, {}),
    "DDP": Kind("06", replicated, {"dp": 2}),
    **{f"ZeRO-{n} by hand": Kind("10", partial(zero, n), _zero(n)) for n in (1, 2, 3)},
    **{f"DeepSpeed {n}": Kind("10", partial(deepspeed, n), _zero(n)) for n in (1, 2, 3)},
    "FullyShard": Kind("13", partial(sharded, FullyShard), {"dp": 2, "zero": 3}),
    "with prefetch": Kind("13", partial(sharded, PrefetchingShard), {"dp": 2, "zero": 3}),
    "hybrid, 2 x 1": Kind("13", partial(sharded, partial(hybrid_shard, mesh=(2, 1))), {"dp": 2}),
    "FSDP2": Kind("13", partial(sharded, shard_by_layer), {"dp": 2, "zero": 3}),
    "tensor parallel": Kind("14", tensor_parallel, {"tp": 2}),
    "sequence parallel": Kind("14", partial(tensor_parallel, sequence_parallel=True), {"tp": 2}),
    "pipeline, 1F1B": Kind("15", pipelined, {"pp": 2}),
    "mesh dp 2, ZeRO-3": Kind("16", partial(on_mesh, 2, 1, 1, 3), {"dp": 2, "zero": 3}),
    "mesh tp 2": Kind("16", partial(on_mesh, 1, 2, 1, 0), {"tp": 2}),
    "mesh pp 2": Kind("16", partial(on_mesh, 1, 1, 2, 0), {"pp": 2}),
    "DDP, two levels": Kind("20", partial(replicated, levels=True), {"dp": 2}),
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """An engine's first losses of the reference run, and the bytes that its ranks kept."""

    losses: list[float]
    predicted: int
    counted: int


def look(rank: int, name: str, steps: int) -> tuple[list[float], int]:
    """On one rank: the curve, and the most bytes of model states in two steps of another model."""
    kind = ENGINES[name]
    engine = kind.make(reference_model())
    losses = reference_curve(engine, range(steps)).losses
    close(engine)
    del engine
    keeping = Keeping()
    torch.manual_seed(0)
    engine = kind.make(build_model(TOY, VOCABULARY))
    keeping.watch(engine)
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (2, 8, TOY.length), generator=draw)
    for _ in range(2):
        batch = Text(rows[0], rows[1])
        train_step(engine, own_share(batch, *engine.share), batch.num_tokens)
    close(engine)
    return losses, keeping.most


def close(engine: Engine) -> None:
    """Let DeepSpeed go, whose hooks hold the process group."""
    if isinstance(engine, DeepSpeedEngine):
        engine.model.destroy()


def run_all(steps: int, names: list[str] | None = None) -> dict[str, Seen]:
    """Every engine, one after the other on the same ranks; the one process by itself."""
    chosen = list(ENGINES) if names is None else names
    import_for("deepspeed", "cpu")  # before there is a group, which its defaults would keep

    def work(rank: int, own: list[str]) -> list[tuple[list[float], int]]:
        gc.freeze()  # what the parent made is not looked through again with every engine
        return [look(rank, name, steps) for name in own]

    alone = [name for name in chosen if name == "one process"]
    others = [name for name in chosen if name != "one process"]
    found = {}
    for own, ranks in ((alone, 1), (others, RANKS)):
        by_rank = run_ranks(work, ranks, own, timeout=280) if own else []
        for i, name in enumerate(own):
            plan = Plan(**{**vars(FLAT), **ENGINES[name].plan})
            states = predicted_states(spec_of_table(TOY), plan)
            assert states is not None, "the planner knows this model"
            found[name] = Seen(by_rank[0][i][0], states, max(each[i][1] for each in by_rank))
    return {name: found[name] for name in chosen}


def draw_closing(seen: Mapping[str, Seen]) -> Figure:
    """Counted bytes of every engine as a bar, and what was predicted as a line across it."""
    use_style()
    figure, ax = plt.subplots(figsize=(8, 4.6))
    rows, names = range(len(seen)), [f"{ENGINES[name].lesson} {name}" for name in seen]
    counted = [one.counted / 1e6 for one in seen.values()]
    ax.barh(rows, counted, color=MEANING["parameters"], alpha=0.6, label="counted")
    predicted = [one.predicted / 1e6 for one in seen.values()]
    ax.plot(predicted, rows, "|", color=MEANING["theory"], markersize=12, label="predicted")
    ax.set_yticks(rows, names, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("model states on the fullest rank (MB)")
    exact = sum(one.counted == one.predicted for one in seen.values())
    ax.set_title(f"{exact} of {len(seen)} engines keep what was predicted, to the byte")
    ax.legend(loc="center right")
    return figure
