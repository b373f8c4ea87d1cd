"""The words that the parts of the grader pass one another."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """What became of one exercise of one student."""

    RIGHT = "right"
    PARTLY = "partly right"
    WRONG = "wrong"
    UNSOLVED = "not solved"
    MISSING = "missing"  # no such cell, or no notebook
    UNREADABLE = "cannot be graded"  # not JSON, a cell that is there twice, a syntax error
    STOPPED = "stopped"  # a limit was reached, or the process died


@dataclass(frozen=True)
class Exercise:
    """One exercise of a pristine lesson: its id ("02.4a"), its name and what it is worth."""

    id: str
    name: str
    points: int


@dataclass(frozen=True)
class Lesson:
    """A pristine lesson, read from the course: what is graded and what it is graded with.

    `setup` is the source of the setup cell, `stubs` the pristine exercise cells by id, `digest`
    changes with anything that can change a grade (the notebook, checks.py, shared/, the grader).
    """

    number: str
    folder: str
    exercises: tuple[Exercise, ...]
    setup: str
    stubs: Mapping[str, str]
    digest: str


@dataclass(frozen=True)
class Answers:
    """What one student handed in for one lesson: exercise cells by id, and why others are not.

    `problems` has a reason for every exercise of the lesson that is not in `cells`; `notes` are
    things that an instructor may want to know and that cost nothing (an old format, say).
    """

    student: str
    lesson: str
    cells: Mapping[str, str]
    problems: Mapping[str, tuple[Outcome, str]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What came out for one exercise of one student.

    `message` is the row's reason in one line; `words` are the check's own words, in lines;
    `mistake` is the mistake that was recognised, "" if none; `flags` say what needs a look and
    what was seen. `passed` of `total` checks passed (0 of 0 when none ran). `by_hand` says what an
    instructor has set, "" if nothing.
    """

    student: str
    lesson: str
    exercise: str
    name: str
    points: float
    max: int
    outcome: Outcome
    message: str
    words: str = ""
    mistake: str = ""
    hint: str = ""
    passed: int = 0
    total: int = 0
    flags: tuple[str, ...] = ()
    by_hand: str = ""


@dataclass(frozen=True)
class Limits:
    """What one graded notebook may use. Sizes in bytes, times in seconds."""

    exercise_seconds: float = 60.0
    memory: int = 4 << 30
    num_processes: int = 48
    file_size: int = 64 << 20
    folder_size: int = 256 << 20
    output: int = 1 << 20
