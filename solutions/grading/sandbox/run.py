"""Grade one student's answers to one lesson: confined, watched, and never with an exception."""

import contextlib
import hashlib
import json
import secrets
import shutil
import tempfile
import threading
from pathlib import Path
from queue import Empty, Queue

from solutions.grading.intake.audit import audit
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Verdict
from solutions.grading.sandbox.assemble import graded_notebook
from solutions.grading.sandbox.confine import find_layers
from solutions.grading.sandbox.folders import RunFolder, copy_course
from solutions.grading.sandbox.reader import Findings, Reader
from solutions.grading.verdicts import make_verdict


class Closed(Exception):
    """The workspace was closed while a notebook ran."""


class Workspace:
    """A temporary folder with a copy of the course, and in it a folder for each run.

    Threads may grade at the same time, as many as there are `slots`. `layers` are lines that say
    what isolates a submission on this machine.
    """

    def __init__(self, course: Path, slots: int = 1) -> None:
        self._original = course.resolve()
        self.isolation = find_layers()
        self.layers = self.isolation.lines()
        self.closing = threading.Event()
        self._num_slots = slots
        self._slots: Queue[int] = Queue()
        for slot in range(slots):
            self._slots.put(slot)

    def __enter__(self) -> "Workspace":
        self.folder = Path(tempfile.mkdtemp(prefix="grading_"))
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
            return Grading(self, slot, answers, lesson, limits).verdicts()
        finally:
            self._slots.put(slot)

    def check_open(self) -> None:
        """Raise Closed once the workspace is being closed."""
        if self.closing.is_set():
            raise Closed("the grader was stopped")


class Grading:
    """One student's answers to one lesson, run as often as it takes to settle every exercise."""

    def __init__(
        self, workspace: Workspace, slot: int, answers: Answers, lesson: Lesson, limits: Limits
    ) -> None:
        self.workspace, self.slot, self.answers = workspace, slot, answers
        self.lesson, self.limits = lesson, limits
        self.exercises = {each.id: each for each in lesson.exercises}
        names = {each.name for each in lesson.exercises}
        self.flags = {
            id: audit(answers.cells.get(id, ""), lesson.setup, names) for id in self.exercises
        }

    def verdicts(self) -> list[Verdict]:
        """The verdicts in the lesson's order, from as many runs as it takes.

        Each run settles at least one exercise; after two that settle none, the rest is given up.
        """
        done = {id: self._problem(id) for id in self.exercises if id not in self.answers.cells}
        stubbed: set[str] = set()
        failures = 0
        while len(done) < len(self.exercises):
            wanted = [id for id in self.exercises if id not in done]
            found = self._run(wanted, stubbed)
            self.workspace.check_open()  # a run that was ended says nothing about an answer
            settled = len(done) + len(stubbed)
            done = found.verdicts | done  # an answer keeps its verdict, should it stop a later run
            # What stopped a run or spoilt it must not be there when the others are judged.
            stubbed |= {id for id, each in found.verdicts.items() if each.stop is not None}
            if len(done) + len(stubbed) == settled:
                failures += 1
                if failures > 1:
                    done |= {id: self._given_up(id, found.broken) for id in wanted}
        return [done[id] for id in self.exercises]

    def _problem(self, id: str) -> Verdict:
        outcome, reason = self.answers.problems.get(id, (Outcome.MISSING, "no such cell"))
        return make_verdict(self.answers, self.exercises[id], outcome, reason)

    def _given_up(self, id: str, why: str) -> Verdict:
        words = f"the notebook could not be run: {why}"
        return make_verdict(self.answers, self.exercises[id], Outcome.UNREADABLE, words)

    def _run(self, wanted: list[str], stubbed: set[str]) -> Findings:
        key, name = secrets.token_bytes(32), f"g{secrets.token_hex(12)}"
        place = self.workspace.folder, self.slot, self.workspace.isolation
        with RunFolder(*place, self.limits) as folder:
            folder.key_file.write_text(key.hex())
            folder.notebook.write_text(
                graded_notebook(
                    self.lesson,
                    self.answers,
                    wanted=wanted,
                    stubbed=stubbed,
                    name=name,
                    guard=folder.guard_options(self.lesson.number),
                )
            )
            report = folder.run(len(wanted), seed_of(self.answers), self.workspace.closing)
            names = folder.names()
        reader = Reader(self.answers, self.exercises, self.limits, key, names, self.flags)
        found = reader.read(report)
        if not found.verdicts and not found.broken:
            found.broken = report.log or "it said nothing"
        return found


def seed_of(answers: Answers) -> int:
    """The seed for these answers: equal for equal cells, and known to nobody beforehand."""
    text = json.dumps([answers.lesson, sorted(answers.cells.items())])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
