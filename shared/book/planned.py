"""States of pictures by arithmetic: the planner's bytes, tables of schedules, who is in a group."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shared.errors import InputError
from shared.parallel3d.mesh import build_mesh
from shared.pipeline.schedules import (
    Table,
    bubble,
    gpipe_schedule,
    idle_share,
    interleaved_schedule,
    kept_at_once,
    one_f_one_b_schedule,
)
from shared.planner.memory import memory_per_rank
from shared.planner.models import MODELS
from shared.planner.specs import Plan
from shared.plots import BLUE, GREY, MEANING, SKY, VARIANTS, VERMILION
from shared.sharding.counting import formula
from shared.training.quiet_deepspeed import import_deepspeed

State = dict[str, Any]
GRID = {"F": SKY, "B": VERMILION, "": "#e6e6e6"}  # of a schedule, by a cell's first letter


def pipeline(schedule: str, ranks: int, micro_batches: int) -> State:
    """A schedule as its table; a frame is one more slot of time."""
    try:
        table, chunks = table_of(schedule, ranks, micro_batches)
    except InputError as error:
        return {"says": f"{error}.", "refused": True}
    kept = kept_at_once(table[0])
    each = f", each of 1/{chunks} of its layers" if chunks > 1 else ""
    share, expected = idle_share(table), bubble(ranks, micro_batches, chunks)
    cells = [["" if cell is None else f"{cell}" for cell in row] for row in table]

    def batches(number: int) -> str:
        return f"{number} micro-batch{'es' if number > 1 else ''}"

    return {
        "rows": [f"rank {rank}" for rank in range(ranks)],
        "grid": cells,
        "colours": GRID,
        "numbers": {
            "slots of time": len(table[0]),
            "waiting, counted in the table": f"{share:.1%}",
            "waiting, by (p - 1)/(v m + p - 1)": f"{expected:.1%}",
            "micro-batches kept at once, rank 0": kept,
        },
        "says": f"{ranks} ranks and {batches(micro_batches)} under {schedule}: a rank waits"
        f" {share:.0%} of the step, and rank 0 keeps at most {batches(kept)}{each}.",
    }


def table_of(schedule: str, ranks: int, micro_batches: int) -> tuple[Table, int]:
    """A schedule's table, and the stages of a rank."""
    if schedule == "interleaved, v = 2":
        return interleaved_schedule(ranks, micro_batches, 2), 2
    make = gpipe_schedule if schedule == "GPipe" else one_f_one_b_schedule
    return make(ranks, micro_batches), 1


def ring(ranks: int) -> State:
    """An all-reduce around a ring: who is in the sum of each chunk after each step."""
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    frames = [_named(held)]
    says = [f"Before the first step each of {ranks} ranks has its own numbers in each chunk."]
    for step in range(2 * (ranks - 1)):
        sent = [(rank - 1 - step) % ranks for rank in range(ranks)]  # as in lesson 05's table
        moved = [(rank, sent[rank], set(held[rank][sent[rank]])) for rank in range(ranks)]
        for rank, chunk, those in moved:
            there = held[(rank + 1) % ranks]
            there[chunk] = there[chunk] | those if step < ranks - 1 else those
        frames.append(_named(held))
        half = "reduce-scatter" if step < ranks - 1 else "all-gather"
        complete = sum(len(those) == ranks for row in held for those in row)
        says.append(
            f"Step {step + 1} of {2 * (ranks - 1)} ({half}): rank 0 sent chunk {sent[0]} to rank"
            f" {1 % ranks}; {complete} of {ranks * ranks} chunks are complete."
        )
    assert all(len(those) == ranks for row in held for those in row)
    sends = 2 * (ranks - 1) / ranks
    return {
        "rows": [f"rank {rank}" for rank in range(ranks)],
        "frames": frames,
        "columns": [f"chunk {chunk}" for chunk in range(ranks)],
        "numbers": {
            "steps, one after the other": 2 * (ranks - 1),
            "each rank sends, of the tensor": f"{sends:.3f} S",
            "a central rank would send": f"{ranks - 1} S",
        },
        "says": says,
    }


def _named(held: Sequence[Sequence[set[int]]]) -> list[list[list[str]]]:
    """Who is in each chunk, and a colour: the more, the darker; that of a message when complete."""
    full = len(held)
    return [
        [["+".join(map(str, sorted(those))), _shade(len(those), full)] for those in row]
        for row in held
    ]


