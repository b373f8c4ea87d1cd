"""All plans of a cluster: which fit, fastest first, and which limit stops the others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from shared.errors import InputError
from shared.planner.limits import misfits
from shared.planner.memory import gathered_bytes, memory_per_rank
from shared.planner.outcomes import FITTED, Choice, Memory
from shared.planner.seconds import exposed_seconds, step_time
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.planner.variants import USABLE, Asked, layouts, variants


@dataclass(frozen=True)
class Refusal:
    """A plan that cannot be, the first limit that it hits, and by how much, in words."""

    plan: Plan
    limit: str
    words: str
    missing: float = 0.0
    memory: Memory | None = None


@dataclass(frozen=True)
class Survey:
    """All plans of a cluster: those that fit, fastest first, and the others."""

    choices: list[Choice] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)

    @property
    def nearest(self) -> Refusal | None:
        """Of the plans that only memory refuses, the one that misses the least."""
        short = [refusal for refusal in self.refused if refusal.limit == "memory"]
        return min(short, key=lambda refusal: refusal.missing, default=None)


def best_plans(model: ModelSpec, cluster: Cluster, batch: int, count: int = 5) -> list[Choice]:
    """Return the `count` fastest plans that fit, for steps of `batch` sequences on all GPUs.

    Of `layouts` and their `variants` those fit whose fullest rank needs at most `USABLE` of a GPU's
    memory, by `memory_per_rank` and, with ZeRO-3, `gathered_bytes`. Fastest by `exposed_seconds`,
    the worst case: `step_time` where no message hides behind compute (`survey` ranks by
    `step_time`). Of equally fast plans the one that needs less memory comes first.

    Raises InputError where none fits: it names the plan that misses the least, what it needs, how
    much that is too much, and which kind of bytes is most of it; where no layout is possible, the
    limit that stops the most.
    """
    found = survey(model, cluster, batch)
    if not found.choices:
        raise InputError(none_fits(found, cluster))
    return sorted(found.choices, key=lambda choice: slowness(model, choice, cluster))[:count]


def survey(model: ModelSpec, cluster: Cluster, batch: int, asked: Asked | None = None) -> Survey:
    """Try every plan; `asked` leaves out those that differ from what was decided."""
    found = Survey()
    for result in _tried(model, cluster, batch, asked or Asked()):
        if isinstance(result, Refusal):
            found.refused.append(result)
        else:
            plan, memory = result
            found.choices.append(Choice(plan, memory, step_time(model, plan, cluster)))
    found.choices.sort(key=lambda choice: (choice.time.total, choice.memory.total))
    return found


def _tried(
    model: ModelSpec, cluster: Cluster, batch: int, asked: Asked
) -> Iterator[Refusal | tuple[Plan, Memory]]:
    """Every plan: with its bytes where it fits, else why not."""
    if batch < 1:
        raise InputError(f"a batch must have 1 sequence or more, got {batch}")
    for layout in layouts(cluster, asked):
        stopped = first_limit(model, layout, cluster, batch, asked)
        if stopped is not None:
            yield stopped
            continue
        for plan in variants(model, layout, batch, asked):
            memory = memory_per_rank(model, plan)
            missing = memory.total + gathered_bytes(model, plan) - USABLE * cluster.memory
            if missing > 0:
                yield Refusal(plan, "memory", f"{_gb(missing)} too much", missing, memory)
            else:
                yield plan, memory


def slowness(model: ModelSpec, choice: Choice, cluster: Cluster) -> tuple[float, int]:
    """The worst case: seconds with nothing hidden, then bytes."""
    return exposed_seconds(model, choice.plan, cluster, choice.time), choice.memory.total


def bounds(model: ModelSpec, choice: Choice, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a step if all of what can hide behind compute does, and if nothing does."""
    times = [
        step_time(model, choice.plan, cluster, replace(FITTED, hidden=share)).total
        for share in (FITTED.hidden, 1.0, 0.0)
    ]
    return times[1] / times[0] * choice.time.total, times[2] / times[0] * choice.time.total


def fewest_gpus(
    model: ModelSpec, gpu: Callable[[int], Cluster], batch: int, asked: Asked | None = None
) -> int | None:
    """Of 1, 2, 4 and so on to 16,384 GPUs the fewest that a plan fits on; None for no number."""

    def fits(cluster: Cluster) -> bool:
        tried = _tried(model, cluster, batch, asked or Asked())
        return any(not isinstance(result, Refusal) for result in tried)

    return next((n for n in (2**power for power in range(15)) if fits(gpu(n))), None)


def first_limit(
    model: ModelSpec, layout: Plan, cluster: Cluster, batch: int, asked: Asked
) -> Refusal | None:
    """What of the model, the nodes or the batch a layout cannot share out, or None."""
    for misfit in misfits(model, layout):
        return Refusal(layout, misfit.limit, misfit.words)
    if layout.pp > 1 and (asked.zero or 0) > 1 and asked.deepspeed:
        return Refusal(layout, "ZeRO", f"ZeRO-{asked.zero} in a pipeline: DeepSpeed refuses it")
    if layout.tp > cluster.gpus_per_node and asked.tp is None:
        words = f"tp {layout.tp} is more than the {cluster.gpus_per_node} GPUs of a node"
        return Refusal(layout, "node", words)
    if batch % layout.dp:
        over = batch % layout.dp
        words = f"{batch} sequences over dp {layout.dp} leave {over} over"
        return Refusal(layout, "batch", words)
    rows = batch // layout.dp
    if asked.micro_batch is not None and rows % asked.micro_batch:
        over = rows % asked.micro_batch
        words = (
            f"{rows} sequences a replica in micro-batches of {asked.micro_batch} leave {over} over"
        )
        return Refusal(layout, "batch", words)
    return None


def none_fits(found: Survey, cluster: Cluster) -> str:
    """Why there is no plan: the nearest one and what it lacks, or what stops the most layouts."""
    near = found.nearest
    if near is not None and near.memory is not None:
        kinds = ("parameters", "gradients", "optimizer", "activations")
        most = max(kinds, key=lambda kind: getattr(near.memory, kind))
        return (
            f"no plan fits: {_gb(USABLE * cluster.memory)} of {_gb(cluster.memory)} can be "
            f"used; the nearest plan ({describe(near.plan)}) needs {_gb(near.missing)} more, and "
            f"most of its bytes are {most}"
        )
    limits = [refusal.limit for refusal in found.refused]
    most = max(set(limits), key=limits.count)
    example = next(refusal for refusal in found.refused if refusal.limit == most)
    return f"no plan for {cluster.gpus} GPUs: {example.words}"


def describe(plan: Plan) -> str:
    """A plan in a few words."""
    words = [f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}"]
    if plan.chunks > 1:
        shorter = " (first and last stage a layer less)" if plan.cut else ""
        words.append(f"{plan.chunks} chunks{shorter}")
    words.append(f"ZeRO-{plan.zero}")
    words.append(f"{plan.num_micro_batches} x {plan.micro_batch}")
    words.append(f"checkpoint {plan.checkpoint}")
    words += [f"LoRA {plan.lora}"] if plan.lora else []
    words += ["not for DeepSpeed"] if plan.pp > 1 < plan.zero else []
    return ", ".join(words)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 5e7 else f"{size / 1e6:.1f} MB"
