"""What is wrong with a table, slot by slot; nothing here knows a schedule's order."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from shared.exercises.expecting import expect, expect_equal, recognise
from shared.pipeline.schedules import Cell, Order, Table, prerequisites, timetable


def read_orders(rows: Sequence[str]) -> list[Order]:
    """Orders from text: "F0 B0'" are a forward and a backward; ' marks a rank's second stage."""
    orders = []
    for rank, row in enumerate(rows):
        order: Order = []
        for word in row.split():
            chunk = word.count("'")
            kind = "F" if word[0] == "F" else "B"
            order.append(Cell(kind, int(word[1:].rstrip("'")), chunk * len(rows) + rank))
        orders.append(order)
    return orders


def order_of(row: Sequence[Cell | None]) -> Order:
    """A rank's work without the waiting."""
    return [cell for cell in row if cell is not None]


def of_kind(row: Sequence[Cell | None], kind: str) -> list[tuple[int, int]]:
    """The (micro-batch, stage) of all forwards or all backwards of a rank, in its order."""
    return [cell[1:] for cell in order_of(row) if cell.kind == kind]


def alive(row: Sequence[Cell | None]) -> int:
    """The most forwards of a rank that wait for their backward at one time."""
    steps = (1 if cell.kind == "F" else -1 for cell in order_of(row))
    return max(itertools.accumulate(steps), default=0)


def say(row: Sequence[Cell | None]) -> str:
    """A rank's order as a reader wants it."""
    return " ".join(map(str, order_of(row)))


def no_table(table: Any, num_ranks: int) -> dict[str, bool]:
    """Signs that this is no table at all, most specific first."""
    rows = table if isinstance(table, list) else []
    cells = [cell for row in rows if isinstance(row, list) for cell in row]
    return {
        "the rows are slots and the columns are ranks: it is the other way round": (
            len(rows) != num_ranks
            and all(isinstance(row, list) and len(row) == num_ranks for row in rows)
            and bool(rows)
        ),
        "the table has not one row for each rank": len(rows) != num_ranks,
        "a row is no list": not all(isinstance(row, list) for row in rows),
        "the table has cells that are neither a Cell nor None": not all(
            cell is None or type(cell) is Cell for cell in cells
        ),
        "the rows have different lengths: each has a cell for every slot": (
            len({len(row) for row in rows if isinstance(row, list)}) > 1
        ),
    }


def slots_of(table: Any) -> dict[Cell, int]:
    """The slot of each piece of work."""
    return {cell: at for row in table for at, cell in enumerate(row) if cell is not None}


def too_early(table: Any, num_stages: int) -> tuple[Cell, Cell] | None:
    """The first piece of work that does not come after what it needs, and that."""
    slots = slots_of(table)
    for cell, at in sorted(slots.items(), key=lambda each: each[1]):
        for wanted in sorted(prerequisites(cell, num_stages)):
            if slots.get(wanted, -1) >= at:
                return cell, wanted
    return None


