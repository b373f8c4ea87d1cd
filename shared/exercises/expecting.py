"""What a lesson's checks.py is written with: what is expected of an answer, mistakes by name."""

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shared.exercises.comparing import close, custom_eq_type, difference
from shared.exercises.wrong import Wrong

FORMS = torch.dtype, torch.device, torch.Size, type
asked = Counter[str]()  # by the running check: a refusal or a "form", or something of the "work"


def wrong(mistake: str, *, expected: str = "", seen: str = "", hint: str = "") -> NoReturn:
    """Report a recognised mistake."""
    raise Wrong(mistake, expected, seen, hint)


def recognise(
    mistakes: Mapping[str, bool | Callable[[], bool]], *, expected: str, seen: str, hint: str = ""
) -> None:
    """Report the first mistake whose sign was seen, most specific first; none is fine.

    A sign is a bool, or a function of no arguments where looking is only safe or worth its time
    once the rows above have been ruled out.
    """
    asked["work"] += 1
    for mistake, sign in mistakes.items():
        if sign() if callable(sign) else sign:
            raise Wrong(mistake, expected, seen, hint)


def alike(
    got: Any, looks_like: Mapping[str, Any], same: Callable[[Any, Any], Any] = operator.eq
) -> dict[str, bool]:
    """Rows for `recognise`: by the words for a mistake, whether got is the value it produces."""
    return {words: bool(same(got, value)) for words, value in looks_like.items()}


def expect(condition: bool, *, expected: str, seen: str, mistake: str = "", hint: str = "") -> None:
    """Raise `Wrong` unless the condition holds."""
    asked["work"] += 1
    if not condition:
        raise Wrong(mistake, expected, seen, hint)


def expect_equal(
    got: Any,
    want: Any,
    *,
    what: str,
    mistake: str = "",
    hint: str = "",
    looks_like: Mapping[str, Any] | None = None,
) -> None:
    """Numbers, strings, tuples: equal by ==, of types that do not say themselves what equals.

    `looks_like` maps the words for a mistake to the value that it produces; `mistake` is what any
    other wrong value looks like.
    """
    asked["form" if isinstance(got, FORMS) else "work"] += 1
    stranger = custom_eq_type(got, want)
    if stranger is not None:
        raise Wrong(expected=f"{what} = {want!r}", seen=f"an object of {stranger.__name__}")
    if got != want:
        named = (words for words, value in (looks_like or {}).items() if got == value)
        raise Wrong(next(named, mistake), f"{what} = {want!r}", f"{got!r}", hint)


def expect_raises(
    kind: type[Exception],
    function: Callable[..., Any],
    *args: Any,
    what: str,
    hint: str = "",
    mentions: Sequence[Any] = (),
    **kwargs: Any,
) -> None:
    """The call must raise that kind of error, whose message must name the values that were seen.

    A message may have 1,234 for 1234.
    """
    asked["form"] += 1
    try:
        function(*args, **kwargs)
    except NotImplementedError:
        raise
    except kind as error:
        said = f"{error}\n" + re.sub(r"(?<=\d),(?=\d{3})", "", str(error))
        missing = [str(value) for value in mentions if str(value) not in said]
        if missing:
            raise Wrong(
                f"the error for {what} does not say which value was seen",
                expected=f"a message that contains {' and '.join(missing)}",
                seen=repr(str(error)),
                hint=hint,
            ) from None
        return
    except Exception as error:
        raise Wrong(
            f"{what} raises the wrong kind of error",
            expected=kind.__name__,
            seen=f"{type(error).__name__}: {error}",
            hint=hint,
        ) from None
    raise Wrong(f"{what} is accepted", f"a {kind.__name__}", "no error", hint)


def accepted(function: Callable[..., Any], *args: Any, what: str, hint: str = "", **kw: Any) -> Any:
    """Return what the call returns; with a ValueError it refuses what the contract allows."""
    try:
        return function(*args, **kw)
    except ValueError as error:
        said = f"ValueError: {error}"
        raise Wrong(f"{what} is refused", f"{what} accepted", said, hint) from None


def expect_close(
    got: Any,
    want: Tensor,
    *,
    what: str,
    looks_like: Mapping[str, Tensor | Callable[[], Tensor]] | None = None,
    atol: float | None = None,
    rtol: float | None = None,
    hint: str = "",
) -> None:
    """Equal within the tolerance of the dtype; a recognised wrong value is named first.

    `looks_like` maps the words for a mistake to the tensor (or a function that makes it) which
    that mistake produces; it is only consulted when `got` differs from `want`.
    """
    asked["work"] += 1
    # A class of one's own could answer to every comparison as it likes.
    if type(got) not in (Tensor, nn.Parameter, type(want)):
        raise Wrong(expected=f"{what} is a tensor", seen=f"{type(got).__name__}", hint=hint)
    got, want = Tensor.detach(got), Tensor.detach(want)  # by attributes, too, a tensor can answer
    if got.shape == want.shape and got.dtype == want.dtype and close(got, want, atol, rtol):
        return
    likely = ""
    for mistake_words, value in (looks_like or {}).items():
        value = value if isinstance(value, Tensor) else value()
        same = value.shape == got.shape and close(got.to(value.dtype), value, atol, rtol)
        if same and not (
            value.shape == want.shape and close(value.to(want.dtype), want, atol, rtol)
        ):
            likely = likely or mistake_words
            # By chance the numbers of two mistakes can be near each other: the nearer is named.
            if close(got.to(value.dtype), value, atol, rtol, scale=0.1):
                likely = mistake_words
                break
    raise Wrong(likely, hint=hint, **difference(got, want, what))


def without_group(act: Callable[..., Any], *args: Any, mistake: str, expected: str, hint: str):
    """Call an answer where there is no process group; `mistake` names one that asks for it."""
    try:
        return act(*args)
    except (ValueError, RuntimeError) as error:
        if "process group" not in str(error):
            raise
        raise Wrong(mistake, expected, f"{type(error).__name__}: {error}", hint) from None
