"""The checks of one exercise, in order, and how they are run on an answer."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.errors import InputError
from shared.exercises.expecting import asked
from shared.exercises.guarding import guarding_arguments, preserve_global_state
from shared.exercises.remembered import forget_answers
from shared.exercises.seeds import first_seed, forget_seeds, kept_random_states
from shared.exercises.signatures import signature_fault
from shared.exercises.wrong import Fault, Wrong
from shared.ranks.failures import is_own_file

Check = Callable[[Any], None]


@dataclass
class ExerciseChecks:
    """All that is known about one exercise: how hard it is, a hint and its checks in order.

    Unless it works `in_place`, an answer that changes its arguments is wrong. `forbidden` names the
    calls that are the exercise itself: the grader points at an answer that uses one.
    """

    id: str
    name: str
    difficulty: int
    minutes: int
    hint: str
    in_place: bool = False
    forbidden: Sequence[str] = ()
    checks: list[tuple[str, Check]] = field(default_factory=list)
    hollow: set[str] = field(default_factory=set)  # passed: nothing but a refusal or form was asked

    def check(self, title: str) -> Callable[[Check], Check]:
        """Register a function that raises `Wrong` when the candidate it is given is wrong."""

        def register(function: Check) -> Check:
            self.checks.append((title, function))
            return function

        return register

    def faults(self, candidate: Any) -> list[Fault | None]:
        """Run every check; None where it passed. Global state is left as it was."""
        guarded, results = self._begin(candidate), list[Fault | None]()
        for index in range(len(self.checks)):
            passed = sum(result is None for result in results)
            results.append(self._fault(index, candidate, guarded, passed))
        return results

    def first_fault(self, candidate: Any) -> Fault | None:
        """Run the checks until one fails; None when all pass."""
        guarded = self._begin(candidate)
        for index in range(len(self.checks)):
            fault = self._fault(index, candidate, guarded, passed=index)
            if fault is not None:
                return fault
        return None

    def passed_for_nothing(self, faults: Sequence[Fault]) -> int:
        """How many of the checks without a fault pass as well what refuses all it is given.

        All, where none of them asks for more than refusals, shapes and dtypes, or fails what names
        all that it refuses and what does nothing.
        """
        failed = {fault.title for fault in faults}
        passed = [each for each in self.checks if each[0] not in failed]
        trivial = _refuse_by_name, _do_nothing
        if all(
            title in self.hollow or any(run_check(check, each) is None for each in trivial)
            for title, check in passed
        ):
            return len(passed)
        return sum(run_check(check, _refuse) is None for _, check in passed)

    def _begin(self, candidate: Any) -> Any:
        """Return what the checks are given: one object for all, which laboratories know it by."""
        forget_answers()
        return candidate if self.in_place else guarding_arguments(candidate)

    def _fault(self, index: int, candidate: Any, guarded: Any, passed: int) -> Fault | None:
        """Return what one check finds; the first one looks at the parameters before all else."""
        title, function = self.checks[index]
        wrong = signature_fault(self.id, self.name, candidate) if index == 0 else None
        if wrong is not None:
            title = "the parameters"
        else:
            wrong = run_check(function, guarded)
        if wrong is None:
            (self.hollow.discard if asked["work"] or not asked["form"] else self.hollow.add)(title)
            return None
        texts = wrong.mistake, wrong.expected, wrong.seen, wrong.hint
        return Fault(title, passed, len(self.checks), *texts)


def checks_for(
    id: str,
    *,
    name: str,
    difficulty: int,
    minutes: int,
    hint: str,
    in_place: bool = False,
    forbidden: Sequence[str] = (),
) -> ExerciseChecks:
    """Open the checks of one exercise; difficulty (1 to 5) is also its points.

    `in_place` says that the exercise asks for an argument to be overwritten; `forbidden` has how
    the dotted names of calls begin that are the exercise itself.
    """
    assert 1 <= difficulty <= 5, f"difficulty runs from 1 to 5, got {difficulty}"
    assert hint, f"exercise {id} needs a hint"
    return ExerciseChecks(id, name, difficulty, minutes, hint, in_place, forbidden)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("refused")


def _refuse_by_name(*args: Any, **kwargs: Any) -> Any:
    raise InputError(f"{[getattr(each, 'shape', each) for each in args]} {kwargs} refused")


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def run_check(function: Check, candidate: Any) -> Wrong | None:
    """What one check says; None when it passes. Random states and switches are put back.

    A switch that is left changed is a fault of its own, unless the check has named another.
    """
    forget_seeds()
    asked.clear()
    with kept_random_states(), preserve_global_state() as changed:
        wrong: Wrong | None = None
        try:
            function(candidate)
        except Exception as error:  # whatever the learner's code raises is a finding, not a crash
            wrong = error if type(error) is Wrong else _as_wrong(error)
        named = wrong is not None and wrong.mistake
        return wrong if named else changed() or wrong


def _as_wrong(error: Exception) -> Wrong:
    where = _where(error)
    if isinstance(error, NotImplementedError):
        return Wrong("a part of the stub is still there", seen=f"NotImplementedError{where}")
    seed = first_seed()
    repeat = "" if seed is None else f" (seed {seed}: set TORCH_HANDLE_SEED to repeat)"
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "..."
    return Wrong(seen=f"{type(error).__name__}: {text}{where}{repeat}")


def _where(error: Exception) -> str:
    """The line of the learner's own code that the exception went through last."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_own_file(frame.filename):
            return f", in {frame.name} at: {frame.line}" if frame.line else f", in {frame.name}"
    return ", outside your code: does it take what it is given, and return what is asked for?"
