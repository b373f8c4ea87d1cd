"""What a cell of a submitted notebook holds: exercises, definitions, or why it cannot run."""

import ast
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from solutions.grading.notebook import CodeCell
from solutions.grading.results import Exercise, Outcome

DECORATOR = re.compile(r"^@exercise\(\s*['\"]([0-9]{2}\.[0-9]+[a-z]?)['\"]", re.MULTILINE)
DEFINITION = re.compile(r"^(?:async +def|def|class) +(\w+)", re.MULTILINE)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Found:
    """One cell, looked at: its exercises as (id, name), the names it defines, and what is wrong."""

    cell: CodeCell
    exercises: tuple[tuple[str, str], ...] = ()
    names: tuple[str, ...] = ()
    fault: str = ""


def look(source: str, cell: CodeCell | None = None) -> Found:
    """Find the exercises in a cell's source: by the syntax tree or, where it is broken, by line."""
    cell = cell or CodeCell(0, source)
    if cell.damage:
        return _look_at_lines(cell, f"cell {cell.place} is damaged: {cell.damage}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in a student's text is no matter of ours
            body = ast.parse(source).body
    except SyntaxError as error:
        fault = f"syntax error in line {error.lineno or 1} of the cell: {error.msg}"
        return _look_at_lines(cell, _magic(source) or fault)
    except (ValueError, RecursionError, MemoryError) as error:  # a null byte, 1,000 parentheses
        fault = f"Python cannot read the cell: {str(error) or type(error).__name__}"
        return _look_at_lines(cell, fault)
    definitions = [node for node in body if isinstance(node, Definition)]
    exercises = [(id, node.name) for node in definitions for id in _ids(node)]
    names = tuple(node.name for node in definitions)
    return Found(cell, tuple(exercises), names)


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


def find_answer(
    exercise: Exercise, found: Sequence[Found]
) -> tuple[str, tuple[Outcome, str] | None]:
    """The source of the one cell that answers an exercise, or why there is none."""
    owners = [each for each in found if exercise.id in [id for id, _ in each.exercises]]
    if not owners:
        return "", _why_missing(exercise, found)
    if len(owners) > 1:
        places = " and ".join(str(each.cell.place) for each in owners[:5])
        reason = f"exercise {exercise.id} is there {len(owners)} times (cells {places}): keep one"
        return "", (Outcome.UNREADABLE, reason)
    owner = owners[0]
    if owner.fault:
        return "", (Outcome.UNREADABLE, owner.fault)
    if len(owner.exercises) > 1:
        ids = " and ".join(id for id, _ in owner.exercises[:5])
        reason = f"cell {owner.cell.place} holds the exercises {ids}: give each a cell of its own"
        return "", (Outcome.UNREADABLE, reason)
    name = owner.exercises[0][1]
    if name != exercise.name:
        reason = f"exercise {exercise.id} is called {exercise.name}; the cell defines {name[:60]}"
        return "", (Outcome.UNREADABLE, reason)
    return owner.cell.source, None


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
