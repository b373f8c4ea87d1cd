"""The exercise cells of a notebook, for scripts that run a learner's own answers (`--mine`)."""

import ast
import linecache
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from shared.errors import InputError
from shared.exercises import notebook
from shared.exercises.lessons import lesson_folder, load_checks, solution_module
from shared.exercises.stubs import is_stub

EXERCISE = re.compile(r"^@exercise\(\s*['\"]([0-9]{2}\.[0-9]+[a-z]?)['\"]\s*\)", re.MULTILINE)


@dataclass(frozen=True)
class Cells:
    """The code of a lesson notebook that answers need: its imports and its exercise cells by id."""

    setup: str
    exercises: dict[str, str]


def read_cells(path: Path) -> Cells:
    """Take the setup cell and the exercise cells out of a notebook.

    Raises InputError when the file is missing, is no notebook, or holds an exercise twice.
    """
    # Here, not at the top: it takes longer to import than torch does, and every rank of every
    # script would pay for it, though only --mine reads a notebook.
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise InputError(f"no notebook at {path}") from None
    except Exception as error:
        raise InputError(f"{path} cannot be read as a notebook: {error}") from None
    setup, exercises = [], {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        if "setup" in cell.metadata.get("tags", []):
            setup.append(cell.source)
        for id in EXERCISE.findall(cell.source):
            if id in exercises:
                raise InputError(f"{path} holds exercise {id} twice: keep one of the cells")
            exercises[id] = cell.source
    return Cells("\n".join(setup), exercises)


class Answers(SimpleNamespace):
    """Answers by name; asking for one that nobody has written says which exercise it is."""

    def __getattr__(self, name: str) -> Any:
        missing: dict[str, str] = self.__dict__.get("missing", {})
        if name in missing:
            raise InputError(
                f"exercise {missing[name]} ({name}) is not solved yet, and this script uses it:"
                " solve it in the lesson's notebook first"
            )
        raise AttributeError(name)


def lesson_answers(number: str, *, mine: bool) -> Answers:
    """The lesson's exercise names as attributes; with `mine`, the learner's own where solved.

    Without solutions/ the learner's own are taken in any case. `.own` lists the ids that are the
    learner's. Raises InputError when a cell does not run, or when `mine` finds nothing solved;
    the result raises it when it is asked for an answer that is nowhere.
    """
    module = solution_module(number)
    checks = load_checks(number)
    found: dict[str, Any] = {} if module is None else dict(vars(module))
    own: list[str] = []
    if mine or module is None:
        path = lesson_folder(number) / "lesson.ipynb"
        _run_cells(number, path)
        for id, each in checks.items():
            # What the cell defined, whatever the mode put in its place: mine means mine.
            answer = notebook.defined[id].own if id in notebook.defined else None
            if answer is not None and not is_stub(answer):
                own.append(id)
                found[each.name] = answer
        if mine and not own:
            raise InputError(f"--mine: no exercise of {path} is solved yet; solve one first")
    names = {each.name: found[each.name] for each in checks.values() if each.name in found}
    missing = {each.name: id for id, each in checks.items() if each.name not in found}
    return Answers(**names, own=own, missing=missing)


def _run_cells(number: str, path: Path) -> None:
    """Execute setup and exercises like cells, each under a file name of its own for tracebacks."""
    cells = read_cells(path)
    module = ModuleType(f"_answers_of_lesson_{number}")
    sys.modules[module.__name__] = module  # dataclasses look their module up by name
    sources = {"setup": cells.setup, **cells.exercises}
    for label, source in sources.items():
        filename = f"<{path.parent.name}/lesson.ipynb {label}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        try:
            exec(compile(_definitions(source), filename, "exec"), module.__dict__)
        except Exception as error:
            raise InputError(
                f"the cell of {label} in {path} does not run: {type(error).__name__}: {error}"
            ) from None


def _definitions(source: str) -> ast.Module:
    """Leave out top-level expressions: a notebook cell shows things that a script need not."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
    return tree
