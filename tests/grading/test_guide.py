"""The instructor guide says what is: options, limits, points, files, versions."""

import re
import shlex

import pytest

from shared.exercises.lessons import ROOT, load_checks
from solutions import grade, rehearsal, student_edition
from solutions.grading.results import Limits

GUIDE = (ROOT / "solutions" / "README.md").read_text()
BLOCKS = re.findall(r"^ *```bash\n(.*?)^ *```", GUIDE, re.MULTILINE | re.DOTALL)
LINES = [line.strip() for block in BLOCKS for line in block.splitlines()]
COMMANDS = [re.sub(r"^[A-Z_]+=\S+ ", "", line) for line in LINES if line]
LESSONS = sorted(
    path.parent.name.removeprefix("lesson") for path in ROOT.glob("lessons/*/checks.py")
)
PARSERS = {
    "solutions.grade": grade.make_parser(),
    "solutions.student_edition": student_edition.make_parser(),
    "solutions.rehearsal": rehearsal.make_parser(),
}


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith(".venv/")])
def test_a_commands_words_are_understood(line):
    program, dash, module, *words = shlex.split(line)
    assert (program, dash) == (".venv/bin/python", "-m")
    if module in PARSERS:
        PARSERS[module].parse_args(words)
    elif module == "shared.exercises.mistakes":
        assert all(any(name.startswith(word) for name in LESSONS) for word in words)
    elif module == "pytest":
        assert all((ROOT / word).exists() for word in words)
    else:
        assert module == "pip", f"who holds the words of {module}?"


def test_every_option_of_the_grader_is_explained_and_no_other():
    table = re.findall(r"^\| `(--[a-z-]+)", GUIDE, re.MULTILINE)
    known = {word for each in PARSERS["solutions.grade"]._actions for word in each.option_strings}
    assert set(table) == known - {"-h", "--help", "--out"}
    assert "--out" in GUIDE


def test_what_other_commands_are_there_is_known():
    """A new kind of command needs somebody who runs it: test_nbgrader.py, or a look by hand."""
    first = {shlex.split(line)[0] for line in COMMANDS}
    usual = {"git", "nbgrader", "mkdir", "cp", "cd", "source"}
    assert first == {".venv/bin/python", "./run_all.sh", *usual}
    words = {line.split()[1] for line in COMMANDS if line.startswith("nbgrader ")}
    assert words == {"generate_assignment", "autograde", "export", "generate_feedback"}


def test_the_limits_are_those_of_the_grader():
    limits = Limits()
    said = re.search(r"One notebook at a time has (.*?)\. They", GUIDE, re.DOTALL)[1]
    assert re.sub(r"\s+", " ", said) == (
        f"{limits.exercise_seconds:g} s an exercise, {limits.memory >> 30} GiB of memory, "
        f"{limits.num_threads} processes and threads, {limits.file_size >> 20} MiB a file, "
        f"and {limits.folder_size >> 20} MiB in all"
    )


@pytest.mark.parametrize("number", [name[:2] for name in LESSONS])
def test_the_points_are_those_of_the_lesson(number):
    row = re.search(rf"^\| {number} \| ({number}\..*?) \| (\d+) \|$", GUIDE, re.MULTILINE)
    assert row, f"no row of points for lesson {number}"
    told = {id: int(points) for id, points in re.findall(r"(\d\d\.\d+[a-z]?) \((\d)\)", row[1])}
    checks = load_checks(number)
    assert told == {id: each.difficulty for id, each in checks.items()}
    assert int(row[2]) == sum(told.values())


def test_the_exercises_that_are_named_exist():
    there = {id for name in LESSONS for id in load_checks(name[:2])}
    whole = {id.rstrip("abc") for id in there}
    named = set(re.findall(r"\b(\d\d\.\d[a-z]?)\b", GUIDE))
    assert {id for id in named if id[:2] in {each[:2] for each in there}} <= there | whole


def test_the_week_plan_has_every_lesson_once():
    plan = GUIDE[GUIDE.index("## Eight weeks") : GUIDE.index("A plan for the 90 minutes")]
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", plan, re.MULTILINE)
    assert [week for week, _ in rows] == list("12345678")
    numbers = [number for _, cell in rows for number in re.findall(r"\b\d\d\b", cell)]
    assert numbers == [f"{n:02}" for n in range(1, 13)]
    assert all(name[:2] in numbers for name in LESSONS if int(name[:2]) <= 12)
