"""The to-do list of one lesson: where every exercise of the learner's notebook stands.

python -m shared.exercises.todo NN RESULTS SECONDS

Only the setup cell and the exercise cells run, in their order. Each exercise is defined and checked
in a process of its own, forked from this one, so that an answer that never returns, or that ends
its process, costs no other exercise its result. RESULTS receives a line of JSON for each.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch

from shared.errors import InputError
from shared.exercises import notebook
from shared.exercises.answers import (
    Cells,
    import_what_torch_puts_off,
    names_from_other_cells,
    new_module,
    read_cells,
    run_cell,
)
from shared.exercises.checks import ExerciseChecks
from shared.exercises.lessons import lesson_folder, load_checks, solution_module
from shared.exercises.status import ExerciseStatus, Outcome
from shared.exercises.wrong import Fault
from shared.ranks.failures import own_line
from shared.ranks.visible import without_gpus

GRACE = 5.0  # seconds after its time limit until a process that does not end is killed


class _TimeUp(BaseException):
    """The time limit; no `except Exception` of an answer catches it."""


def statuses(number: str, seconds: float) -> Iterator[ExerciseStatus]:
    """Judge a lesson's exercises one after the other, each for `seconds` at most.

    Raises InputError when the notebook cannot be read or its setup cell does not run.
    """
    path = lesson_folder(number) / "lesson.ipynb"
    if notebook.solution_mode() and solution_module(number) is None:
        raise InputError("TORCH_HANDLE_IMPLEMENTATION=solution needs solutions/: unset it")
    judge = _Judge(path, read_cells(path), new_module(number), seconds)
    import_what_torch_puts_off()
    os.chdir(path.parent)  # as the notebook's kernel does
    try:
        with _limited(seconds):
            judge.run_cell("setup", judge.cells.setup)
    except (Exception, _TimeUp) as error:
        what = judge.too_late if isinstance(error, _TimeUp) else _in_short(error)
        raise InputError(f"the setup cell of {path} does not run: {what}") from None
    for checks in load_checks(number).values():
        yield judge.next(checks)


@dataclass(frozen=True)
class _Judge:
    """Judges the exercises of one notebook in order; `module` holds what they have defined."""

    path: Path
    cells: Cells
    module: ModuleType
    seconds: float

    @property
    def too_late(self) -> str:
        return f"no result after {self.seconds:g} s"

    def next(self, checks: ExerciseChecks) -> ExerciseStatus:
        """Judge an exercise in a process of its own, then define it here for those that follow."""
        source = self.cells.exercises.get(checks.id)
        if source is None:
            status = _status(checks, Outcome.OPEN, problem="the notebook has no cell for it")
        else:
            status = self._judged_in_a_fork(checks, source)
        vars(self.module)[checks.name] = notebook.substitute_reference(checks.id, checks.name)
        if source is not None and status.outcome not in (Outcome.BROKEN, Outcome.STOPPED):
            with contextlib.suppress(Exception):  # it ran there, and may not run twice
                self.run_cell(checks.id, source)
        return status

    def run_cell(self, label: str, source: str) -> None:
        run_cell(source, f"{self.path.parent.name}/{self.path.name} {label}", self.module)

    def _judged_in_a_fork(self, checks: ExerciseChecks, source: str) -> ExerciseStatus:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=self._send, args=(sender, checks, source))
        process.start()
        sender.close()
        deadline = time.monotonic() + self.seconds + GRACE
        try:
            # Its end alone does not close the pipe: ranks that it has left hold it open.
            while not receiver.poll(0.05) and process.is_alive() and time.monotonic() < deadline:
                pass
            if receiver.poll(0):
                return receiver.recv()
        except (EOFError, OSError):  # OSError: it ended while it was sending
            process.join(GRACE)  # the pipe is closed a moment before the process has ended
        finally:
            problem = self.too_late if process.is_alive() else _ending(process.exitcode or 0)
            process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # the ranks that it started
            process.join()
        return _status(checks, Outcome.STOPPED, problem=problem)

    def _send(self, pipe: Connection, checks: ExerciseChecks, source: str) -> None:
        """Judge one exercise and send how it stands: all that the new process does."""
        os.setpgid(0, 0)
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        try:
            with _limited(self.seconds):
                status = self._judged(checks, source)
        except _TimeUp:
            problem = self.too_late + own_line(traceback.format_exc())
            status = _status(checks, Outcome.STOPPED, problem=problem)
        pipe.send(status)

    def _judged(self, checks: ExerciseChecks, source: str) -> ExerciseStatus:
        names = names_from_other_cells(checks.id, self.cells)
        elsewhere = (
            f"another cell defines {', '.join(names)}: put it into this one" if names else ""
        )
        try:
            self.run_cell(checks.id, source)
            bound = notebook.defined[checks.id].bound
        except Exception as error:
            return _status(checks, Outcome.BROKEN, problem=elsewhere or _in_short(error))
        result = notebook.judge(checks.id, bound)
        fault = result.fault
        if fault is not None and not fault.mistake:
            fault = replace(fault, mistake=elsewhere)
        return _status(checks, Outcome(result.outcome), fault=fault)


@contextlib.contextmanager
def _limited(seconds: float) -> Generator[None]:
    """Raise _TimeUp in the body after so many seconds."""

    def stop(number: int, frame: object) -> None:
        raise _TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _status(
    checks: ExerciseChecks, outcome: Outcome, *, fault: Fault | None = None, problem: str = ""
) -> ExerciseStatus:
    return ExerciseStatus(checks.id, checks.name, checks.difficulty, outcome, fault, problem)


def _ending(status: int) -> str:
    """Return how an answer ended the process that judged it."""
    if status < 0:
        return f"it is ended by {signal.Signals(-status).name}"
    return f"it ends Python, with status {status}"


def _in_short(error: BaseException) -> str:
    """Return what a cell raised, in one line."""
    if isinstance(error, SyntaxError):
        return (
            f"{type(error).__name__}: {error.msg}, line {error.lineno}: {error.text or ''}".strip()
        )
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:200] + own_line("".join(traceback.format_exception(error)))


def main(arguments: list[str]) -> int:
    """Write a lesson's statuses to a file as they come; 2 when its notebook is of no use."""
    number, path, seconds = arguments
    without_gpus()
    with Path(path).open("w", encoding="utf-8") as results:

        def write(**record: object) -> None:
            print(json.dumps(record), file=results, flush=True)

        write(exercises=[f"{checks.id} {checks.name}" for checks in load_checks(number).values()])
        try:
            for status in statuses(number, float(seconds)):
                write(status=status.record())
        except InputError as error:
            write(error=str(error))
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
