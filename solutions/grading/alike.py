"""Who handed in the same: cells that are equal to the letter, or but for names and comments."""

import ast
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.sources import Definition, parsed
from solutions.grading.results import Answers, Lesson

SIZE = 150  # expressions and statements: shorter right answers are alike by themselves
OURS = "the course's own"
LEFT_OUT = {"annotation", "returns", "type_comment", "ctx", "decorator_list"}


def equal_answers(handed_in: Iterable[tuple[Answers, Lesson]]) -> list[str]:
    """Who handed in the same cells to the letter, untouched ones apart: a line for each group."""
    same: dict[tuple[str, str], list[str]] = {}
    for answers, lesson in handed_in:
        for cell in sorted(answers.cells.items() - lesson.stubs.items()):
            same.setdefault(cell, []).append(answers.student)
    return _lines((id, who) for (id, _), who in same.items())


def similar_answers(handed_in: Iterable[tuple[Answers, Lesson]], course: Path) -> list[str]:
    """The same for longer definitions that differ in names, comments and annotations alone.

    The course's answers are compared as well: in shared/ they are there to be typed over.
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    lessons = dict[str, Lesson]()
    for answers, lesson in handed_in:
        lessons[lesson.number] = lesson
        for id, cell in answers.cells.items():
            for shape in _shapes(_body(cell)):
                found.setdefault((id, shape), {})[answers.student] = cell
    for lesson in lessons.values():
        known = KnownAnswers(course, lesson)
        for each in known.references() if known.path(f"solutions.{lesson.folder}") else ():
            for shape in _shapes([each.node]):
                found.setdefault((each.exercise, shape), {})[OURS] = ""
    return _lines((id, list(who)) for (id, _), who in found.items() if len({*who.values()}) > 1)


def _lines(groups: Iterable[tuple[str, list[str]]]) -> list[str]:
    """A line for those who have several exercises in common, not one for each exercise."""
    found: dict[str, list[str]] = {}
    for id, students in groups:
        if students[1:]:
            found.setdefault("; ".join(students), []).append(id)
    return sorted(f"{' '.join(sorted(ids))}: {who}" for who, ids in found.items())


def _body(cell: str) -> list[ast.stmt]:
    try:
        return parsed(cell).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _shapes(body: Iterable[ast.stmt]) -> Iterator[str]:
    """The long definitions of a cell as text, without names and docstrings."""
    for node in (each for each in body if isinstance(each, Definition)):
        if sum(isinstance(each, ast.expr | ast.stmt) for each in ast.walk(node)) >= SIZE:
            with contextlib.suppress(RecursionError):
                yield _bare(node)


def _bare(value: Any) -> str:
    if isinstance(value, list):
        return f"[{' '.join(filter(None, map(_bare, value)))}]"
    if isinstance(value, ast.Expr) and isinstance(value.value, ast.Constant):
        return ""
    if isinstance(value, ast.Constant):
        return repr(value.value)
    if not isinstance(value, ast.AST):
        return "" if isinstance(value, str) else repr(value)
    parts = (_bare(each) for name, each in ast.iter_fields(value) if name not in LEFT_OUT)
    return f"({type(value).__name__} {' '.join(parts)})"
