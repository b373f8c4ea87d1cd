"""A class from its submissions to its verdicts: read, grade what is new, remember, put in order."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from shared.errors import InputError
from solutions.grading.intake.lesson import lesson_folders, no_answers, read_lessons, take_answers
from solutions.grading.intake.notebook import Unreadable
from solutions.grading.intake.submissions import NOTHING, Submission
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Verdict
from solutions.grading.sandbox.run import Workspace
from solutions.grading.store import Store, key_of
from solutions.grading.texts import brief
from solutions.grading.verdicts import make_verdict

T = TypeVar("T")
OpenJudge = Callable[[Path], AbstractContextManager[Workspace]]


@dataclass(frozen=True)
class Task:
    """One student's answers to one lesson."""

    answers: Answers
    lesson: Lesson


@dataclass
class Outcomes:
    """Verdicts of a class; how many notebooks were run, were known, or failed in the grader."""

    verdicts: list[Verdict] = field(default_factory=list)
    num_run: int = 0
    num_known: int = 0
    num_failed: int = 0


def choose_lessons(
    course: Path, submissions: Iterable[Submission], numbers: Sequence[str] | None
) -> dict[str, Lesson]:
    """The lessons that are named, or else those that some submission holds and the course has.

    Raises InputError for unknown numbers, and when no submission holds a lesson.
    """
    if numbers is not None:
        return read_lessons(course, numbers)
    held = {number for each in submissions for number in (*each.notebooks, *each.problems)}
    if chosen := [number for number in lesson_folders(course) if number in held]:
        return read_lessons(course, chosen)
    reasons = [reason for each in submissions for reason in each.problems.values()]
    shown = "".join(f"\n  {reason}" for reason in reasons[:5])
    raise InputError(f"no submission holds a lesson; name some with --lessons{shown}")


def read_answers(submission: Submission, lesson: Lesson) -> Answers:
    """A student's answers to one lesson, or the reason why there are none."""
    student, number = submission.student, lesson.number
    if number in submission.problems:
        return no_answers(student, lesson, Outcome.UNREADABLE, submission.problems[number])
    if number in submission.notebooks:
        try:
            return take_answers(student, lesson, submission.notebooks[number].read())
        except Unreadable as reason:
            return no_answers(student, lesson, Outcome.UNREADABLE, str(reason))
    if (reason := submission.problems.get("", NOTHING)) != NOTHING:
        return no_answers(student, lesson, Outcome.UNREADABLE, reason)
    others = " ".join(sorted({*submission.notebooks, *submission.problems} - {""}))
    held = f"no notebook of lesson {number} (handed in: {others or 'none that can be read'})"
    return no_answers(student, lesson, Outcome.MISSING, submission.problems.get("", held))


@contextmanager
def in_parallel(
    jobs: int, judge: Workspace, items: Mapping[T, Sequence[Any]]
) -> Generator[Iterator[tuple[T, Future[Any]]]]:
    """Have each item's arguments graded in so many threads: items and results as they come."""
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="grading")
    try:
        futures = {pool.submit(judge.grade, *given): item for item, given in items.items()}
        yield ((futures.pop(future), future) for future in as_completed(futures))
    finally:
        judge.closing.set()  # after Ctrl-C: what still runs is ended at once
        pool.shutdown(cancel_futures=True)


def sort_out(
    tasks: Iterable[Task], store: Store, limits: Limits, *, again: bool
) -> tuple[Outcomes, dict[str, list[Task]]]:
    """The verdicts that need no run, and the tasks that do, those with equal answers together."""
    result = Outcomes()
    waiting: dict[str, list[Task]] = {}
    for task in tasks:
        key = key_of(task.answers, task.lesson, limits)
        known = None if again or not task.answers.cells else store.get(key, task.answers.student)
        if task.answers.cells and known is None:
            waiting.setdefault(key, []).append(task)
        else:
            result.num_known += known is not None
            result.verdicts += complete(task, known or [])
    return result, waiting


def grade_waiting(
    waiting: Mapping[str, list[Task]],
    judge: Workspace,
    store: Store,
    limits: Limits,
    *,
    jobs: int,
    result: Outcomes,
    tick: Callable[[], object],
) -> None:
    """Have equal answers judged once; add the verdicts to `result`, in the order they come.

    `tick` is called once for every task. When interrupted, whatever was finished is in the store.
    """
    items = {key: (same[0].answers, same[0].lesson, limits) for key, same in waiting.items()}
    with in_parallel(jobs, judge, items) as results:
        for key, future in results:
            error = future.exception()
            found = future.result() if error is None else _fault_of_ours(error)
            cells = waiting[key][0].answers.cells
            if isinstance(found, str):
                result.num_failed += 1
            elif not any(v.outcome is Outcome.UNREADABLE and v.exercise in cells for v in found):
                store.put(key, found)  # what could not even be started is tried again next time
            result.num_run += 1
            for task in waiting[key]:
                result.verdicts += complete(task, found)
                tick()


def _fault_of_ours(error: BaseException) -> str:
    """The reason of a row when the fault is the grader's, not the student's."""
    text = " ".join(str(error).split())[:200]
    return f"the grader failed ({type(error).__name__}: {text}): grade again with --again"


def complete(task: Task, found: list[Verdict] | str) -> list[Verdict]:
    """A verdict for every exercise: the judged ones, and the reason where nothing was judged."""
    judged = {each.exercise: each for each in found} if isinstance(found, list) else {}
    fallback = found if isinstance(found, str) else "the grader gave no verdict"
    verdicts = []
    for exercise in task.lesson.exercises:
        reason = task.answers.problems.get(exercise.id, (Outcome.UNREADABLE, fallback))
        if exercise.id in judged and exercise.id not in task.answers.problems:
            verdict = replace(judged[exercise.id], student=task.answers.student)
        else:
            verdict = make_verdict(task.answers, exercise, *reason)
        notes = "; ".join(task.answers.notes.get(exercise.id, ()))
        if notes and verdict.outcome not in (Outcome.RIGHT, Outcome.UNSOLVED):
            # It may be all there is to it: it comes before the NameError that follows from it.
            hint = brief(f"This answer {notes}. {verdict.hint}")
            verdict = replace(verdict, message=brief(f"{notes}; {verdict.message}"), hint=hint)
        verdicts.append(verdict)
    return verdicts
