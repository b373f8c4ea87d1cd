"""Where the parts of a lesson are: its folder, its checks, its solution."""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

from shared.exercises.checks import ExerciseChecks

ROOT = Path(__file__).resolve().parents[2]


def lesson_folder(id: str) -> Path:
    """The folder of the lesson that an exercise id ("06.2") or a lesson number ("06") names."""
    number = id.split(".")[0]
    found = sorted((ROOT / "lessons").glob(f"{number}_*"))
    if len(found) != 1:
        raise ValueError(f"no lesson {number!r} in {ROOT / 'lessons'}: found {len(found)} folders")
    return found[0]


@cache
def load_checks(number: str) -> dict[str, ExerciseChecks]:
    """The exercises of a lesson's checks.py by id, in the order of the file."""
    path = lesson_folder(number) / "checks.py"
    name = f"_checks_of_lesson_{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"cannot load {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return {each.id: each for each in vars(module).values() if isinstance(each, ExerciseChecks)}


def solution_module(number: str) -> ModuleType | None:
    """The lesson's solution module; None in a course that was given without solutions/."""
    if not (ROOT / "solutions").is_dir():
        return None
    return importlib.import_module(f"solutions.lesson{lesson_folder(number).name}")
