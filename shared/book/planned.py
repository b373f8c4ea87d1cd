"""States of pictures by arithmetic: the planner's bytes, tables of schedules, who is in a group."""

import math
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
from shared.plots import BLUE, MEANING, SKY, VARIANTS, VERMILION
from shared.sharding.counting import formula

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
        "says": f"{ranks} ranks and {count(micro_batches, 'micro-batch')} under {schedule}: a rank"
        f" waits {share:.0%} of the step, and rank 0 keeps at most"
        f" {count(kept, 'micro-batch')}{each}.",
    }


def count(number: int, what: str) -> str:
    """A number and its noun: "1 rank", "2 ranks", "2 micro-batches"."""
    return f"{number} {what}{('es' if what.endswith('h') else 's') * (number != 1)}"


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
        "begins": min(3, len(frames) - 1),
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
        "stacked": True,
        "unit": "GB",
        "line": {"value": 80, "label": "80 GB"},
        "numbers": {"bytes a parameter": f"{each:.2f}", "GB a rank": f"{gigabytes:.1f}"},
        "says": f"{billions:g} billion parameters under stage {stage} on {count(ranks, 'rank')}:"
        f" the states take {gigabytes:.1f} GB a rank before any activation, which {fits} in 80 GB.",
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
        "stacked": True,
        "unit": "GB",
        "line": {"value": 80, "label": "80 GB"},
        "numbers": {"GPUs of 80 GB, at least": math.ceil(whole / 80)},
        "says": f"{model} with {count(sequences, 'sequence')} of {MODELS[model].seq_len:,} tokens"
        f" in {precision}: {whole:,.0f} GB where a GPU has 80.",
    }


def mesh(dp: int, tp: int, pp: int, node: int, axis: str) -> State:
    """Who talks to whom along an axis: each rank in the colour of its group, by node."""
    members, ranks = build_mesh(dp, tp, pp)[axis], dp * tp * pp
    if ranks > 128:
        return {"says": f"{ranks} ranks are more than fit here: 128 do.", "refused": True}
    nodes = [list(range(first, min(first + node, ranks))) for first in range(0, ranks, node)]
    of = {rank: number for number, group in enumerate(members) for rank in group}
    across = sum(len({rank // node for rank in group}) > 1 for group in members)
    return {
        "rows": [f"node {number}" for number in range(len(nodes))],
        "frames": [
            [[[str(r), _pale(VARIANTS[of[r] % len(VARIANTS)])] for r in row] for row in nodes]
        ],
        "numbers": {"ranks": ranks, "nodes": len(nodes)},
        "says": f"{axis}: {count(len(members), 'group')} of {len(members[0])}, a colour each;"
        f" {across} of them reach across nodes. Rank 0's: {members[0]}.",
    }


def _pale(colour: str) -> str:
    """A colour under black text: half of it is white."""
    return "#" + "".join(f"{(int(colour[n : n + 2], 16) + 255) // 2:02x}" for n in (1, 3, 5))


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
