"""How the lessons' scripts went, a line each, and a bar while they run."""

import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from shared.cli.machine import moves
from shared.ranks.logs import last_words

NUM_LOG_LINES = 12
BAR_WIDTH = 24
OPEN = "is not solved yet"  # ends what a script says of an exercise that it needs


@dataclass(frozen=True)
class Result:
    """How one lesson's script went; `problem` is empty when all is well.

    `warning` says what went wrong behind the results, which are whole.
    """

    lesson: str
    seconds: float
    headline: str
    problem: str
    log: str
    when: str
    warning: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        return not self.problem

    @property
    def open(self) -> bool:
        """Whether all that is wrong is an exercise that nobody has solved yet."""
        return self.problem.endswith(OPEN)


class Stopped(Exception):
    """The call was interrupted while other threads ran lessons."""


class Display:
    """One line a lesson; on a terminal also a bar that moves while lessons run.

    `over` is set when they are to end: each notices it when it says that it still runs.
    """

    def __init__(self, lessons: list[str]) -> None:
        self.num_lessons = len(lessons)
        self.width = max(map(len, lessons))
        self.num_done = 0
        self.moves = moves()
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {}  # of the lessons that run
        self._drawn = 0.0

    def running(self, lesson: str, seconds: float) -> None:
        """Draw the bar, about five times a second; raises Stopped when all are to end."""
        if self.over.is_set():
            raise Stopped
        if not self.moves:
            return
        with self._lock:
            self._seconds[lesson] = seconds
            if time.monotonic() - self._drawn < 0.2:
                return
            self._drawn = time.monotonic()
            filled = BAR_WIDTH * self.num_done // self.num_lessons
            bar = "█" * filled + "░" * (BAR_WIDTH - filled)
            names = "; ".join(f"{name}, {s:.0f} s" for name, s in self._seconds.items())
            line = f"{bar} {self.num_done}/{self.num_lessons}  {names}"
            print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    def done(self, result: Result) -> None:
        """Print the lesson's line, and the end of its log if it failed."""
        with self._lock:
            self._print(result)

    def _print(self, result: Result) -> None:
        self.num_done += 1
        self._seconds.pop(result.lesson, None)
        self.clear()
        verdict = "pass" if result.passed else "open" if result.open else "FAIL"
        what = result.problem or result.headline
        if verdict == "FAIL":
            what += f" (see {result.log})"
        if result.warning:
            what += f" (warning: {result.warning}; see {result.log})"
        print(
            f"{result.lesson:<{self.width}}  {result.seconds:6.1f} s  {verdict}  {what}", flush=True
        )
        if verdict == "FAIL":
            log = Path(result.log).read_text(encoding="utf-8", errors="replace")
            for line in last_words(log, NUM_LOG_LINES):
                print(f"    | {line}", flush=True)

    def clear(self) -> None:
        """Take the bar off the terminal."""
        if self.moves:
            print("\r\033[K", end="", flush=True)
