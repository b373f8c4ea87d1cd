"""Grades as a table for a spreadsheet and as JSON for a program."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from solutions.grading.results import Outcome, Verdict
from solutions.grading.roster import Person, Roster
from solutions.grading.texts import MAX_MESSAGE, as_cell, brief, shortened, show_points

COLUMNS = ("student", "lesson", "exercise", "points", "max", "message")
# Of points.csv, and what a person has there.
WITH_ROSTER = {"student": "name", "id": "id", "email": "email"}
CANVAS = {"Student": "name", "ID": "id", "SIS Login ID": "login", "Section": "section"}


def in_order(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """By student and lesson; the exercises of a lesson stay in the order in which they come."""
    return sorted(verdicts, key=lambda each: (each.student.casefold(), each.student, each.lesson))


def by_lesson(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """One student's verdicts, those of each lesson together."""
    return {lesson: list(own) for lesson, own in groupby(verdicts, key=lambda each: each.lesson)}


def by_student(verdicts: Iterable[Verdict]) -> dict[str, list[Verdict]]:
    """Verdicts that are in order, those of each student together."""
    return {student: list(own) for student, own in groupby(verdicts, key=lambda each: each.student)}


def write_csv(path: Path, verdicts: Iterable[Verdict]) -> None:
    """One row an exercise of a student."""
    rows = [
        (v.student, v.lesson, v.exercise, show_points(v.points), str(v.max), reason(v))
        for v in verdicts
    ]
    _write_table(path, [COLUMNS, *rows])


def reason(verdict: Verdict) -> str:
    """The message of a row: what was set by hand or needs a look, then what came out.

    In a row that is too long the former is cut, for the page has all of it.
    """
    head = f"needs a look: {'; '.join(verdict.flags)}" if verdict.flags else verdict.by_hand
    room = max(100, MAX_MESSAGE - len(verdict.message) - 2)
    return brief("; ".join(filter(None, (shortened(head, room), verdict.message))))


def write_points(path: Path, verdicts: Iterable[Verdict], roster: Roster | None = None) -> None:
    """One row a student, as a learning platform takes it: the points of each lesson, and of all.

    A lesson of which nothing was handed in is an empty cell. With a roster each row has the
    person's name, id and address, and who handed in nothing has a row as well. Where the roster is
    Canvas's gradebook, the columns are those that its import asks for.
    """
    students, roster = by_student(verdicts), roster or {}
    canvas = any(person.section for person in roster.values())
    columns = CANVAS if canvas else WITH_ROSTER if roster else {"student": "name"}
    lessons = by_lesson(next(iter(students.values()), ()))  # everybody has the same ones
    worth = {lesson: sum(each.max for each in own) for lesson, own in lessons.items()}
    all_of = "Final Points" if canvas else f"all of {sum(worth.values())}"  # no assignment there
    heads = [*columns, *(f"lesson {lesson} of {most}" for lesson, most in worth.items()), all_of]
    possible = ["Points Possible", *[""] * (len(columns) - 1), *map(str, worth.values()), ""]
    rows = [
        [*_who(called, roster, columns), *_numbers(students.get(called, ()), len(worth))]
        for called in {**students, **roster}
    ]
    rows.sort(key=lambda row: row[0].casefold())
    _write_table(path, [heads, *[possible] * canvas, *rows])


def _who(called: str, roster: Roster, columns: Mapping[str, str]) -> list[str]:
    person = roster.get(called, Person(called))
    return [getattr(person, each) for each in columns.values()]


def _numbers(theirs: Iterable[Verdict], num_lessons: int) -> list[str]:
    """A student's points, lesson by lesson and in all; nothing for who handed in nothing."""
    lessons = by_lesson(theirs)
    if not lessons:
        return [""] * (num_lessons + 1)
    total = sum(each.points for own in lessons.values() for each in own)
    return [*map(_points, lessons.values()), show_points(total)]


def _points(verdicts: Sequence[Verdict]) -> str:
    missing = all(each.outcome is Outcome.MISSING for each in verdicts)
    return "" if missing else show_points(sum(each.points for each in verdicts))


def write_json(path: Path, verdicts: Iterable[Verdict], meta: Mapping[str, Any]) -> None:
    """All that is known of every exercise, after `meta`."""
    content = {**meta, "verdicts": [asdict(each) for each in verdicts]}
    replace_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _write_table(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """A CSV file, UTF-8; no cell is one that a spreadsheet would compute."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    for row in rows:
        table.writerow(map(as_cell, row))
    replace_file(path, f"\ufeff{text.getvalue()}")  # Excel takes a table without this for ANSI


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step: who reads it sees the old one or the new one."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text, encoding="utf-8", newline="")
    aside.replace(path)
