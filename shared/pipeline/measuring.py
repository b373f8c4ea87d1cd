"""What a pipeline's run shows: the bubble in its events."""

from collections.abc import Sequence

from shared.pipeline.executor import Event


def measured_bubble(runs: Sequence[Sequence[Event]]) -> float:
    """The share of all ranks' time, from the first start to the last end, in which nothing ran."""
    events = [event for run in runs for event in run]
    whole = max(e.end for e in events) - min(e.start for e in events)
    return 1 - sum(e.end - e.start for e in events) / (len(runs) * whole)
