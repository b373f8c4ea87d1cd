"""What the fields of a description may hold."""

from collections.abc import Sequence
from functools import cache
from typing import get_args, get_type_hints

from shared.errors import InputError


def at_least(spec: object, names: Sequence[str], least: int) -> None:
    """Raise InputError for a number below `least`, and for a count that is no whole number."""
    whole = _whole_numbers(type(spec))
    for name in names:
        value = getattr(spec, name)
        good = not isinstance(value, bool) and isinstance(
            value, int if name in whole else int | float
        )
        if not good or not value >= least:  # NaN is not
            what = "a whole number" if name in whole else "a number"
            raise InputError(f"{name} must be {what}, {least} or more, got {value!r}")


@cache
def _whole_numbers(kind: type) -> frozenset[str]:
    """The fields that hold a count; a search makes some ten thousand descriptions."""
    hints = get_type_hints(kind).items()
    return frozenset(name for name, hint in hints if int in (hint, *get_args(hint)))


def one_of(spec: object, name: str, allowed: Sequence[object]) -> None:
    """Raise InputError for a field that has none of the values that are known."""
    value = getattr(spec, name)
    if value not in allowed or isinstance(value, bool):
        raise InputError(f"{name} must be one of {', '.join(map(str, allowed))}, not {value!r}")


def yes_or_no(spec: object, names: Sequence[str]) -> None:
    """Raise InputError for a field that is neither True nor False."""
    for name in names:
        if not isinstance(getattr(spec, name), bool):
            raise InputError(f"{name} must be true or false, got {getattr(spec, name)!r}")
