"""Which settings explain that two runs of one training differ."""

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

Settings = Mapping[str, Any]
Run = Callable[[dict[str, Any]], list[float]]


def explain_difference(
    run: Run, ours: Settings, theirs: Settings, tolerance: float
) -> tuple[str, ...]:
    """The fewest settings that turn our curve into theirs."""
    goal = run(dict(theirs))
    differ = [name for name in theirs if theirs[name] != ours[name]]
    for size in range(len(differ)):
        for names in combinations(differ, size):
            curve = run({**ours, **{name: theirs[name] for name in names}})
            # Not by their max(), which may pass over a NaN.
            if all(abs(a - b) <= tolerance for a, b in zip(curve, goal, strict=True)):
                return names
    return tuple(differ)  # theirs itself: it has been run
