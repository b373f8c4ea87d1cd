"""Known wrong answers, and what the checks say to them: `python -m shared.exercises.mistakes NN`.

The reference must pass, and every mistake must hear its own words.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from shared.exercises.lessons import lesson_folder, load_checks, solution_module
from shared.exercises.wrong import Fault


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
    name = f"solutions.mistakes.lesson{lesson_folder(number).name}"
    return mistakes_in(importlib.import_module(name))


@dataclass(frozen=True)
class Heard:
    """What the checks said to one answer; `says` is what they must say, "" for the reference."""

    exercise: str
    says: str
    fault: Fault | None

    @property
    def as_expected(self) -> bool:
        """The reference heard nothing; a mistake heard its own words."""
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
    for each, checks in load_checks(number).items():
        if id in (None, each):
            yield Heard(each, "", checks.first_fault(getattr(references, checks.name)))


def hear_mistakes(number: str, id: str | None = None) -> Iterator[Heard]:
    """Put a lesson's mistakes, or one exercise's, before its checks."""
    checks = load_checks(number)
    for each in known_mistakes(number):
        if id in (None, each.id):
            yield Heard(each.id, each.says, checks[each.id].first_fault(each.answer))


def main(arguments: list[str]) -> int:
    """Print what every answer hears; 1 when one did not hear what it must, 2 without an argument.

    An argument is a lesson ("02") or an exercise ("02.4a").
    """
    if not arguments:
        print("usage: python -m shared.exercises.mistakes NN|NN.E [...]", file=sys.stderr)
        return 2
    failed = count = 0
    for argument in arguments:
        number, _, exercise = argument.partition(".")
        wanted = argument if exercise else None
        for heard in (*hear_references(number, wanted), *hear_mistakes(number, wanted)):
            count += 1
            failed += not heard.as_expected
            who = f"mistake {heard.says!r}" if heard.says else "reference"
            print(f"{'ok  ' if heard.as_expected else 'FAIL'} {heard.exercise} {who}")
            if heard.fault is not None:
                print(f"       at the check of {heard.fault.title}", *heard.fault.lines(), sep="\n")
    print(f"{count} tried, {failed} not as expected")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
