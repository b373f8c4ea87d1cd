"""How one exercise of a learner's notebook stands, as data that travels between processes.

Nothing here imports torch: who prints the to-do list need not wait for it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from shared.exercises.wrong import Fault


class Outcome(StrEnum):
    """What came of one exercise."""

    RIGHT = "right"
    WRONG = "wrong"  # with the fault
    OPEN = "open"
    BROKEN = "does not run"  # its cell: with the problem
    STOPPED = "stopped"  # by its time limit: with the problem


@dataclass(frozen=True)
class ExerciseStatus:
    """One exercise: what it is called and worth, what came of it, and why it is not right.

    `fault` says what a check found; `problem` why no check could say anything.
    """

    id: str
    name: str
    points: int
    outcome: Outcome
    fault: Fault | None = None
    problem: str = ""

    @property
    def reason(self) -> str:
        """Why the answer is not right, in one line; "" where it is right, or nothing is said."""
        return self.fault.in_short if self.fault is not None else self.problem

    def record(self) -> dict[str, Any]:
        """Return the same as numbers, strings and dicts, for JSON."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "ExerciseStatus":
        """Return the status that `record()` wrote."""
        rest = {key: record[key] for key in ("id", "name", "points", "problem")}
        fault = Fault(**record["fault"]) if record["fault"] else None
        return cls(**rest, outcome=Outcome(record["outcome"]), fault=fault)
