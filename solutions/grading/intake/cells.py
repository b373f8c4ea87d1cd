"""What a cell of a submitted notebook holds: exercises, definitions, or why it cannot run."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from solutions.grading.intake.notebook import CodeCell
from solutions.grading.intake.sources import bound_by, imported_by, parsed
from solutions.grading.results import Exercise, Outcome

DECORATOR = re.compile(r"^@exercise\(\s*['\"]([0-9]{2}\.[0-9]+[a-z]?)['\"]", re.MULTILINE)
DEFINITION = re.compile(r"^(?:async +def|def|class) +(\w+)", re.MULTILINE)
# Commands that time or show things and change nothing of what a cell defines.
HARMLESS = re.compile(
    r"^%(?:%(?:time|capture)|(?:matplotlib|load_ext|autoreload|config)\b.*)$", re.M
)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Found:
    """One cell, looked at: its exercises as (id, name), and what is wrong with it.

    `names` are the functions and classes that it defines, `binds` all that is known by a name
    after it, `needs` the names that it reads and does not make itself, `left_out` are lines for
    the notebook alone.
    """

    cell: CodeCell
    exercises: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    fault: str = ""
    binds: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    left_out: tuple[str, ...] = ()


def look(source: str, cell: CodeCell | None = None) -> Found:
    """Find the exercises in a cell's source: by the syntax tree or, where it is broken, by line."""
    cell = cell or CodeCell(0, source)
    if cell.damage:
        return _look_at_lines(cell, f"cell {cell.place} is damaged: {cell.damage}")
    left_out = tuple(each.group() for each in HARMLESS.finditer(source))
    source = HARMLESS.sub(r"# \g<0>", source)  # commented out: line numbers stay
    cell = replace(cell, source=source)
    try:
        tree = parsed(source)
    except SyntaxError as error:
        fault = f"syntax error in line {error.lineno or 1} of the cell: {error.msg}"
        return _look_at_lines(cell, _magic(source) or fault)
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, 1,000 parentheses
        fault = f"Python cannot read the cell: {str(error) or type(error).__name__}"
        return _look_at_lines(cell, fault)
    definitions = [node for node in tree.body if isinstance(node, Definition)]
    exercises = [(id, node.name) for node in definitions for id in _ids(node)]
    names = tuple(node.name for node in definitions)
    bound, needed = names_bound(tree), names_needed(tree)
    return Found(cell, tuple(exercises), names, "", bound, needed, left_out)


def names_bound(tree: ast.Module) -> frozenset[str]:
    """The names that a cell leaves behind: imports, definitions and assignments at its top."""
    imported = (local for node in tree.body for local, _, _ in imported_by(node))
    return frozenset(imported).union(*map(bound_by, tree.body))


def names_needed(tree: ast.Module) -> frozenset[str]:
    """The names that a cell reads and binds nowhere, neither at its top nor in a function."""
    read, made = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (made if isinstance(node.ctx, ast.Store) else read).add(node.id)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, Definition):
            made.add(node.name)
        made.update(local for local, _, _ in imported_by(node))
    return frozenset(read - made)


def borrowed(owner: Found, found: Sequence[Found], known: frozenset[str]) -> list[str]:
    """What an answer takes from cells that are not graded, in words: name and cell."""
    places = {name: each.cell.place for each in found if not each.exercises for name in each.binds}
    missing = sorted(name for name in owner.needs - known if name in places)
    return [f"{name} (cell {places[name]})" for name in missing]


def _look_at_lines(cell: CodeCell, fault: str) -> Found:
    names = tuple(DEFINITION.findall(cell.source))
    ids = DECORATOR.findall(cell.source)
    return Found(cell, tuple((id, "") for id in ids), names, fault)


def _magic(source: str) -> str:
    """What is wrong when a line is a command of the notebook and not of Python."""
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith(("%", "!")):
            return (
                f"line {number} of the cell is a notebook command ({line.strip()[:20]}), no Python"
            )
    return ""


def _ids(node: Definition) -> list[str]:
    """The ids of the @exercise decorators above a definition."""
    ids = []
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and decorator.args:
            function, argument = decorator.func, decorator.args[0]
            name = getattr(function, "id", getattr(function, "attr", ""))
            if name == "exercise" and isinstance(argument, ast.Constant):
                ids.append(str(argument.value)[:20])
    return ids


def find_answer(exercise: Exercise, found: Sequence[Found]) -> Found | tuple[Outcome, str]:
    """The one cell that answers an exercise, or why there is none."""
    owners = [each for each in found if exercise.id in [id for id, _ in each.exercises]]
    if not owners:
        return _why_missing(exercise, found)
    if len(owners) > 1:
        places = " and ".join(str(each.cell.place) for each in owners[:5])
        reason = f"exercise {exercise.id} is there {len(owners)} times (cells {places}): keep one"
        return Outcome.UNREADABLE, reason
    owner = owners[0]
    if owner.fault:
        return Outcome.UNREADABLE, owner.fault
    if len(owner.exercises) > 1:
        ids = " and ".join(id for id, _ in owner.exercises[:5])
        reason = f"cell {owner.cell.place} holds the exercises {ids}: give each a cell of its own"
        return Outcome.UNREADABLE, reason
    name = owner.exercises[0][1]
    if name != exercise.name:
        reason = f"exercise {exercise.id} is called {exercise.name}; the cell defines {name[:60]}"
        reason += ": give it its name back"
        return Outcome.UNREADABLE, reason
    return owner


def _why_missing(exercise: Exercise, found: Sequence[Found]) -> tuple[Outcome, str]:
    """Look for the cell by nbgrader's name and by the function's, to say what became of it."""
    grade_id = f"exercise-{exercise.id.replace('.', '-')}"
    decorator = f'@exercise("{exercise.id}")'
    for each in found:
        if each.cell.grade_id != grade_id and exercise.name not in each.names:
            continue
        if each.fault:
            return Outcome.UNREADABLE, each.fault
        if each.exercises:
            other = each.exercises[0][0]
            reason = f"cell {each.cell.place} is marked as exercise {other}, not {exercise.id}"
            return Outcome.MISSING, f"{reason}: put {decorator} back"
        if exercise.name in each.names:
            reason = f"{decorator} is missing above {exercise.name} in cell {each.cell.place}"
            return Outcome.MISSING, reason
    damaged = "".join(
        f"; {each.fault}" for each in found if each.cell.damage and not each.exercises
    )[:200]
    return Outcome.MISSING, f"the notebook has no cell of exercise {exercise.id}{damaged}"
