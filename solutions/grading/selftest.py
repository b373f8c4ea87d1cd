"""The grader tried on the known answers: `python -m solutions.grade --self-test [--lessons 01]`.

References must get full marks and stubs none; right answers in another style (solutions/
alternatives) full marks; every wrong answer of solutions/mistakes must lose points and hear its own
words. None may be flagged, but for an engine that does the exercise itself. References and stubs
are handed in as a student would, typed into the lesson's notebook; the others are judged behind
the references, all answers to an exercise in one sandbox.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from solutions.grading.classroom import Judge, OpenJudge
from solutions.grading.intake.answer_cells import AnswerCells, hand_in
from solutions.grading.intake.lesson import read_lessons, take_answers
from solutions.grading.reports.summary import aligned
from solutions.grading.results import Answers, Lesson, Limits, Outcome, Verdict
from solutions.grading.sandbox.run import Workspace

KINDS = ("reference", "stub", "alternative", "mistake")


@dataclass(frozen=True)
class Due:
    """What must come of one answer; a mistake must hear `says`."""

    lesson: str
    kind: str
    title: str
    says: str = ""

    def complaint(self, verdict: Verdict) -> str:
        """What is not as it must be in this verdict; "" when all is."""
        got = f"{self.title} has {verdict.points} of {verdict.max} ({verdict.message})"
        flags = [flag for flag in verdict.flags if not flag.endswith("the exercise itself")]
        if flags or (verdict.flags and self.kind != "mistake"):
            return f"{self.title} is flagged: {'; '.join(verdict.flags)}"
        if self.kind == "stub":
            untouched = verdict.outcome is Outcome.UNSOLVED and verdict.points == 0
            return "" if untouched else got
        if self.kind != "mistake":
            right = verdict.outcome is Outcome.RIGHT and verdict.points == verdict.max
            return "" if right else got
        if not 0 <= verdict.points < verdict.max:
            return f"{got} in spite of the mistake"
        texts = verdict.mistake, verdict.expected, verdict.seen, verdict.hint
        heard = any(self.says in text for text in texts)
        return "" if heard else f"{self.title} heard other words: {texts}"


@dataclass(frozen=True)
class Try:
    """Answers that are graded together, and what is due for each exercise of the lesson."""

    answers: Answers
    lesson: Lesson
    due: Mapping[str, Due]

    def complaints(self, verdicts: Sequence[Verdict]) -> dict[Due, str]:
        """What is wrong with each of the verdicts, "" for nothing."""
        by_id = {each.exercise: each for each in verdicts}
        return {
            due: due.complaint(by_id[id]) if id in by_id else f"{due.title} has no verdict"
            for id, due in self.due.items()
        }


def tries(course: Path, lesson: Lesson, most: int | None = None) -> Iterator[Try]:
    """All known answers to a lesson, `most` alternatives and mistakes of each exercise."""
    known = AnswerCells(course, lesson)
    pristine = (course / "lessons" / lesson.folder / "lesson.ipynb").read_bytes()
    for kind, cells in (("reference", known.references), ("stub", {})):
        answers = take_answers("self-test", lesson, hand_in(pristine, cells))
        due = {e.id: Due(lesson.number, kind, f"{e.id} {kind}") for e in lesson.exercises}
        yield Try(answers, lesson, due)
    for place, exercise in enumerate(lesson.exercises):
        cells: dict[str, str] = {}
        due = {}
        for number, cell in enumerate(known.alternatives.get(exercise.id, [])[:most], 1):
            id = f"{exercise.id} alternative {number}"
            cells[id], due[id] = cell, Due(lesson.number, "alternative", id)
        wrong = [each for each in known.mistakes if each.exercise == exercise.id][:most]
        for number, each in enumerate(wrong, 1):
            id, title = f"{exercise.id} mistake {number}", f"{exercise.id} mistake {each.says!r}"
            cells[id], due[id] = each.cell, Due(lesson.number, "mistake", title, each.says)
        others = lesson.exercises[:place]
        further = tuple(replace(exercise, id=id, of=exercise.id) for id in cells)
        stubs = {**known.references, **dict.fromkeys(cells, "")}
        reason = Outcome.MISSING, "it stands in front of the answers that are tried"
        answers = Answers("self-test", lesson.number, cells, {e.id: reason for e in others})
        yield Try(answers, replace(lesson, exercises=(*others, *further), stubs=stubs), due)


def self_test(
    course: Path,
    jobs: int,
    limits: Limits,
    lessons: Sequence[str] | None,
    *,
    most: int | None = None,
    open_judge: OpenJudge = Workspace,
) -> bool:
    """Try the lessons (all by default); print a table and what is not as it must be.

    Returns whether everything was. Raises InputError for a lesson that the course does not have.
    """
    chosen = read_lessons(course, lessons)
    with open_judge(course, jobs) as judge:
        began = time.monotonic()
        todo = [each for lesson in chosen.values() for each in tries(course, lesson, most)]
        complaints = _run(todo, judge, jobs, limits)
    _report(complaints, time.monotonic() - began)
    return not any(complaints.values())


def _run(todo: Sequence[Try], judge: Judge, jobs: int, limits: Limits) -> dict[Due, str]:
    """What is wrong with each answer, "" for nothing, told as it comes."""
    complaints: dict[Due, str] = {}
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="self_test")
    total = sum(len(each.due) for each in todo)
    try:
        futures = {
            pool.submit(judge.grade, each.answers, each.lesson, limits): each for each in todo
        }
        with tqdm(total=total, desc="self test", unit="answer", disable=None) as bar:
            for future in as_completed(futures):
                found = futures[future].complaints(future.result())
                complaints |= found
                bar.update(len(found))
                for line in filter(None, found.values()):
                    bar.write(line, file=sys.stderr)
    finally:
        # Not waiting: after Ctrl-C the judge, closed next, ends what the threads wait for.
        pool.shutdown(wait=False, cancel_futures=True)
    return complaints


def _report(complaints: Mapping[Due, str], seconds: float) -> None:
    """Print a row for each lesson and the time."""
    rows = []
    for lesson in sorted({due.lesson for due in complaints}):
        row = {"lesson": lesson}
        for kind in KINDS:
            mine = [
                not c for due, c in complaints.items() if (due.lesson, due.kind) == (lesson, kind)
            ]
            row[f"{kind}s"] = f"{sum(mine)} of {len(mine)}"
        rows.append(row)
    print(aligned(rows))
    bad = sum(map(bool, complaints.values()))
    print(f"{len(complaints)} answers in {seconds:.0f} s, {bad} not as due")
