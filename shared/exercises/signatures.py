"""What parameters a contract names, and whether an answer has them: names, places and defaults.

The contracts' signatures stand in signatures.json, since a course can be given without solutions/:
`python -m shared.exercises.contracts` writes it anew.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from shared.exercises.wrong import Wrong

TABLE = Path(__file__).with_name("signatures.json")
HINT = "a call that the contract allows must do what it says there: keep the line that begins def"
_NONE = Parameter.empty
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@cache
def contracts() -> dict[str, dict[str, str]]:
    """Return the parameters of each exercise, by what has them ("f", "Class.method") as text."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def signature_fault(id: str, name: str, answer: Any) -> Wrong | None:
    """Return how an answer's parameters differ from the contract's, as a fault; None if nowhere.

    Parameters of its own may follow, with defaults; *args and **kwargs take what they are given,
    and names may stand for what a contract's *args is given. A default of None can stand for any:
    whether it does, the other checks see.
    """
    for what, text in contracts().get(id, {}).items():
        owner, _, method = what.partition(".")
        own = signature_of(answer, method) if owner == name else None
        if own is not None and (found := next(_differences(_read(text), own), None)):
            if inspect.isclass(answer) and _names_are_torchs(answer, method):
                continue
            mistake, expected, seen = found
            where = f" of {method}" if method else ""
            return Wrong(mistake.format(where), expected, seen, HINT)
    return None


def signature_of(answer: Any, method: str) -> Signature | None:
    """Return what an answer is called with, or a method of it without self; None if unknown.

    Where the contract has a class, a function that makes the objects does for its constructor.
    """
    called, bound = answer, True
    if method and inspect.isclass(answer):
        called: Any = getattr(answer, method, None)
        kept = inspect.getattr_static(answer, method, None)
        bound = isinstance(kept, staticmethod | classmethod)
        if not inspect.isroutine(called):  # a property
            return None
    elif method not in ("", "__init__"):
        return None
    try:
        found = inspect.signature(called)
    except (TypeError, ValueError):  # built in: it does not say
        return None
    return found if bound else found.replace(parameters=[*found.parameters.values()][1:])


def _names_are_torchs(answer: type, method: str) -> bool:
    """Whether a method is torch's, or overrides torch's under the names that it has there."""
    own, theirs = (
        [cls for cls in answer.__mro__ if method in vars(cls) and wanted(cls.__module__)]
        for wanted in (lambda _: True, lambda module: module.startswith("torch."))
    )
    return bool(theirs) and _kinds(vars(own[0])[method]) == _kinds(vars(theirs[0])[method])


def _kinds(method: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.kind) for p in inspect.signature(method).parameters.values()]


def _read(text: str) -> Signature:
    """Return the signature that a line of the table has; a default is its text."""
    arguments = ast.parse(f"def f({text}): pass").body[0].args  # ty: ignore
    places, names = arguments.args, arguments.kwonlyargs
    defaults = [None] * (len(places) - len(arguments.defaults)) + arguments.defaults
    of_kind = {
        Parameter.POSITIONAL_OR_KEYWORD: zip(places, defaults, strict=True),
        Parameter.VAR_POSITIONAL: [(arg, None) for arg in (arguments.vararg,) if arg],
        Parameter.KEYWORD_ONLY: zip(names, arguments.kw_defaults, strict=True),
        Parameter.VAR_KEYWORD: [(arg, None) for arg in (arguments.kwarg,) if arg],
    }
    return Signature(
        [
            Parameter(arg.arg, kind, default=_Text(ast.unparse(value)) if value else _NONE)
            for kind, pairs in of_kind.items()
            for arg, value in pairs
        ]
    )


class _Text(str):
    """A default as the table has it, shown as it is."""

    __repr__ = str.__str__


ANY = _Text("...")  # a default that is a class or a function: the answer's own may do


def _differences(contract: Signature, own: Signature) -> Iterator[tuple[str, str, str]]:
    """Yield what differs: the mistake, with a place for the method's name, expected and seen."""
    expected, seen = f"({in_short(contract)})", f"({in_short(own)})"
    theirs, ours = contract.parameters, own.parameters
    takes_all = any(p.kind in _VARIABLE for p in ours.values())
    takes_names = any(p.kind is Parameter.VAR_KEYWORD for p in theirs.values())
    takes_places = any(p.kind is Parameter.VAR_POSITIONAL for p in theirs.values())
    strangers = [name for name in ours if name not in theirs and ours[name].kind not in _VARIABLE]
    places = [name for name in ours if ours[name].kind is not Parameter.KEYWORD_ONLY]
    for place, (name, wanted) in enumerate(theirs.items()):
        got, there = ours.get(name), places[place : place + 1]
        in_place = wanted.kind is not Parameter.POSITIONAL_OR_KEYWORD or there == [name]
        if wanted.kind in _VARIABLE or (got is None and takes_all):
            continue
        if got is None:
            called = f"called {there[0]}" if there and there[0] in strangers else "missing"
            yield f"the parameter {name}{{}} is {called}", expected, seen
        elif not in_place and not takes_all:
            yield f"the parameter {name}{{}} stands in another place", expected, seen
        elif not _same_default(wanted.default, got.default):
            mistake = f"the parameter {name}{{}} has a different default"
            yield mistake, in_short(wanted), in_short(got)
    for name in strangers:
        given = takes_places and ours[name].kind is not Parameter.KEYWORD_ONLY
        if ours[name].default is _NONE and not takes_names and not given:
            mistake = f"the parameter {name}{{}} is not in the contract, and has no default"
            yield mistake, expected, seen


def _same_default(wanted: Any, got: Any) -> bool:
    """Whether a default does for the contract's; where that has none, any is the answer's own."""
    if wanted is _NONE or got is None or wanted == ANY:
        return True
    try:
        value = ast.literal_eval(wanted)
    except ValueError:
        return wanted == ast.unparse(ast.parse(repr(got), mode="eval"))
    return (type(value) is bool) == (type(got) is bool) and bool(value == got)


def in_short(signature: Signature | Parameter) -> str:
    """Return parameters as they stand in a definition, without their annotations."""
    if isinstance(signature, Parameter):
        return in_short(Signature([signature.replace(kind=Parameter.KEYWORD_ONLY)]))[3:]
    plain = [p.replace(annotation=_NONE) for p in signature.parameters.values()]
    plain = [
        p.replace(default=ANY) if p.default is not _NONE and callable(p.default) else p
        for p in plain
    ]
    return str(Signature(plain))[1:-1]
