"""Lesson 15: all cuts of a model into stages, and one that people like."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from shared.exercises.expecting import wrong


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
