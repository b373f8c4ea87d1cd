"""The to-do list: a line for each exercise of the learner's notebooks, which says how it stands.

python -m shared.cli.todo [lessonNN_topic ...] [--watch] [--details] [--time-limit S]

The judging itself is in shared/exercises/todo.py, and runs in a process of its own for each lesson:
this one needs neither torch nor the learner's code.
"""

import argparse
import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from shared.cli.command import INTERRUPTED, ROOT, all_lessons
from shared.cli.machine import moves
from shared.exercises.status import ExerciseStatus, Outcome
from shared.ranks.logs import last_words
from shared.ranks.processes import raise_on_stop_signals, supervise

LOOK = 0.5  # seconds between two looks at the notebooks' files
NUM_LOG_LINES = 12
SHORT = 160  # characters of a line whose mistake was not recognised


@dataclass
class ToDoList:
    """One lesson: its exercises by id and name, and how those stand that have been judged."""

    lesson: str  # "lesson 02"
    exercises: list[str] = field(default_factory=list)
    statuses: list[ExerciseStatus] = field(default_factory=list)
    error: str = ""  # why nothing (more) can be judged
    bad_input: bool = False  # the error is the notebook's

    @property
    def all_right(self) -> bool:
        """Whether every exercise has been judged, and is right."""
        right = [status for status in self.statuses if status.outcome is Outcome.RIGHT]
        return not self.error and len(right) == len(self.exercises)


class Printer:
    """Prints a line an exercise, and on a terminal the one that is being judged."""

    def __init__(self, *, details: bool) -> None:
        self.details = details
        self.moves = moves()

    def waiting(self, todo: ToDoList, seconds: float) -> None:
        """Show which exercise is being judged, and since when the lesson is."""
        if self.moves:
            name = next(iter(todo.exercises[len(todo.statuses) :]), todo.lesson)
            print(f"\r\033[K{name} ... {seconds:.0f} s", end="", flush=True)

    def clear(self) -> None:
        """Take what is being judged off the terminal."""
        if self.moves:
            print("\r\033[K", end="", flush=True)

    def exercise(self, todo: ToDoList, status: ExerciseStatus) -> None:
        """Print how one exercise stands."""
        self.clear()
        print(exercise_line(status, max(map(len, todo.exercises))), flush=True)
        fault = status.fault
        if self.details and fault is not None:
            print(f"  {fault.where}", *fault.lines(), sep="\n")

    def lesson(self, todo: ToDoList) -> None:
        """Print a lesson's totals; what kept it from being judged goes to stderr."""
        self.clear()
        if todo.error:
            print(f"run_all.sh: {todo.error}", file=sys.stderr, flush=True)
        if todo.statuses:
            print(totals(todo.lesson, [todo]), flush=True)


def exercise_line(status: ExerciseStatus, width: int) -> str:
    """Return one line: id, name, points, and that it is right or open, or what is wrong."""
    title = f"{status.id} {status.name}"
    points = f"{status.points} point{'s' if status.points > 1 else ' '}"
    reason = status.reason
    if status.fault is not None and not status.fault.mistake:
        reason = textwrap.shorten(reason, SHORT, placeholder=" ...")
    return f"{title:<{width}}  {points}  {status.outcome}{': ' * bool(reason)}{reason}"


def totals(what: str, lessons: Sequence[ToDoList]) -> str:
    """Return a line: how many exercises are right, their points, how many are wrong and open."""
    statuses = [status for todo in lessons for status in todo.statuses]
    right = [status for status in statuses if status.outcome is Outcome.RIGHT]
    num_open = sum(status.outcome is Outcome.OPEN for status in statuses)
    num_wrong = len(statuses) - len(right) - num_open
    points = f"{sum(e.points for e in right)} of {sum(e.points for e in statuses)} points"
    rest = [f"{num_wrong} wrong"] * bool(num_wrong) + [f"{num_open} open"] * bool(num_open)
    return ", ".join([f"{what}: {len(right)} of {len(statuses)} exercises right", points, *rest])


