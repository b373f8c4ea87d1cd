"""What the terminal says at the end: the class in a few lines, and what needs an instructor."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import plain, show_points

MAX_LINES = 12
UNGRADED = (Outcome.UNREADABLE, Outcome.STOPPED)


def summary(verdicts: Sequence[Verdict]) -> str:
    """A table of exercises, the points, what needs a look, and who could not be graded."""
    if not verdicts:
        return "nothing was graded"
    parts = [_exercises(verdicts), _points(verdicts)]
    flagged = [f"{_who(v)}: {'; '.join(v.flags)}" for v in verdicts if v.flags]
    parts.append(_listed("needs a look", flagged))
    parts.append(_listed("stopped, or cannot be graded", _ungraded(verdicts)))
    return "\n\n".join(part for part in parts if part)


def _who(verdict: Verdict) -> str:
    return f"{verdict.student}, {verdict.exercise}"


def _exercises(verdicts: Sequence[Verdict]) -> str:
    by_id: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_id.setdefault(verdict.exercise, []).append(verdict)
    rows = []
    for id, these in by_id.items():
        outcomes = Counter(v.outcome for v in these)
        first = these[0]
        mean = sum(v.points for v in these) / len(these)
        rows.append(
            {
                "exercise": f"{id} {first.name}",
                "right": outcomes[Outcome.RIGHT],
                "partly": outcomes[Outcome.PARTLY],
                "wrong": outcomes[Outcome.WRONG],
                "not graded": sum(outcomes[each] for each in UNGRADED),
                "not solved": outcomes[Outcome.UNSOLVED] + outcomes[Outcome.MISSING],
                "mean points": f"{mean:.2f} of {first.max}",
            }
        )
    return aligned(rows)


def aligned(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows as text in columns: the first to the left, the others to the right."""
    columns = list(rows[0])
    table = [columns, *([plain(str(row[column])) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def _points(verdicts: Sequence[Verdict]) -> str:
    """The spread of the points over the students."""
    totals: dict[str, float] = {}
    for verdict in verdicts:
        totals[verdict.student] = totals.get(verdict.student, 0.0) + verdict.points
    full = sum({v.exercise: v.max for v in verdicts}.values())
    low, high = (show_points(each(totals.values())) for each in (min, max))
    if len(totals) == 1:
        return f"{high} of {full} points"
    middle = show_points(median(totals.values()))
    return f"{len(totals)} students, {full} points: median {middle}, from {low} to {high}"


def _ungraded(verdicts: Iterable[Verdict]) -> list[str]:
    """One line for each reason of a student, with the exercises that it took."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if verdict.outcome in UNGRADED and not verdict.flags:
            reasons.setdefault((verdict.student, verdict.message), []).append(verdict.exercise)
    return [f"{who}, {_range(ids)}: {reason}" for (who, reason), ids in reasons.items()]


def _range(ids: Sequence[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more"


def _listed(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    shown = [f"  {' '.join(plain(line).split())}" for line in lines[:MAX_LINES]]
    left = len(lines) - MAX_LINES
    shown += [f"  and {left} more, in grades.csv"] if left > 0 else []
    return "\n".join([f"{title}:", *shown])
