"""A feedback page per student, and a page that lists the class for the instructor.

The pages need no other file and no network, follow the reader's dark or light setting, and print.
Jinja escapes everything on them: names and words come from submissions. What a check said becomes a
sentence and labelled rows; what holds for a whole lesson (no notebook) is said once.
"""

import base64
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import jinja2

from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import as_sentence, plain, show_points

KINDS = {  # the colours of outcomes; what is not here was tried, and is wrong
    Outcome.RIGHT: "right",
    Outcome.PARTLY: "partly",
    Outcome.UNSOLVED: "none",
    Outcome.MISSING: "none",
}
MAX_MISTAKES = 12
# The instructor's page, and names that Windows keeps for devices, whatever the ending.
TAKEN = re.compile(r"index|con|prn|aux|nul|(com|lpt)\d", re.IGNORECASE)


class Card(NamedTuple):
    """One exercise on a page: what its check said as labelled rows, `looks` for the instructor."""

    verdict: Verdict
    kind: str
    text: str
    rows: Sequence[tuple[str, str]]
    hint: str
    looks: str

    @property
    def title(self) -> str:
        """The exercise's number and name."""
        return plain(f"{self.verdict.exercise} {self.verdict.name}")


class LessonPart(NamedTuple):
    """One lesson on a page; `common` is the reason that all its exercises share, "" if none."""

    number: str
    title: str
    cards: Sequence[Card]
    points: float
    max: int
    common: str


def write_feedback(
    folder: Path,
    students: Mapping[str, Sequence[Verdict]],
    *,
    titles: Mapping[str, str] | None = None,
    picture: Path | None = None,
) -> dict[str, Path]:
    """Write NAME.html for each student, and index.html for the instructor.

    `titles` has the lessons' folders by number ("02": "02_attention"), for the headings; the
    picture of the class is put into the index. Returns each student's page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    templates = _environment()
    paths = {who: folder / f"{name}.html" for who, name in page_names(students).items()}
    rows, lessons = [], {}
    for who, verdicts in students.items():
        parts = make_parts(verdicts, titles or {})
        page = {"student": plain(who), "lessons": parts, "headline": headline(verdicts)}
        text = templates.get_template("feedback.html.jinja").render(page, footer=_footer(parts))
        _write(paths[who], text)
        lessons |= {part.number: part.title for part in parts}
        by_lesson = {part.number: part for part in parts if not _missing(part)}
        rows.append(
            {**page, "link": paths[who].name, "by_lesson": by_lesson, "notes": _notes(parts)}
        )
    index = templates.get_template("index.html.jinja").render(
        headline=f"Students: {len(rows)}. Lessons: {', '.join(sorted(lessons))}.",
        lessons=sorted(lessons.items()),
        rows=rows,
        mistakes=most_frequent([v for verdicts in students.values() for v in verdicts]),
        picture=base64.b64encode(picture.read_bytes()).decode("ascii") if picture else "",
    )
    _write(folder / "index.html", index)
    return paths


def page_names(students: Mapping[str, Sequence[Verdict]] | Sequence[str]) -> dict[str, str]:
    """A file name for each student: safe on every system, unique where case does not count.

    Letters lose their accents, everything else becomes "-". A name that lost more than spaces by
    that, or that meets another one, gets a piece of its digest.
    """
    names = {who: _safe(who) for who in students}
    folded = Counter(name.casefold() for name in names.values())
    return {
        who: f"{name}-{hashlib.sha256(who.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
        if not _is_plain(who) or folded[name.casefold()] > 1
        else name
        for who, name in names.items()
    }


def _safe(student: str) -> str:
    letters = unicodedata.normalize("NFKD", student).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9]+", "-", letters).strip("-")[:60] or "student"


def _is_plain(student: str) -> bool:
    """Whether the file name says the student's name in full."""
    ordinary = re.fullmatch(r"[A-Za-z0-9]+([ _.-][A-Za-z0-9]+)*", student) is not None
    return ordinary and len(student) <= 60 and not TAKEN.fullmatch(student)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"points": show_points, "plain": plain}
    return environment


