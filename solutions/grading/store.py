"""What was graded already, kept beside the grades, so that a second run grades what changed."""

import fcntl
import hashlib
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shared.errors import InputError
from solutions.grading.reports.table import replace_file
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Stop, Verdict

FOLDER = ".graded"


def key_of(answers: Answers, lesson: Lesson, limits: Limits) -> str:
    """A digest that is equal for what must get equal grades: the same cells, judged the same way.

    The student is not part of it. Two who handed in the same cells, untouched stubs above all,
    are graded once.
    """
    parts = [lesson.number, lesson.digest, sorted(answers.cells.items()), asdict(limits)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class Store:
    """Verdicts by key, one small file each in OUT/.graded."""

    def __init__(self, out: Path) -> None:
        self.folder = out / FOLDER

    def get(self, key: str, student: str) -> list[Verdict] | None:
        """The verdicts of an earlier run in this student's name; None where there are none."""
        try:
            kept = json.loads(self._path(key).read_text(encoding="utf-8"))
            return [_verdict(each, student) for each in kept]
        except (OSError, ValueError, TypeError, KeyError):  # not there, or of another version
            return None

    def put(self, key: str, verdicts: list[Verdict]) -> None:
        """Keep verdicts; a run that is ended a moment later still has them."""
        kept = [asdict(replace(each, student="")) for each in verdicts]
        replace_file(self._path(key), json.dumps(kept, indent=1) + "\n")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _verdict(kept: dict[str, Any], student: str) -> Verdict:
    kept |= {"student": student, "outcome": Outcome(kept["outcome"])}
    kept |= {"stop": Stop(kept["stop"]) if kept["stop"] else None}
    kept |= {name: tuple(kept[name]) for name in ("flags", "also")}
    return Verdict(**kept)


@contextmanager
def opened(out: Path, submissions: Path) -> Generator[Store]:
    """The output folder, made or of an earlier run, for this run alone.

    Raises InputError when it holds other things, cannot be written or lies among the submissions.
    """
    here, there = out.resolve(), submissions.resolve()
    if here.is_relative_to(there) or there.is_relative_to(here):
        raise InputError(f"--out {out} and the submissions lie in one another: give another folder")
    try:
        if out.exists() and any(out.iterdir()) and not (out / FOLDER).is_dir():
            raise InputError(f"--out {out} holds other things than grades: give a new folder")
        (out / FOLDER).mkdir(parents=True, exist_ok=True)
        lock = (out / FOLDER / "lock").open("w")
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--out {out} is being written by another grading") from None
        yield Store(out)
