"""Trace files in Chrome's format: read with clear words, ranks merged, steps, memory.

A trace here is the whole content of the file, a dict whose "traceEvents" are dicts: what the
profiler wrote and what Perfetto shows. `shared.measuring.trace` holds the spans of one, sorted out.
"""

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import InputError

STEP = "ProfilerStep#"  # what torch.profiler calls the span of a step
Event = Mapping[str, Any]
Interval = tuple[float, float]
_RANK, _WORKER = (re.compile(rf"{name}[ _-]?(\d+)", re.IGNORECASE) for name in ("rank", "worker"))
# Older profilers wrote what C++ prints, and names that are no UTF-8 (kineto #105, #80).
_NO_NUMBER = re.compile(r'(?<=":)\s*-?(?:inf|nan)(?=\s*[,}])')


def read_chrome(path: Path) -> dict[str, Any]:
    """Read a trace of training steps, packed by gzip or not.

    Where the content does not say which rank wrote it, the file's name may ("rank_3").

    Raises InputError for a file that is not there, is cut off, is no trace in Chrome's format, or
    holds no step of torch.profiler that lasts (a trace of another program, or one without
    profiler.step()).
    """
    content = _read_json(path)
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
    if not any(start < end for start, end in spans):  # what is read is a share of their time
        raise InputError(f"{path}: its {STEP}... take 0 microseconds: profile it again")
    named = _RANK.findall(path.name) or _WORKER.findall(path.name)
    info = content.get("distributedInfo") or {}
    if "rank" not in info and named:
        content["distributedInfo"] = {**info, "rank": int(named[-1])}
    return content


def _read_json(path: Path) -> Any:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        text = _NO_NUMBER.sub("null", data.decode("utf-8-sig", "replace"))
        if text.startswith("\ufffd"):
            raise InputError(f"{path} is not text, and not packed by gzip")
        return json.loads(text, strict=False)  # names may hold tabs and line breaks
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"{path} is cut off: the archive ends too early, copy it again") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        if len(text[error.pos :].strip()) > 8 and not error.msg.startswith("Unterminated string"):
            raise InputError(
                f"{path} is no JSON at {where}: {text[max(0, error.pos - 20) : error.pos + 10]!r}. "
                "If a name holds a backslash or a quote that the profiler did not escape, profile "
                "without with_stack, or put a backslash before it there"
            ) from None
        raise InputError(
            f"{path} is cut off or no JSON ({where}): "
            "was the run ended while it wrote the trace? Profile it again"
        ) from None


def rank_of(trace: Mapping[str, Any]) -> int:
    """Return the rank that wrote the trace; 0 where there was no process group."""
    return trace.get("distributedInfo", {}).get("rank", 0)


def step_spans(trace: Mapping[str, Any]) -> list[Interval]:
    """Return start and end of each step, in microseconds and in order, by the CPU's clock."""
    return sorted(span for _, span in named_steps(trace))


def gpu_step_spans(trace: Mapping[str, Any]) -> dict[str, Interval]:
    """Return each step on the GPU by name: its first kernel's start, its last one's end.

    Each stream has a span of its own for a step. Empty for a trace without a GPU.
    """
    found: dict[str, Interval] = {}
    for name, (start, end) in named_steps(trace, "gpu_user_annotation"):
        first, last = found.get(name, (start, end))
        found[name] = min(first, start), max(last, end)
    return found


def named_steps(
    trace: Mapping[str, Any], category: str = "user_annotation"
) -> list[tuple[str, Interval]]:
    """Return the spans that are called after a step, the CPU's or another category's."""
    return [
        (event["name"], (event["ts"], event["ts"] + event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
        and event.get("name", "").startswith(STEP)
        and event.get("cat") == category
    ]


def step_seconds(trace: Mapping[str, Any]) -> float:
    """Return the mean length of the steps, in seconds.

    A CPU that runs ahead ends its steps early: on a GPU a step lasts from its first kernel to the
    first of the next step, or to its own last one where it is the only step.
    """
    gpu = sorted(gpu_step_spans(trace).values())
    if len(gpu) > 1:
        return (gpu[-1][0] - gpu[0][0]) / (len(gpu) - 1) / 1e6
    spans = gpu or step_spans(trace)
    return sum(end - start for start, end in spans) / len(spans) / 1e6


def is_message(event: Event) -> bool:
    """Whether an event is a collective: a span of gloo's, or a kernel of NCCL's."""
    name = event.get("name", "")
    return name.startswith("gloo:") or (event.get("cat") == "kernel" and "nccl" in name.lower())


def merge_ranks(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one trace in which each rank is a process of its own, called "rank r", in order.

    Times stay as they are: ranks of one machine share a clock, those of several machines are as
    far apart as the machines' clocks. Arrows (flows) keep to their rank.

    Raises InputError for fewer than two traces, and for two of the same rank.
    """
    ranks = [rank_of(trace) for trace in traces]
    if len(set(ranks)) < 2 or len(set(ranks)) < len(ranks):
        raise InputError(
            f"a merged view needs traces of different ranks, at least two; got ranks {ranks}: call "
            "the files rank_0.json, rank_1.json ... where a trace does not say who wrote it"
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
