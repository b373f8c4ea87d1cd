"""Play a term with invented students: `python -m solutions.rehearsal --students 30`.

For each lesson some of them hand in (right answers, known mistakes, untouched stubs, in the shapes
of learning platforms) and are graded as a class is. Prints how many minutes all of them would take
at most on this machine, and what is not as it must be.
"""

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shared.errors import InputError
from shared.ranks.processes import raise_on_stop_signals
from solutions import grade
from solutions.grading.classroom import OpenJudge
from solutions.grading.intake.known import KnownAnswer, KnownAnswers, hand_in
from solutions.grading.intake.lesson import read_lessons
from solutions.grading.results import Lesson
from solutions.grading.sandbox.run import Workspace

Kinds = dict[str, str]  # by exercise: what its answer is
# What a notebook is called, by turns; {name} is the student's.
SHAPES = (
    "{name}/lessons/{folder}/lesson.ipynb",
    "{name}_1234_assignsubmission_file_/{folder}.ipynb",
    "{name}_LATE_12345_1234567_{folder}.ipynb",
    "{name}.zip",
)


def mixed_class(
    course: Path, lesson: Lesson, count: int, seed: int = 0
) -> Iterator[tuple[dict[str, str], Kinds]]:
    """The exercise cells of so many students, no two alike, and what each is.

    The first one has everything right; of the others six answers of ten are, three are mistakes.
    """
    known, chance = KnownAnswers(course, lesson), random.Random(seed)
    right = {each.exercise: each for each in known.references()}
    mistakes = list(known.mistakes())
    for student in range(count):
        cells, kinds = dict[str, str](), dict[str, str]()
        for id in right:
            wrong = chance.choice([each for each in mistakes if each.exercise == id])
            options: list[tuple[str, KnownAnswer | None]]
            options = [("right", right[id]), ("mistake", wrong), ("stub", None)]
            [(kinds[id], one)] = chance.choices(options, [6, 3, 1] if student else [1, 0, 0])
            # Equal answers are graded once, and a class would not be as kind.
            cell = known.cell(one) if one else lesson.stubs[id]
            cells[id] = f"# submission {student}\n{cell}"
        yield cells, kinds


def write_class(folder: Path, course: Path, lesson: Lesson, count: int) -> dict[str, Kinds]:
    """Store the notebooks of a class; what each student's answers are."""
    pristine = (course / "lessons" / lesson.folder / "lesson.ipynb").read_bytes()
    kinds = dict[str, Kinds]()
    for place, (cells, of_cells) in enumerate(mixed_class(course, lesson, count)):
        name, shape = f"Student {place + 1:02}", SHAPES[place % len(SHAPES)]
        path = folder / shape.format(name=name, folder=lesson.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr(f"{lesson.folder}/lesson.ipynb", hand_in(pristine, cells))
        else:
            path.write_bytes(hand_in(pristine, cells))
        kinds[name] = of_cells
    return kinds


def not_as_due(grades: Path, kinds: Mapping[str, Kinds]) -> Iterator[str]:
    """Who has other points than his answers are worth; a line each.

    A right answer that stands on a mistake may be wrong: full points are due to who is all right.
    """
    found = {(v["student"], v["exercise"]): v for v in json.loads(grades.read_text())["verdicts"]}
    for student, of_exercises in kinds.items():
        for id, kind in of_exercises.items():
            verdict = found.get((student, id), {"points": None, "max": 0, "message": "no verdict"})
            points, most = verdict["points"], verdict["max"]
            full = set(of_exercises.values()) == {"right"}
            good = points == most if full else points is not None
            if not good or (kind != "right" and points == most) or (kind == "stub" and points):
                said = verdict["message"]
                yield f"{student}, {id}, a {kind} answer: {points} of {most} ({said})"


def rehearse(args: argparse.Namespace, course: Path, open_judge: OpenJudge) -> bool:
    """Play the term; print a line a week, and return whether all was as due."""
    good, minutes, limits = True, 0.0, grade.limits_of(args)
    played = min(max(args.played, args.jobs), args.students)  # fewer would leave cores idle
    waves = math.ceil(args.students / args.jobs) / math.ceil(played / args.jobs)
    print(f"{played} of {args.students} students are graded a week, {args.jobs} at a time")
    with tempfile.TemporaryDirectory() as place, open_judge(course) as judge:
        for number, lesson in read_lessons(course, args.lessons).items():
            folder, out = Path(place, number, "in"), Path(place, number, "out")
            kinds = write_class(folder, course, lesson, played)
            judge.closing.clear()
            began = time.monotonic()
            week = grade.make_parser().parse_args([str(folder), "--out", str(out)])
            week.lessons, week.jobs = [number], args.jobs
            with contextlib.redirect_stdout(io.StringIO()):
                status = grade.grade(week, limits, lambda _: contextlib.nullcontext(judge), course)
            seconds = time.monotonic() - began
            whole = seconds * waves / 60  # at most: the lesson's copy of the course is made once
            minutes += whole
            print(f"lesson {number}: {seconds:.0f} s, so at most {whole:.1f} minutes", flush=True)
            odd = [f"status {status}"] if status else list(not_as_due(out / "grades.json", kinds))
            print(*(f"  {each}" for each in odd), sep="\n", end="\n" if odd else "")
            good = good and not odd
    print(f"the term: at most {minutes:.0f} minutes; {'all as due' if good else 'NOT all as due'}")
    return good


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m solutions.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, theirs = parser.add_argument, grade.make_parser()
    add("--students", type=int, default=30, help="in the class (30)")
    add("--played", type=int, default=3, help="graded a week, or --jobs where that is more (3)")
    add("--lessons", help="such as 02,06 (all)")
    add("--jobs", type=int, default=theirs.get_default("jobs"), help="notebooks at a time")
    add("--timeout", type=float, default=theirs.get_default("timeout"), help="seconds an exercise")
    return parser


def main(
    arguments: Sequence[str] | None = None,
    *,
    open_judge: OpenJudge = Workspace,
    course: Path = grade.COURSE,
) -> int:
    """Return 0 when all was as due, 1 when not, 2 for bad input."""
    args = make_parser().parse_args(arguments)
    args.lessons = (args.lessons or "").replace(",", " ").split() or None
    try:
        if min(args.students, args.played, args.jobs) < 1:
            raise InputError("--students, --played and --jobs must be whole numbers from 1 up")
        return 0 if rehearse(args, course, open_judge) else grade.FAILED
    except InputError as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return grade.USAGE
    except KeyboardInterrupt:
        again = "nothing is kept, --lessons plays the weeks that are left"
        print(f"\nrehearsal: stopped; {again}", file=sys.stderr)
        return grade.INTERRUPTED


if __name__ == "__main__":
    raise_on_stop_signals()
    sys.exit(main())
