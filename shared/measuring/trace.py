"""Traces of training steps: what computed when, what travelled when, and how much of it was hidden.

A trace comes from torch's profiler. On a CPU the computing thread's operators (`aten::...`) are
compute, and gloo's own threads show each collective as `gloo:all_reduce`; on a GPU both are
kernels. Times are microseconds since the first span.
"""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from shared.plots import MEANING

Kind = Literal["compute", "communication"]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in microseconds, on thread or stream `lane`."""

    name: str
    kind: Kind
    start: float
    end: float
    lane: int = 0

    @property
    def duration(self) -> float:
        """Return the length, in microseconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Trace:
    """The spans of one rank, sorted by their start, and when its last backward ended."""

    spans: tuple[Span, ...]
    rank: int = 0
    backward_end: float | None = None

    def of(self, kind: Kind) -> list[Span]:
        """Return the spans of one kind."""
        return [span for span in self.spans if span.kind == kind]


def record_trace(run: Callable[[], Any], device: torch.device | str = "cpu") -> Trace:
    """Profile one call of `run` and return its trace; warm up before, the first steps differ."""
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory(prefix="trace_") as folder:
        path = Path(folder) / "trace.json"
        with quiet_stderr(), profile(activities=activities, **file_alone()) as profiler:
            run()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text()))


def file_alone() -> dict[str, Any]:
    """Arguments of a profiler whose trace is written to a file, and that makes no table.

    Without them torch makes a Python object of every event, which takes ten times as long as all
    the rest. Older versions cannot leave it out; there, acc_events silences a warning of 2.11.
    """
    try:
        return {"experimental_config": _ExperimentalConfig(trace_only=True)}
    except TypeError:
        return {"acc_events": True}


@contextlib.contextmanager
def quiet_stderr() -> Generator[None]:
    """Send what libraries write to stderr nowhere, for as long as the block lasts.

    The profiler announces its start and end on the file descriptor itself, in every process. What
    Python writes to sys.stderr (warnings, a progress bar) is shown.
    """
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with open(kept, "w", buffering=1, closefd=False) as shown:
            # Elsewhere (in a notebook, under pytest) sys.stderr is not the descriptor.
            on_descriptor = sys.stderr is sys.__stderr__
            with contextlib.redirect_stderr(shown if on_descriptor else sys.stderr):
                yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def read_trace(content: Mapping[str, Any]) -> Trace:
    """Return the compute and communication spans of a trace in Chrome's format (`ph: X` events).

    An operator inside another of the same thread is part of it and left out. Raises ValueError
    for what has no list of events, and for a profile of the CPU alone of a run with NCCL, whose
    messages it does not hold; an empty one gives no spans.
    """
    if "traceEvents" not in content:
        raise ValueError("not a trace in Chrome's format: it has no traceEvents")
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    if not on_gpu and any(event["name"].startswith("nccl:") for event in events):
        raise ValueError("NCCL's labels, and no kernels: profile with ProfilerActivity.CUDA")
    spans = [
        Span(event["name"], kind, event["ts"], event["ts"] + event["dur"], event.get("tid", 0))
        for event in events
        if (kind := _kind(event, on_gpu)) is not None
    ]
    outer = _outermost(sorted(spans, key=lambda span: (span.start, -span.end)))
    zero = min((span.start for span in outer), default=0.0)
    moved = [Span(s.name, s.kind, s.start - zero, s.end - zero, s.lane) for s in outer]
    rank = content.get("distributedInfo", {}).get("rank", 0)
    ended = None if on_gpu else _backward_end(events)
    return Trace(tuple(moved), rank, None if ended is None else ended - zero)


def _backward_end(events: Iterable[Mapping[str, Any]]) -> float | None:
    """When the last node of the graph was done, the hooks of its gradient included.

    On a GPU this would be when its kernels were launched, long before they end.
    """
    node = "autograd::engine::evaluate_function"
    nodes = (event for event in events if event["name"].startswith(node))
    return max((event["ts"] + event["dur"] for event in nodes), default=None)


def _kind(event: Mapping[str, Any], on_gpu: bool) -> Kind | None:
    name, category = event["name"], event.get("cat")
    if on_gpu:
        if category != "kernel":
            return None
        return "communication" if "nccl" in name.lower() else "compute"
    if name.startswith("gloo:"):
        return "communication"
    return "compute" if category == "cpu_op" and name.startswith("aten::") else None


def _outermost(spans: Iterable[Span]) -> list[Span]:
    ends: dict[tuple[Kind, int], float] = {}
    outer = []
    for span in spans:
        lane = (span.kind, span.lane)
        if span.end > ends.get(lane, float("-inf")):
            outer.append(span)
            ends[lane] = span.end
    return outer


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals: sorted, and none touches the next."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def covered(span: Span, by: Sequence[Interval]) -> float:
    """Return the microseconds of a span during which one of the merged intervals runs."""
    return sum(max(0.0, min(span.end, end) - max(span.start, start)) for start, end in by)


def overlap_fraction(trace: Trace) -> float:
    """Return the share of the communication time during which this rank also computes, 0 to 1.

    A span lasts from the moment a collective begins on this rank until it has ended, waiting for
    a slower rank included. Nothing communicated counts as all hidden.
    """
    busy = merge((span.start, span.end) for span in trace.of("compute"))
    spans = trace.of("communication")
    total = sum(span.duration for span in spans)
    return sum(covered(span, busy) for span in spans) / total if total else 1.0


def draw_timeline(ax: Axes, traces: Sequence[Trace], labels: Sequence[str] | None = None) -> None:
    """Draw two rows for each trace, compute above communication, over milliseconds.

    A black line across both rows marks where that rank's backward ended.
    """
    names = labels or [f"rank {trace.rank}" for trace in traces]
    ticks: list[str] = []
    for trace, name in zip(traces, names, strict=True):
        kinds: tuple[Kind, ...] = ("compute", "communication")
        for kind in kinds:
            row = len(ticks)
            spans = trace.of(kind)
            bars = [(span.start / 1000, span.duration / 1000) for span in spans]
            edge = "white" if kind == "communication" else "none"
            ax.broken_barh(
                bars, (row - 0.4, 0.8), color=MEANING[kind], edgecolor=edge, linewidth=0.4
            )
            ticks.append(f"{name}: {kind}")
        if trace.backward_end is not None:
            end, rows = trace.backward_end / 1000, [len(ticks) - 2.5, len(ticks) - 0.5]
            ax.plot([end, end], rows, color="black", linewidth=1.8, label="backward ends")
    ax.set_yticks(range(len(ticks)), ticks)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("time in the step (ms)")
