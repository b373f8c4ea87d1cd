"""Points that an instructor sets by hand: a table beside the submissions, read at every run."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shared.errors import InputError
from solutions.grading.results import Lesson, Outcome, Verdict
from solutions.grading.texts import brief, show_points

COLUMNS = ("student", "exercise", "points", "why")


@dataclass(frozen=True)
class Correction:
    """What an exercise is worth in spite of the checks, and why."""

    points: float
    why: str


Key = tuple[str, str]  # student, exercise


def read_corrections(
    path: Path, students: Iterable[str], lessons: Mapping[str, Lesson]
) -> dict[Key, Correction]:
    """The corrections in a CSV file with the columns student, exercise, points, why.

    Raises InputError, with the line, for a student, an exercise or points that cannot be.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # Excel puts a mark in front
            table = csv.DictReader(file)
            head = tuple(table.fieldnames or ())
            rows = [(table.line_num, row) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--corrections {path} cannot be read: {error}") from None
    if head != COLUMNS:
        raise InputError(
            f"--corrections {path} begins with {','.join(head)!r}:"
            f" its first line must be {','.join(COLUMNS)}"
        )
    most = {each.id: each.points for lesson in lessons.values() for each in lesson.exercises}
    known = set(students)
    found: dict[Key, Correction] = {}
    for line, row in rows:
        key, made = (row["student"] or "", row["exercise"] or ""), _read(row, known, most)
        if isinstance(made, Correction) and key in found:
            made = f"{key[0]}, {key[1]} is there twice"
        if isinstance(made, str):
            raise InputError(f"--corrections {path}, line {line}: {made}")
        found[key] = made
    return found


def _read(
    row: Mapping[str, str | None], students: set[str], most: Mapping[str, int]
) -> Correction | str:
    """One row, or what is wrong with it."""
    student, exercise, points, why = (row[name] or "" for name in COLUMNS)
    if student not in students:
        return f"there is no student {student!r}: write the name as in grades.csv"
    if exercise not in most:
        return f"there is no exercise {exercise!r} in the lessons that are graded"
    if None in row:
        return "more than four cells: put quotes around a text with commas"
    try:
        value = float(points)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most[exercise]:
        return f"points must be a number from 0 to {most[exercise]}, got {points!r}"
    return Correction(value, brief(why)) if why.strip() else "say why: students read it"


def correct(
    verdicts: Iterable[Verdict], corrections: Mapping[Key, Correction]
) -> Sequence[Verdict]:
    """The verdicts with the points set by hand; their flags count as looked at."""
    return [
        _corrected(each, corrections[each.student, each.exercise])
        if (each.student, each.exercise) in corrections
        else each
        for each in verdicts
    ]


def _corrected(verdict: Verdict, correction: Correction) -> Verdict:
    points = correction.points
    outcome = Outcome.PARTLY if points else Outcome.WRONG
    outcome = Outcome.RIGHT if points == verdict.max else outcome
    by_hand = f"points set by hand (the checks gave {show_points(verdict.points)})"
    return replace(
        verdict,
        points=round(points, 2),
        outcome=verdict.outcome if points == verdict.points else outcome,
        flags=(),
        by_hand=f"{by_hand}: {correction.why}",
    )
