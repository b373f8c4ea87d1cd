"""Grade one student's answers to one lesson: confined, watched, and never with an exception.

`with Workshop(course) as shop: shop.grade(answers, lesson, limits)` grades many with one copy of
the course; `grade_answers` does the same for a single one.
"""

import contextlib
import hashlib
import json
import secrets
import shutil
import tempfile
import threading
from pathlib import Path
from queue import Empty, Queue

from solutions.grading.assemble import graded_notebook
from solutions.grading.audit import audit
from solutions.grading.confine import find_layers
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Verdict
from solutions.grading.room import Room, furnish
from solutions.grading.verdicts import SPOILT, Findings, Reader, make_verdict


def grade_answers(answers: Answers, lesson: Lesson, limits: Limits, course: Path) -> list[Verdict]:
    """Judge every exercise of the lesson; whatever the answers do, this returns verdicts."""
    with Workshop(course) as shop:
        return shop.grade(answers, lesson, limits)


class Closed(Exception):
    """The workshop was left while a notebook ran."""


class Workshop:
    """A temporary folder with a read-only copy of the course, and rooms to grade in.

    Threads may grade at the same time, as many as there are `slots`. `layers` says, in lines, what
    keeps a submission to itself on this machine.
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

    def __enter__(self) -> "Workshop":
        self.folder = Path(tempfile.mkdtemp(prefix="grading_"))
        furnish(self.folder, self._original)
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
        """Raise Closed when the workshop is being left."""
        if self.closing.is_set():
            raise Closed("the grader was stopped")


class Grading:
    """One student's answers to one lesson, run as often as it takes to settle every exercise."""

    def __init__(
        self, shop: Workshop, slot: int, answers: Answers, lesson: Lesson, limits: Limits
    ) -> None:
        self.shop, self.slot, self.answers = shop, slot, answers
        self.lesson, self.limits = lesson, limits
        self.exercises = {each.id: each for each in lesson.exercises}
        names = {each.name for each in lesson.exercises}
        self.flags = {
            id: audit(answers.cells.get(id, ""), lesson.setup, names) for id in self.exercises
        }

    def verdicts(self) -> list[Verdict]:
        """Each run settles at least one exercise, or is tried a second time, or gives up."""
        done = {id: self._problem(id) for id in self.exercises if id not in self.answers.cells}
        stubbed: set[str] = set()
        failures = 0
        while len(done) < len(self.exercises):
            wanted = [id for id in self.exercises if id not in done]
            found = self._run(wanted, stubbed)
            self.shop.check_open()  # a run that was ended says nothing about an answer
            settled = len(done) + len(stubbed)
            done = found.verdicts | done  # an answer keeps its verdict, should it stop a later run
            # What stopped a run or spoilt it must not be there when the others are judged.
            stubbed |= {id for id, each in found.verdicts.items() if spoils(each)}
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
        with Room(self.shop.folder, self.slot, self.shop.isolation, self.limits) as room:
            room.key_file.write_text(key.hex())
            room.notebook.write_text(
                graded_notebook(
                    self.lesson,
                    self.answers,
                    wanted=wanted,
                    stubbed=stubbed,
                    name=name,
                    guard=room.guard_options(self.lesson.number),
                )
            )
            report = room.run(len(wanted), seed_of(self.answers), self.shop.closing)
            reader = Reader(
                self.answers, self.exercises, self.limits, key, room.names(), self.flags
            )
        found = reader.read(report)
        if not found.verdicts and not found.broken:
            found.broken = report.log or "it said nothing"
        return found


def spoils(verdict: Verdict) -> bool:
    """Whether this answer must be out of the way when the others are judged."""
    return verdict.outcome is Outcome.STOPPED or verdict.message.endswith(SPOILT)


def seed_of(answers: Answers) -> int:
    """The same submission meets the same random numbers, and nobody knows them beforehand."""
    text = json.dumps([answers.lesson, sorted(answers.cells.items())])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
