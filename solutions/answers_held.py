"""Where the source of an answer stands in files that a class gets."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shared.exercises.cells import code_of
from solutions.grading.intake.known import KnownAnswer
from solutions.grading.intake.sources import Definition, parsed


def answers_held(edition: Path, answers: Sequence[KnownAnswer]) -> Iterator[tuple[str, str]]:
    """(file, exercise) where the source of an answer, or of a method of one, stands in a file."""
    paths = sorted([*edition.rglob("*.py"), *edition.glob("lessons/*/lesson.ipynb")])
    sources = {each.relative_to(edition).as_posix(): code_of(each) for each in paths}
    return answers_in(sources, answers)


def answers_in(
    sources: Mapping[str, str], answers: Sequence[KnownAnswer]
) -> Iterator[tuple[str, str]]:
    """The same in sources by the names of their files."""
    ids = {text: each.exercise for each in answers for text in _sources(each.node)}
    for name, source in sources.items():
        for id in sorted({ids[text] for text in _texts(source) & ids.keys()}):
            yield name, id


@cache
def _texts(source: str) -> frozenset[str]:
    """The bodies of all definitions; most files are the same in all weeks' editions."""
    found = (each for each in ast.walk(parsed(source)) if isinstance(each, Definition))
    return frozenset(_text(_body(each)) for each in found)


def _sources(node: Any) -> Iterator[str]:
    """A definition and its methods, without names of their own, docstrings and annotations.

    Methods of one or two statements are left out: two classes have the same `__len__`, or the same
    gather and wait, by chance.
    """
    for each in (n for n in ast.walk(node) if isinstance(n, Definition)):
        body = _body(each)
        if each is node or len(body) > 2:
            yield _text(body)


def _body(node: Any) -> list[ast.stmt]:
    return node.body[ast.get_docstring(node) is not None :]


def _text(body: list[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, body))
