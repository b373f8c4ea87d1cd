"""What a check says: a fault as data, and the one place where it becomes text."""

import textwrap
from dataclasses import dataclass


class Wrong(AssertionError):
    """An answer is wrong, in four short texts: the mistake it looks like, expected, seen, hint."""

    def __init__(self, mistake: str = "", expected: str = "", seen: str = "", hint: str = ""):
        super().__init__(mistake, expected, seen, hint)  # so that it travels between ranks
        self.mistake, self.expected, self.seen, self.hint = mistake, expected, seen, hint

    def __str__(self) -> str:
        return self.mistake or f"expected {self.expected}, seen {self.seen}"


@dataclass(frozen=True)
class Fault:
    """The first check that failed: its title, what it said, how many of `total` passed before."""

    title: str
    passed: int
    total: int
    mistake: str = ""
    expected: str = ""
    seen: str = ""
    hint: str = ""

    @property
    def engine(self) -> str:
        """What of torch's does what is to be built by hand, where the check has seen that."""
        engine, by_engine, _ = self.mistake.partition(" does the work")
        return engine if by_engine else ""

    @property
    def in_short(self) -> str:
        """The recognised mistake; where there is none, what was expected and what was seen."""
        if self.mistake:
            return self.mistake
        expected = f"expected {self.expected}, " if self.expected else ""
        return f"{expected}seen {self.seen}"

    @property
    def where(self) -> str:
        """At which check, and how many have passed where any has."""
        before = f" ({self.passed} of {self.total} checks passed before it)" if self.passed else ""
        return f"at the check of {self.title}{before}"

    def lines(self) -> list[str]:
        """What a learner reads under the headline: the texts that are there, each labelled."""
        named = [
            ("looks like", self.mistake),
            ("expected", self.expected),
            ("seen", self.seen),
            ("hint", self.hint),
        ]
        return [_labelled(name, text) for name, text in named if text]


def _labelled(label: str, text: str) -> str:
    """A labelled text in lines that a notebook shows unbroken."""
    head, rest = f"  {label + ':':<12}", " " * 14
    return textwrap.fill(text, 96, initial_indent=head, subsequent_indent=rest)
