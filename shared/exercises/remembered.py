"""Laboratories that run once for an answer, however many of its checks look at what they saw."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_forget: list[Callable[[], None]] = []


def once_an_answer(laboratory: Callable[P, R]) -> Callable[P, R]:
    """Return the laboratory, which remembers what it returned until the next answer's checks begin.

    Its arguments must be hashable. What it raises is not remembered.
    """
    remembering = functools.cache(laboratory)
    _forget.append(remembering.cache_clear)
    return cast(Callable[P, R], remembering)


def forget_answers() -> None:
    """Begin the checks of another answer, or of the same once more: nothing is remembered."""
    for forget in _forget:
        forget()