def _shade(present: int, full: int) -> str:
    """Grey that darkens with the number of ranks in a sum, and a colour for the complete one."""
    level = round(240 - 70 * (present - 1) / max(1, full - 1))
    return SKY if present == full else f"#{level:02x}{level:02x}{level:02x}"


def zero(stage: int, ranks: int, billions: float) -> State:
    """Bytes of the states of a model in mixed precision on one rank, by kind."""
    sizes = {"parameters": 2, "gradients": 2, "optimizer states": 12}
    cut = {"optimizer states": stage >= 1, "gradients": stage >= 2, "parameters": stage >= 3}
    bars = {kind: size / (ranks if cut[kind] else 1) for kind, size in sizes.items()}
    each = formula(stage, ranks)
    assert abs(sum(bars.values()) - each) < 1e-9
    gigabytes = each * billions
    fits = "fits" if gigabytes <= 80 else "does not fit"
    return {
        "bars": [
            {"label": kind, "value": round(value * billions, 3), "colour": MEANING[kind]}
            for kind, value in bars.items()
        ],
        "unit": "GB",
        "line": {"value": 80, "label": "80 GB"},
        "numbers": {"bytes a parameter": f"{each:.2f}", "GB a rank": f"{gigabytes:.1f}"},
        "says": f"{billions:g} billion parameters under stage {stage} on {ranks} ranks: the states"
        f" take {gigabytes:.1f} GB a rank, before any activation, which {fits} in 80 GB.",
    }


