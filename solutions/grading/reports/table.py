"""Grades as a table for a spreadsheet and as JSON for a program."""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import MAX_MESSAGE, brief, shortened, show_points

COLUMNS = ("student", "lesson", "exercise", "points", "max", "message")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute, or worse, run


def in_order(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """By student, lesson and exercise: "02.4b" comes before "02.10"."""

    def place(verdict: Verdict) -> tuple[Any, ...]:
        digits, letter = re.findall(r"\.(\d+)(.*)", verdict.exercise)[0]
        return verdict.student.casefold(), verdict.student, verdict.lesson, int(digits), letter

    return sorted(verdicts, key=place)


def write_csv(path: Path, verdicts: Iterable[Verdict]) -> None:
    """One row an exercise of a student, UTF-8; no cell is one that a spreadsheet would compute."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for each in in_order(verdicts):
        points = show_points(each.points)
        row = (each.student, each.lesson, each.exercise, points, str(each.max), reason(each))
        table.writerow([_defused(cell) for cell in row])
    replace_file(path, text.getvalue())


def reason(verdict: Verdict) -> str:
    """The message of a row: what was set by hand or needs a look, then what came out.

    In a row that is too long the former is cut, for the page has all of it.
    """
    head = f"needs a look: {'; '.join(verdict.flags)}" if verdict.flags else verdict.by_hand
    room = max(100, MAX_MESSAGE - len(verdict.message) - 2)
    return brief("; ".join(filter(None, (shortened(head, room), verdict.message))))


def write_json(path: Path, verdicts: Iterable[Verdict], meta: Mapping[str, Any]) -> None:
    """All that is known of every exercise, after `meta`."""
    content = {**meta, "verdicts": [asdict(each) for each in in_order(verdicts)]}
    replace_file(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_points(path: Path, verdicts: Sequence[Verdict]) -> None:
    """One row a student, as a learning platform takes it: the points of each lesson, and of all.

    A lesson of which nothing was handed in is an empty cell.
    """
    worth: dict[str, dict[str, int]] = {}
    students: dict[str, list[Verdict]] = {}
    for each in in_order(verdicts):
        worth.setdefault(each.lesson, {})[each.exercise] = each.max
        students.setdefault(each.student, []).append(each)
    full = {lesson: sum(points.values()) for lesson, points in sorted(worth.items())}
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    heads = [f"lesson {lesson} of {most}" for lesson, most in full.items()]
    table.writerow(["student", *heads, f"all of {sum(full.values())}"])
    for student, theirs in students.items():
        cells = [_points([v for v in theirs if v.lesson == lesson]) for lesson in full]
        table.writerow([_defused(student), *cells, show_points(sum(v.points for v in theirs))])
    replace_file(path, text.getvalue())


def _points(verdicts: Sequence[Verdict]) -> str:
    missing = all(each.outcome is Outcome.MISSING for each in verdicts)
    return "" if missing else show_points(sum(each.points for each in verdicts))


def replace_file(path: Path, text: str) -> None:
    """Write a file in one step: who reads it sees the old one or the new one."""
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text, encoding="utf-8", newline="")
    aside.replace(path)


def _defused(cell: str) -> str:
    return f"'{cell}" if cell.startswith(FORMULA) else cell
