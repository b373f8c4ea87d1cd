"""What the terminal says at the end: the class in a few lines, and what needs an instructor."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from solutions.grading.reports.table import by_student
from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import show_points

MAX_LINES = 12
# From what is solved to what was not tried; the table has a column for each, the picture a colour.
GROUPS = {
    "right": (Outcome.RIGHT,),
    "partly": (Outcome.PARTLY,),
    "wrong": (Outcome.WRONG,),
    "not graded": (Outcome.STOPPED, Outcome.UNREADABLE),
    "not solved": (Outcome.UNSOLVED, Outcome.MISSING),
}


def summary(verdicts: Sequence[Verdict]) -> str:
    """A table of exercises, the points, what needs a look, and who could not be graded."""
    flagged = [f"{v.student}, {v.exercise}: {'; '.join(v.flags)}" for v in verdicts if v.flags]
    parts = [
        aligned([_row(these) for these in by_exercise(verdicts)]),
        _points(verdicts),
        _listed("needs a look", flagged),
        _listed("stopped, or cannot be graded", _ungraded(verdicts)),
        _listed("nothing of these lessons", _absent(verdicts)),
    ]
    return "\n\n".join(filter(None, parts))


def by_exercise(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """The class's verdicts, those of each exercise together."""
    found: dict[str, list[Verdict]] = {}
    for each in verdicts:
        found.setdefault(each.exercise, []).append(each)
    return list(found.values())


def _row(these: Sequence[Verdict]) -> dict[str, object]:
    """One exercise: how many students came out how, and the mean of their points."""
    outcomes = Counter(each.outcome for each in these)
    counts = {name: sum(outcomes[each] for each in group) for name, group in GROUPS.items()}
    mean = sum(each.points for each in these) / len(these)
    head = {"exercise": f"{these[0].exercise} {these[0].name}"}
    return {**head, **counts, "mean points": f"{mean:.2f} of {these[0].max}"}


def aligned(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as text in columns: the first to the left, the others to the right."""
    table = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    first, *widths = (max(map(len, column)) for column in zip(*table, strict=True))
    lines = []
    for head, *cells in table:
        right = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([head.ljust(first), *right]))
    return "\n".join(lines)


def _points(verdicts: Sequence[Verdict]) -> str:
    """The spread of the points over the students."""
    students = by_student(verdicts).values()
    most = sum(each.max for each in next(iter(students)))
    totals = [sum(each.points for each in theirs) for theirs in students]
    middle, low, high = (show_points(each(totals)) for each in (median, min, max))
    return f"students: {len(totals)}; points of {most}: median {middle}, from {low} to {high}"


def _ungraded(verdicts: Iterable[Verdict]) -> list[str]:
    """One line for each reason of a student, with the exercises that it took."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in verdicts:
        if each.outcome in GROUPS["not graded"] and not each.flags:
            reasons.setdefault((each.student, each.message), []).append(each.exercise)
    return [
        f"{student}, {id}{f' and {len(more)} more' if more else ''}: {reason}"
        for (student, reason), (id, *more) in reasons.items()
    ]


def _absent(verdicts: Iterable[Verdict]) -> list[str]:
    """One line for each student of whom there is no lesson at all, and why."""
    students = by_student(verdicts).items()
    nothing = [v for v in students if all(each.outcome is Outcome.MISSING for each in v[1])]
    return [f"{student}: {theirs[0].message}" for student, theirs in nothing]


def _listed(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    left = len(lines) - MAX_LINES
    more = [f"and {left} more, in grades.csv"] if left > 0 else []
    return "\n  ".join([f"{title}:", *lines[:MAX_LINES], *more])
