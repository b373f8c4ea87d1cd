"""Known answers, and what the checks say to them: `python -m shared.exercises.mistakes NN`.

Right answers (the reference, the alternatives) must pass; every mistake must hear its own words.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import ModuleType
from typing import Any

from shared.exercises.lessons import lesson_folder, load_checks, solution_module
from shared.exercises.wrong import Fault
from shared.ranks.visible import without_gpus


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


def known_mistakes(number: str) -> list[Mistake]:
    """A lesson's wrong answers, from solutions/mistakes."""
    name = f"solutions.mistakes.{lesson_folder(number).name}"
    return mistakes_in(importlib.import_module(name))


def known_alternatives(number: str) -> dict[str, list[Any]]:
    """A lesson's right answers in another style by exercise, from solutions/alternatives."""
    name = f"solutions.alternatives.{lesson_folder(number).name}"
    if importlib.util.find_spec(name) is None:
        return {}
    return importlib.import_module(name).ALTERNATIVES


@dataclass(frozen=True)
class Heard:
    """What the checks said to one answer; `says` is what they must say, "" for a right answer."""

    exercise: str
    who: str
    says: str
    fault: Fault | None

    @property
    def as_expected(self) -> bool:
        """A right answer heard nothing; a mistake heard its own words."""
        return self.heard_words(self.says) if self.says else self.fault is None

    def heard_words(self, words: str) -> bool:
        """Whether the check said these words, in any of its texts."""
        fault = self.fault
        if fault is None:
            return False
        texts = fault.mistake, fault.expected, fault.seen, fault.hint
        return any(words in text for text in texts)


def hear_references(number: str, id: str | None = None) -> Iterator[Heard]:
    """Put a lesson's references, or one exercise's, before its checks."""
    references = solution_module(number)
    assert references is not None, "trying the checks needs solutions/"
    for exercise, checks in load_checks(number).items():
        if id in (None, exercise):
            fault = checks.first_fault(getattr(references, checks.name))
            yield Heard(exercise, "the reference", "", fault)


def hear_alternatives(number: str, id: str | None = None) -> Iterator[Heard]:
    """Put a lesson's right answers in another style, or one exercise's, before its checks."""
    checks = load_checks(number)
    for exercise, answers in known_alternatives(number).items():
        for answer in answers if id in (None, exercise) else ():
            who = f"the alternative {answer.__name__}"
            yield Heard(exercise, who, "", checks[exercise].first_fault(answer))


def hear_mistakes(number: str, id: str | None = None) -> Iterator[Heard]:
    """Put a lesson's mistakes, or one exercise's, before its checks."""
    checks = load_checks(number)
    for wrong in (m for m in known_mistakes(number) if id in (None, m.id)):
        fault = checks[wrong.id].first_fault(wrong.answer)
        yield Heard(wrong.id, f"the mistake {wrong.says!r}", wrong.says, fault)


HEARINGS = (hear_references, hear_alternatives, hear_mistakes)


def main(arguments: list[str]) -> int:
    """Print what every answer hears; 1 when one did not hear what it must, 2 without an argument.

    An argument is a lesson ("02") or an exercise ("02.4a").
    """
    if not arguments:
        print("usage: python -m shared.exercises.mistakes NN|NN.E [...]", file=sys.stderr)
        return 2
    without_gpus()
    failed = count = 0
    for argument in arguments:
        number, _, exercise = argument.partition(".")
        wanted = argument if exercise else None
        for heard in chain(*(hear(number, wanted) for hear in HEARINGS)):
            count += 1
            failed += not heard.as_expected
            print(f"{'ok  ' if heard.as_expected else 'FAIL'} {heard.exercise} {heard.who}")
            if heard.fault is not None:
                print(f"       at the check of {heard.fault.title}", *heard.fault.lines(), sep="\n")
    print(f"{count} tried, {failed} not as expected")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
