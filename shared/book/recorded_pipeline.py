"""Pipelines as they ran: the course's executor on forked ranks whose work takes a known time."""

import torch
import torch.distributed as dist

from shared.book.film import runs
from shared.book.planned import GRID, State, pipeline, table_of
from shared.errors import InputError
from shared.pipeline.executor import Event, Pipeline
from shared.pipeline.measuring import measured_bubble
from shared.pipeline.schedules import Cell, Table, kept_at_once
from shared.pipeline.sleeping import SleepingPart
from shared.pipeline.stages import split_stages

RECORDED = (2, 4)  # ranks
RUN_CHOICES = (("GPipe", "1F1B", "interleaved, v = 2"), (1, 2, 4, 8, 16))
SECONDS = 0.006  # of a forward; a backward takes twice as long


def pipeline_picture(schedule: str, ranks: int, micro_batches: int, shown: str) -> State:
    """A schedule as its table, or as it ran."""
    try:
        table, chunks = table_of(schedule, ranks, micro_batches)
    except InputError as error:
        return {"says": f"{error}.", "refused": True}
    planned = pipeline(schedule, table, chunks)
    if shown == "planned":
        return planned | {"moves": senders(table)}
    if ranks not in RECORDED:
        return {"says": "Recorded were runs on 2 and on 4 ranks.", "refused": True}
    events = runs(_pipeline_rank, ranks, RUN_CHOICES)[schedule, micro_batches]
    start = min(event.start for own in events for event in own)
    end = max(event.end for own in events for event in own)
    columns = round((end - start) / SECONDS)
    share = measured_bubble(events)
    by_table = planned["numbers"]["waiting, counted in the table"]
    return {
        "rows": planned["rows"],
        "grid": [[_at(own, start + (n + 0.5) * SECONDS) for n in range(columns)] for own in events],
        "colours": GRID,
        "numbers": {
            "milliseconds of the step": round(1000 * (end - start)),
            "waiting, measured": f"{share:.1%}",
            "waiting, counted in the table": by_table,
            "micro-batches kept at once, rank 0": kept_at_once(e.cell for e in events[0]),
        },
        "says": f"One run on {ranks} ranks, when this page was built. A forward takes"
        f" {1000 * SECONDS:.0f} ms, a column here, and a backward twice as long. The ranks waited"
        f" {share:.0%} of the time; the table says {by_table}. The rest is messages, and ranks"
        " that wake up late.",
    }


def senders(table: Table) -> list[str]:
    """For each slot the rank that each rank's work had its input from: a digit, or a dot."""
    last = max(cell.stage for row in table for cell in row if cell)

    def of(cell: Cell | None) -> str:
        stage = cell.stage + (-1 if cell.kind == "F" else 1) if cell else -1
        return str(stage % len(table)) if 0 <= stage <= last else "."

    return ["".join(map(of, slot)) for slot in zip(*table, strict=True)]


def _at(events: list[Event], moment: float) -> str:
    """What a rank did at a moment; empty where it waited."""
    return next((str(e.cell) for e in events if e.start <= moment < e.end), "")


def _pipeline_rank(schedule: str, micro_batches: int) -> list[Event]:
    """This rank's events of a step; none if refused."""
    ranks = dist.get_world_size()
    try:
        table, chunks = table_of(schedule, ranks, micro_batches)
    except InputError:
        return []
    stages = ranks * chunks
    parts = [SleepingPart(SECONDS, 2 * SECONDS) for _ in range(stages)]
    engine = Pipeline(parts, split_stages([1.0] * stages, stages))
    batches = [torch.ones(1, 8) for _ in range(micro_batches)]
    for _ in range(2 if micro_batches == RUN_CHOICES[1][0] else 1):  # the first one warms up
        dist.barrier()
        engine.train_step(table, batches, lambda y, _: y.sum())
    return engine.events
