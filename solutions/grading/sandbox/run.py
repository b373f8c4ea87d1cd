"""Grade one student's answers to one lesson: confined, watched, and never with an exception."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from solutions.grading.intake.audit import audit
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Verdict
from solutions.grading.sandbox import bubblewrap
from solutions.grading.sandbox.process import Place, run_judge
from solutions.grading.sandbox.reader import Reader
from solutions.grading.verdicts import make_verdict

INSIDE = Path(__file__).with_name("inside") / "judge.py"
MAX_FILES = 4096
FREE = """answers run WITHOUT a sandbox (--unconfined): they can read, change and send whatever you
can, solutions/ and other students' grades among it"""
CONFINED = """answers run in bubblewrap: no files but the interpreter's and the course's copy, no
network, no processes but their own, limits on time, memory, processes and files"""
PREPARE = (
    "import compileall, sys, matplotlib.font_manager; compileall.compile_dir(sys.argv[1], quiet=2)"
)


class Closed(Exception):
    """The workspace was closed while a notebook ran."""


class Workspace:
    """A temporary folder with a copy of the course, for any number of runs.

    Threads may grade at the same time, as many as there are `slots`. Raises InputError where
    `confined` is asked for and bubblewrap cannot be had.
    """

    def __init__(self, course: Path, slots: int = 1, *, confined: bool = True) -> None:
        self.confined = confined
        if confined:
            bubblewrap.require()
        self.promise = CONFINED if confined else FREE
        self._original = course.resolve()
        self.closing = threading.Event()
        self._num_slots = slots
        self._slots: Queue[int] = Queue()
        for slot in range(slots):
            self._slots.put(slot)

    def __enter__(self) -> "Workspace":
        self.folder = Path(tempfile.mkdtemp(prefix="grading_"))
        self.place = Place(self.folder, self.confined)
        copy_course(self.folder, self._original)
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs in other threads, as after Ctrl-C, and remove the folder."""
        self.closing.set()
        free = []
        with contextlib.suppress(Empty):
            while len(free) < self._num_slots:  # each is free once its run has ended
                free.append(self._slots.get(timeout=20.0))
        shutil.rmtree(self.folder, ignore_errors=True)
        for slot in free:
            self._slots.put(slot)  # who waited for one learns that it is over

    def grade(self, answers: Answers, lesson: Lesson, limits: Limits) -> list[Verdict]:
        """Judge every exercise of the lesson, in the lesson's order. Raises Closed at the end."""
        slot = self._slots.get()
        try:
            self.check_open()
            return _Grading(self, slot, answers, lesson, limits).verdicts()
        finally:
            self._slots.put(slot)

    def check_open(self) -> None:
        """Raise Closed once the workspace is being closed."""
        if self.closing.is_set():
            raise Closed("the grader was stopped")


def copy_course(workspace: Path, course: Path) -> None:
    """Put into a workspace what all runs share: shared/, the lessons and the data, no solutions/.

    Beside it matplotlib's list of fonts, which takes a second to make.
    """
    workspace.chmod(0o755)
    copy = workspace / "course"
    leave = shutil.ignore_patterns("__pycache__", "*.pyc", "lesson.ipynb")
    for name in ("shared", "lessons", "datasets"):
        if (course / name).is_dir():
            shutil.copytree(course / name, copy / name, ignore=leave)
    shutil.copy(INSIDE, copy / "judge.py")
    fonts = workspace / "caches" / "matplotlib"
    fonts.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", PREPARE, str(copy)],
        env={**os.environ, "MPLCONFIGDIR": str(fonts)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,  # without the list each run makes its own
    )
    for path in workspace.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


class _Grading:
    """One student's answers to one lesson, run as often as it takes to settle every exercise."""

    def __init__(
        self, workspace: Workspace, slot: int, answers: Answers, lesson: Lesson, limits: Limits
    ) -> None:
        self.workspace, self.slot, self.answers = workspace, slot, answers
        self.lesson, self.limits = lesson, limits
        self.exercises = {each.id: each for each in lesson.exercises}
        self.flags = {
            id: audit(answers.cells.get(id, ""), lesson, each.of or id)
            for id, each in self.exercises.items()
        }

    def verdicts(self) -> list[Verdict]:
        """The verdicts in the lesson's order.

        A run ends early only where an answer kills what judges it: then another run goes on.
        """
        done = {id: self._problem(id) for id in self.exercises if id not in self.answers.cells}
        # What changes things for others must not be there when they are judged.
        stubbed = {id for id, flags in self.flags.items() if any(each.spoils for each in flags)}
        stubbed |= {id for id, each in self.exercises.items() if each.of}
        while len(done) < len(self.exercises):
            wanted = [id for id in self.exercises if id not in done]
            found, why = self._run(wanted, stubbed)
            self.workspace.check_open()  # a run that was ended says nothing about an answer
            if not found:
                done |= {id: self._given_up(id, why) for id in wanted}
            stubbed |= {id for id, each in found.items() if each.stop is not None}
            done |= found
        return [done[id] for id in self.exercises]

    def _problem(self, id: str) -> Verdict:
        outcome, reason = self.answers.problems.get(id, (Outcome.MISSING, "no such cell"))
        return make_verdict(self.answers, self.exercises[id], outcome, reason)

    def _given_up(self, id: str, why: str) -> Verdict:
        words = f"the notebook could not be run: {why}"
        return make_verdict(self.answers, self.exercises[id], Outcome.UNREADABLE, words)

    def _run(self, wanted: list[str], stubbed: set[str]) -> tuple[dict[str, Verdict], str]:
        """Run once; the verdicts that came of it and, where there are none, why."""
        report = run_judge(
            self.workspace.place,
            self._job(wanted, stubbed),
            self.limits,
            slot=self.slot,
            seed=seed_of(self.answers),
            seconds=len(wanted) * (self.limits.exercise_seconds + 10),
            closing=self.workspace.closing,
        )
        reader = Reader(self.answers, self.exercises, self.limits, self.flags, report.paths)
        found = reader.read(report.events, report.stop)
        return found, reader.broken or report.log or "it said nothing"

    def _job(self, wanted: list[str], stubbed: set[str]) -> Mapping[str, Any]:
        """What judge.py is given."""
        place = self.workspace.place
        exercises = []
        for each in self.lesson.exercises:
            stub = self.lesson.stubs[each.id]
            own = self.answers.cells.get(each.id, stub)
            exercises.append(
                {
                    "id": each.id,
                    "checks": each.of or each.id,
                    "name": each.name,
                    "source": own,
                    "stub": stub,
                    "others": stub if each.id in stubbed else own,  # what other exercises use
                    "wanted": each.id in wanted,
                    "wrong": self.lesson.wrong.get(each.of or each.id, ()),
                }
            )
        return {
            "course": place.course,
            "caches": place.caches,
            "confined": place.confined,
            "number": self.lesson.number,
            "setup": self.lesson.setup,
            "exercises": exercises,
            "seconds": self.limits.exercise_seconds,
            "memory": self.limits.memory,
            "num_files": MAX_FILES,
        }


def seed_of(answers: Answers) -> int:
    """The seed for these answers: equal for equal cells, and known to nobody beforehand."""
    text = json.dumps([answers.lesson, sorted(answers.cells.items())])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