def one_gpu(model: str, precision: str, sequences: int, checkpoint: str) -> State:
    """Everything that one GPU would have to keep, by kind."""
    recompute = {"all activations": "none", "inputs of layers": "full"}[checkpoint]
    plan = Plan(micro_batch=sequences)
    plan = replace(plan, precision=precision, checkpoint=recompute)
    memory = memory_per_rank(MODELS[model], plan)
    kinds = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer,
        "activations": memory.activations,
    }
    whole = sum(kinds.values()) / 1e9
    return {
        "bars": [
            {"label": kind, "value": round(size / 1e9, 2), "colour": MEANING[kind]}
            for kind, size in kinds.items()
        ],
        "unit": "GB",
        "line": {"value": 80, "label": "80 GB"},
        "numbers": {"in all": f"{whole:,.1f} GB", "GPUs of 80 GB": -(-whole // 80).__int__()},
        "says": f"{model} with {sequences} sequence(s) of {MODELS[model].seq_len:,} tokens in"
        f" {precision}: {whole:,.0f} GB where a GPU has 80.",
    }


def mesh(dp: int, tp: int, pp: int, node: int) -> State:
    """Who talks to whom: each rank's place, by node; a frame for each axis."""
    groups, ranks = build_mesh(dp, tp, pp), dp * tp * pp
    nodes = [list(range(first, min(first + node, ranks))) for first in range(0, ranks, node)]
    frames, says = [], []
    for axis, members in groups.items():
        of = {rank: number for number, group in enumerate(members) for rank in group}
        frames.append([[[str(r), VARIANTS[of[r] % len(VARIANTS)]] for r in row] for row in nodes])
        across = sum(len({rank // node for rank in group}) > 1 for group in members)
        says.append(
            f"{axis}: {len(members)} group(s) of {len(members[0])}, a colour each (eight colours,"
            f" then again); {across} of them reach across nodes. Rank 0's: {members[0]}."
        )
    return {
        "rows": [f"node {number}" for number in range(len(nodes))],
        "frames": frames,
        "numbers": {"ranks": ranks, "nodes": len(nodes), "steps": "dp, tp, pp"},
        "says": says,
    }


def strategies(model: str, gpus: int) -> State:
    """Bytes of the fullest rank under each way of using the same GPUs, states and activations."""
    plans = {
        "data parallel": Plan(dp=gpus),
        "ZeRO-1": Plan(dp=gpus, zero=1),
        "ZeRO-2": Plan(dp=gpus, zero=2),
        "ZeRO-3 / FSDP": Plan(dp=gpus, zero=3),
        "tensor parallel": Plan(tp=gpus),
        "pipeline, m = 16": Plan(pp=gpus, num_micro_batches=16),
    }
    spec, bars, refused = MODELS[model], [], []
    for name, plan in plans.items():
        try:
            size = memory_per_rank(spec, plan).total / 1e9
        except InputError as error:
            refused.append(f"{name}: {error}")
            continue
        bars.append({"label": name, "value": round(size, 1), "colour": BLUE})
    fits = [bar["label"] for bar in bars if bar["value"] <= 80]
    return {
        "bars": bars,
        "unit": "GB",
        "line": {"value": 80, "label": "80 GB"},
        "numbers": {"fit in 80 GB": ", ".join(fits) or "none"},
        "says": f"{model}, {gpus} GPUs, one sequence of {spec.seq_len:,} tokens in a micro-batch,"
        " mixed precision, all activations kept: bytes of the fullest rank by the planner."
        + (f" Not possible: {'; '.join(refused)}." if refused else ""),
    }


PLACES = {"all on the GPU": (False, False), "optimizer": (True, False), "all states": (True, True)}


def offload(place: str, ranks: int, billions: float, bus: int) -> State:
    """What ZeRO-3 keeps on a GPU and in host memory by DeepSpeed's estimate, and what crosses.

    The flow is that of ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840, section 4): gradients
    leave in 16 bits, the processor updates, and weights come back in 16 bits.
    """
    import_deepspeed("cuda")  # where there is one
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as estimate

    optimizer, weights = PLACES[place]
    given = {"cpu_offload": optimizer, "cpu_offload_params": weights}
    host, gpu, _ = estimate(int(billions * 1e9), 0, ranks, 1, **given, additional_buffer_factor=1.0)
    share = 2 * billions / ranks  # GB of a rank's part in 16 bits, weights or gradients
    up = share * (2 if weights else 1) if optimizer else 0.0  # for forward and for backward
    down = share if optimizer else 0.0
    size = {"GPU, by DeepSpeed's estimate": gpu, "host, a GPU's share": host / ranks * optimizer}
    colours = (BLUE, MEANING["optimizer states"])
    kept = "weights, gradients" + ("" if optimizer else ", optimizer states")
    there = "16-bit weights, " if weights else ""
    return {
        "bars": [
            {"label": label, "value": round(each / 1e9, 2), "colour": colour}
            for (label, each), colour in zip(size.items(), colours, strict=True)
        ],
        "unit": "GB",
        "line": {"value": 80, "label": "80 GB"},
        **_flow(share, optimizer, weights),
        "numbers": {
            "on a GPU": "one unit's weights at a time" if weights else kept,
            "in host memory": f"{there}float32 weights and moments" if optimizer else "nothing",
            "over the bus a step, up and down": f"{up:.2f} and {down:.2f} GB",
            f"seconds of that at {bus} GB/s": f"{(up + down) / bus:.2f}",
        },
    }


def _flow(share: float, optimizer: bool, weights: bool) -> State:
    """A step's four parts, one a frame: what goes up, what comes down, who computes."""
    gb, nothing = f"{share:.2f} GB", ["", "transparent"]
    up, down = [gb, VERMILION], [gb, MEANING["gradients"]]
    updates = ["updates", MEANING["optimizer states"]]
    computes, idle = ["computes", SKY], ["waits", GREY]
    fetched = up if weights else nothing
    table = {
        "forward": (fetched, nothing, computes, nothing),
        "backward": (fetched, down if optimizer else nothing, computes, nothing),
        "update": (nothing, nothing, *((idle, updates) if optimizer else (updates, nothing))),
        "publish": (up if optimizer and not weights else nothing, nothing, idle, nothing),
    }
    columns = list(table.values())
    return {
        "rows": ["weights up", "gradients down", "GPU", "processor"],
        "columns": list(table),
        "frames": [
            [list(row) for row in zip(*columns[: n + 1], strict=True)] for n in range(len(columns))
        ],
        "says": [f"{name}: {_what_crosses(name, optimizer, weights)}" for name in table],
    }


def _what_crosses(step: str, optimizer: bool, weights: bool) -> str:
    if not optimizer:
        own = "; the GPU updates its own part" if step == "update" else ""
        return f"nothing crosses to host memory{own}."
    return {
        "forward": "each rank's part of the weights goes up, and is gathered from there."
        if weights
        else "the weights are on the GPUs; nothing crosses.",
        "backward": "the mean of each part's gradients goes down"
        + (", and the weights come up once more." if weights else "."),
        "update": "the processor updates this rank's part; the GPU has nothing to do, unless the"
        " update runs beside the next step.",
        "publish": "the updated weights stay in host memory until the next forward."
        if weights
        else "the updated part goes up in 16 bits.",
    }[step]
