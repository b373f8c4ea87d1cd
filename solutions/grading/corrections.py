"""Points that an instructor sets by hand: a table beside the submissions, read at every run."""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shared.errors import InputError
from solutions.grading.results import Lesson, Outcome, Verdict
from solutions.grading.texts import as_cell, brief, decoded, show_points

COLUMNS = ("student", "exercise", "points", "why")


class Correction(NamedTuple):
    """What an exercise is worth in spite of the checks, and why."""

    points: float
    why: str


Corrections = Mapping[tuple[str, str], Correction]  # by student and exercise


def read_corrections(
    path: Path, students: Iterable[str], lessons: Mapping[str, Lesson]
) -> Corrections:
    """The corrections in a CSV file with the columns student, exercise, points, why.

    As a spreadsheet saves it: UTF-8 or Windows' own letters, semicolons with commas in numbers.
    Raises InputError, with the line, for a student, an exercise or points that cannot be.
    """
    most = {each.id: each.points for lesson in lessons.values() for each in lesson.exercises}
    known = {written: each for each in students for written in (each, as_cell(each))}
    found: dict[tuple[str, str], Correction] = {}
    try:
        text = decoded(path.read_bytes())
        german = text.startswith(";".join(COLUMNS))
        lines = io.StringIO(text, newline="")  # a quote that is open would hide rows: strict
        table = csv.reader(lines, strict=True, delimiter=";" if german else ",")
        if (head := tuple(next(table, ()))) != COLUMNS:
            raise InputError(f"begins with {','.join(head)!r}, not with {','.join(COLUMNS)!r}")
        for cells in filter(None, table):
            if german and len(cells) == len(COLUMNS):
                cells[2] = cells[2].replace(",", ".")
            if problem := _problem(cells, known, most, found):
                raise InputError(f"line {table.line_num}: {problem}")
            written, exercise, points, why = cells
            found[known[written], exercise] = Correction(round(float(points), 2), brief(why))
    except InputError as error:
        raise InputError(f"--corrections {path}: {error}") from None
    except (OSError, csv.Error) as error:
        raise InputError(f"--corrections {path} cannot be read: {error}") from None
    return found


def no_longer_named(grades: Path, corrections: Corrections) -> list[str]:
    """What the last run into this folder had set by hand, and this one does not name."""
    try:
        before = json.loads(grades.read_text(encoding="utf-8"))["verdicts"]
        were = {(v["student"], v["exercise"]) for v in before if v["by_hand"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [f"{student}, {exercise}" for student, exercise in sorted(were - corrections.keys())]


def _problem(
    cells: list[str], students: Mapping[str, str], most: Mapping[str, int], before: Corrections
) -> str:
    """What is wrong with a row; "" if nothing is."""
    if len(cells) != len(COLUMNS):
        return f"there are {len(cells)} cells, not 4: put quotes around a text with commas"
    student, exercise, points, why = cells
    if student not in students:
        return f"there is no student {student!r}: write the name as in grades.csv"
    if exercise not in most:
        return f"there is no exercise {exercise!r} in the lessons that are graded"
    if (students[student], exercise) in before:
        return f"{student}, {exercise} is there twice"
    try:
        possible = 0 <= float(points) <= most[exercise]
    except ValueError:
        possible = False
    if not possible:
        return f"points must be a number from 0 to {most[exercise]}, got {points!r}"
    return "" if why.strip() else "say why: students read it"


def correct(verdicts: Iterable[Verdict], corrections: Corrections) -> list[Verdict]:
    """The verdicts with the points set by hand; their flags count as looked at."""
    corrected = []
    for verdict in verdicts:
        if by_hand := corrections.get((verdict.student, verdict.exercise)):
            points, outcome = by_hand.points, verdict.outcome
            if points or outcome in (Outcome.RIGHT, Outcome.PARTLY):
                outcome = {0: Outcome.WRONG, verdict.max: Outcome.RIGHT}.get(points, Outcome.PARTLY)
            said = f"points set by hand (before: {show_points(verdict.points)})"
            verdict = replace(
                verdict,
                points=points,
                outcome=outcome,
                flags=(),
                by_hand=f"{said}: {by_hand.why}",
            )
        corrected.append(verdict)
    return corrected
