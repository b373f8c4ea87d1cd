"""One verdict out of all that was seen, in the order in which one looks; the script's figure."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from lessons.lesson21_clusters.faults import Seen
from shared.clusters.report import Finding
from shared.clusters.verdicts import (
    Hang,
    Odd,
    OwnSeconds,
    Straggler,
    describe_hang,
    describe_odd,
    describe_straggler,
)
from shared.plots import GREY, MEANING, use_style

NOTHING = "nothing found"
# A step here is a few milliseconds, and on a machine with more work than cores any of them may take
# twice as long: with a factor of 2 a healthy rank was called a straggler once in eighteen runs.
FACTOR = 4.0


def own_seconds(seen: Sequence[Seen]) -> OwnSeconds:
    """Seconds before the collective, of the steps that every rank made, without the first one."""
    steps = min(len(each.own) for each in seen)
    first = min(1, steps - 1)  # in the first step libraries warm up
    return torch.tensor([each.own[first:steps] for each in seen], dtype=torch.float64).T


def whole_seconds(seen: Sequence[Seen]) -> OwnSeconds:
    """Seconds of whole steps, of those that every rank finished, without the first one."""
    steps = min(len(each.whole) for each in seen)
    return torch.tensor([each.whole[min(1, steps) : steps] for each in seen]).T


def verdict(
    findings: Sequence[Finding],
    hangs: Sequence[Hang],
    said: Sequence[str],
    straggler: Straggler | None,
    odd: Sequence[Odd],
) -> str:
    """One line: the first thing to mend. What breaks a run comes before what slows it."""
    lines = [each.words for each in findings if each.breaks]
    lines += [describe_hang(each, dict(enumerate(said))) for each in hangs]
    lines += [f"rank {rank} said: {words}" for rank, words in enumerate(said) if words]
    lines += [describe_straggler(straggler)] if straggler else []
    lines += [describe_odd(each) for each in odd]
    return lines[0] if lines else NOTHING


def draw_seconds(own: OwnSeconds, whole: OwnSeconds) -> Figure:
    """Milliseconds by rank: what a log shows, and what each rank did itself."""
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True)
    titles = ("Whole steps: all ranks alike", "Before the all_reduce: each rank's own")
    for ax, seconds, title in zip(axes, (whole, own), titles, strict=True):
        for rank, column in enumerate(seconds.T):
            x = [rank + 0.5 * (i / max(1, len(column) - 1) - 0.5) for i in range(len(column))]
            ax.plot(x, 1000 * column, ".", color=MEANING["compute"])
            ax.hlines(1000 * column.quantile(0.5), rank - 0.3, rank + 0.3, color=GREY, zorder=3)
        ax.set_xticks(range(seconds.shape[1]))
        ax.set(xlabel="rank", title=title)
    axes[0].set_ylabel("ms (a point a step, a line the median)")
    axes[0].set_ylim(bottom=0)
    return figure


def figures(own: OwnSeconds, whole: OwnSeconds) -> dict[str, Figure]:
    """The script's figure, where a step was finished."""
    return {"seconds.png": draw_seconds(own, whole)} if whole.numel() else {}