def judge(name: str, time_limit: float, printer: Printer) -> ToDoList:
    """Judge the exercises of a folder of lessons/, printing as they come; return how they stand."""
    number = name.removeprefix("lesson")[:2]
    todo = ToDoList(f"lesson {number}")
    with tempfile.TemporaryDirectory(prefix="todo_") as folder:
        results, log = Path(folder) / "results", Path(folder) / "log"
        results.touch()
        command = [sys.executable, "-m", "shared.exercises.todo", number, str(results)]
        env = {"OMP_NUM_THREADS": "1", **os.environ, "MPLBACKEND": "agg"}
        with results.open(encoding="utf-8") as stream:

            def look(seconds: float) -> None:
                for record in _new_records(stream):
                    _add(todo, record, printer)
                printer.waiting(todo, seconds)

            command.append(f"{time_limit:g}")
            outcome = supervise(command, env=env, log=log, tick=look)
            look(outcome.seconds)
        if outcome.status != 0 and not todo.error:
            said = last_words(log.read_text(encoding="utf-8", errors="replace"), NUM_LOG_LINES)
            todo.error = "\n".join([f"{todo.lesson} could not be judged:", *said])
    printer.lesson(todo)
    return todo


def _new_records(stream: TextIO) -> Iterator[dict[str, Any]]:
    """Yield what was written since the last look; half a line is left for the next."""
    while True:
        place = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(place)
            return
        yield json.loads(line)


def _add(todo: ToDoList, record: dict[str, Any], printer: Printer) -> None:
    if "exercises" in record:
        todo.exercises = record["exercises"]
    elif "error" in record:
        todo.error, todo.bad_input = record["error"], True
    else:
        todo.statuses.append(ExerciseStatus.from_record(record["status"]))
        printer.exercise(todo, todo.statuses[-1])


def watch(names: Sequence[str], judge_lesson: Callable[[str], ToDoList]) -> NoReturn:
    """Judge lessons, and each one again whenever its notebook is saved; ends by an interrupt."""
    saved: dict[str, float] = {}
    while True:
        changed = [name for name in names if _saved(name) != saved.get(name)]
        for name in changed:
            again = name in saved
            saved[name] = _saved(name)  # before it is judged: the next save counts again
            if again:
                print(f"\n{time.strftime('%H:%M:%S')} lessons/{name}/lesson.ipynb was saved")
            judge_lesson(name)
        if changed:
            print("watching: save a notebook and its lesson is judged again; Ctrl-C ends this")
        sys.stdout.flush()
        time.sleep(LOOK)


def _saved(name: str) -> float:
    """Return when a lesson's notebook was written last; 0 where there is none."""
    try:
        return (ROOT / "lessons" / name / "lesson.ipynb").stat().st_mtime
    except OSError:
        return 0.0


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if every exercise is right, 1 if one is not, 2 if a notebook cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lessons", nargs="*")
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--details", action="store_true")
    parser.add_argument("--time-limit", type=float, default=60.0)
    args = parser.parse_args(arguments)
    names = args.lessons or all_lessons()
    printer = Printer(details=args.details)
    raise_on_stop_signals()
    try:
        if args.watch:
            watch(names, lambda name: judge(name, args.time_limit, printer))
        lists = [judge(name, args.time_limit, printer) for name in names]
    except KeyboardInterrupt:
        printer.clear()
        print("run_all.sh: stopped; no process was left behind", file=sys.stderr)
        return INTERRUPTED
    if len(lists) > 1:
        judged = sum(not todo.error for todo in lists)
        what = f"all {len(lists)}" if judged == len(lists) else f"{judged} of {len(lists)}"
        print(totals(f"{what} lessons", lists))
    if any(todo.bad_input for todo in lists):
        return 2
    return 0 if all(todo.all_right for todo in lists) else 1


if __name__ == "__main__":
    sys.exit(main())