def given_to_timetable(error: BaseException) -> list[Order]:
    """The orders that timetable() had when it raised; none if it was not there."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not timetable.__code__:
        trace = trace.tb_next
    return [] if trace is None else [list(order) for order in trace.tb_frame.f_locals["orders"]]


def no_signs(orders: list[Order], p: int, m: int, v: int) -> dict[str, bool]:
    """Nothing is known of the order."""
    return {}


DEADLOCK = "the order ends in a deadlock: each rank waits for work that nobody does before it"


def made(
    answer: Callable[..., Table],
    p: int,
    m: int,
    v: int | None = None,
    signs_of: Callable[..., dict[str, bool]] = no_signs,
) -> Table:
    """The table for sizes that can be done; an order that cannot is named, and so is a refusal.

    `signs_of(orders, p, m, v)` are mistakes that an order may show although it ends in a deadlock.
    """
    size = f"{p} ranks, {m} micro-batches" + ("" if v is None else f", {v} stages a rank")
    try:
        return answer(p, m) if v is None else answer(p, m, v)
    except ValueError as error:
        waits = re.findall(r"rank (\d+) for ([FB])(-?\d+) of stage (\d+)", str(error))
        every = [(int(r), kind, int(i), int(s)) for r, kind, i, s in waits]
        first = all((kind, i, s) == ("B", 0, r) for r, kind, i, s in every)
        recognise(
            {
                "a micro-batch that there is not: the warm-up has no more forwards than there are "
                "micro-batches": any(not 0 <= i < m for _, _, i, _ in every),
                "a rank has stages that belong to another: rank r has r, r + p, ...": any(
                    s % p != r for r, _, _, s in every
                ),
                "the backwards take a rank's stages from first to last: the last is where "
                "gradients come from": bool(every) and (v or 1) > 1 and first,
                **signs_of(given_to_timetable(error), p, m, v or 1),
                DEADLOCK: bool(every),
                "sizes are refused that can be done": True,
            },
            expected=f"a table for {size}",
            seen=f"{type(error).__name__}: {error}",
        )
        raise


def expect_looked_at(answer: Callable[..., Table], p: int, m: int, v: int) -> None:
    """Sizes that cannot be done are refused as such, not as the deadlock that they end in."""
    try:
        answer(p, m, v)
    except ValueError as error:
        expect(
            "deadlock" not in str(error),
            mistake=f"{m} micro-batches on {p} ranks are not looked at: the error is timetable()'s",
            expected=f"an error that says that {m} is no multiple of {p}",
            seen=str(error),
        )


def expect_valid(table: Any, p: int, m: int, v: int) -> None:
    """Every piece of work once, on its rank, after what it needs, in as few slots as possible."""
    size = f"{p} ranks, {m} micro-batches" + (f", {v} stages a rank" if v > 1 else "")
    recognise(
        no_table(table, p),
        expected=f"{p} lists, each with a Cell or None for every slot ({size})",
        seen=f"{type(table).__name__} of {len(table) if isinstance(table, list) else 0} rows",
    )
    cells = [cell for row in table for cell in order_of(row)]
    wanted = {(k, i, s) for k in "FB" for i in range(m) for s in range(p * v)}
    exchanged = {(kind, s, i) for kind, i, s in wanted}
    strange = sorted({cell[:] for cell in cells} - wanted)
    missing = sorted(wanted - {cell[:] for cell in cells})
    place = [(r, c) for r, row in enumerate(table) for c in row if c and c.stage % p != r]
    recognise(
        {
            "micro-batch and stage are exchanged in the cells": (
                bool(strange) and {cell[:] for cell in cells} == exchanged
            ),
            "a micro-batch or a stage that there is not: they are counted from 0": (
                bool(strange) and ("F", 0, 0) in missing
            ),
            "more micro-batches than there are: with few of them the warm-up is shorter": (
                bool(strange) and all(i >= m for _, i, _ in strange)
            ),
            "a micro-batch or a stage that there is not": bool(strange),
            "a rank has stages that belong to another: rank r has r, r + p, ...": bool(place),
            "a piece of work is missing": bool(missing),
            "a piece of work is done twice": len(cells) > len(wanted),
        },
        expected=f"{len(wanted)} pieces of work, each once ({size})",
        seen=f"{len(cells)}, look at {[*missing, *strange, *place][:1]}",
    )
    expect_in_time(table, p * v, size)


def expect_in_time(table: Any, num_stages: int, size: str) -> None:
    """Every piece of work after what it needs."""
    early = too_early(table, num_stages)
    if early is not None:
        cell, need = early
        slots = slots_of(table)
        recognise(
            {
                "these are orders, not slots: timetable() makes the table of them": (
                    not any(each is None for row in table for each in row)
                ),
                "a backward begins at the first stage: gradients come from the last": (
                    cell.kind == need.kind == "B" and slots[need] > slots[cell]
                ),
                "a piece of work is in the same slot as what it needs": slots[need] == slots[cell],
                "a piece of work comes before what it needs": True,
            },
            expected=f"{need} of stage {need.stage} before {cell} of stage {cell.stage} ({size})",
            seen=f"slots {slots[need]} and {slots[cell]}",
        )


def num_slots(p: int, m: int, v: int) -> int:
    """The slots of a step with the bubble of the formula."""
    return 2 * (v * m + p - 1)


def expect_slots(table: Table, p: int, m: int, v: int) -> None:
    """The bubble of the formula, after the orders have been looked at."""
    want, got = num_slots(p, m, v), len(table[0])
    size = f"{p} ranks, {m} micro-batches" + (f", {v} stages a rank" if v > 1 else "")
    again = len(timetable([order_of(row) for row in table])[0])
    recognise(
        {
            "the order is right, but the slots are not the earliest: timetable() finds them": (
                got > want == again
            ),
            "the order makes ranks wait longer than the bubble's formula allows": got > want,
        },
        expected=f"{want} slots, 2 (v m + p - 1), for {size}",
        seen=f"{got}",
    )
    expect_equal(got, want, what=f"the slots for {size}")


NO_OVERLAP = "a micro-batch begins when the one before it is through: nothing overlaps"


def one_by_one(table: Table, m: int, v: int) -> bool:
    """Whether the first of several ranks does each backward before the next forward."""
    kinds = "".join(cell.kind for cell in order_of(table[0]))
    return len(table) > 1 and m > 1 and kinds == "FB" * (m * v)


def expect_all_then_all(table: Table, rank: int, m: int) -> None:
    """GPipe's order on one rank."""
    row, p = table[rank], len(table)
    kinds = "".join(cell.kind for cell in order_of(row))
    forwards = [i for i, _ in of_kind(row, "F")]
    backwards = [i for i, _ in of_kind(row, "B")]
    recognise(
        {
            NO_OVERLAP: one_by_one(table, m, 1),
            "a backward comes before the last forward: this keeps fewer alive, but is not GPipe": (
                kinds != "F" * m + "B" * m
            ),
            "the forwards are not in the order of the micro-batches": forwards != sorted(forwards),
            "the backwards begin with the first micro-batch: the last one is done first, whose "
            "loss has just been computed": backwards == sorted(backwards) and m > 1,
        },
        expected=f"rank {rank} of {p}: F0 ... F{m - 1}, B{m - 1} ... B0",
        seen=say(row),
    )
    expect_equal(backwards, [*range(m)][::-1], what="the backwards' micro-batches")


