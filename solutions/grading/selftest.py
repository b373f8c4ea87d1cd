"""The grader tried on answers of which it is known what must come: `--self-test`.

The references and the alternatives must have full points, the stubs none, and every known mistake
must lose points and hear its own words; none may be flagged, but a mistake that calls the engine.
Further answers are graded beside the references, as exercises of their own: a run has
three seconds of processor behind it before it comes to the first of them.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from solutions.grading.classroom import OpenJudge, in_parallel
from solutions.grading.intake.audit import audit
from solutions.grading.intake.known import KnownAnswers, hand_in
from solutions.grading.intake.lesson import read_lessons, take_answers
from solutions.grading.reports.summary import aligned
from solutions.grading.results import Answers, Exercise, Lesson, Limits, Outcome, Verdict
from solutions.grading.sandbox.run import Workspace

KINDS = ("reference", "stub", "alternative", "mistake")


@dataclass(frozen=True)
class Due:
    """What must come of one answer; a mistake must hear `says`."""

    kind: str
    title: str
    says: str = ""

    def complaint(self, verdict: Verdict | None) -> str:
        """What is not as it must be in this verdict; "" when all is."""
        if verdict is None:
            return f"{self.title} has no verdict"
        flags = [flag for flag in verdict.flags if not flag.endswith("the exercise itself")]
        if flags or (verdict.flags and self.kind != "mistake"):
            return f"{self.title} is flagged: {'; '.join(verdict.flags)}"
        if self.kind == "mistake":
            texts = verdict.mistake, verdict.expected, verdict.seen, verdict.hint
            if verdict.points < verdict.max and not any(self.says in text for text in texts):
                return f"{self.title} heard other words: {texts}"
            good = verdict.points < verdict.max
        else:
            outcome, points = Outcome.RIGHT, verdict.max
            if self.kind == "stub":
                outcome, points = Outcome.UNSOLVED, 0
            good = (verdict.outcome, verdict.points) == (outcome, points)
        got = f"{verdict.points} of {verdict.max} ({verdict.message})"
        return "" if good else f"{self.title} has {got}"


@dataclass(frozen=True)
class Try:
    """Answers that are graded together, and what is due for each exercise of the lesson."""

    answers: Answers
    lesson: Lesson
    due: dict[str, Due]


def tries(course: Path, lesson: Lesson, num_runs: int) -> Iterator[Try]:
    """All known answers to a lesson, in so many runs; what is due to each."""
    known = KnownAnswers(course, lesson)
    pristine = (course / "lessons" / lesson.folder / "lesson.ipynb").read_bytes()
    stubs = take_answers("self-test", lesson, hand_in(pristine, {})).cells
    references = {each.exercise: known.cell(each) for each in known.references()}
    right = take_answers("self-test", lesson, hand_in(pristine, references))
    others = [("alternative", each) for each in known.alternatives()]
    others += [("mistake", each) for each in known.mistakes()]
    for run in range(min(num_runs, len(lesson.exercises))):
        chosen = lesson.exercises[run::num_runs]
        cells = {each.id: right.cells[each.id] for each in chosen}
        due = {each.id: Due("reference", f"{each.id} reference") for each in chosen}
        exercises = list[Exercise]()
        for exercise in lesson.exercises:
            if exercise in chosen:
                given = [("stub", "", stubs[exercise.id])]
                mine = (each for each in others if each[1].exercise == exercise.id)
                given += [(kind, each.says, known.cell(each)) for kind, each in mine]
                for number, (kind, says, cell) in enumerate(given):
                    cells[id := f"{exercise.id} {kind} {number}"] = cell
                    title = f"{exercise.id} {kind} {repr(says) if says else number or ''}"
                    due[id] = Due(kind, title.rstrip(), says)
                    exercises.append(replace(exercise, id=id, of=exercise.id))
            exercises.append(exercise)
        flags = {each.id: audit(cells[each.id], lesson, each.of) for each in exercises if each.of}
        reason = Outcome.MISSING, "it stands in front of the answers that are tried"
        problems = dict.fromkeys(references.keys() - cells.keys(), reason)
        answers = Answers(
            "self-test", lesson.number, cells, problems, flags={**right.flags, **flags}
        )
        further = replace(
            lesson, exercises=tuple(exercises), stubs={**dict.fromkeys(cells, ""), **references}
        )
        yield Try(answers, further, due)


def self_test(
    course: Path,
    jobs: int,
    limits: Limits,
    lessons: Sequence[str] | None,
    *,
    open_judge: OpenJudge = Workspace,
) -> bool:
    """Try the lessons (all by default); print a table and what is not as it must be.

    Returns whether everything was. Raises InputError for a lesson that the course does not have.
    """
    began, good, tried = time.monotonic(), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    chosen = read_lessons(course, lessons)
    todo = [each for lesson in chosen.values() for each in tries(course, lesson, jobs)]
    todo.sort(key=lambda each: -len(each.due))  # what takes longest must not begin last
    items = {n: (each.answers, each.lesson, limits) for n, each in enumerate(todo)}
    total = sum(len(each.due) for each in todo)
    with (
        open_judge(course) as judge,
        tqdm(total=total, desc="self test", unit="answer", disable=None) as bar,
        in_parallel(jobs, judge, items) as results,
    ):
        for n, future in results:
            verdicts = {each.exercise: each for each in future.result()}
            for id, due in todo[n].due.items():
                if complaint := due.complaint(verdicts.get(id)):
                    bar.write(complaint, file=sys.stderr)
                tried[todo[n].lesson.number, due.kind] += 1
                good[todo[n].lesson.number, due.kind] += not complaint
                bar.update()
    rows = [
        {"lesson": n} | {f"{kind}s": f"{good[n, kind]} of {tried[n, kind]}" for kind in KINDS}
        for n in chosen
    ]
    print(aligned(rows))
    bad = tried.total() - good.total()
    print(f"{tried.total()} answers in {time.monotonic() - began:.0f} s, {bad} not as due")
    return bad == 0