def _write(path: Path, text: str) -> None:
    """UTF-8 and \\n everywhere, so that the bytes are the same on every system."""
    path.write_bytes(text.encode("utf-8", "replace"))


def headline(verdicts: Sequence[Verdict]) -> str:
    """A student's result in one line."""
    right = sum(each.outcome is Outcome.RIGHT for each in verdicts)
    points, most = sum(each.points for each in verdicts), sum(each.max for each in verdicts)
    share = f"{show_points(points)} of {most} points"
    return f"{share}, {right} of {len(verdicts)} exercises right"


def _footer(parts: Sequence[LessonPart]) -> str:
    """Sentences on how points come about, for the outcomes that are on this page."""
    kinds = Counter(card.kind for part in parts for card in part.cards)
    notes = []
    if kinds["partly"]:
        notes.append("An exercise has several checks and gives points for each one that passes.")
    if kinds["partly"] + kinds["wrong"] > 1:
        notes.append("Mend exercises in order: a later one may call an earlier one.")
    return " ".join(notes)


def _missing(part: LessonPart) -> bool:
    return all(card.verdict.outcome is Outcome.MISSING for card in part.cards)


def _notes(parts: Sequence[LessonPart]) -> list[str]:
    """What an instructor should see of a student: flags, and what could not be graded."""
    notes = []
    for part in parts:
        if part.common:
            notes.append(f"lesson {part.number}: {part.common}")
            continue
        for card in part.cards:
            ungraded = card.verdict.outcome in (Outcome.STOPPED, Outcome.UNREADABLE)
            if said := card.looks or (card.text if ungraded else ""):
                notes.append(f"{card.verdict.exercise}: {said}")
    return notes


def most_frequent(verdicts: Sequence[Verdict]) -> list[tuple[str, str, int]]:
    """The mistakes most often recognised, (exercise, its words, students); ties by exercise.

    Where at least three were made by several students, those that one made are left out.
    """
    said = ((v.exercise, " ".join(plain(v.mistake).split())) for v in verdicts if v.mistake)
    ordered = sorted(
        ((*key, n) for key, n in Counter(said).items()), key=lambda row: (-row[2], row)
    )
    repeated = [row for row in ordered if row[2] > 1]
    return (repeated if len(repeated) >= 3 else ordered)[:MAX_MISTAKES]


def make_parts(verdicts: Sequence[Verdict], titles: Mapping[str, str]) -> list[LessonPart]:
    """A student's lessons; a reason that all exercises of one share stands there once."""
    parts = []
    for number, group in groupby(sorted(verdicts, key=lambda v: v.lesson), lambda v: v.lesson):
        found = list(group)
        reasons = {(each.outcome, each.message, each.flags) for each in found}
        outcome, message, flags = next(iter(reasons))
        shared = len(found) > len(reasons) == 1 and not flags
        shared = shared and outcome in (Outcome.MISSING, Outcome.UNREADABLE)
        name = titles.get(number, "").removeprefix(f"{number}_").replace("_", " ")
        parts.append(
            LessonPart(
                number,
                f"Lesson {number}: {name}" if name else f"Lesson {number}",
                [make_card(each) for each in found],
                sum(each.points for each in found),
                sum(each.max for each in found),
                as_sentence(plain(message)) if shared else "",
            )
        )
    return parts


def make_card(verdict: Verdict) -> Card:
    """What the page shows of a verdict."""
    text = _what_came_out(verdict)
    if verdict.by_hand:
        text = f"The checks said: {text}" if verdict.title else ""
        text = f"{as_sentence(plain(verdict.by_hand))} {text}".strip()
    rows = {
        "looks like": verdict.mistake,
        "expected": verdict.expected,
        "seen": verdict.seen,
        "also not right": "; ".join(verdict.also),
    }
    return Card(
        verdict,
        kind=KINDS.get(verdict.outcome, "wrong"),
        text=text,
        rows=[(label, plain(said)) for label, said in rows.items() if said],
        hint="" if verdict.outcome is Outcome.RIGHT else as_sentence(plain(verdict.hint)),
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
