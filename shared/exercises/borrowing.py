"""Whether an answer is the course's own: taken from shared/, derived from it, or a call of it."""

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

OURS = ("shared.", "solutions.")


def borrowed(answer: Any, name: str) -> str:
    """What an answer to the exercise `name` has of the course's answer to it, in words; else "".

    Seen are the answer itself, its bases, and what its own functions name; not what those call.
    """
    kind = "class" if inspect.isclass(answer) else "function"
    if _is_ours(answer, name):
        return f"this answer is the course's own {kind} ({_path(answer)})"
    for base in getattr(answer, "__mro__", ())[1:]:
        if _is_ours(base, name):
            return f"this answer derives from the course's own class ({_path(base)})"
    for function in _functions(answer):
        for named in _named(function, name):
            what = "class" if inspect.isclass(named) else "function"
            return f"this answer uses the course's own {what} ({_path(named)})"
    return ""


def _is_ours(value: Any, name: str) -> bool:
    module = getattr(value, "__module__", None)
    named = getattr(value, "__name__", None) == name
    return named and isinstance(module, str) and module.startswith(OURS)


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__name__}"


def _functions(answer: Any) -> Iterator[FunctionType]:
    """The functions of an answer: it, or the methods that it defines itself."""
    for part in vars(answer).values() if inspect.isclass(answer) else (answer,):
        function = inspect.unwrap(getattr(part, "__func__", part))  # of a class or static method
        if isinstance(function, FunctionType):
            yield function


def _named(function: FunctionType, name: str) -> Iterator[Any]:
    """The course's answers that a function names: global, of a module, imported, from around."""
    closed = (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    used = set(_names(function.__code__))
    imported = (sys.modules.get(word) for word in used if word.startswith(OURS))
    known = [function.__globals__[word] for word in used if word in function.__globals__]
    for value in (*closed, *known, *imported):
        found = vars(value).get(name) if isinstance(value, ModuleType) and name in used else value
        if _is_ours(found, name):
            yield found


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (an empty one raises)
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
