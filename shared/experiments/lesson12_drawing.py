"""Pictures of a trace: one step with its labels, operators and messages; memory over time."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from shared.measuring.chrome import step_spans
from shared.plots import BLUE, GREEN, GREY, MEANING, ORANGE, PURPLE

LABELS = {"data": GREY, "forward": BLUE, "backward": ORANGE, "optimizer": GREEN}
ROWS = ("labels", "operators", "messages")


def draw_step(ax: Axes, trace: Mapping[str, Any]) -> None:
    """Draw the first step of a trace: its labels, its outermost operators, its messages."""
    start, end = step_spans(trace)[0]
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        row_color = _place(event)
        if row_color and start <= event["ts"] < end:
            length = min(event["dur"], end - event["ts"])
            bars.setdefault(row_color, []).append(((event["ts"] - start) / 1e3, length / 1e3))
    for (row, color), spans in bars.items():
        edge = color if row == "messages" else "none"  # few, and some shorter than a pixel
        ax.broken_barh(spans, (ROWS.index(row) - 0.4, 0.8), facecolor=color, edgecolor=edge)
    for name, color in LABELS.items():
        ax.plot([], [], color=color, linewidth=6, label=name)
    ax.set_yticks(range(len(ROWS)), ROWS)
    ax.set_ylim(len(ROWS) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("time in the step (ms)")


def _place(event: Mapping[str, Any]) -> tuple[str, str] | None:
    """The row and the colour of an event; None for what is not drawn."""
    if event.get("ph") != "X" or "dur" not in event:
        return None
    name, category = event["name"], event.get("cat")
    if name in LABELS and category == "user_annotation":
        return "labels", LABELS[name]
    if name.startswith("gloo:") or (category == "kernel" and "nccl" in name.lower()):
        return "messages", MEANING["communication"]
    if category == "kernel" or (category == "cpu_op" and name.startswith("aten::")):
        return "operators", MEANING["compute"]
    return None


def draw_memory(ax: Axes, timeline: Sequence[tuple[float, int]]) -> None:
    """Draw bytes above the start over time, from `memory_timeline`."""
    zero, at_start = timeline[0][0], min(size for _, size in timeline)
    times = [(at - zero) / 1e3 for at, _ in timeline]
    sizes = [(size - at_start) / 2**20 for _, size in timeline]
    ax.step(times, sizes, where="post", color=PURPLE)
    ax.fill_between(times, sizes, step="post", color=PURPLE, alpha=0.2)
    ax.set(xlabel="time (ms)", ylabel="MiB above the lowest")
    ax.set_title("Memory grows through the forward and falls through the backward")
