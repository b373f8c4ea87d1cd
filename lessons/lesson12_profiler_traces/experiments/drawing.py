"""Pictures of a trace: a step with its labels, operators and messages, or counts; memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.axes import Axes

from shared.measuring.chrome import gpu_step_spans, is_message, named_steps
from shared.plots import BLUE, GREEN, GREY, MEANING, ORANGE, PURPLE

LABELS = {"data": GREY, "forward": BLUE, "backward": ORANGE, "optimizer": GREEN}
ROWS = ("labels", "operators", "messages")


def whole_steps(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return the steps from what the CPU did first for each to what its GPU did last."""
    gpu = gpu_step_spans(trace)
    return sorted(
        (start, max(end, gpu.get(name, (start, end))[1]))
        for name, (start, end) in named_steps(trace)
    )


def median_step(trace: Mapping[str, Any]) -> tuple[float, float]:
    """The step of median length: a longer one may only have lost its processor for a moment."""
    steps = sorted(whole_steps(trace), key=lambda step: step[1] - step[0])
    return steps[len(steps) // 2]


def draw_counts(ax: Axes, trace: Mapping[str, Any], bin_ms: float = 0.5) -> int:
    """Draw how many operators begin in each half millisecond of the median step; return how many.

    Reads ("aten::item") are drawn over the operators that they are among; the labels lie behind.
    Most operators are shorter than a pixel: their spans would not show how many there are.
    """
    start, end = median_step(trace)
    edges = [bin_ms * number for number in range(int((end - start) / 1e3 / bin_ms) + 2)]
    inside = [e for e in trace["traceEvents"] if _place(e) and start <= e["ts"] < end]
    operators = [e for e in inside if e["name"].startswith("aten::")]
    for wanted, color in (("aten::", MEANING["compute"]), ("aten::item", PURPLE)):
        at = [(e["ts"] - start) / 1e3 for e in operators if e["name"].startswith(wanted)]
        counts = torch.tensor(at).histc(bins=len(edges) - 1, min=0, max=edges[-1])
        ax.stairs(counts / bin_ms, edges, fill=True, color=color)
    for event in inside:
        left, length = (event["ts"] - start) / 1e3, min(event["dur"], end - event["ts"]) / 1e3
        if event["name"] in LABELS:
            ax.axvspan(left, left + length, color=LABELS[event["name"]], alpha=0.15, linewidth=0)
        elif _place(event) == ("messages", MEANING["communication"]):
            # Above the counts, whatever their scale. Some are shorter than a pixel: hence the edge.
            color, top = MEANING["communication"], ax.get_xaxis_transform()
            span = [(left, length)]
            ax.broken_barh(span, (0.86, 0.1), facecolor=color, edgecolor=color, transform=top)
    ax.set(ylabel="operators\nper ms", xlabel="time in the step (ms)")
    ax.set(yscale="log", ylim=(1, 20_000))
    return len(operators)


def draw_step(ax: Axes, trace: Mapping[str, Any], step: tuple[float, float] | None = None) -> None:
    """Draw a step of a trace, the median one if none is given: labels, operators, messages.

    `step` is (start, end) in microseconds, and the axis begins at its start.
    """
    start, end = step or median_step(trace)
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
    if is_message(event):
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
