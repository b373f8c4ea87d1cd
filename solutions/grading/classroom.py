"""A class from its submissions to its verdicts: read, grade what is new, remember, put in order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from shared.errors import InputError
from solutions.grading.intake.lesson import lesson_folders, no_answers, read_lessons, take_answers
from solutions.grading.intake.notebook import Unreadable
from solutions.grading.intake.submissions import Submission
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Verdict
from solutions.grading.store import Store, key_of
from solutions.grading.texts import brief
from solutions.grading.verdicts import make_verdict


class Judge(Protocol):
    """Where answers are run: `solutions.grading.sandbox.run.Workspace`, or a stand-in in a test."""

    @property
    def promise(self) -> str:
        """What the terminal says of the walls around answers."""
        ...

    def grade(self, answers: Answers, lesson: Lesson, limits: Limits) -> list[Verdict]:
        """Verdicts for the exercises whose cells the answers hold; called from several threads."""
        ...


OpenJudge = Callable[..., AbstractContextManager[Judge]]


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
    chosen = [number for number in lesson_folders(course) if number in held]
    if not chosen:
        reasons = [reason for each in submissions for reason in each.problems.values()]
        shown = "".join(f"\n  {reason}" for reason in reasons[:5])
        raise InputError(f"no submission holds a lesson; name some with --lessons{shown}")
    return read_lessons(course, chosen)


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
    if "" in submission.problems:
        return no_answers(student, lesson, Outcome.MISSING, submission.problems[""])
    held = " ".join(submission.notebooks)
    reason = f"no notebook of lesson {number} (handed in: {held})"
    return no_answers(student, lesson, Outcome.MISSING, reason)


def equal_answers(tasks: Iterable[Task]) -> list[str]:
    """Who handed in the same cells to the letter, untouched ones apart: a line for each group."""
    same: dict[tuple[object, ...], list[str]] = {}
    for task in tasks:
        own = {id: c for id, c in task.answers.cells.items() if c != task.lesson.stubs[id]}
        if own:
            same.setdefault((task.lesson.number, *sorted(own.items())), []).append(
                task.answers.student
            )
    return [
        f"lesson {key[0]}: {', '.join(students)} (exercises: {len(key) - 1})"
        for key, students in same.items()
        if len(students) > 1
    ]


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
    judge: Judge,
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
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="grading")
    try:
        futures = {}
        for key, same in waiting.items():
            futures[pool.submit(judge.grade, same[0].answers, same[0].lesson, limits)] = key
        for future in as_completed(futures):
            key = futures.pop(future)
            error = future.exception()
            found = future.result() if error is None else describe(error)
            if isinstance(found, str):
                result.num_failed += 1
            elif not _given_up(found, waiting[key][0].answers):
                store.put(key, found)
            result.num_run += 1
            for task in waiting[key]:
                result.verdicts += complete(task, found)
                tick()
    finally:
        # Not waiting: after Ctrl-C the judge, closed next, ends what the threads wait for.
        pool.shutdown(wait=False, cancel_futures=True)


def _given_up(found: Sequence[Verdict], answers: Answers) -> bool:
    """Whether a notebook could not even be started: that is tried again in the next run."""
    unread = {each.exercise for each in found if each.outcome is Outcome.UNREADABLE}
    return bool(unread & set(answers.cells))


def describe(error: BaseException) -> str:
    """The reason of a row when the fault is the grader's, not the student's."""
    text = " ".join(str(error).split())[:200]
    return f"the grader failed ({type(error).__name__}: {text}): grade again with --again"


def complete(task: Task, found: list[Verdict] | str) -> list[Verdict]:
    """A verdict for every exercise: the judged ones, and the reason where nothing was judged."""
    judged = {each.exercise: each for each in found} if isinstance(found, list) else {}
    fallback = found if isinstance(found, str) else "the grader gave no verdict"
    verdicts = []
    for exercise in task.lesson.exercises:
        if exercise.id in task.answers.problems:
            verdict = make_verdict(task.answers, exercise, *task.answers.problems[exercise.id])
        elif exercise.id in judged:
            verdict = replace(judged[exercise.id], student=task.answers.student)
        else:
            verdict = make_verdict(task.answers, exercise, Outcome.UNREADABLE, fallback)
        verdicts.append(_with_notes(verdict, task.answers.notes.get(exercise.id, ())))
    return verdicts


def _with_notes(verdict: Verdict, notes: Sequence[str]) -> Verdict:
    """The verdict with what was noted of its exercise, where points were lost.

    It may be all there is to it, so it comes first: before the NameError that follows from it.
    """
    if not notes or verdict.outcome in (Outcome.RIGHT, Outcome.UNSOLVED):
        return verdict
    mine = "; ".join(notes)
    hint = verdict.hint or brief(f"This answer {mine}.")
    return replace(verdict, message=brief(f"{mine}; {verdict.message}"), hint=hint)