def in_turns(warmup: int, total: int) -> str:
    """How the kinds follow: warm-up, one of each, the rest."""
    warmup = min(warmup, total)
    return "F" * warmup + "FB" * (total - warmup) + "B" * warmup


def expect_turns(table: Table, rank: int, m: int, v: int) -> None:
    """The order of kinds on one rank, for 1F1B with any number of stages a rank."""
    row, p = table[rank], len(table)
    late = len(table[0]) > num_slots(p, m, v)
    warmup = (v - 1) * p + (2 if v > 1 else 1) * (p - 1 - rank)
    kinds = "".join(cell.kind for cell in order_of(row))
    begins = len(kinds) - len(kinds.lstrip("F"))
    right = in_turns(min(begins, v * m) - 1, v * m) if begins < v * m else in_turns(warmup, v * m)
    most, got = min(warmup + 1, v * m), alive(row)
    ends = [i for i, _ in of_kind(row, "B")]
    where = f"rank {rank} of {p}, {m} micro-batches" + (f", {v} stages a rank" if v > 1 else "")
    recognise(
        {
            NO_OVERLAP: one_by_one(table, m, v),
            "all forwards come before the first backward, as in GPipe: all are kept alive": (
                begins == v * m > most
            ),
            "the warm-up is too long: more micro-batches are kept alive than are needed": (
                begins > most
            ),
            "the warm-up is too short: ranks wait": begins < most and late,
            "the backwards begin with the newest micro-batch: the oldest has waited longest": (
                v == 1 and ends != sorted(ends) and ends[0] != 0
            ),
            "the backwards that are left do not go oldest first": v == 1 and ends != sorted(ends),
            "after the warm-up forwards and backwards do not take turns": kinds != right,
        },
        expected=f"{most} forwards first and alive ({where})",
        seen=f"{begins} forwards first, {got} alive: {say(row)}",
    )
    forwards = [i for i, _ in of_kind(row, "F")]
    expect(
        v > 1 or forwards == sorted(forwards),
        mistake="the forwards do not follow the order of the micro-batches",
        expected=f"F0 ... F{m - 1} on {where}",
        seen=say(row),
    )
