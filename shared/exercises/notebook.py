"""How notebook, checks and solutions meet: `@exercise`, `check`, and the three modes.

reading   (default) an unsolved stub is replaced by the reference; faults are printed
strict    (TORCH_HANDLE_STRICT=1, or under pytest) an unsolved or wrong answer raises
solution  (TORCH_HANDLE_IMPLEMENTATION=solution) every exercise is the reference
"""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.errors import InputError, ShortError
from shared.exercises.borrowing import borrowed
from shared.exercises.checks import ExerciseChecks
from shared.exercises.lessons import ROOT, lesson_folder, load_checks, solution_module
from shared.exercises.stubs import is_stub, signature_difference
from shared.exercises.waiting import before_a_reader
from shared.exercises.wrong import Fault
from shared.ranks.visible import without_gpus

T = TypeVar("T")
COURSES_OWN = ": the course's own answer; run this cell for yours"  # ends what is stored

if (ipython := sys.modules.get("IPython")) is not None and (shell := ipython.get_ipython()):
    from shared.exercises import cell_magic

    without_gpus()  # a notebook forks ranks; a script that reads `--mine` keeps its GPUs
    cell_magic.register(shell, lambda: not stored())


class NotSolved(ShortError):
    """An unsolved exercise was checked in strict mode, or used where there are no solutions."""


class WrongAnswer(ShortError):
    """A check found a fault, in strict mode."""


class SignatureDiffers(ShortError):
    """The stub in the notebook and the reference do not have the same signature."""


@dataclass(frozen=True)
class Exercise:
    """One exercise of the running notebook: what the cell defined and what its name is bound to."""

    id: str
    own: Any
    bound: Any
    solved: bool


@dataclass(frozen=True)
class Result:
    """What came of one exercise: "right", "wrong" (then with the fault) or "open"."""

    checks: ExerciseChecks
    outcome: str
    fault: Fault | None = None
    note: str = ""  # beside a right answer: that it is the course's own

    def words(self, ending: str = "") -> str:
        """What a learner reads about it; `ending` follows where the answer is right."""
        title = f"{self.checks.id} {self.checks.name}"
        if self.outcome == "open":
            return f"{title}: not solved yet; {_what_stands_in()}"
        if self.fault is None:
            count = len(self.checks.checks)
            right = f"{title}: right ({count} check{'s' * (count > 1)} passed){ending}"
            return f"{right}\nnote: {self.note}" if self.note else right
        return "\n".join([f"{title}: not right yet, {self.fault.where}", *self.fault.lines()])


defined: dict[str, Exercise] = {}  # by id, in the notebook or script that runs


def solution_mode() -> bool:
    """Whether every exercise takes the reference.

    Raises InputError when TORCH_HANDLE_IMPLEMENTATION holds a word it does not know.
    """
    word = os.environ.get("TORCH_HANDLE_IMPLEMENTATION", "")
    if word not in ("", "solution"):
        raise InputError(f"TORCH_HANDLE_IMPLEMENTATION is {word!r}; it can be 'solution' or unset")
    return word == "solution"


def strict_mode() -> bool:
    """Whether an unsolved or wrong exercise raises: asked for, or running under pytest (nbval)."""
    asked = os.environ.get("TORCH_HANDLE_STRICT")
    return asked == "1" if asked is not None else "PYTEST_VERSION" in os.environ


def stored() -> bool:
    """Whether the outputs are to be kept or compared: then nobody sits before them."""
    return solution_mode() or strict_mode()


def exercise(id: str) -> Callable[[T], T]:
    """Mark the function or class in this cell as the answer to exercise `id`.

    What the name is bound to afterwards follows the mode (see the module's docstring). Without
    solutions/ an unsolved stub becomes a placeholder that raises `NotSolved` when it is used.
    """

    def decorate(own: Any) -> Any:
        bound = own
        if solution_mode():
            bound = _reference(id, own.__name__)
            if bound is None:
                raise NotSolved(f"{id}: solution mode needs solutions/, which is not here")
            if difference := signature_difference(own, bound):
                raise SignatureDiffers(f"{id}: {difference}")
        elif is_stub(own):
            bound = substitute_reference(id, own.__name__, own)
        defined[id] = Exercise(id, own, bound, solved=bound is own or solution_mode())
        return bound

    return decorate


def _reference(id: str, name: str) -> Any:
    module = solution_module(id.split(".")[0])
    if module is None:
        return None
    if not hasattr(module, name):
        raise ValueError(f"exercise {id} is called {name!r}; {module.__name__} has no such name")
    return getattr(module, name)


def substitute_reference(id: str, name: str, stub: Any = None) -> Any:
    """Return the reference, or without solutions/ what raises `NotSolved` when it is called.

    That has the parameters of the stub: libraries look at what they are given.
    """
    reference = _reference(id, name)
    if reference is not None:
        return reference
    message = f"exercise {id} ({name}) is not solved yet, and this cell uses it: solve it first"

    class Unsolved:
        def __new__(cls, *args: Any, **kwargs: Any) -> "Unsolved":
            raise NotSolved(message)

    Unsolved.__name__ = Unsolved.__qualname__ = name
    if stub is not None:
        functools.update_wrapper(Unsolved, stub, ("__doc__",), updated=())
    return Unsolved


def judge(id: str, candidate: Any) -> Result:
    """Put an answer before its checks. Raises ValueError for an exercise that does not exist."""
    checks = load_checks(id.split(".")[0]).get(id)
    if checks is None:
        raise ValueError(f"there is no exercise {id!r} in {lesson_folder(id).name}/checks.py")
    state = defined.get(id)
    is_reference = state is not None and not state.solved and candidate is state.bound
    if is_reference or is_stub(candidate):
        return Result(checks, "open")
    fault = checks.first_fault(candidate)
    note = "" if fault is not None or solution_mode() else borrowed(candidate, checks.name)
    return Result(checks, "right" if fault is None else "wrong", fault, note)


def check(id: str, candidate: Any) -> None:
    """Say whether an answer is right and, if not, which mistake it looks like.

    Raises `NotSolved` or `WrongAnswer` in strict mode; prints the same words in reading mode.
    Interrupted, it raises `Stopped`, with the line that the answer was in.
    """
    title = f"{id} {getattr(candidate, '__name__', '')}".rstrip()
    with before_a_reader(title, says_how_to_stop=not stored()):
        result = judge(id, candidate)
    if result.outcome != "right" and strict_mode():
        raise {"open": NotSolved, "wrong": WrongAnswer}[result.outcome](result.words())
    compared = solution_mode() or "PYTEST_VERSION" in os.environ
    print(result.words(COURSES_OWN if compared else ""))


def _what_stands_in() -> str:
    if (ROOT / "solutions").is_dir():
        return "the cells below use the reference in its place"
    return "a cell below that uses it will stop"
