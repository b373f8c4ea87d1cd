"""The lesson's pictures: eight ranks as a box, and published runs against what is predicted."""

import itertools
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shared.parallel3d.mesh import Groups
from shared.planner.fit import LeftOut
from shared.planner.published import Run
from shared.plots import GREEN, MEANING, VERMILION, theory

COLORS = {"tp": VERMILION, "dp": MEANING["parameters"], "pp": GREEN}
WORDS = {
    "tp": "tp: all-reduces in every layer",
    "dp": "dp: gradients, once a step",
    "pp": "pp: vectors at a border",
}
PLACES = {"tp": (2.0, 0.0), "dp": (0.8, 1.0), "pp": (0.0, -2.8)}  # the box, seen from the side


def draw_mesh(groups: Groups) -> Figure:
    """Ranks as the corners of a box, each stage a framed node; an edge joins a group's ranks."""
    figure, ax = plt.subplots(figsize=(6.4, 4.6))
    at, words = {}, {}
    for rank in sorted(itertools.chain(*groups["tp"])):
        place = {axis: _place(lists, rank) for axis, lists in groups.items()}
        at[rank] = [sum(place[axis] * PLACES[axis][i] for axis in PLACES) for i in (0, 1)]
        words[rank] = f"copy {place['dp']},\npart {place['tp']}"
    for stage in range(len(groups["pp"][0])):
        below = stage * PLACES["pp"][1] - 0.5
        frame = Rectangle((-1.2, below), 5.2, 2.0, fill=False, edgecolor="0.5", linestyle="--")
        ax.add_patch(frame)
        ax.text(-1.1, below + 1.8, f"node {stage}: stage {stage}", fontsize=9, color="0.3")
    for axis, color in COLORS.items():
        for i, ranks in enumerate(groups[axis]):
            label = WORDS[axis] if i == 0 else None
            ends = zip(*(at[rank] for rank in ranks), strict=True)
            ax.plot(*ends, color=color, linewidth=2.2, alpha=0.8, label=label, zorder=1)
    for rank, (x, y) in at.items():
        ax.plot(x, y, "o", markersize=20, color="white", markeredgecolor="black", zorder=2)
        ax.text(x, y, str(rank), ha="center", va="center", zorder=3)
        side, align = (-1, "right") if _place(groups["tp"], rank) == 0 else (1, "left")
        ax.text(x + 0.3 * side, y, words[rank], ha=align, va="center", fontsize=7)
    ax.set(xlim=(-1.3, 4.1), ylim=(-3.4, 1.6))
    ax.set_axis_off()
    ax.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, -0.1), fontsize=8)
    ax.set_title("Every rank talks to one other along each axis")
    return figure


def _place(lists: Sequence[Sequence[int]], rank: int) -> int:
    return next(ranks.index(rank) for ranks in lists if rank in ranks)


def draw_unseen(families: Mapping[str, Sequence[Run]], unseen: Mapping[str, LeftOut]) -> Figure:
    """Published FLOP/s over those predicted by other families; hollow: by one constant."""
    figure, ax = plt.subplots(figsize=(6.6, 5.2))
    ends = (90.0, 720.0)
    theory(ax, ends, ends, "predicted = published")
    band, missed = 0.12, list[tuple[bool, bool]]()  # by the planner, by the constant
    low, high = ([x / (1 + error) for x in ends] for error in (band, -band))
    ax.fill_between(ends, low, high, alpha=0.12, lw=0, label="within 12 %")
    colors = plt.get_cmap("tab10").colors  # ty: ignore - of a ListedColormap
    for (name, runs), color in zip(families.items(), colors, strict=True):
        published = [run.published / 1e12 for run in runs]
        off = unseen[name]
        planned, flat = (
            [y * (1 + error) for y, error in zip(published, errors, strict=True)]
            for errors in (off.planner, off.constant)
        )
        missed += [
            (abs(a) > band, abs(b) > band) for a, b in zip(off.planner, off.constant, strict=True)
        ]
        ax.plot(flat, published, "o", markerfacecolor="none", markeredgecolor=color, alpha=0.5)
        ax.plot(planned, published, "o", color=color, label=name)
    ax.plot([], [], "o", markerfacecolor="none", markeredgecolor="black", label="hollow: constant")
    ax.set(xlim=ends, ylim=ends, xlabel="predicted (TFLOP/s a GPU)")
    ax.set(ylabel="published (TFLOP/s a GPU)")
    planner, one_number = map(sum, zip(*missed, strict=True))
    words = f"More than 12 % off, of {len(missed)} runs of other families"
    ax.set_title(f"{words}:\nthe planner {planner}, the constant {one_number}")
    ax.legend(fontsize=8, loc="upper left")
    return figure
