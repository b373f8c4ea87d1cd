"""The code cells of a notebook that somebody else made, and the one that answers an exercise.

Reading has bounds, and whatever cannot be read ends in one reason. Only what grading needs is
looked at: a notebook whose metadata or outputs are damaged is still graded.
"""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared.exercises.commands import as_python
from solutions.grading.intake.sources import Definition, bound_at, bound_by, imported_by, parsed
from solutions.grading.results import Exercise, Outcome

MAX_VALUES = 1_000_000  # an empty JSON list of 3 bytes takes 64 in memory
MAX_CELL_CHARACTERS = 200_000
MAX_CODE_CHARACTERS = 2_000_000  # some seconds of reading as Python

DECORATOR = re.compile(r"^@exercise\(\s*['\"]([0-9]{2}\.[0-9]+[a-z]?)['\"]", re.MULTILINE)
DEFINITION = re.compile(r"^(?:async +def|def|class) +(\w+)", re.MULTILINE)


class Unreadable(Exception):
    """Something of a submission cannot be read; the message is the reason in one line."""


@dataclass(frozen=True)
class Cell:
    """One code cell: its place in the notebook from 1, and its exercises as (id, name).

    `fault` says why it cannot be used, `defines` has its functions and classes, `binds` all that is
    known by a name after it, `needs` what it reads and does not make itself.
    """

    place: int
    source: str
    exercises: tuple[tuple[str, str], ...] = ()
    defines: tuple[str, ...] = ()
    fault: str = ""
    binds: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()


def read_cells(notebook: bytes) -> list[Cell]:
    """The code cells of a notebook in order.

    Raises Unreadable with the reason for anything that is no notebook of format 4.
    """
    if not (sources := _sources(notebook)):
        raise Unreadable("the notebook has no cell of code")
    total = sum(min(len(source), MAX_CELL_CHARACTERS) for _, source in sources)
    if total > MAX_CODE_CHARACTERS:
        raise Unreadable(f"its cells hold {total} characters; {MAX_CODE_CHARACTERS} are read")
    return [look(source, place) for place, source in sources]


def _sources(notebook: bytes) -> list[tuple[int, str]]:
    """Place and source of each code cell, empty where it is no text."""
    content = _parse(notebook)
    if not isinstance(content, dict) or "nbformat" not in content:
        raise Unreadable("it is JSON, but no notebook: it has no nbformat number")
    if (version := content["nbformat"]) != 4:
        shown = repr(version)[:40] if isinstance(version, int | str) else type(version).__name__
        raise Unreadable(f"wrong version: notebook format {shown}; save it as format 4")
    if not isinstance(content.get("cells"), list):
        raise Unreadable("not a notebook: it has no list of cells")
    return [
        (place, _text(cell.get("source")))
        for place, cell in enumerate(content["cells"], 1)
        if isinstance(cell, dict) and cell.get("cell_type") == "code"
    ]


