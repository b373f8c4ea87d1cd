"""The instructor guide says what is: options, limits, points, files, versions."""

import re
import shlex
import subprocess
import sys

import pytest

from shared.exercises.lessons import ROOT, load_checks
from solutions import grade, student_edition
from solutions.grading.results import Limits

GUIDE = (ROOT / "solutions" / "README.md").read_text()
BLOCKS = re.findall(r"^ *```bash\n(.*?)^ *```", GUIDE, re.MULTILINE | re.DOTALL)
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines()]
OF_THE_COURSE = [line for line in COMMANDS if line.startswith(".venv/bin/python -m ")]
LESSONS = sorted(path.parent.name for path in ROOT.glob("lessons/*/checks.py"))


@pytest.mark.parametrize("line", OF_THE_COURSE)
def test_a_commands_words_are_understood(line):
    module, *words = shlex.split(line)[2:]
    parsers = {
        "solutions.grade": grade.make_parser(),
        "solutions.student_edition": student_edition.make_parser(),
    }
    if module in parsers:
        parsers[module].parse_args(words)
    elif module == "shared.exercises.mistakes":
        assert (ROOT / "shared" / "exercises" / "mistakes.py").exists()
        assert all(any(name.startswith(word) for name in LESSONS) for word in words)
    else:
        assert module in ("pytest", "pip"), f"who holds the words of {module}?"


def test_every_option_of_the_grader_is_explained_and_no_other():
    table = re.findall(r"^\| `(--[a-z-]+)", GUIDE, re.MULTILINE)
    actions = grade.make_parser()._actions
    known = {word for each in actions for word in each.option_strings} - {"-h", "--help", "--out"}
    assert set(table) == known
    assert "--out" in GUIDE


def test_what_other_commands_are_there_is_known():
    """A new kind of command needs somebody who runs it: test_nbgrader.py, or a look by hand."""
    first = {shlex.split(line)[0] for line in COMMANDS if line}
    assert first == {
        ".venv/bin/python",
        "./run_all.sh",
        "git",
        "nbgrader",
        "mkdir",
        "cp",
        "cd",
        "source",
    }
    words = {line.split()[1] for line in COMMANDS if line.startswith("nbgrader ")}
    assert words == {"generate_assignment", "autograde", "export", "generate_feedback"}


def test_the_limits_are_those_of_the_grader():
    limits = Limits()
    said = re.search(r"One notebook at a time has (.*?)\. They", GUIDE, re.DOTALL)[1]
    assert re.sub(r"\s+", " ", said) == (
        f"{limits.exercise_seconds:g} s an exercise, {limits.memory >> 30} GiB of memory, "
        f"{limits.num_processes} processes, {limits.file_size >> 20} MiB a file, "
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


def test_help_is_there_for_both_commands():
    for module in ("solutions.grade", "solutions.student_edition"):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0
        assert done.stdout.startswith("usage: python -m solutions.")
