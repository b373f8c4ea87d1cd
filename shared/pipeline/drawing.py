"""A schedule as it was planned, and as it happened, in the same style."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from shared.pipeline.executor import Event
from shared.pipeline.schedules import Table
from shared.plots import MEANING

COLORS = {"F": MEANING["compute"], "B": MEANING["gradients"]}
LABELS = {"F": "forward", "B": "backward"}


def draw_table(ax: Axes, table: Table) -> None:
    """A row for each rank, a box for each piece of work, with its micro-batch; grey is waiting."""
    slots = [[(at, 1.0, *cell) for at, cell in enumerate(row) if cell is not None] for row in table]
    _draw(ax, slots, len(table[0]))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no slot 2.5
    ax.set_xlabel("slot")


def draw_events(ax: Axes, runs: Sequence[Sequence[Event]], until: float | None = None) -> None:
    """The same of what happened: `runs[rank]` are a rank's events; in milliseconds.

    `until` is where the axis ends, for runs that are compared.
    """
    began = min(event.start for events in runs for event in events)
    boxes = [
        [(1000 * (e.start - began), 1000 * (e.end - e.start), *e.cell) for e in events]
        for events in runs
    ]
    _draw(ax, boxes, max(start + long for row in boxes for start, long, *_ in row), until)
    ax.set_xlabel("ms")


def _draw(
    ax: Axes, rows: Sequence[Sequence[tuple]], end: float, until: float | None = None
) -> None:
    first = min(stage for row in rows for *_, stage in row)
    for rank, row in enumerate(rows):
        ax.barh(rank, end, height=0.8, color=MEANING["idle"], alpha=0.25, linewidth=0)
        for start, long, kind, micro_batch, stage in row:
            later = (stage - first) // len(rows)  # the rank's second stage, third ...
            ax.barh(
                rank,
                long,
                left=start,
                height=0.8,
                color=COLORS[kind],
                alpha=max(1 - 0.45 * later, 0.25),
                edgecolor="white",
                linewidth=0.6,
            )
            middle = start + long / 2
            ax.text(middle, rank, str(micro_batch), ha="center", va="center", fontsize=6)
    ax.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, until or end))
    ax.set_yticks(range(len(rows)), [f"rank {rank}" for rank in range(len(rows))])
    ax.grid(visible=False)


def legend(ax: Axes) -> None:
    """What the colours mean, above the axes at the right."""
    for kind, label in LABELS.items():
        ax.barh(-5, 0, color=COLORS[kind], label=label)
    ax.barh(-5, 0, color=MEANING["idle"], alpha=0.25, label="waits")
    ax.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1, fontsize=8)
