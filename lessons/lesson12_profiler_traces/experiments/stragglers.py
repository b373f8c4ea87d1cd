"""Which rank the others wait for: a question to all ranks' traces, merged."""

from collections.abc import Mapping
from typing import Any

from shared.errors import InputError
from shared.measuring.chrome import step_spans


def lateness(merged: Mapping[str, Any]) -> dict[int, float]:
    """How late each rank enters its collectives, as a share of a step: the mean over the steps.

    `merged` comes from `merge_ranks`: its processes are ranks, on one clock. The k-th message of a
    step (a span of gloo's, a kernel of NCCL's) on one rank belongs to the k-th on every other. A
    rank is late in it by its start less the earliest rank's; of a step the largest counts.
    The last rank's messages are short, and those of the ranks that wait for it are long.
    What one rank has more of in a step than another is left out. Raises InputError where no step
    sends anything, and for ranks whose steps differ in number.
    """
    late = {rank: list[float]() for rank in merged["ranks"]}
    starts = {rank: _starts_by_step(merged, rank) for rank in late}
    counts = {rank: len(own) for rank, own in starts.items()}
    if len(set(counts.values())) > 1:
        raise InputError(f"steps in the traces, by rank: {counts}; record the same on all ranks")
    for of_step in zip(*starts.values(), strict=True):
        together = list(zip(*of_step, strict=False))
        for rank, own in zip(late, zip(*together, strict=True), strict=False):
            behind = [at - min(all_of) for at, all_of in zip(own, together, strict=True)]
            late[rank].append(max(behind))
    if not all(late.values()):
        raise InputError("no message lies in the steps of these traces: nobody waits for anybody")
    lengths = [b - a for a, b in step_spans(merged)]
    usual = sum(lengths) / len(lengths)
    return {rank: sum(each) / len(each) / usual for rank, each in late.items()}


def _starts_by_step(merged: Mapping[str, Any], rank: int) -> list[list[float]]:
    """When each message of each step begins, in order, on one rank."""
    own = {"traceEvents": [e for e in merged["traceEvents"] if e.get("pid") == rank]}
    messages = sorted(
        event["ts"]
        for event in own["traceEvents"]
        if event.get("ph") == "X" and "dur" in event and _is_message(event)
    )
    return [[at for at in messages if a <= at < b] for a, b in step_spans(own)]


def _is_message(event: Mapping[str, Any]) -> bool:
    name = event["name"]
    return name.startswith("gloo:") or (event.get("cat") == "kernel" and "nccl" in name.lower())
