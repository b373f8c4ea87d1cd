"""What the ranks of a pipeline waited for, from the events of a step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.pipeline.executor import Event
from shared.pipeline.schedules import Cell, prerequisites


@dataclass(frozen=True)
class Waiting:
    """Shares of all ranks' time from the first start to the last end; together, all waiting.

    `schedule` is the bubble of equal pieces of work, `unequal` what is added because some take
    longer than others (slightly negative where that saves a wait), `messages` the rest: what
    travels, and ranks that wait for a core.
    """

    schedule: float
    unequal: float
    messages: float

    @property
    def total(self) -> float:
        """The share of the time in which ranks do nothing."""
        return self.schedule + self.unequal + self.messages


def split_waiting(runs: Sequence[Sequence[Event]], bubble: float) -> Waiting:
    """Say what the ranks waited for; `runs[rank]` are a rank's events, `bubble` the formula's.

    Three steps are compared: as it was; the same pieces of work in the same order, each begun as
    soon as its inputs are computed; and the same work in equal pieces, by the formula.
    """
    events = [event for run in runs for event in run]
    whole = max(event.end for event in events) - min(event.start for event in events)
    work = sum(event.end - event.start for event in events) / len(runs)  # of a rank, in the mean
    equal = work / (1 - bubble)
    alone = seconds_without_messages(runs)
    return Waiting(bubble * equal / whole, (alone - equal) / whole, (whole - alone) / whole)


def seconds_without_messages(runs: Sequence[Sequence[Event]]) -> float:
    """Seconds of a step in which every piece of work begins as soon as its inputs are computed."""
    num_stages = 1 + max(event.cell.stage for run in runs for event in run)
    rows, free, ends = [deque(run) for run in runs], [0.0] * len(runs), dict[Cell, float]()
    while any(rows):
        before = len(ends)
        for rank, row in enumerate(rows):
            while row and prerequisites(row[0].cell, num_stages) <= ends.keys():
                cell, start, end = row[0].cell, row[0].start, row.popleft().end
                ready = [ends[need] for need in prerequisites(cell, num_stages)]
                ends[cell] = free[rank] = max([free[rank], *ready]) + end - start
        assert len(ends) > before, "these events are not those of one step"
    return max(free)
