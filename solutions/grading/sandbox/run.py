"""Grade one student's answers to one lesson: confined, watched, and never with an exception."""

import hashlib
import json
import tempfile
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from solutions.grading.intake.names import CALLS, FRAMES, MODULES
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Verdict
from solutions.grading.sandbox import bubblewrap
from solutions.grading.sandbox.editions import Editions
from solutions.grading.sandbox.process import run_judge
from solutions.grading.verdicts import Reader, make_verdict, spoils

FREE = """answers run WITHOUT a sandbox (--unconfined): they can read, change and send whatever you
can, solutions/ and other students' grades among it"""
CONFINED = """answers run in bubblewrap: no files but the interpreter's and the course's copy, no
network, no processes but their own, limits on time, memory, processes and files"""


class Closed(Exception):
    """The workspace was closed while a notebook ran."""


class Workspace:
    """A temporary folder with copies of the course, for any number of runs.

    Threads may grade at the same time. Raises InputError where `confined` is asked for and
    bubblewrap cannot be had.
    """

    def __init__(self, course: Path, *, confined: bool = True) -> None:
        self.confined = confined
        if confined:
            bubblewrap.require()
        self.promise = CONFINED if confined else FREE
        self._original = course.resolve()
        self.closing = threading.Event()

    def __enter__(self) -> "Workspace":
        # Removed at the end of the program, too: Ctrl-C may come before this returns.
        self._made = tempfile.TemporaryDirectory(prefix="grading_", ignore_cleanup_errors=True)
        self.folder = Path(self._made.name)
        self.folder.chmod(0o755)
        self._editions = Editions(self.folder, self._original)
        return self

    def __exit__(self, *_: object) -> None:
        self._made.cleanup()

    def grade(self, answers: Answers, lesson: Lesson, limits: Limits) -> list[Verdict]:
        """Judge every exercise, in the lesson's order; raises Closed when `closing` is set.

        The notebook is run as often as it takes: a run ends early where an answer kills what
        judges it, and then another one goes on.
        """
        exercises = {each.id: each for each in lesson.exercises}
        absent, done = (Outcome.MISSING, "no such cell"), dict[str, Verdict]()
        for id in exercises.keys() - answers.cells.keys():
            problem = answers.problems.get(id, absent)
            done[id] = make_verdict(answers, exercises[id], *problem)
        # What changes things for others must not be there when they are judged.
        stubbed = {id for id, each in exercises.items() if each.of}
        stubbed |= {id for id, flags in answers.flags.items() if any(f.spoils for f in flags)}
        copy = self._editions.of(lesson)
        while len(done) < len(exercises):
            wanted = [id for id in exercises if id not in done]
            job = _job(answers, lesson, limits, wanted, stubbed)
            report = run_judge(
                self.folder,
                copy.folder,
                {**job, "texts": copy.texts},
                limits,
                confined=self.confined,
                seed=_seed_of(answers),
                closing=self.closing,
            )
            if self.closing.is_set():  # a run that was ended says nothing about an answer
                raise Closed("the grader was stopped")
            reader = Reader(answers, exercises, limits, report.paths)
            found = reader.read(report.events, report.stop)
            stubbed |= {id for id, each in found.items() if each.stop or spoils(each)}
            if not found:
                why = reader.broken or report.log or "it said nothing"
                problem = Outcome.UNREADABLE, f"the notebook could not be run: {why}"
                found = {id: make_verdict(answers, exercises[id], *problem) for id in wanted}
            done |= found
        return [done[id] for id in exercises]


def _job(
    answers: Answers, lesson: Lesson, limits: Limits, wanted: list[str], stubbed: Collection[str]
) -> Mapping[str, Any]:
    """What judge.py is given; `stubbed` are the cells that other exercises must not use."""
    exercises = []
    for each in lesson.exercises:
        stub = lesson.stubs[each.id]
        own = answers.cells.get(each.id, stub)
        exercises.append(
            {
                "id": each.id,
                "checks": each.of or each.id,
                "name": each.name,
                "source": own,
                "stub": stub,
                "others": stub if each.id in stubbed else own,
                "wanted": each.id in wanted,
                "wrong": lesson.wrong.get(each.of or each.id, ()),
                "forbidden": lesson.forbidden.get(each.of or each.id, ()),
                "own": lesson.answers.get(each.of or each.id, ""),
            }
        )
    number, setup = lesson.number, lesson.setup
    names = {"frames": sorted(FRAMES), "unneeded": sorted(CALLS | MODULES)}
    sizes = {"seconds": limits.exercise_seconds, "memory": limits.memory}
    return {"number": number, "setup": setup, "exercises": exercises, "names": names, **sizes}


def _seed_of(answers: Answers) -> int:
    """The seed for these answers: equal for equal cells, and known to nobody beforehand."""
    text = json.dumps([answers.lesson, sorted(answers.cells.items())])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
