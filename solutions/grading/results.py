"""The data that the parts of the grader hand to one another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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


class Stop(StrEnum):
    """Why the run of a notebook could not continue after an answer."""

    EXERCISE_TIME = "exercise time"  # one exercise took longer than it may
    TIME = "time"  # the run fell silent: something has stopped what judges
    MEMORY = "memory"
    FOLDER = "folder"  # files in the run's folder
    OUTPUT = "output"  # what the run says of itself
    DIED = "died"  # a process ended before it had said anything
    CLOSING = "closing"  # the grader itself was stopped


@dataclass(frozen=True)
class Exercise:
    """One exercise of a pristine lesson: its id ("02.4a"), its name and what it is worth.

    `of` is the exercise to which this is a further answer (in the self test); "" for itself.
    """

    id: str
    name: str
    points: int
    of: str = ""


@dataclass(frozen=True)
class Lesson:
    """A pristine lesson, read from the course: what is graded and what it is graded with."""

    number: str
    folder: str
    exercises: tuple[Exercise, ...]
    setup: str  # the setup cell
    stubs: Mapping[str, str]  # the pristine exercise cells by id
    digest: str  # changes with anything that can change a grade
    # By exercise: how the names of calls begin that are the exercise itself; known wrong answers as
    # (what is said to it, cell); and where shared/ has the course's own answer.
    forbidden: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wrong: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    answers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Flag:
    """What needs a look, and in which line; `spoils`: it changes things for other exercises."""

    line: int
    what: str
    spoils: bool = False

    def __str__(self) -> str:
        return f"line {self.line} {self.what}"


@dataclass(frozen=True)
class Answers:
    """What one student handed in for one lesson, by exercise: a cell, or why there is none.

    `notes` may explain something, and cost nothing; `flags` has what the audit of a cell found.
    """

    student: str
    lesson: str
    cells: Mapping[str, str]
    problems: Mapping[str, tuple[Outcome, str]]
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    flags: Mapping[str, tuple[Flag, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What came out for one exercise of one student.

    `message` is the reason in one line. What the check said is there as it said it: `title` of the
    first check that failed, `mistake` that it recognised, what it `expected`, what it has `seen`,
    its `hint`; `also` has the titles of the other checks that failed. `passed` of `total` checks
    passed (0 of 0 when none ran). `stop` says why the run ended here, None if it did not. `flags`
    say what needs a look and what was seen; `by_hand` what an instructor has set, "" if nothing.
    """

    student: str
    lesson: str
    exercise: str
    name: str
    points: float
    max: int
    outcome: Outcome
    message: str
    title: str = ""
    mistake: str = ""
    expected: str = ""
    seen: str = ""
    hint: str = ""
    also: tuple[str, ...] = ()
    passed: int = 0
    total: int = 0
    stop: Stop | None = None
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

    @property
    def num_threads(self) -> int:
        """Eight for each process: the system counts threads, and gloo starts three a group."""
        return 8 * self.num_processes
