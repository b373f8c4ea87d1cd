"""The answers in a learner's notebook: for scripts (`--mine`) and for the to-do list."""

import ast
import builtins
import contextlib
import dis
import importlib
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType

from shared.errors import InputError
from shared.exercises.cells import code_cells
from shared.exercises.commands import as_python

EXERCISE = re.compile(r"^@exercise\(\s*['\"]([0-9]{2}\.[0-9]+[a-z]?)['\"]\s*\)", re.MULTILINE)
CHECK = re.compile(r"^check\(\s*['\"]([0-9]{2}\.[0-9]+[a-z]?)['\"]", re.MULTILINE)


@dataclass(frozen=True)
class Cells:
    """The code of a lesson's notebook: its setup cell, its exercise cells by id, and the rest."""

    setup: str
    exercises: dict[str, str]
    others: list[str]


def read_cells(path: Path) -> Cells:
    """Return the code of a notebook.

    Raises InputError when the file is missing, is no notebook, or holds an exercise twice.
    """
    setup, exercises, others = [], {}, []
    for source, tags in code_cells(path):
        ids = EXERCISE.findall(source)
        if "setup" in tags:
            setup.append(source)
        elif not ids:
            others.append(source)
        for id in ids:
            if id in exercises:
                raise InputError(f"{path} holds exercise {id} twice: keep one of the cells")
            exercises[id] = source
    return Cells("\n".join(setup), exercises, others)


def import_what_torch_puts_off() -> None:
    """Import what torch imports at first use: each process forked later would do it anew, 0.9 s."""
    for name in ("sympy", "torch._dynamo"):
        importlib.import_module(name)


def new_module(number: str) -> ModuleType:
    """Return an empty module for a lesson's cells to be run in."""
    module = ModuleType(f"_answers_of_lesson_{number}")
    sys.modules[module.__name__] = module  # dataclasses look their module up by name
    return module


def run_cell(source: str, label: str, module: ModuleType) -> None:
    """Run a cell in a module; `label` is what tracebacks call it, and different for each cell.

    What a cell only shows (top-level expressions) is left out. Raises whatever the cell raises.
    """
    filename = f"<{label}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    _, tree = as_python(source, partial(ast.parse, filename=filename))
    tree.body = [node for node in tree.body if not isinstance(node, ast.Expr)]
    exec(compile(tree, filename, "exec"), module.__dict__)


def names_from_other_cells(id: str, cells: Cells) -> list[str]:
    """Return what an exercise's cell uses that only a cell besides setup and exercises defines.

    Scripts and graders do not run those.
    """
    own = [cells.setup, *cells.exercises.values()]
    elsewhere = names_bound(cells.others) - names_bound(own) - set(dir(builtins))
    return sorted(names_used(cells.exercises[id]) & elsewhere)


def names_used(source: str) -> set[str]:
    """Return the names that a cell reads and that are no function's own."""
    loads = ("LOAD_NAME", "LOAD_GLOBAL")
    nested = (inner for code in _compiled([source]) for inner in _with_nested(code))
    return {i.argval for code in nested for i in dis.get_instructions(code) if i.opname in loads}


def names_bound(sources: list[str]) -> set[str]:
    """Return the names that cells leave behind."""
    instructions = (i for code in _compiled(sources) for i in dis.get_instructions(code))
    return {i.argval for i in instructions if i.opname == "STORE_NAME"}


def _compiled(sources: list[str]) -> Iterator[CodeType]:
    """Yield the code of those sources that are Python, but for Jupyter's own lines."""
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError):
            yield compile(as_python(source)[1], "<cell>", "exec")


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
