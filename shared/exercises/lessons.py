"""Where the parts of a lesson are: its folder, its checks, its solution."""

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType

from shared.exercises.checks import ExerciseChecks

ROOT = Path(__file__).resolve().parents[2]


def lesson_folder(id: str) -> Path:
    """The folder of the lesson that an exercise id ("06.2") or a lesson number ("06") names."""
    number = id.split(".")[0]
    found = sorted((ROOT / "lessons").glob(f"lesson{number}_*"))
    if len(found) != 1:
        raise ValueError(f"no lesson {number!r} in {ROOT / 'lessons'}: found {len(found)} folders")
    return found[0]


@cache
def load_checks(number: str) -> dict[str, ExerciseChecks]:
    """The exercises of a lesson's checks.py by id, in the order of the file."""
    module = importlib.import_module(f"lessons.{lesson_folder(number).name}.checks")
    return {value.id: value for value in vars(module).values() if isinstance(value, ExerciseChecks)}


def solution_module(number: str) -> ModuleType | None:
    """The lesson's solution module; None in a course that was given without solutions/."""
    if not (ROOT / "solutions").is_dir():
        return None
    return importlib.import_module(f"solutions.{lesson_folder(number).name}")
