"""What a check saw of a right answer, with one thing changed: something in it has to speak."""

import copy
import dataclasses
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial, partialmethod, wraps
from itertools import islice, zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.exercises import expecting
from shared.exercises.checks import Check, run_check
from shared.exercises.rank_cases import RankCases
from shared.exercises.wrong import Wrong
from shared.ranks.failures import Failure, RankFailed

OPS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
Asked = defaultdict[tuple[Any, ...], list[Any]]  # by the place in a sight: what was asked of it


def _noting(kind: type, *names: str) -> type:
    """A kind of thing that writes down in `asked` what its methods are given, None for nothing."""

    def noted(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            self.asked.append(args[0] if args else None)
            return getattr(kind, name)(self, *args)

        return method

    own = {name: noted(name) for name in names}
    return type(kind.__name__, (kind,), {"__hash__": kind.__hash__, "asked": []} | own)


Text = _noting(str, "__eq__", "__ne__", "__contains__", "startswith", "__hash__")
List = _noting(list, "__len__", "__iter__", "__getitem__", "__eq__", "__ne__", "__contains__")
Dict = _noting(dict, "__getitem__", "get", "__iter__", "items", "values", "keys", "__len__")
Set = _noting(set, "__contains__", "__iter__", "__len__", "__eq__", "__ne__")


class Number(int):
    """A number that writes down which value of it a comparison turns on, sums seen through."""

    asked: list[Any]
    back: Callable[[float], float]

    def _compare(self, other: Any, compare: Callable[[Any, Any], Any]) -> Any:
        if isinstance(other, int | float) and not isinstance(other, bool):
            self.asked.append(self.back(float(other)))
        return compare(int(self), int(other) if type(other) is Number else other)

    def _count(self, other: Any, name: str, back: Callable[[Any, Any], Any]) -> Any:
        found = getattr(int, name)(self, other)
        return found if found is NotImplemented else self.made(found, lambda x: back(x, other))

    def made(self, value: int, back: Callable[[float], float]) -> "Number":
        """A number that was made of this one."""
        number = Number(value)
        number.asked, number.back = self.asked, lambda x: self.back(back(x))
        return number

    def __hash__(self) -> int:
        self.asked.append(None)
        return int(self)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _own = partialmethod(Number._compare, compare=getattr(operator, _name))
    setattr(Number, f"__{_name}__", _own)
for _name, _back in {
    "__add__": operator.sub,
    "__radd__": operator.sub,
    "__sub__": operator.add,
    "__rsub__": lambda value, other: other - value,
    "__mul__": operator.truediv,
    "__rmul__": operator.truediv,
    "__floordiv__": operator.mul,
}.items():
    setattr(Number, _name, partialmethod(Number._count, name=_name, back=_back))


def parts(sight: Any) -> list[tuple[Any, Any]]:
    """What a sight is made of, by name or place; nothing where it is one thing."""
    if isinstance(sight, list | tuple):
        return list(enumerate(sight))
    if isinstance(sight, dict):
        return list(sight.items())
    own = dataclasses.is_dataclass(sight) and not isinstance(sight, type)
    return list(vars(sight).items()) if own else []


def put(sight: Any, at: Any, part: Any) -> Any:
    """The sight with another part in one place."""
    if isinstance(sight, list | tuple):
        given = [part if i == at else each for i, each in enumerate(sight)]
        return type(sight)(*given) if hasattr(sight, "_fields") else type(sight)(given)
    if isinstance(sight, dict):
        return {**sight, at: part}
    other = copy.copy(sight)
    vars(other)[at] = part
    return other


def listening(sight: Any, asked: Asked, at: tuple[Any, ...] = ()) -> Any:
    """The sight with things in it that write down what is asked of them."""
    for name, part in parts(sight):
        sight = put(sight, name, listening(part, asked, (*at, name)))
    kinds = {int: Number, str: Text, list: List, dict: Dict, set: Set}
    if type(sight) in kinds:
        sight = kinds[type(sight)](sight)
        sight.asked, sight.back = asked[at], lambda value: value
    return sight


def changes(sight: Any, asked: Asked, tensors: bool, at: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The sight with one thing in it changed, for every thing: `tensors` alone, or all others.

    What nobody asked anything of stays as it is, where that is known.
    """
    if type(sight) in (int, str, list, dict, set) and not asked[at]:
        return
    if isinstance(sight, Tensor) == tensors:
        for other in _others(sight, asked[at]):
            if isinstance(sight, Tensor | list | dict) or other != sight:
                yield other
    inside = parts(sight)
    if isinstance(sight, dict) and None not in asked[at]:
        inside = [(name, part) for name, part in inside if name in asked[at]]
    named = isinstance(sight, dict) and not any(isinstance(x, Tensor) for _, x in inside)
    if len(inside) > 5 and isinstance(sight, list | dict) and not named:
        inside.sort(key=lambda each: each[0] not in asked[at])
        inside = [*inside[:3], inside[len(inside) // 2], inside[-1]]
    yield from _in_turn(
        map(partial(put, sight, name), changes(part, asked, tensors, (*at, name)))
        for name, part in inside
    )
    if isinstance(sight, list) and sight:
        last = changes(sight[-1], asked, tensors, (*at, len(sight) - 1))
        yield from ([*sight, other] for other in islice(last, 1))


def _others(sight: Any, asked: list[Any]) -> list[Any]:
    """What could stand in the place of one thing, of which so much was `asked`."""
    names = [*dict.fromkeys(x for x in asked if type(x) in (int, str, Number, Text))]
    if isinstance(sight, bool):
        return [not sight]
    if isinstance(sight, int | float):
        turns = [round(x) for x in asked if isinstance(x, float) and abs(x) < 1e15]
        near = [x + y for x in turns for y in (0, 1, -1)]
        return [*dict.fromkeys([sight + 1, sight + 2, 0 * sight, sight + 100_000, *near])]
    if isinstance(sight, str):
        return [*dict.fromkeys([*names, *(OPS if sight in OPS else ("", "another"))])]
    if isinstance(sight, torch.dtype):
        return [*DTYPES]
    if isinstance(sight, Tensor):
        double = sight.dtype == torch.float64
        more = ~sight if sight.dtype == torch.bool else sight + 1
        cut = [sight[:0], sight[1:], sight.roll(1), torch.cat([sight] * 2)] if sight.dim() else []
        of_graph = [sight.clone().requires_grad_()] if sight.is_floating_point() else []
        other = [sight.float(), sight.float().double() if double else sight.double()]
        kinds = [sight.detach(), *of_graph, None, 0.5]
        return [more, *other, 0 * sight, *cut, sight[None], *kinds]
    if isinstance(sight, set):
        known = [x for each in [*sight][:1] for x in _others(each, [])]
        return [set(), *(sight | {x} for x in [*names, *known] if x not in sight)]
    if isinstance(sight, dict):
        some = [*sight][:1] if isinstance([*sight.values(), 0][0], Tensor) else [*sight][:20]
        less = [{name: sight[name] for name in sight if name != each} for each in some]
        return [{}, *less, *({**sight, x: True} for x in names if x not in sight)]
    if isinstance(sight, list):
        some = [sight[i:] for i in range(1, min(8, len(sight)))]
        more = ([*sight, x] for x in (*(sight[-1:] or ["another"]), *names))
        return [[], *more, sorted(sight, key=str), tuple(sight), *some, sight * 2, sight * 8]
    if isinstance(sight, Exception):
        return [None, KeyError("another"), type(sight)("another")]
    return []


def _given(answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return answer(*args, **kwargs)
    except Exception as error:
        return error


class Sights:
    """What ranks, and calls of functions that are watched, gave while a check ran.

    `instead` of one of them has what a check is to be given when it runs again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken, self.instead = dict[Any, Any](), dict[Any, Any]()
        self.failing = dict[Any, RankFailed]()  # by the words for it: a way in which ranks fail
        outcome, seen = RankCases.outcome, RankCases.seen

        def look(cases: RankCases, case: Any) -> Any:
            return self._see((id(cases), case), partial(outcome, cases, case))

        def look_for(cases: RankCases, case: Any, **words: Any) -> Any:
            self._note((id(cases), case), **words)
            return seen(cases, case, **words)

        monkeypatch.setattr(expecting, "custom_eq_type", lambda got, want: None)  # of noting kinds
        monkeypatch.setattr(RankCases, "outcome", look)
        monkeypatch.setattr(RankCases, "seen", look_for)

    def begin(self) -> None:
        """Begin a check."""
        self.taken, self.instead, self.failing = {}, {}, {}
        self.calls = 0

    def watched(self, look: Callable[..., Any], once: bool = False) -> Callable[..., Any]:
        """The function: each call of it in this process is a sight, with what it raised.

        `once`: where a check runs again, what it gave is given again.
        """

        @wraps(look)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            key = ("call", self.calls)
            if key not in self.instead and not (once and key in self.taken):
                self.taken[key] = [_given(look, *args, **kwargs)]
            (given,) = self.instead.get(key, self.taken.get(key))
            if isinstance(given, Exception):
                raise given
            return given

        return call

    def _see(self, key: Any, look: Callable[[], Any]) -> Any:
        if key not in self.instead:
            try:
                self.taken[key] = look()
            except Exception as error:
                self.taken[key] = error
        given = self.instead.get(key, self.taken.get(key))
        if isinstance(given, Exception):
            raise given
        return given

    def _note(self, key: Any, *, apart: str, known: Any = None, **_: Any) -> None:
        self.failing.setdefault(apart, (key, RankFailed("late", kind=Failure.LATE, rank=0)))
        for sign, (words, _) in (known or {}).items():
            kind = sign if isinstance(sign, Failure) else Failure.RAISED
            error = sign() if isinstance(sign, type) else None
            failed = RankFailed(str(sign), kind=kind, rank=0, error=error, error_text=str(sign))
            self.failing.setdefault(words, (key, failed))

    def ask(self, check: Check, answer: Any, instead: dict[Any, Any]) -> Wrong | None:
        """What a check says to a change."""
        self.instead, self.calls = instead, 0
        wrong = run_check(check, answer)
        self.instead = {}
        return wrong

    def changed(self) -> Iterator[dict[Any, Any]]:
        """What a check is given instead, one change after the other."""
        yield from [{key: failed} for key, failed in self.failing.values()]
        asked = defaultdict[Any, Asked](lambda: defaultdict(list))
        taken = dict(self.taken)
        for key, sight in taken.items():
            yield {key: listening(sight, asked[key])}
        yield from [{key: sight[::-1]} for key, sight in taken.items() if len(sight) > 1]
        for tensors in (False, True):
            yield from _in_turn(
                map(
                    partial(put, {key: sight}, key),
                    map(partial(put, sight, x), changes(sight[x], asked[key], tensors, (x,))),
                )
                for key, sight in taken.items()
                for x in {0, len(sight) - 1}
            )


def _in_turn(ways: Iterable[Iterator[Any]]) -> Iterator[Any]:
    """One of each, then the next of each, to the end of all."""
    for row in zip_longest(*ways):
        yield from (each for each in row if each is not None)
