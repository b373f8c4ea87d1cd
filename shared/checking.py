"""What a lesson's checks.py is written with: one exercise, its checks in order, faults in words."""

import os
import random
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shared.comparing import close, comparing_itself, difference
from shared.distributed import current_rank

_seeds: list[int] = []  # of the check that runs: what was drawn, then what followed from it


class Wrong(AssertionError):
    """An answer is wrong, in four short texts: the mistake it looks like, expected, seen, hint."""

    def __init__(self, mistake: str = "", expected: str = "", seen: str = "", hint: str = ""):
        super().__init__(mistake or f"expected {expected}, seen {seen}")
        self.mistake, self.expected, self.seen, self.hint = mistake, expected, seen, hint

    def lines(self) -> list[str]:
        """The texts that are there, each with its label."""
        named = [
            ("looks like", self.mistake),
            ("expected", self.expected),
            ("seen", self.seen),
            ("hint", self.hint),
        ]
        return [labelled(name, text) for name, text in named if text]


def labelled(label: str, text: str) -> str:
    """A labelled text in lines that a notebook shows unbroken."""
    head, rest = f"  {label + ':':<12}", " " * 14
    return textwrap.fill(text, 96, initial_indent=head, subsequent_indent=rest)


@dataclass(frozen=True)
class Fault:
    """The first check that failed: its title, why, and how many had passed before it."""

    title: str
    wrong: Wrong
    passed: int


