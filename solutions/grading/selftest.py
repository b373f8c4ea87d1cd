"""The grader tried on the known answers: `python -m solutions.grade --self-test [--lessons 01]`.

References must get full marks and stubs none, and every wrong answer of solutions/mistakes must
lose points at exactly its exercise, hear its own words there, and leave all others full. None may
be flagged. Each is handed in as a student would: typed into the lesson's notebook, taken out of it
again, and graded in confinement.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from solutions.grading.answer_cells import AnswerCells, hand_in
from solutions.grading.classroom import Judge, OpenJudge
from solutions.grading.intake.lesson import read_lessons, take_answers
from solutions.grading.reports.summary import aligned
from solutions.grading.results import Lesson, Limits, Outcome, Verdict
from solutions.grading.sandbox.run import Workspace


@dataclass(frozen=True)
class HandIn:
    """One notebook handed in, and what must come of it.

    `kind` is "reference", "stub" or "mistake"; a mistake is in `exercise`, and the check must say
    `says` to it.
    """

    lesson: Lesson
    kind: str
    cells: Mapping[str, str]
    exercise: str = ""
    says: str = ""

    @property
    def title(self) -> str:
        """The kind, with the lesson or with the exercise and its mistake."""
        if self.kind == "mistake":
            return f"{self.exercise} mistake {self.says!r}"
        return f"{self.lesson.number} {self.kind}s"

    def complaints(self, verdicts: Sequence[Verdict]) -> list[str]:
        """One line for each verdict that is not as it must be."""
        if [each.exercise for each in verdicts] != [each.id for each in self.lesson.exercises]:
            return [f"{self.title}: there are verdicts for {[v.exercise for v in verdicts]}"]
        found = [(each, self._complaint(each)) for each in verdicts]
        return [f"{self.title}: {each.exercise} {why}" for each, why in found if why]

    def _complaint(self, verdict: Verdict) -> str:
        """What is not as it must be in this verdict; "" when all is."""
        got = f"has {verdict.points} of {verdict.max} ({verdict.message})"
        if verdict.flags:
            return f"is flagged: {'; '.join(verdict.flags)}"
        if self.kind == "stub":
            untouched = verdict.outcome is Outcome.UNSOLVED and verdict.points == 0
            return "" if untouched else got
        if verdict.exercise != self.exercise:
            right = verdict.outcome is Outcome.RIGHT and verdict.points == verdict.max
            return "" if right else got
        if not 0 <= verdict.points < verdict.max:
            return f"{got} in spite of the mistake"
        texts = verdict.mistake, verdict.expected, verdict.seen, verdict.hint
        return "" if any(self.says in text for text in texts) else f"heard other words: {texts}"


def hand_ins(course: Path, lesson: Lesson, most: int | None = None) -> Iterator[HandIn]:
    """A lesson's references, its stubs, and its mistakes (`most` of each exercise) one by one."""
    known = AnswerCells(course, lesson)
    right = known.references
    yield HandIn(lesson, "reference", right)
    yield HandIn(lesson, "stub", {})
    for exercise in lesson.exercises:
        mistakes = [each for each in known.mistakes if each.exercise == exercise.id]
        for each in mistakes[:most]:
            yield HandIn(
                lesson, "mistake", {**right, exercise.id: each.cell}, exercise.id, each.says
            )


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
    due = [each for lesson in chosen.values() for each in hand_ins(course, lesson, most)]
    began = time.monotonic()
    with open_judge(course, jobs) as judge:
        complaints = _run(due, judge, course, jobs, limits)
    _report(due, complaints, time.monotonic() - began)
    return not any(complaints.values())


def _run(
    due: Sequence[HandIn], judge: Judge, course: Path, jobs: int, limits: Limits
) -> dict[int, list[str]]:
    """The complaints about each notebook, by its place in `due`."""

    def run(each: HandIn) -> list[str]:
        pristine = course / "lessons" / each.lesson.folder / "lesson.ipynb"
        notebook = hand_in(pristine.read_bytes(), each.cells)
        answers = take_answers("self-test", each.lesson, notebook)
        return each.complaints(judge.grade(answers, each.lesson, limits))

    complaints: dict[int, list[str]] = {}
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="self_test")
    try:
        futures = {pool.submit(run, each): place for place, each in enumerate(due)}
        finished = tqdm(
            as_completed(futures), total=len(due), desc="self test", unit="notebook", disable=None
        )
        for future in finished:
            complaints[futures[future]] = future.result()
            for line in complaints[futures[future]]:
                finished.write(line, file=sys.stderr)  # at once: 400 notebooks take half an hour
    finally:
        # Not waiting: after Ctrl-C the judge, closed next, ends what the threads wait for.
        pool.shutdown(wait=False, cancel_futures=True)
    return complaints


def _report(due: Sequence[HandIn], complaints: Mapping[int, list[str]], seconds: float) -> None:
    """Print a row for each lesson and the rate."""
    rows = []
    for lesson in dict.fromkeys(each.lesson.number for each in due):
        row = {"lesson": lesson}
        for kind in ("reference", "stub", "mistake"):
            mine = [i for i, t in enumerate(due) if (t.lesson.number, t.kind) == (lesson, kind)]
            good = sum(not complaints[i] for i in mine)
            row[f"{kind}s"] = (
                ("as due" if good else "NOT") if len(mine) == 1 else f"{good} of {len(mine)}"
            )
        rows.append(row)
    print(aligned(rows))
    rate = 60 * len(due) / seconds if seconds else 0.0
    bad = sum(map(bool, complaints.values()))
    print(f"{len(due)} notebooks in {seconds:.0f} s ({rate:.0f} a minute), {bad} not as due")
