"""Try a lesson's checks: the reference must pass, every known mistake must get its own words.

python -m shared.tools.checks NN [NN ...]
"""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from shared.checking import mistakes_in
from shared.course import fault_words, lesson_folder, load_checks, solution_module


@dataclass(frozen=True)
class Trial:
    """One candidate put before its exercise's checks; `says` is empty for the reference."""

    exercise: str
    says: str
    heard: str

    @property
    def as_expected(self) -> bool:
        """The reference heard nothing; a mistake heard its own words."""
        return self.heard_words(self.says) if self.says else not self.heard

    def heard_words(self, words: str) -> bool:
        """Whether the check said these words, wherever its lines break."""
        return " ".join(words.split()) in " ".join(self.heard.split())


def trials(number: str) -> Iterator[Trial]:
    """Run the reference and the mistakes of a lesson through its checks, exercise by exercise."""
    references = solution_module(number)
    assert references is not None, "trying the checks needs solutions/"
    module = importlib.import_module(f"solutions.mistakes.lesson{lesson_folder(number).name}")
    mistakes = mistakes_in(module)
    for id, checks in load_checks(number).items():
        fault = checks.first_fault(getattr(references, checks.name))
        yield Trial(id, "", fault_words(checks, fault) if fault else "")
        for each in mistakes:
            if each.id == id:
                fault = checks.first_fault(each.answer)
                yield Trial(id, each.says, fault_words(checks, fault) if fault else "")


def main(numbers: list[str]) -> int:
    """Print every trial; 1 when one did not go as expected, 2 without a lesson number."""
    if not numbers:
        print("usage: python -m shared.tools.checks NN [NN ...]", file=sys.stderr)
        return 2
    failed = 0
    for number in numbers:
        for trial in trials(number):
            failed += not trial.as_expected
            who = f"mistake {trial.says!r}" if trial.says else "reference"
            print(f"{'ok  ' if trial.as_expected else 'FAIL'} {trial.exercise} {who}")
            print("".join(f"       {line}\n" for line in trial.heard.splitlines()), end="")
    print(f"{failed} not as expected")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