@dataclass
class ExerciseChecks:
    """All that is known about one exercise: how hard it is, its hints and its checks in order."""

    id: str
    name: str
    difficulty: int
    minutes: int
    hints: Sequence[str]
    checks: list[tuple[str, Callable[[Any], None]]] = field(default_factory=list)

    def check(self, title: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """Register a function that raises `Wrong` when the candidate it is given is wrong."""

        def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
            self.checks.append((title, function))
            return function

        return register

    def faults(self, candidate: Any) -> list[Fault | None]:
        """Run every check; None where it passed. The global random state is left as it was."""
        results: list[Fault | None] = []
        for title, function in self.checks:
            wrong = _run(function, candidate)
            passed = sum(result is None for result in results)
            results.append(Fault(title, wrong, passed) if wrong else None)
        return results

    def first_fault(self, candidate: Any) -> Fault | None:
        """Run the checks until one fails; None when all pass."""
        for passed, (title, function) in enumerate(self.checks):
            wrong = _run(function, candidate)
            if wrong:
                return Fault(title, wrong, passed)
        return None


def _run(function: Callable[[Any], None], candidate: Any) -> Wrong | None:
    _seeds.clear()
    python_state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            function(candidate)
    except Wrong as wrong:
        return wrong
    except Exception as error:  # whatever the learner's code raises is a finding, not a crash
        return _as_wrong(error)
    finally:
        random.setstate(python_state)
    return None


def _as_wrong(error: Exception) -> Wrong:
    seed = f" (seed {_seeds[0]}: set TORCH_HANDLE_SEED to repeat)" if _seeds else ""
    if isinstance(error, NotImplementedError):
        return Wrong(
            "a part of the stub is still there", seen=f"NotImplementedError{_where(error)}"
        )
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    return Wrong(seen=f"{type(error).__name__}: {text}{_where(error)}{seed}")


def _where(error: Exception) -> str:
    """The line of the learner's own code that the exception went through last."""
    library = (os.path.dirname(torch.__file__), os.path.dirname(os.__file__))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        own = not frame.filename.startswith(library) and os.path.basename(frame.filename) not in (
            "checks.py",
            "checking.py",
        )
        if own:
            return f", in {frame.name} at: {frame.line}" if frame.line else f", in {frame.name}"
    return ", outside your code: does it take what it is given, and return what is asked for?"


def checks_for(
    id: str, *, name: str, difficulty: int, minutes: int, hints: Sequence[str]
) -> ExerciseChecks:
    """Open the checks of one exercise; difficulty (1 to 5) is also its points."""
    assert 1 <= difficulty <= 5, f"difficulty runs from 1 to 5, got {difficulty}"
    assert hints, f"exercise {id} needs at least one hint"
    return ExerciseChecks(id, name, difficulty, minutes, hints)


def without_group(act: Callable[..., Any], *args: Any, mistake: str, expected: str, hint: str):
    """Call an answer where there is no process group; `mistake` names one that asks for it."""
    try:
        return act(*args)
    except (ValueError, RuntimeError) as error:
        if "process group" not in str(error):
            raise
        raise Wrong(mistake, expected, f"{type(error).__name__}: {error}", hint) from None


def fresh_seed() -> int:
    """A new seed at every call and in every run, so that no answer fits the numbers of one.

    The first number of a check is drawn, or TORCH_HANDLE_SEED, and is shown on failure; seeds
    follow from it, from the place of the call in the check and from the rank.
    """
    if not _seeds:
        given = os.environ.get("TORCH_HANDLE_SEED")
        _seeds.append(int(given) if given else random.SystemRandom().randrange(2**31))
    _seeds.append(random.Random(f"{_seeds[0]} {len(_seeds)} {current_rank()}").randrange(2**31))
    return _seeds[-1]


def fresh_generator() -> torch.Generator:
    """A torch generator on a fresh seed."""
    return torch.Generator().manual_seed(fresh_seed())


def wrong(mistake: str, *, expected: str = "", seen: str = "", hint: str = "") -> None:
    """Report a recognised mistake."""
    raise Wrong(mistake, expected, seen, hint)


def expect(condition: bool, *, expected: str, seen: str, mistake: str = "", hint: str = "") -> None:
    """Raise `Wrong` unless the condition holds."""
    if not condition:
        raise Wrong(mistake, expected, seen, hint)


def expect_equal(got: Any, want: Any, *, what: str, mistake: str = "", hint: str = "") -> None:
    """Numbers, strings, tuples: equal by ==, of types that do not say themselves what equals."""
    stranger = comparing_itself(got, want)
    if stranger is not None:
        raise Wrong(expected=f"{what} = {want!r}", seen=f"an object of {stranger.__name__}")
    if got != want:
        raise Wrong(mistake, f"{what} = {want!r}", f"{got!r}", hint)


def expect_raises(
    kind: type[Exception],
    function: Callable[..., Any],
    *args: Any,
    what: str,
    hint: str = "",
    mentions: Sequence[Any] = (),
    **kwargs: Any,
) -> None:
    """The call must raise that kind of error, whose message must name the values that were seen."""
    try:
        function(*args, **kwargs)
    except NotImplementedError:
        raise
    except kind as error:
        missing = [str(value) for value in mentions if str(value) not in str(error)]
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
    # A class of one's own could answer to every comparison as it likes.
    if type(got) not in (Tensor, nn.Parameter, type(want)):
        raise Wrong(expected=f"{what} is a tensor", seen=f"{type(got).__name__}", hint=hint)
    got = got.detach()
    want = want.detach()
    if got.shape == want.shape and got.dtype == want.dtype and close(got, want, atol, rtol):
        return
    for mistake_words, value in (looks_like or {}).items():
        value = value if isinstance(value, Tensor) else value()
        same = value.shape == got.shape and close(got.to(value.dtype), value, atol, rtol)
        if same and not (
            value.shape == want.shape and close(value.to(want.dtype), want, atol, rtol)
        ):
            raise Wrong(mistake_words, hint=hint, **difference(got, want, what))
    raise Wrong(hint=hint, **difference(got, want, what))


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give, and words that the check must say to it."""

    id: str
    says: str
    answer: Any


def mistake(id: str, *, says: str) -> Callable[[Any], Any]:
    """Register a wrong answer in its module; several may bear the exercise's name."""

    def register(answer: Any) -> Any:
        module = sys.modules[answer.__module__]
        module.__dict__.setdefault("MISTAKES", []).append(Mistake(id, says, answer))
        return answer

    return register


def mistakes_in(module: ModuleType) -> list[Mistake]:
    """The wrong answers that a module of solutions/mistakes registered, in order."""
    return list(module.__dict__.get("MISTAKES", []))
