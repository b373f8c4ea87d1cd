"""The same GPUs used in several ways, by the planner: bytes of a GPU and seconds of a step."""

from dataclasses import replace

from shared.book.planned import KEPT, KINDS, State, panel, shares
from shared.errors import InputError
from shared.planner.memory import gathered_bytes, memory_per_rank
from shared.planner.models import GPUS, MODELS
from shared.planner.report import LIKELY, unproven
from shared.planner.search import describe, survey
from shared.planner.seconds import step_time
from shared.planner.specs import Plan
from shared.planner.variants import USABLE, Asked
from shared.plots import GREY, ORANGE, SKY, VERMILION, YELLOW

TIMES = {
    "compute": SKY,
    "waits in the pipeline": GREY,
    "messages of tensor parallelism": ORANGE,
    "of the pipeline": YELLOW,
    "of data parallelism": VERMILION,
}
SEQUENCES = 4  # a GPU and step
NODE, FIRST = 8, "the planner's first"


def strategies(model: str, gpu: str, gpus: int, kept: str) -> State:
    """All ways with steps of as many sequences, and the fastest plan that fits."""
    spec, cluster, batch = MODELS[model], GPUS[gpu](gpus), SEQUENCES * gpus
    plans = {name: replace(p, checkpoint=KEPT[kept]) for name, p in _plans(gpus, batch).items()}
    found = survey(spec, cluster, batch, Asked(checkpoint=KEPT[kept])).choices
    if found:
        plans[FIRST] = found[0].plan
    memory: list[tuple[str, list[float] | str]] = []
    seconds: list[tuple[str, list[float] | str]] = []
    limit, best = USABLE * cluster.memory, ""
    for name, plan in plans.items():
        try:
            held, time = memory_per_rank(spec, plan), step_time(spec, plan, cluster)
        except InputError as error:
            memory.append((name, f"{error}"))
            continue
        gathered = gathered_bytes(spec, plan)
        memory.append((name, [*shares(held), gathered / 1e9]))
        parts = [time.compute, time.bubble, time.tensor_parallel, time.pipeline, time.data_parallel]
        fits = held.total + gathered <= limit
        seconds.append((name, parts if fits else "does not fit"))
        if name == FIRST:
            speed = batch * spec.seq_len / time.total / gpus
            best = f" First of all its plans: {describe(plan)}; {speed:,.0f} tokens/s a GPU."
    fit = sum(isinstance(parts, list) for name, parts in seconds if name != FIRST)
    least, most = LIKELY
    proven = f"80 of 100 published runs took {1 / most:.2f} to {1 / least:.2f} of it"
    off = unproven(spec, Plan(), cluster) or proven
    kinds = KINDS | {"units gathered": YELLOW}
    return {
        "panels": [
            panel("GB of the fullest GPU", "GB", kinds, memory, line=limit / 1e9),
            panel(f"Seconds of a step ({off})", "s", TIMES, seconds),
        ],
        "numbers": {"sequences a step": batch, "ways that fit": fit},
        "says": f"{model} on {gpus} {gpu.upper()}s by the planner, {spec.seq_len:,} tokens a"
        f" sequence each, mixed precision; the line is 0.9 of a GPU's memory."
        + (best or " No plan fits."),
    }


def _plans(gpus: int, batch: int) -> dict[str, Plan]:
    """The ways that have names, each over all GPUs, with micro-batches of one sequence."""
    node = min(gpus, NODE)
    shapes = {
        "data parallel": (1, 1, 0),
        "ZeRO-1": (1, 1, 1),
        "ZeRO-2": (1, 1, 2),
        "ZeRO-3, FSDP": (1, 1, 3),
        f"tensor {node}, ZeRO-1": (node, 1, 1),
        f"pipeline {node}, ZeRO-1": (1, node, 1),
    }
    if gpus > NODE:
        shapes |= {f"tensor {NODE}, ZeRO-3": (NODE, 1, 3), "3D: tensor 8, pipeline 2": (NODE, 2, 1)}
    plans = {}
    for name, (tp, pp, zero) in shapes.items():
        dp = gpus // (tp * pp)
        plans[name] = Plan(
            dp=dp, tp=tp, pp=pp, zero=zero, num_micro_batches=batch // dp, sequence_parallel=tp > 1
        )
    return plans
