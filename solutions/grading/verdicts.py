"""How a verdict is made: its points from the checks that passed, its texts cleaned one by one."""

from collections.abc import Iterable, Mapping

from solutions.grading.results import Answers, Exercise, Outcome, Stop, Verdict
from solutions.grading.texts import brief, clean


def make_verdict(
    answers: Answers,
    exercise: Exercise,
    outcome: Outcome,
    message: str,
    *,
    title: str = "",
    mistake: str = "",
    expected: str = "",
    seen: str = "",
    hint: str = "",
    also: Iterable[str] = (),
    passed: int = 0,
    total: int = 0,
    for_nothing: int = 0,
    stop: Stop | None = None,
    flags: Iterable[str] = (),
    paths: Mapping[str, str] | None = None,
) -> Verdict:
    """A verdict on one exercise; `paths` are names for folders, as in `clean`.

    Points are the share of checks that passed, without those that pass `for_nothing`. What is
    flagged has none until an instructor says otherwise.
    """
    flags = tuple(brief(flag, paths) for flag in flags)
    counted = 1.0 if outcome is Outcome.RIGHT else 0.0
    if outcome is Outcome.PARTLY and total > for_nothing:
        counted = max(0, passed - for_nothing) / (total - for_nothing)
    return Verdict(
        student=answers.student,
        lesson=answers.lesson,
        exercise=exercise.id,
        name=exercise.name,
        points=0.0 if flags else round(exercise.points * counted, 2),
        max=exercise.points,
        outcome=outcome,
        message=brief(message, paths),
        title=clean(title, paths),
        mistake=clean(mistake, paths),
        expected=clean(expected, paths),
        seen=clean(seen, paths),
        hint=clean(hint, paths),
        also=tuple(clean(each, paths) for each in also),
        passed=passed,
        total=total,
        stop=stop,
        flags=flags,
    )
