"""Grade a class: `python -m solutions.grade SUBMISSIONS --out grades/`.

SUBMISSIONS holds a folder or a zip per student. Only exercise cells are taken, each lesson is run
in confinement, and grades.csv, grades.json, a page per student and a picture of the class are
written to --out. A second run grades what changed. See solutions/README.md.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm import tqdm

from shared.errors import InputError
from shared.ranks.processes import raise_on_stop_signals
from solutions.grading import classroom, selftest
from solutions.grading.alike import equal_answers, similar_answers
from solutions.grading.corrections import correct, no_longer_named, read_corrections
from solutions.grading.intake.submissions import (
    Submission,
    doubtful_names,
    find_submissions,
    late,
    left_out,
    users,
)
from solutions.grading.reports import feedback, picture, summary, table
from solutions.grading.results import Lesson, Limits, Verdict
from solutions.grading.roster import Roster, as_handed_in, differences, read_roster
from solutions.grading.sandbox.run import Workspace
from solutions.grading.store import opened

COURSE = Path(__file__).resolve().parents[1]
FAILED, USAGE, INTERRUPTED = 1, 2, 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m solutions.grade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, seconds = parser.add_argument, Limits().exercise_seconds
    add("submissions", type=Path, nargs="?", help="folder of submissions")
    add("--out", type=Path, help="folder for the grades, new or of an earlier run")
    add("--lessons", help="such as 02,06 (those handed in)")
    add("--jobs", type=int, default=_num_cores(), help="notebooks at a time")
    add("--timeout", type=float, default=seconds, help=f"seconds per exercise ({seconds:g})")
    add("--again", action="store_true", help="grade also what is graded already")
    corrections = "points by hand: student,exercise,points,why"
    add("--corrections", type=Path, metavar="CSV", help=corrections)
    roster = "the class: name,id,email; points.csv has them, and who is missing is named"
    add("--roster", type=Path, metavar="CSV", help=roster)
    unconfined = (
        "run answers without a sandbox, with all your rights: on a machine for nothing else"
    )
    add("--unconfined", action="store_true", help=unconfined)
    known = "grade the references, stubs, alternatives and known mistakes"
    add("--self-test", action="store_true", help=known)
    return parser


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def main(
    arguments: Sequence[str] | None = None,
    *,
    open_judge: classroom.OpenJudge = Workspace,
    course: Path = COURSE,
) -> int:
    """Do what the arguments say; return the exit status. A test brings a judge of its own."""
    args = make_parser().parse_args(arguments)
    try:
        limits = limits_of(args)
        args.lessons = (args.lessons or "").replace(",", " ").split() or None
        if args.unconfined:
            open_judge = partial(Workspace, confined=False)
        if args.self_test and args.submissions is not None:
            raise InputError(
                f"--self-test takes no folder, got {args.submissions}: several lessons are joined "
                "by commas, --lessons 02,06"
            )
        if args.self_test:
            good = selftest.self_test(
                course, args.jobs, limits, args.lessons, open_judge=open_judge
            )
            return 0 if good else FAILED
        if args.submissions is None or args.out is None:
            raise InputError("give a folder of submissions and --out (or --self-test)")
        return grade(args, limits, open_judge, course)
    except InputError as error:
        print(f"grade: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        kept = "" if args.self_test else "; what was graded is kept, the same command resumes"
        print(f"\ngrade: stopped{kept}", file=sys.stderr)
        return INTERRUPTED


def limits_of(args: argparse.Namespace) -> Limits:
    """The limits of an exercise; InputError for `jobs` or seconds that cannot be."""
    if args.jobs < 1:
        raise InputError(f"--jobs must be a whole number from 1 up, got {args.jobs}")
    if not 1 <= args.timeout <= 86400:
        raise InputError(f"--timeout must be seconds from 1 to 86400, got {args.timeout:g}")
    return Limits(exercise_seconds=args.timeout)


def grade(
    args: argparse.Namespace, limits: Limits, open_judge: classroom.OpenJudge, course: Path
) -> int:
    """Grade the submissions, write what came out, and return the exit status."""
    submissions = find_submissions(args.submissions)
    lessons = classroom.choose_lessons(course, submissions, args.lessons)
    tasks = [
        classroom.Task(classroom.read_answers(submission, lesson), lesson)
        for submission in submissions
        for lesson in lessons.values()
    ]
    students = [each.student for each in submissions]
    by_hand = read_corrections(args.corrections, students, lessons) if args.corrections else {}
    roster = as_handed_in(read_roster(args.roster), users(args.submissions)) if args.roster else {}
    say_what_is_there(args.submissions, submissions, lessons, roster)
    with opened(args.out, args.submissions) as store:
        result, waiting = classroom.sort_out(tasks, store, limits, again=args.again)
        if waiting:
            with (
                open_judge(course) as judge,
                tqdm(total=sum(map(len, waiting.values())), desc="grading", disable=None) as bar,
            ):
                bar.write(judge.promise)
                to_judge = waiting, judge, store, limits
                classroom.grade_waiting(*to_judge, jobs=args.jobs, result=result, tick=bar.update)
        verdicts = correct(table.in_order(result.verdicts), by_hand)
        dropped = no_longer_named(args.out / "grades.json", by_hand)
        write_results(args.out, verdicts, lessons, limits, roster)
    print(summary.summary(verdicts))
    handed_in = [(each.answers, each.lesson) for each in tasks]
    for title, lines in (
        ("equal to the letter", equal_answers(handed_in)),
        ("alike but for names and comments", similar_answers(handed_in, course)),
        ("set by hand in the last run, not named in this one", dropped),
    ):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  ")
    print(f"\nnotebooks run: {result.num_run}; known from an earlier run: {result.num_known}")
    print(f"written: {args.out / 'grades.csv'}, {args.out / 'feedback' / 'index.html'}")
    if result.num_failed:
        print(f"grade: the grader failed at {result.num_failed} notebooks", file=sys.stderr)
    return FAILED if result.num_failed else 0


def say_what_is_there(
    folder: Path, found: Sequence[Submission], lessons: Iterable[str], roster: Roster
) -> None:
    """Who handed in what, and what in the folder may be a mistake."""
    print(f"students: {len(found)}")
    for line in differences(roster, [each.student for each in found]) if roster else ():
        print(line)
    for number in lessons:
        count = sum(number in (*each.notebooks, *each.problems) for each in found)
        print(f"lesson {number}: handed in by {count}")
    for name in left_out(folder):
        print(f"not a submission: {name}")
    for line in (*late(folder), *doubtful_names(folder)):
        print(line)


def write_results(
    out: Path,
    verdicts: Sequence[Verdict],
    lessons: Mapping[str, Lesson],
    limits: Limits,
    roster: Roster | None = None,
) -> None:
    """Replace everything that is in the output folder; nothing in it changes from run to run."""
    points = {
        number: {exercise.id: exercise.points for exercise in lesson.exercises}
        for number, lesson in lessons.items()
    }
    table.write_csv(out / "grades.csv", verdicts)
    table.write_points(out / "points.csv", verdicts, roster)
    meta = {"lessons": points, "limits": asdict(limits)}
    table.write_json(out / "grades.json", verdicts, meta)
    picture.draw_class(out / "class.png", verdicts)
    shutil.rmtree(out / "feedback", ignore_errors=True)  # no page of a student who is not there
    titles = {number: lesson.folder for number, lesson in lessons.items()}
    students = table.by_student(verdicts)
    feedback.write_feedback(out / "feedback", students, titles=titles, picture=out / "class.png")


if __name__ == "__main__":
    raise_on_stop_signals()
    sys.exit(main())