def _parse(notebook: bytes) -> Any:
    if not notebook.strip():
        raise Unreadable("the notebook is an empty file")
    if notebook.lstrip()[:1] == b"<":
        raise Unreadable("not JSON: a web page was saved instead of the notebook")
    if sum(map(notebook.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise Unreadable(f"the notebook may hold more than {MAX_VALUES} values: clear its outputs")
    try:
        return json.loads(notebook.decode(json.detect_encoding(notebook)))
    except RecursionError:
        raise Unreadable("not a notebook: JSON nested too deeply") from None
    except ValueError as error:  # no UTF-8, no JSON, a number of 10,000 digits
        raise Unreadable(f"not JSON: {str(error)[:100]}") from None


def _text(source: Any) -> str:
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        return "".join(source)
    return source if isinstance(source, str) else ""


def look(source: str, place: int = 0) -> Cell:
    """Find the exercises in a cell's source: by the syntax tree or, where it is broken, by line."""
    try:
        if len(source) > MAX_CELL_CHARACTERS:
            raise ValueError(f"it has {len(source)} characters; {MAX_CELL_CHARACTERS} are read")
        source, tree = as_python(source, parsed)
    except SyntaxError as error:
        fault = f"syntax error in line {error.lineno or 1} of the cell: {error.msg}"
        line = (error.text or "").strip()[:40]
        return _look_at_lines(source, place, f"{fault} ({line})" if line else fault)
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, 1,000 parentheses
        fault = f"Python cannot read the cell: {str(error) or type(error).__name__}"
        return _look_at_lines(source, place, fault)
    definitions = [n for n in tree.body if isinstance(n, Definition | ast.AsyncFunctionDef)]
    return Cell(
        place,
        source,
        exercises=tuple((id, node.name) for node in definitions for id in _ids(node)),
        defines=tuple(node.name for node in definitions),
        binds=frozenset(_bound(tree)),
        needs=frozenset(_needed(tree)),
    )


def _look_at_lines(source: str, place: int, fault: str) -> Cell:
    source = source[:MAX_CELL_CHARACTERS]
    exercises = tuple((id, "") for id in DECORATOR.findall(source))
    return Cell(place, source, exercises, tuple(DEFINITION.findall(source)), fault)


def _ids(node: Definition | ast.AsyncFunctionDef) -> Iterator[str]:
    """The ids of the @exercise decorators above a definition."""
    for decorator in node.decorator_list:
        match decorator:
            case ast.Call(
                func=ast.Name(id="exercise") | ast.Attribute(attr="exercise"),
                args=[ast.Constant(value=str(id)), *_],
            ):
                yield id[:20]


def _bound(tree: ast.Module) -> Iterator[str]:
    """The names that a cell leaves behind: imports, definitions and assignments at its top."""
    for node in tree.body:
        yield from bound_by(node)
        yield from (local for local, _, _ in imported_by(node))


def _needed(tree: ast.Module) -> set[str]:
    """The names that a cell reads and binds nowhere, neither at its top nor in a function."""
    read, made = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name):  # del, too
                made.add(name)
            case _:
                made.update(bound_at(node))
    return read - made


def borrowed(owner: Cell, cells: Sequence[Cell], known: frozenset[str]) -> list[str]:
    """What an answer takes from cells that are not graded, in words: name and cell."""
    places = {name: each.place for each in cells if not each.exercises for name in each.binds}
    missing = sorted((owner.needs - known) & places.keys())
    return [f"{name} (cell {places[name]})" for name in missing]


def find_answer(exercise: Exercise, cells: Sequence[Cell]) -> Cell | tuple[Outcome, str]:
    """The one cell that answers an exercise, or why there is none."""
    owners = [each for each in cells if exercise.id in dict(each.exercises)]
    if not owners:
        return _why_missing(exercise, cells)
    owner, name = owners[0], owners[0].exercises[0][1]
    if len(owners) > 1:
        places = " and ".join(str(each.place) for each in owners[:5])
        reason = f"exercise {exercise.id} is there {len(owners)} times (cells {places}): keep one"
    elif owner.fault:
        reason = owner.fault
    elif len(owner.exercises) > 1:
        ids = " and ".join(id for id, _ in owner.exercises[:5])
        reason = f"cell {owner.place} holds the exercises {ids}: give each a cell of its own"
    elif name != exercise.name:
        reason = f"exercise {exercise.id} is called {exercise.name}; the cell defines {name[:60]}"
        reason += ": give it its name back"
    else:
        return owner
    return Outcome.UNREADABLE, reason


def written_beside(exercise: Exercise, cells: Sequence[Cell]) -> str:
    """Where an answer stands whose own cell was left as it was; "" where there is none."""
    beside = [each for each in cells if not each.exercises and exercise.name in each.binds]
    if not beside:
        return ""
    return (
        f"the cell of exercise {exercise.id} is as it was, and cell {beside[-1].place} defines"
        f" {exercise.name}: move it into the exercise's cell"
    )


def _why_missing(exercise: Exercise, cells: Sequence[Cell]) -> tuple[Outcome, str]:
    """Look for the cell by the function's name, to say what became of its decorator."""
    for each in cells:
        if exercise.name in each.defines and each.fault:
            return Outcome.UNREADABLE, each.fault
        if exercise.name in each.binds:
            reason = f"cell {each.place} defines {exercise.name} and is not marked as its answer"
            return Outcome.UNREADABLE, f'{reason}: put @exercise("{exercise.id}") back'
    reason = f"the notebook has no cell of exercise {exercise.id}"
    broken = [each for each in cells if each.fault and not each.exercises]
    if broken:
        reason += f"; cell {broken[0].place}: {broken[0].fault[:100]}"
    return Outcome.MISSING, reason
