"""Which rank the others wait for: a question to all ranks' traces, merged."""

from collections.abc import Mapping
from typing import Any

from shared.errors import InputError
from shared.measuring.chrome import gpu_step_spans, is_message, named_steps, step_seconds


def lateness(merged: Mapping[str, Any]) -> dict[int, float]:
    """How late each rank enters its collectives, as a share of a step: the mean over the steps.

    `merged` comes from `merge_ranks`: its processes are ranks, on one clock. The k-th message of a
    step (a span of gloo's, a kernel of NCCL's) on one rank belongs to the k-th on every other. A
    rank is late in it by its start less the earliest rank's; of a step the largest counts. A kernel
    is of the step that launched it: the CPU's steps end before it begins.
    Ranks that wait have long messages, in a healthy run too: lengths do not tell who is late.
    What one rank has more of in a step than another is left out. Raises InputError where no step
    sends anything or lasts, and for ranks whose steps differ in number.
    """
    late = {rank: list[float]() for rank in merged["ranks"]}
    own = {
        rank: {"traceEvents": [e for e in merged["traceEvents"] if e.get("pid") == rank]}
        for rank in late
    }
    starts = {rank: _starts_by_step(each) for rank, each in own.items()}
    counts = {rank: len(each) for rank, each in starts.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"steps in the traces, by rank: {counts}; record the same on all ranks")
    for of_step in zip(*starts.values(), strict=True):
        together = list(zip(*of_step, strict=False))
        for rank, mine in zip(late, zip(*together, strict=True), strict=False):
            behind = [at - min(all_of) for at, all_of in zip(mine, together, strict=True)]
            late[rank].append(max(behind))
    if not all(late.values()):
        raise InputError("no message lies in the steps of these traces: nobody waits for anybody")
    usual = 1e6 * sum(map(step_seconds, own.values())) / len(own)
    if not usual:
        raise InputError("the steps of these traces take 0 microseconds by their kernels")
    return {rank: sum(each) / len(each) / usual for rank, each in late.items()}


def _starts_by_step(trace: Mapping[str, Any]) -> list[list[float]]:
    """When each message of each step begins, in order, on one rank; what lies in no step is none's.

    A kernel belongs to the step in which the CPU launched it; where the trace does not say who
    launched it, to the last step that the GPU had begun.
    """
    cpu, gpu = sorted(named_steps(trace), key=lambda step: step[1]), gpu_step_spans(trace)
    by_launch = [span for _, span in cpu]
    by_kernel = [gpu.get(name, span) for name, span in cpu]
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    found: list[list[float]] = [[] for _ in cpu]
    for event in filter(is_message, events):
        launch = launched.get(event.get("args", {}).get("correlation"))
        at, spans = (event["ts"], by_kernel) if launch is None else (launch, by_launch)
        if event.get("cat") != "kernel":  # gloo's
            spans = by_launch
        steps = [n for n, (start, end) in enumerate(spans) if start <= at < end]
        if steps:
            found[steps[-1]].append(event["ts"])
    return [sorted(each) for each in found]
