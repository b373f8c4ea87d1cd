"""States of pictures by arithmetic: the planner's bytes, tables of schedules, who is in a group."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

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
from shared.planner.outcomes import Memory
from shared.planner.specs import Checkpoint, Plan
from shared.plots import MEANING, SKY, VARIANTS, VERMILION
from shared.sharding.counting import formula

State = dict[str, Any]
GRID = {"F": SKY, "B": VERMILION, "": "#e6e6e6"}  # of a schedule, by a cell's first letter


def pipeline(schedule: str, table: Table, chunks: int) -> State:
    """A schedule's table, with `chunks` stages on a rank; a frame is one more slot of time."""
    ranks, micro_batches = len(table), 1 + max(cell.micro_batch for cell in table[0] if cell)
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


def zero(ranks: int, billions: float) -> State:
    """Bytes of a model's states in mixed precision on a rank, and what it sends, by stage."""
    kept, sent = [], []
    for stage in range(4):
        sizes = {"parameters": 2, "gradients": 2, "optimizer states": 12}
        cut = {"optimizer states": stage >= 1, "gradients": stage >= 2, "parameters": stage >= 3}
        parts = [size / (ranks if cut[kind] else 1) for kind, size in sizes.items()]
        assert abs(sum(parts) - formula(stage, ranks)) < 1e-9
        kept.append((f"stage {stage}", [part * billions for part in parts]))
        passes = 3 if stage == 3 else 2  # each (n - 1) / n of the 16-bit numbers (section 7)
        sent.append((f"stage {stage}", [2 * passes * (ranks - 1) / ranks * billions]))
    fit = [name for name, parts in kept if sum(parts) <= 80]
    each = [f"{formula(stage, ranks):.2f}" for stage in range(4)]
    return {
        "panels": [
            panel("GB a rank", "GB", {kind: MEANING[kind] for kind in sizes}, kept, line=80),
            panel("GB that a rank sends in a step", "GB", {"messages": VERMILION}, sent),
        ],
        "numbers": {"bytes a parameter, stages 0 to 3": ", ".join(each)},
        "says": f"{billions:g} billion parameters on {count(ranks, 'rank')}, before any activation:"
        f" {', '.join(fit) or 'no stage'} {'fit' if len(fit) > 1 else 'fits'} in 80 GB.",
    }


def panel(
    title: str,
    unit: str,
    kinds: dict[str, str],
    rows: Iterable[tuple[str, Sequence[float] | str]],
    line: float | None = None,
) -> State:
    """Stacked bars under a title: kinds and their colours, and a value of each kind a row.

    A row that has none says why. `line`: a mark, in the unit of the bars.
    """
    found = [
        (label, given if isinstance(given, str) else [float(f"{value:.5g}") for value in given])
        for label, given in rows
    ]
    return {"title": title, "unit": unit, "kinds": list(kinds.items()), "rows": found, "line": line}


def short(value: float) -> str:
    """A number by three digits that count, as the page writes it."""
    return f"{float(f'{value:.3g}'):,.10g}"


def one_gpu(model: str, precision: str, sequences: int, kept: str) -> State:
    """Everything that one GPU would have to keep, by kind."""
    plan = Plan(micro_batch=sequences)
    plan = replace(plan, precision=precision, checkpoint=KEPT[kept])
    memory = memory_per_rank(MODELS[model], plan)
    whole = memory.total / 1e9
    return {
        "panels": [panel("GB", "GB", KINDS, [("one GPU", shares(memory))], line=80)],
        "numbers": {"GPUs of 80 GB, at least": math.ceil(whole / 80)},
        "says": f"{model} with {count(sequences, 'sequence')} of {MODELS[model].seq_len:,} tokens"
        f" in {precision}: {short(whole)} GB where a GPU has 80.",
    }


KEPT: dict[str, Checkpoint] = {"all activations": "none", "inputs of layers": "full"}
KINDS = {
    kind: MEANING[kind] for kind in ("parameters", "gradients", "optimizer states", "activations")
}


def shares(memory: Memory) -> list[float]:
    """GB by kind."""
    sizes = memory.parameters, memory.gradients, memory.optimizer, memory.activations
    return [size / 1e9 for size in sizes]


def mesh(dp: int, tp: int, pp: int, node: int, axis: str) -> State:
    """Who talks to whom along an axis: each rank in the colour of its group, by node."""
    members, ranks = build_mesh(dp, tp, pp)[axis], dp * tp * pp
    if ranks > 128:
        return {"says": f"{ranks} ranks are more than fit here: 128 do.", "refused": True}
    nodes = [list(range(first, min(first + node, ranks))) for first in range(0, ranks, node)]
    of = {rank: number for number, group in enumerate(members) for rank in group}
    across = num_across(members, node)
    return {
        "rows": [f"node {number}" for number in range(len(nodes))],
        "frames": [
            [[[str(r), pale(VARIANTS[of[r] % len(VARIANTS)])] for r in row] for row in nodes]
        ],
        "groups": members,
        "node": node,
        "numbers": {"ranks": ranks, "nodes": len(nodes)},
        "says": f"{axis}: {count(len(members), 'group')} of {len(members[0])}, a colour each;"
        f" {across} of them reach across nodes. Rank 0's: {members[0]}.",
    }


def num_across(groups: Iterable[Iterable[int]], node: int) -> int:
    """How many groups of ranks have members on more than one node."""
    return sum(len({rank // node for rank in group}) > 1 for group in groups)


def pale(colour: str) -> str:
    """A colour under black text: half of it is white."""
    return "#" + "".join(f"{(int(colour[n : n + 2], 16) + 255) // 2:02x}" for n in (1, 3, 5))
