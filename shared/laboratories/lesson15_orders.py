"""Lesson 15: what an order of work shows of the mistake behind it, and what a picture is not."""

from collections.abc import Sequence

from shared.laboratories.lesson15_tables import in_turns, of_kind, order_of
from shared.pipeline.schedules import Cell, Order, Table

FIRST_TO_LAST = (
    "the backwards take a rank's stages from first to last: the last is where gradients come from"
)


def begins(order: Order) -> int:
    """The forwards before the first backward."""
    kinds = "".join(cell.kind for cell in order)
    return len(kinds) - len(kinds.lstrip("F"))


def drains(order: Order) -> bool:
    """Whether new micro-batches begin after several have gone back one after the other."""
    kinds = "".join(cell.kind for cell in order)
    return "BB" in kinds and "F" in kinds[kinds.index("BB") :]


def turns_signs(orders: list[Order], p: int, m: int, v: int) -> dict[str, bool]:
    """What 1F1B's orders show that end in a deadlock."""
    got = [begins(order) for order in orders]
    upside_down = [min(rank, m - 1) + 1 for rank in range(p)]
    return {
        "the forwards ahead are counted from the wrong end: the first rank has the most": (
            p > 1 and m > 1 and got == upside_down
        ),
        "the warm-up is too short: ranks wait": any(
            n < min(p - rank, m) for rank, n in enumerate(got)
        ),
        "a rank empties itself before it begins new micro-batches: after the warm-up forwards and "
        "backwards take turns": any(map(drains, orders)),
    }


def groups_of(row: Sequence[Cell | None], rank: int, p: int, m: int, v: int) -> dict[str, bool]:
    """What an interleaved order on one rank shows: groups of p through its stages and back."""
    own = [*range(rank, p * v, p)]
    groups = [range(a, a + p) for a in range(0, m, p)]
    forwards = [(i, s) for group in groups for s in own for i in group]
    backwards = [(i, s) for group in groups for s in own[::-1] for i in group]
    stages_first = [(i, s) for s in own for i in range(m)]
    got, back = of_kind(row, "F"), of_kind(row, "B")
    return {
        "all micro-batches go through a stage before the next stage begins: they come in groups "
        "of p": got == stages_first != forwards,
        "the forwards come in another order than by groups of p": got != forwards,
        FIRST_TO_LAST: v > 1 and back == forwards,
        "the backwards come in another order than by groups of p": back != backwards,
    }


def interleaved_signs(orders: list[Order], p: int, m: int, v: int) -> dict[str, bool]:
    """The first sign that the rows of an interleaved order show, for orders with all their work."""
    if sorted(map(len, orders)) != [2 * m * v] * p:
        return {}
    every = [groups_of(order, rank, p, m, v) for rank, order in enumerate(orders)]
    shown = {words: any(signs[words] for signs in every) for words in every[0]}
    short = any(begins(order) <= (v - 1) * p for order in orders)
    return shown | {
        "the first backward stands before its own forward: the warm-up lacks those of the rank's "
        "earlier stages": short and v > 1
    }


def signs(table: Table) -> dict[str, str]:
    """Why a picture is not of that kind; no entry for what it is."""
    p = len(table)
    orders = [order_of(row) for row in table]
    m = 1 + max(cell.micro_batch for cell in orders[0])
    v = len({cell.stage for cell in orders[0]})
    kinds = ["".join(cell.kind for cell in order) for order in orders]
    why = {}
    if not all(each == "F" * (v * m) + "B" * (v * m) for each in kinds):
        why["gpipe"] = "a rank begins a backward before its last forward"
    warm = [(v - 1) * p + (2 if v > 1 else 1) * (p - 1 - rank) for rank in range(p)]
    turns = all(k == in_turns(w, v * m) for k, w in zip(kinds, warm, strict=True))
    if not turns or v > 1:
        why["1f1b"] = (
            "a rank has several stages" if v > 1 else "the last rank does not turn back at once"
        )
    if not turns or v == 1:
        why["interleaved"] = "each rank has one stage"
    if len(why) < 3:
        why["none"] = "every rank keeps to the order of one of the three"
    return why
