"""What stands on a student's feedback page, before it is HTML or Markdown.

What a check said becomes a sentence and labelled rows, and what holds for a whole lesson (no
notebook, nothing solved) is said once and not at each exercise.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import TURNING, show_points

KINDS = {
    Outcome.RIGHT: "right",
    Outcome.PARTLY: "partly",
    Outcome.WRONG: "wrong",
    Outcome.STOPPED: "wrong",
    Outcome.UNREADABLE: "wrong",
    Outcome.UNSOLVED: "none",
    Outcome.MISSING: "none",
}


@dataclass(frozen=True)
class Card:
    """One exercise on the page.

    `kind` is the colour's name, `label` the outcome in words; `rows` are labels with what the check
    said; `looks` is what an instructor has to look at, "" if nothing.
    """

    exercise: str
    name: str
    points: float
    max: int
    kind: str
    label: str
    text: str
    rows: Sequence[tuple[str, str]]
    hint: str
    looks: str

    @property
    def title(self) -> str:
        """The exercise's number and name."""
        return f"{self.exercise} {self.name}"


@dataclass(frozen=True)
class LessonPart:
    """One lesson on the page; `common` is the reason that all its exercises share, "" if none."""

    number: str
    title: str
    cards: Sequence[Card]
    common: str

    @property
    def points(self) -> float:
        """Points in this lesson."""
        return sum(card.points for card in self.cards)

    @property
    def max(self) -> int:
        """The most points that could be had."""
        return sum(card.max for card in self.cards)

    @property
    def num_right(self) -> int:
        """Exercises with all their points."""
        return sum(card.kind == "right" for card in self.cards)

    @property
    def missing(self) -> bool:
        """Whether nothing was handed in."""
        return all(card.label == Outcome.MISSING for card in self.cards)


@dataclass(frozen=True)
class Page:
    """The feedback for one student: their name and a part for each lesson."""

    student: str
    lessons: Sequence[LessonPart]

    @property
    def points(self) -> float:
        """Points in all lessons."""
        return sum(lesson.points for lesson in self.lessons)

    @property
    def max(self) -> int:
        """The most points that could be had."""
        return sum(lesson.max for lesson in self.lessons)

    @property
    def headline(self) -> str:
        """The result in one line."""
        cards = [card for lesson in self.lessons for card in lesson.cards]
        right = sum(card.kind == "right" for card in cards)
        share = f"{show_points(self.points)} of {self.max} points"
        return f"{share}, {right} of {len(cards)} exercises right"

    @property
    def footer(self) -> str:
        """Sentences on how points come about, for the outcomes that are on this page."""
        kinds = [card.kind for lesson in self.lessons for card in lesson.cards]
        notes = []
        if "partly" in kinds:
            notes.append(
                "An exercise has several checks and gives points for each one that passes."
            )
        if sum(kind in ("partly", "wrong") for kind in kinds) > 1:
            notes.append("Mend exercises in order: a later one may call an earlier one.")
        return " ".join(notes)


def make_page(student: str, verdicts: Sequence[Verdict], titles: Mapping[str, str]) -> Page:
    """The page with a student's verdicts; `titles` has the name of a lesson by its number."""
    by_lesson: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_lesson.setdefault(verdict.lesson, []).append(verdict)
    parts = [_part(number, found, titles) for number, found in sorted(by_lesson.items())]
    return Page(plain(student), parts)


def _part(number: str, verdicts: Sequence[Verdict], titles: Mapping[str, str]) -> LessonPart:
    """The part of one lesson; a reason that all its exercises share stands there once."""
    first = verdicts[0]
    shared = len(verdicts) > 1 and all(
        (v.outcome, v.message, v.flags) == (first.outcome, first.message, ())
        and v.outcome in (Outcome.MISSING, Outcome.UNREADABLE)
        for v in verdicts
    )
    title = titles.get(number, "").removeprefix(f"{number}_").replace("_", " ")
    return LessonPart(
        number,
        f"Lesson {number}: {title}" if title else f"Lesson {number}",
        [make_card(each) for each in verdicts],
        as_sentence(plain(first.message)) if shared else "",
    )


def make_card(verdict: Verdict) -> Card:
    """What the page shows of a verdict."""
    text = _what_came_out(verdict)
    if verdict.by_hand:
        text = f"The checks said: {text}" if verdict.title else ""
        text = f"{as_sentence(plain(verdict.by_hand))} {text}".strip()
    rows = (
        ("looks like", verdict.mistake),
        ("expected", verdict.expected),
        ("seen", verdict.seen),
        ("also not right", "; ".join(verdict.also)),
    )
    solved = verdict.outcome is Outcome.RIGHT
    return Card(
        exercise=plain(verdict.exercise),
        name=plain(verdict.name),
        points=verdict.points,
        max=verdict.max,
        kind=KINDS[verdict.outcome],
        label=str(verdict.outcome),
        text=text,
        rows=[(label, plain(said)) for label, said in rows if said],
        hint="" if solved else as_sentence(plain(verdict.hint)),
        looks=as_sentence("; ".join(map(plain, verdict.flags))),
    )


def _what_came_out(verdict: Verdict) -> str:
    """The outcome in sentences: where the checks failed and how many passed, or the reason."""
    passed, total = verdict.passed, verdict.total
    if verdict.outcome is Outcome.UNSOLVED:
        return ""  # the label says it
    if total and passed == total:
        all_of_them = {1: "Its check", 2: "Both checks"}.get(total, f"All {total} checks")
        return f"{all_of_them} passed."
    if verdict.title:
        share = f" {passed} of {total} checks passed." if total > 1 else ""
        return f"Not right yet, at the check of {plain(verdict.title)}.{share}"
    return as_sentence(plain(verdict.message))


def plain(text: str) -> str:
    """Text without what a page, a terminal or a file name could stumble over.

    Line breaks stay. Control characters, lone surrogates and marks that turn the direction of
    writing become a replacement character.
    """
    text = text.replace("\r\n", "\n").replace("\t", " ")
    return "".join(
        "\ufffd" if c in TURNING or (c != "\n" and unicodedata.category(c) in ("Cc", "Cs")) else c
        for c in text
    )


def as_sentence(text: str) -> str:
    """The text with a capital first and a full stop last, unless that would change code."""
    text = text.strip()
    if re.match(r"[a-z]{2,}[,:]? [a-z0-9(]", text):
        text = text[0].upper() + text[1:]
    return f"{text}." if " " in text and text[-1].isalnum() else text
