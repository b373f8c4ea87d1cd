"""A script's answers: the reference ones that it imports, or with `--mine` the learner's own.

A course can be given without solutions/. `from solutions.lesson06_ddp import BucketedDDP` works
there too: the name holds a placeholder until `put_mine_in_place` finds the learner's answer.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import re
import sys
from types import ModuleType
from typing import Any

from shared.errors import InputError
from shared.exercises import notebook
from shared.exercises.answers import new_module, read_cells, run_cell
from shared.exercises.cells import EDITION
from shared.exercises.lessons import ROOT, lesson_folder, load_checks
from shared.exercises.stubs import is_stub


class Unsolved:
    """An exercise that nobody has written; raises InputError when a script uses it.

    It has the parameters of its stub, where there is one: libraries look at what they are given.
    """

    def __init__(self, number: str, name: str, stub: Any = None) -> None:
        if stub is not None:
            functools.update_wrapper(self, stub, updated=())
        ids = {exercise.name: id for id, exercise in load_checks(number).items()}
        self._words = (
            f"exercise {ids[name]} ({name}) is not solved yet, and this script uses it: solve it in"
            " the lesson's notebook first"
            if name in ids
            else f"{name} is part of lesson {number}'s solutions, which are not here"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(self._words)


class _WithoutSolutions(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of solutions where there are none: every name in them is `Unsolved`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname == "solutions" or re.fullmatch(r"solutions\.lesson\d\d_\w+", fullname):
            is_package = fullname == "solutions"
            return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)
        return None

    def exec_module(self, module: ModuleType) -> None:
        number = module.__name__.removeprefix("solutions.lesson")[:2]

        def unsolved(name: str) -> Unsolved:
            if name.startswith("__"):
                raise AttributeError(name)
            return Unsolved(number, name)

        setattr(module, "__getattr__", unsolved)  # noqa: B010  (PEP 562, for a module that is made)


if not (ROOT / "solutions").is_dir():
    sys.meta_path.insert(0, _WithoutSolutions())  # before another checkout that is installed


def put_mine_in_place(number: str, names: dict[str, Any], *, mine: bool) -> dict[str, str]:
    """Replace the exercises among a script's names, its globals(), by the learner's solved ones.

    Return for each of the lesson's exercises that the script names whose it runs: "mine" or
    "reference". Without solutions/ the learner's own are taken in any case, and what is "open" is
    `Unsolved`, but for a lesson of an earlier week than its edition's, whose answers are in
    "shared/". Raises InputError when a cell does not run, or when `mine` finds nothing solved.
    """
    checks = load_checks(number)
    own: dict[str, Any] = {}
    otherwise = "reference" if (ROOT / "solutions").is_dir() else "open"
    if mine or otherwise == "open":
        path = lesson_folder(number) / "lesson.ipynb"
        run_cells(number)
        for id, exercise in checks.items():
            # What the cell defined, whatever the mode put in its place: mine means mine.
            answer = notebook.defined[id].own if id in notebook.defined else None
            if answer is not None and not is_stub(answer):
                own[exercise.name] = answer
        if mine and not own:
            raise InputError(f"--mine: no exercise of {path} is solved yet; solve one first")
    whose = dict[str, str]()
    left = _left_by_earlier_weeks() if otherwise == "open" else {}
    for id, name in (
        (id, exercise.name) for id, exercise in checks.items() if exercise.name in names
    ):
        whose[id] = "mine" if name in own else otherwise
        if name in own:
            names[name] = own[name]
        elif place := left.get(id):
            module, _, answer = place.rpartition(".")
            names[name], whose[id] = getattr(importlib.import_module(module), answer), "shared/"
        elif otherwise == "open":
            stub = notebook.defined[id].own if id in notebook.defined else None
            names[name] = Unsolved(number, name, stub)
    return whose


def _left_by_earlier_weeks() -> dict[str, str]:
    """Where a class's edition has the answers of the weeks before its own, by exercise."""
    mark = ROOT / EDITION
    return json.loads(mark.read_bytes()).get("answers", {}) if mark.exists() else {}


def run_cells(number: str) -> None:
    """Run the setup and exercise cells of a lesson's notebook: `notebook.defined` then has them.

    Raises InputError when one of them does not run.
    """
    path = lesson_folder(number) / "lesson.ipynb"
    cells = read_cells(path)
    module = new_module(number)
    for label, source in {"setup": cells.setup, **cells.exercises}.items():
        try:
            run_cell(source, f"{path.parent.name}/{path.name} {label}", module)
        except Exception as error:
            raise InputError(
                f"the cell of {label} in {path} does not run: {type(error).__name__}: {error}"
            ) from None
