"""All cuts of a model into stages, and what an order of work shows of the mistake behind it."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from lessons.lesson15_pipeline_parallel.laboratory.tables import in_turns, of_kind, order_of
from shared.exercises.expecting import wrong
from shared.pipeline.schedules import Cell, Order, Table


class Cost(float):
    """A cost that counts what is done with it, in `left`, a box that all costs share."""

    left: list[int]

    def __add__(self, other: float) -> "Cost":
        return _used(self, float(self) + other)

    __radd__ = __add__

    def __sub__(self, other: float) -> "Cost":
        return _used(self, float(self) - other)

    def __lt__(self, other: float) -> bool:
        return float(_used(self, self)) < other

    def __gt__(self, other: float) -> bool:
        return float(_used(self, self)) > other


def _used(cost: Cost, value: float) -> Cost:
    cost.left[0] -= 1
    if cost.left[0] < 0:
        wrong(
            "it looks at all cuts, or at the same rest again and again: the best cut of a rest is "
            "found once",
            expected="a number of additions that grows with the parts times the stages",
            seen=f"more than {cost.left[1]:,} additions and comparisons",
        )
    found = Cost(value)
    found.left = cost.left
    return found


def counted(costs: Sequence[float], most: int) -> list[float]:
    """Costs with which no more than so many additions and comparisons may be done together."""
    box, found = [most, most], [Cost(cost) for cost in costs]
    for cost in found:
        cost.left = box
    return list(found)


def slowest(costs: Sequence[float], cuts: Sequence[range]) -> float:
    """The cost of the slowest stage."""
    return max(sum(costs[i] for i in cut) for cut in cuts)


def every_cut(count: int, num_stages: int) -> Iterator[list[range]]:
    """All cuts of so many parts."""
    for ends in itertools.combinations(range(1, count), num_stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise((0, *ends, count))]


def squares(costs: Sequence[float], cuts: Sequence[range]) -> float:
    """The sum of the squares of all stages' costs."""
    return sum(sum(costs[i] for i in cut) ** 2 for cut in cuts)


def spread(costs: Sequence[float], cuts: Sequence[range]) -> float:
    """By how much the slowest stage costs more than the fastest."""
    sums = [sum(costs[i] for i in cut) for cut in cuts]
    return max(sums) - min(sums)


def best_of(
    found: Sequence[tuple[Sequence[float], int, Sequence[range]]],
    badness: Callable[[Sequence[float], Sequence[range]], float],
) -> bool:
    """Whether all these cuts are the best ones by another measure."""
    return all(
        badness(costs, cuts)
        <= min(badness(costs, each) for each in every_cut(len(costs), k)) * (1 + 1e-9)
        for costs, k, cuts in found
    )


def filled(costs: Sequence[float], num_stages: int) -> list[range]:
    """A stage takes parts until it has its share or more, or none would be left for the others."""
    ends, here = [0], 0.0
    for i, cost in enumerate(costs):
        here += cost
        left = num_stages - len(ends)
        if left and (here >= sum(costs) / num_stages or len(costs) - i - 1 == left):
            ends.append(i + 1)
            here = 0.0
    return [range(a, b) for a, b in itertools.pairwise((*ends, len(costs)))]


def greedy(costs: Sequence[float], num_stages: int) -> list[range]:
    """A stage takes parts until it has its share of the whole."""
    cuts, at = [], 0
    for left in range(num_stages, 0, -1):
        end, share = at + 1, sum(costs) / num_stages
        while end < len(costs) - left + 1 and sum(costs[at : end + 1]) <= share:
            end += 1
        end = len(costs) if left == 1 else end
        cuts.append(range(at, end))
        at = end
    return cuts


# Orders of work

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
