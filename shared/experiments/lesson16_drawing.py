"""Lesson 16's pictures: eight ranks as a box, and what was published against what is predicted."""

import itertools
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shared.parallel3d.mesh import Groups
from shared.planner.outcomes import Fitted
from shared.planner.published import Run
from shared.planner.seconds import step_time
from shared.plots import GREEN, MEANING, VERMILION, measured, theory

COLORS = {"tp": VERMILION, "dp": MEANING["parameters"], "pp": GREEN}
WORDS = {
    "tp": "tp: all-reduces in every layer",
    "dp": "dp: gradients, once a step",
    "pp": "pp: vectors at a border",
}
PLACES = {"tp": (1.0, 0.0), "dp": (0.0, 1.0), "pp": (3.0, 0.45)}


def draw_mesh(groups: Groups) -> Figure:
    """Ranks as points; a line joins those that are in one group of an axis."""
    figure, ax = plt.subplots(figsize=(7.5, 3.0))
    at = {}
    for rank in sorted(itertools.chain(*groups["tp"])):
        place = {axis: _place(lists, rank) for axis, lists in groups.items()}
        at[rank] = [sum(place[axis] * PLACES[axis][i] for axis in PLACES) for i in (0, 1)]
    for axis, color in COLORS.items():
        for i, ranks in enumerate(groups[axis]):
            x, y = zip(*(at[rank] for rank in ranks), strict=True)
            label = WORDS[axis] if i == 0 else None
            ax.plot(x, y, color=color, linewidth=2.5, alpha=0.8, label=label, zorder=1)
    for rank, (x, y) in at.items():
        ax.plot(x, y, "o", markersize=22, color="white", markeredgecolor="black", zorder=2)
        ax.text(x, y, str(rank), ha="center", va="center", zorder=3)
    ax.set(xlim=(-0.5, 4.5), ylim=(-0.4, 1.9))
    ax.set_axis_off()
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.2), fontsize=8)
    ax.set_title("Every rank talks to one other along each axis")
    return figure


def _place(lists: Sequence[Sequence[int]], rank: int) -> int:
    return next(ranks.index(rank) for ranks in lists if rank in ranks)


def draw_published(runs: Sequence[Run], fitted: Fitted) -> Figure:
    """Published FLOP/s of a GPU over the predicted ones."""
    figure, (ax, more) = plt.subplots(1, 2, figsize=(9, 3.6))
    _scatter(ax, [run for run in runs if run.source != "Llama 3 2024"], fitted, (90, 190))
    ax.set_title("A100: all rows within 10 % of the line")
    _scatter(more, [run for run in runs if run.source == "Llama 3 2024"], fitted, (340, 470))
    more.set_title("H100, Llama 3: predicted 1 to 9 % too fast")
    return figure


def _scatter(ax: Axes, runs: Sequence[Run], fitted: Fitted, ends: tuple[float, float]) -> None:
    theory(ax, ends, ends, "predicted = published")
    # An error is a share of what was published.
    low, high = ([x / (1 + error) for x in ends] for error in (0.1, -0.1))
    ax.fill_between(ends, low, high, alpha=0.12, lw=0, label="within 10 %")
    for source in dict.fromkeys(run.source for run in runs):
        own = [run for run in runs if run.source == source]
        predicted = [
            run.flops / step_time(run.model, run.plan, run.cluster, fitted).total / 1e12
            for run in own
        ]
        measured(ax, predicted, [run.published / 1e12 for run in own], source)
    ax.set(xlim=ends, ylim=ends, xlabel="predicted (TFLOP/s a GPU)")
    ax.set_ylabel("published (TFLOP/s a GPU)")
    ax.legend(fontsize=8, loc="upper left")
