"""How notebook, checks and solutions meet: `@exercise`, `check`, and the three modes.

reading   (default) an unsolved stub is replaced by the reference; faults are printed
strict    (TORCH_HANDLE_STRICT=1, or under pytest) an unsolved or wrong answer raises
solution  (TORCH_HANDLE_IMPLEMENTATION=solution) every exercise is the reference
"""

import dis
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from shared.checking import ExerciseChecks, Fault, labelled
from shared.launching import launch as launch
from shared.ranks import run_ranks as run_ranks

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")


class ShortError(Exception):
    """An error whose message is all that a learner needs: notebooks show it without frames."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


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


defined: dict[str, Exercise] = {}  # by id, in the notebook or script that runs


def solution_mode() -> bool:
    """Whether every exercise takes the reference.

    Raises ValueError when TORCH_HANDLE_IMPLEMENTATION holds a word it does not know.
    """
    word = os.environ.get("TORCH_HANDLE_IMPLEMENTATION", "")
    if word not in ("", "solution"):
        raise ValueError(f"TORCH_HANDLE_IMPLEMENTATION is {word!r}; it can be 'solution' or unset")
    return word == "solution"


def strict_mode() -> bool:
    """Whether an unsolved or wrong exercise raises: asked for, or running under pytest (nbval)."""
    asked = os.environ.get("TORCH_HANDLE_STRICT")
    return asked == "1" if asked is not None else "PYTEST_VERSION" in os.environ


def lesson_folder(id: str) -> Path:
    """The folder of the lesson that an exercise id ("06.2") or a lesson number ("06") names."""
    number = id.split(".")[0]
    found = sorted((ROOT / "lessons").glob(f"{number}_*"))
    if len(found) != 1:
        raise ValueError(f"no lesson {number!r} in {ROOT / 'lessons'}: found {len(found)} folders")
    return found[0]


@cache
def load_checks(number: str) -> dict[str, ExerciseChecks]:
    """The exercises of a lesson's checks.py by id, in the order of the file."""
    path = lesson_folder(number) / "checks.py"
    name = f"_checks_of_lesson_{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"cannot load {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return {each.id: each for each in vars(module).values() if isinstance(each, ExerciseChecks)}


def solution_module(number: str) -> ModuleType | None:
    """The lesson's solution module; None in a course that was given without solutions/."""
    if not (ROOT / "solutions").is_dir():
        return None
    return importlib.import_module(f"solutions.lesson{lesson_folder(number).name}")


def exercise(id: str) -> Callable[[T], T]:
    """Mark the function or class in this cell as the answer to exercise `id`.

    What the name is bound to afterwards follows the mode (see the module's docstring). Without
    solutions/ an unsolved stub becomes a placeholder that raises `NotSolved` when it is used.
    """

    def decorate(own: Any) -> Any:
        reference = _reference(id, own.__name__) if solution_mode() or is_stub(own) else None
        if solution_mode():
            if reference is None:
                raise NotSolved(f"{id}: solution mode needs solutions/, which is not here")
            compare_signatures(id, own, reference)
            bound = reference
        elif is_stub(own):
            bound = _placeholder(id, own.__name__) if reference is None else reference
        else:
            bound = own
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


def _placeholder(id: str, name: str) -> Any:
    message = f"exercise {id} ({name}) is not solved yet, and this cell uses it: solve it first"

    class Unsolved:
        def __new__(cls, *args: Any, **kwargs: Any) -> "Unsolved":
            raise NotSolved(message)

    Unsolved.__name__ = Unsolved.__qualname__ = name
    return Unsolved


def is_stub(answer: Any) -> bool:
    """Whether a function, or every method of a class, only raises NotImplementedError."""
    functions = _own_methods(answer).values() if inspect.isclass(answer) else [answer]
    codes = [getattr(inspect.unwrap(each), "__code__", None) for each in functions]
    return bool(codes) and all(code is not None and _only_raises(code) for code in codes)


def _own_methods(cls: type) -> dict[str, Any]:
    return {
        name: getattr(value, "__func__", value)
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType | staticmethod | classmethod)
    }


def _only_raises(code: CodeType) -> bool:
    """Compare the instructions with those of a bare stub, so that no source text is needed."""

    def essence(code: CodeType) -> list[tuple[str, Any]]:
        skip = {"RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "MAKE_CELL"}
        return [(i.opname, i.argval) for i in dis.get_instructions(code) if i.opname not in skip]

    def bare() -> None:
        raise NotImplementedError

    def called() -> None:
        raise NotImplementedError()

    return essence(code) in (essence(bare.__code__), essence(called.__code__))


def compare_signatures(id: str, own: Any, reference: Any) -> None:
    """Raise `SignatureDiffers` unless names, kinds and defaults agree, method by method."""
    if inspect.isclass(own) != inspect.isclass(reference):
        raise SignatureDiffers(f"{id}: one of stub and reference is a class, the other is not")
    if inspect.isclass(own):
        pairs = {
            name: (value, getattr(reference, name)) for name, value in _own_methods(own).items()
        }
    else:
        pairs = {own.__name__: (own, reference)}
    for name, (stub, answer) in pairs.items():
        if _shape(stub) != _shape(answer):
            raise SignatureDiffers(
                f"{id} {name}: the notebook has {inspect.signature(stub)}, "
                f"the solution has {inspect.signature(answer)}"
            )


def _shape(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


def check(id: str, candidate: Any) -> None:
    """Say whether an answer is right and, if not, which mistake it looks like.

    Raises `NotSolved` or `WrongAnswer` in strict mode; prints the same words in reading mode.
    """
    checks = load_checks(id.split(".")[0]).get(id)
    if checks is None:
        raise ValueError(f"there is no exercise {id!r} in {lesson_folder(id).name}/checks.py")
    state = defined.get(id)
    stand_in = state is not None and not state.solved and candidate is state.bound
    if stand_in or is_stub(candidate):
        _tell(NotSolved, not_solved_words(checks))
        return
    fault = checks.first_fault(candidate)
    if fault:
        _tell(WrongAnswer, fault_words(checks, fault))
    else:
        count = len(checks.checks)
        print(f"{id} {checks.name}: right ({count} check{'s' * (count > 1)} passed)")


def not_solved_words(checks: ExerciseChecks) -> str:
    """What the check of an untouched stub says: the first hint, and what the cells below do."""
    below = (
        "the cells below use the reference in its place"
        if (ROOT / "solutions").is_dir()
        else "a cell below that uses it will stop"
    )
    head = f"{checks.id} {checks.name}: not solved yet; {below}"
    return f"{head}\n{labelled('hint', checks.hints[0])}"


def fault_words(checks: ExerciseChecks, fault: Fault) -> str:
    """What a learner reads about a wrong answer."""
    before = f"{fault.passed} of {len(checks.checks)} checks passed before it"
    head = f"{checks.id} {checks.name}: not right yet, at the check of {fault.title} ({before})"
    return "\n".join([head, *fault.wrong.lines()])


def _tell(kind: type[ShortError], words: str) -> None:
    if strict_mode():
        raise kind(words)
    print(words)


def answers(number: str, *, mine: bool = False) -> Any:
    """The lesson's exercise names as attributes: the references, or the learner's own answers.

    Imported late: a notebook needs no notebook reader.
    """
    from shared.answers import lesson_answers

    return lesson_answers(number, mine=mine)
