"""Trace files in Chrome's format: read with clear words, ranks merged, steps, memory.

A trace here is the whole content of the file, a dict whose "traceEvents" are dicts: what the
profiler wrote and what Perfetto shows. `shared.measuring.trace` holds the spans of one, sorted out.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import InputError

STEP = "ProfilerStep#"  # what torch.profiler calls the span of a step
Event = Mapping[str, Any]


def read_chrome(path: Path) -> dict[str, Any]:
    """Read a trace of training steps.

    Raises InputError for a file that is not there, is cut off, is no trace in Chrome's format, or
    holds no step of torch.profiler (a trace of another program, or one without profiler.step()).
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text: unpack it first (gunzip), if it is .gz") from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path} is cut off or no JSON (line {error.lineno}, column {error.colno}): "
            "was the run ended while it wrote the trace? Profile it again"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise InputError(f"{path} is no trace in Chrome's format: it has no list of traceEvents")
    try:
        spans = step_spans(content)
    except (AttributeError, KeyError, TypeError):
        raise InputError(f"{path} is no trace in Chrome's format: its events lack parts") from None
    if not spans:
        raise InputError(
            f"{path} holds no {STEP}...: it is a trace of another program, or nobody called "
            "profiler.step() after each step"
        )
    return content


def rank_of(trace: Mapping[str, Any]) -> int:
    """Return the rank that wrote the trace; 0 where there was no process group."""
    return trace.get("distributedInfo", {}).get("rank", 0)


def step_spans(trace: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return start and end of each step, in microseconds and in order, by the CPU's clock."""
    return sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
        and event.get("name", "").startswith(STEP)
        and event.get("cat") == "user_annotation"
    )


def step_seconds(trace: Mapping[str, Any]) -> float:
    """Return the mean length of the steps, in seconds."""
    spans = step_spans(trace)
    return sum(end - start for start, end in spans) / len(spans) / 1e6


def merge_ranks(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one trace in which each rank is a process of its own, called "rank r", in order.

    Times stay as they are: ranks of one machine share a clock, those of several machines are as
    far apart as the machines' clocks. Arrows (flows) keep to their rank.

    Raises InputError for fewer than two traces, and for two of the same rank.
    """
    ranks = [rank_of(trace) for trace in traces]
    if len(set(ranks)) < 2 or len(set(ranks)) < len(ranks):
        raise InputError(
            f"a merged view needs traces of different ranks, at least two; got ranks {ranks}"
        )
    zero = min(_base(trace) for trace in traces)
    merged: list[dict[str, Any]] = []
    for rank, trace in sorted(zip(ranks, traces, strict=True), key=lambda pair: pair[0]):
        merged += _of_one_rank(rank, trace, (_base(trace) - zero) / 1000)
    first = {k: v for k, v in traces[0].items() if k not in ("traceEvents", "distributedInfo")}
    return {**first, "baseTimeNanoseconds": zero, "ranks": sorted(ranks), "traceEvents": merged}


def _base(trace: Mapping[str, Any]) -> int:
    return trace.get("baseTimeNanoseconds", 0)


def _of_one_rank(rank: int, trace: Mapping[str, Any], shift: float) -> list[dict[str, Any]]:
    """The events of a rank under one process number, each of its threads with a number of its own.

    Streams of a GPU are called threads as well, 7 say; their process is the GPU's number, which is
    0 on every machine.
    """
    threads: dict[tuple[Any, Any], int] = {}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
    ]
    for event in trace["traceEvents"]:
        if event.get("ph") == "M" and event.get("name", "").startswith("process_"):
            continue
        place = event.get("pid"), event.get("tid")
        moved = {**event, "pid": rank, "tid": threads.setdefault(place, len(threads))}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift
        if "id" in event:
            moved["id"] = f"{rank}.{event['id']}"
        events.append(moved)
    return events


def memory_timeline(trace: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return (microseconds, bytes in use) at each allocation and release on this rank's device.

    Needs profile(profile_memory=True). What was allocated before the profiler began is not in it,
    so only differences mean something. Raises InputError for a trace without such events.
    """
    found = [e for e in trace["traceEvents"] if e.get("name") == "[memory]" and "args" in e]
    if not found:
        raise InputError("the trace holds no memory events: profile with profile_memory=True")
    device = max(event["args"]["Device Type"] for event in found)  # 0 CPU, 1 CUDA
    mine = [event for event in found if event["args"]["Device Type"] == device]
    return sorted((event["ts"], event["args"]["Total Allocated"]) for event in mine)
