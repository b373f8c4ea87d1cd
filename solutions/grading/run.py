"""Grade one student's answers to one lesson: confined, watched, and never with an exception.

`with Workshop(course) as shop: shop.grade(answers, lesson, limits)` grades many with one copy of
the course; `grade_answers` does the same for a single one.
"""

import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path
from queue import Queue

from solutions.grading.assemble import graded_notebook
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Verdict
from solutions.grading.session import run_notebook
from solutions.grading.verdicts import SPOILT, Findings, Reader, make_verdict

PARTS = Path(__file__).resolve().parent


def grade_answers(answers: Answers, lesson: Lesson, limits: Limits, course: Path) -> list[Verdict]:
    """Judge every exercise of the lesson; whatever the answers do, this returns verdicts."""
    with Workshop(course) as shop:
        return shop.grade(answers, lesson, limits)


class Workshop:
    """A temporary folder with a read-only copy of the course, and rooms to grade in.

    Threads may grade at the same time, as many as there are `slots`.
    """

    def __init__(self, course: Path, slots: int = 1) -> None:
        self._original, self._num_slots = course.resolve(), slots

    def __enter__(self) -> "Workshop":
        self.folder = Path(tempfile.mkdtemp(prefix="grading_"))
        self.folder.chmod(0o755)
        self.copy = self.folder / "course"
        copy_course(self._original, self.copy)
        self._slots: Queue[int] = Queue()
        for slot in range(self._num_slots):
            self._slots.put(slot)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def grade(self, answers: Answers, lesson: Lesson, limits: Limits) -> list[Verdict]:
        """Judge every exercise of the lesson, in the lesson's order."""
        slot = self._slots.get()
        try:
            return Grading(self, slot, answers, lesson, limits).verdicts()
        finally:
            self._slots.put(slot)


def copy_course(course: Path, place: Path) -> None:
    """What the sandbox sees of the course: shared/, the lessons, the data; never solutions/."""
    leave = shutil.ignore_patterns("__pycache__", "*.pyc", "lesson.ipynb")
    for name in ("shared", "lessons", "datasets"):
        if (course / name).is_dir():
            shutil.copytree(course / name, place / name, ignore=leave)
    for name in ("guard.py", "kernel.py", "inside.py"):
        shutil.copy(PARTS / name, place / name)


class Grading:
    """One student's answers to one lesson, run as often as it takes to settle every exercise."""

    def __init__(
        self, shop: Workshop, slot: int, answers: Answers, lesson: Lesson, limits: Limits
    ) -> None:
        self.shop, self.slot, self.answers = shop, slot, answers
        self.lesson, self.limits = lesson, limits
        self.exercises = {each.id: each for each in lesson.exercises}
        self.flags: dict[str, tuple[str, ...]] = dict.fromkeys(self.exercises, ())

    def verdicts(self) -> list[Verdict]:
        """Each run settles at least one exercise, or is tried a second time, or gives up."""
        done = {id: self._problem(id) for id in self.exercises if id not in self.answers.cells}
        stubbed: set[str] = set()
        failures = 0
        while len(done) < len(self.exercises):
            wanted = [id for id in self.exercises if id not in done]
            found = self._run(wanted, stubbed)
            done |= found.verdicts
            # What stopped a run or spoilt it must not be there when the others are judged.
            stubbed |= {id for id, each in found.verdicts.items() if spoils(each)}
            if not found.verdicts:
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
        room = Path(tempfile.mkdtemp(prefix=f"room_{self.slot}_", dir=self.shop.folder))
        try:
            return self._run_in(room, wanted, stubbed)
        finally:
            shutil.rmtree(room, ignore_errors=True)

    def _run_in(self, room: Path, wanted: list[str], stubbed: set[str]) -> Findings:
        home = room / "home"
        home.mkdir()
        key, name = secrets.token_bytes(32), f"g{secrets.token_hex(12)}"
        key_file = home / "key"
        key_file.write_text(key.hex())
        notebook = room / "graded.ipynb"
        notebook.write_text(
            graded_notebook(
                self.lesson,
                self.answers,
                wanted=wanted,
                stubbed=stubbed,
                name=name,
                key_file=str(key_file),
            )
        )
        connection = home / "kernel.json"
        inner = room / "inner.json"
        inner.write_text(
            json.dumps(
                {
                    "home": str(home),
                    "argv": [
                        sys.executable,
                        str(self.shop.copy / "kernel.py"),
                        str(connection),
                        str(self.shop.copy),
                    ],
                    "environment": self._environment(home),
                }
            )
        )
        launcher = [sys.executable, "-I", "-S", str(self.shop.copy / "inside.py"), str(inner)]
        report = run_notebook(
            notebook,
            {"connection": str(connection), "command": launcher},
            course=PARTS.parent.parent,
            exercise_seconds=self.limits.exercise_seconds,
            total_seconds=60 + 2 * len(wanted) * (self.limits.exercise_seconds + 10),
            watch=lambda: "",
        )
        paths = {str(home): "<home>", str(self.shop.copy): "<course>"}
        found = Reader(self.answers, self.exercises, self.limits, key, paths, self.flags).read(
            report
        )
        if not found.verdicts and not found.broken:
            found.broken = report.log
        return found

    def _environment(self, home: Path) -> dict[str, str]:
        """All that the kernel sees of an environment."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(home),
            "TMPDIR": str(home),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "TORCH_HANDLE_STRICT": "1",
            "TORCH_HANDLE_SEED": str(seed_of(self.answers)),
        }


def spoils(verdict: Verdict) -> bool:
    """Whether this answer must be out of the way when the others are judged."""
    return verdict.outcome is Outcome.STOPPED or verdict.message.endswith(SPOILT)


def seed_of(answers: Answers) -> int:
    """The same submission meets the same random numbers, and nobody knows them beforehand."""
    text = json.dumps([answers.lesson, sorted(answers.cells.items())])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
