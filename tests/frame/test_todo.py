"""./run_all.sh todo: a line for each exercise of a learner's notebook, whatever stands in it."""

import os
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from shared.cli.todo import exercise_line
from shared.exercises.answers import Cells, names_from_other_cells, read_cells
from shared.exercises.status import ExerciseStatus, Outcome
from shared.exercises.wrong import Fault

CHECKS = """from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_equal, recognise

def checked(id, name, want, points=1):
    exercise = checks_for(id, name=name, difficulty=points, minutes=5, hint="a folded hint")

    @exercise.check("a value")
    def value(answer):
        got = answer(4)
        recognise({"it doubles": got == 8}, expected=f"{want}", seen=f"{got}", hint="look again")
        expect_equal(got, want, what=f"{name}(4)")

    return exercise

square = checked("01.1", "square", 16, points=3)
cube = checked("01.2", "cube", 64)
plus = checked("01.3", "plus", 5)
half = checked("01.4", "half", 2)
quarter = checked("01.5", "quarter", 1)
negate = checked("01.6", "negate", -4)
missing = checked("01.7", "missing", 4)
endless = checked("01.8", "endless", 4)
stubborn = checked("01.9a", "stubborn", 4)
leaving = checked("01.9b", "leaving", 4)
helped = checked("01.10", "helped", 4)
nowhere = checked("01.11", "nowhere", 4)
"""
SOLUTION = "\n".join(
    f"def {name}(x): return {value}"
    for name, value in {
        **dict.fromkeys(["missing", "endless", "stubborn", "leaving", "helped", "nowhere"], "x"),
        **{"square": "x * x", "cube": "x**3", "plus": "x + 1", "negate": "-x"},
        **{"half": "x // 2", "quarter": "x // 4"},
    }.items()
)
STUB = "raise NotImplementedError"
ANSWERS = {
    "01.1": "def square(x): return x * x\n!pip install einops\nsquare?",
    "01.2": "def cube(x): return 2 * x",
    "01.3": "def plus(x): return x - 1",
    "01.4": f"def half(x): {STUB}",
    "01.5": "def quarter(x): return half(half(x))",
    "01.6": "def negate(x): return -(x",
    "01.7": "class missing(Base): pass",
    "01.8": "def endless(x):\n    while True:\n        x += 1",
    "01.9a": (
        "def stubborn(x):\n    import signal\n    signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "    while True:\n        x += 1"
    ),
    "01.9b": "def leaving(x):\n    import os\n    os._exit(3)",
    "01.10": "def helped(x): return helper(x)",
}
LINES = """\
01.1 square     3 points  right
01.2 cube       1 point   wrong: it doubles
01.3 plus       1 point   wrong: expected plus(4) = 5, seen 3
01.4 half       1 point   open
01.5 quarter    1 point   right
01.6 negate     1 point   does not run: SyntaxError: '(' was never closed, line 2: def negate(x): \
return -(x
01.7 missing    1 point   does not run: NameError: name 'Base' is not defined, in <module> at: \
class missing(Base): pass
01.8 endless    1 point   stopped: no result after 3 s, in endless at: x += 1
01.9a stubborn  1 point   stopped: no result after 3 s
01.9b leaving   1 point   stopped: it ends Python, with status 3
01.10 helped    1 point   wrong: another cell defines helper: put it into this one
01.11 nowhere   1 point   open: the notebook has no cell for it
lesson 01: 2 of 12 exercises right, 4 of 14 points, 8 wrong, 2 open
"""


def write(course, answers):
    """Store a notebook with these answers, and what a learner's notebook has besides."""
    setup = "from shared.exercises.notebook import check, exercise"
    cells = [new_code_cell(setup, metadata={"tags": ["setup"]})]
    cells.append(new_code_cell("%time 1\ndef helper(x): return x"))
    cells.append(new_code_cell("def helper(x): return x"))
    for id, answer in answers.items():
        cells += [new_code_cell(f'@exercise("{id}")\n{answer}'), new_code_cell("1 / 0")]
    nbformat.write(new_notebook(cells=cells), course.notebook)


@pytest.fixture
def course(toy):
    """The toy course with twelve exercises, answered in every way there is."""
    (toy.lesson / "checks.py").write_text(CHECKS)
    (toy.root / "solutions" / "lesson01_toy.py").write_text(SOLUTION)
    write(toy, ANSWERS)
    return toy


def todo(course, *arguments, **environment):
    """Run ./run_all.sh todo as it runs once Python is found."""
    return course.run("-m", "shared.cli.command", "--no-setup", "todo", *arguments, **environment)


def test_every_way_to_stand_has_its_line(course):
    done = todo(course, "--time-limit", "3")
    # How far the endless loop came is not always the same line of it.
    said = done.stdout.replace("at: while True:", "at: x += 1")
    assert said.splitlines() == LINES.splitlines(), done.stderr
    assert done.returncode == 1


@pytest.mark.full
def test_all_right_is_status_0_and_solution_mode_is_all_right(course):
    write(course, {id: ANSWERS[id] for id in ("01.1", "01.5")})
    only = CHECKS.split("cube =")[0] + 'quarter = checked("01.5", "quarter", 1)\n'
    (course.lesson / "checks.py").write_text(only)
    done = todo(course, "1")
    assert done.returncode == 1, "half is nowhere in the notebook"
    assert "NameError: name 'half' is not defined" in done.stdout
    done = todo(course, "lesson01_toy", TORCH_HANDLE_IMPLEMENTATION="solution")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("lesson 01: 2 of 2 exercises right, 4 of 4 points\n")


@pytest.mark.full
def test_details_are_what_the_check_says_and_an_open_exercise_keeps_its_hint(course):
    write(course, {id: ANSWERS[id] for id in ("01.2", "01.4")})
    done = todo(course, "-v")
    details = [
        "01.2 cube       1 point   wrong: it doubles",
        "  at the check of a value",
        "  looks like: it doubles",
        "  expected:   64",
        "  seen:       8",
        "  hint:       look again",
        "01.3 plus       1 point   open: the notebook has no cell for it",
        "01.4 half       1 point   open",
    ]
    assert "\n".join(details) in done.stdout
    assert "a folded hint" not in done.stdout


@pytest.mark.full
def test_without_solutions_it_says_which_exercise_comes_first(course):
    shutil.rmtree(course.root / "solutions")
    write(course, {id: ANSWERS[id] for id in ("01.4", "01.5")})
    done = todo(course)
    assert "01.4 half       1 point   open\n" in done.stdout
    assert "seen NotSolved: exercise 01.4 (half) is not solved yet" in done.stdout
    done = todo(course, TORCH_HANDLE_IMPLEMENTATION="solution")
    assert done.returncode == 2
    assert done.stderr == (
        "run_all.sh: TORCH_HANDLE_IMPLEMENTATION=solution needs solutions/: unset it\n"
    )


@pytest.mark.full
def test_bad_input_is_one_clear_line_and_the_other_lessons_are_judged(course):
    done = todo(course, "07")
    assert done.returncode == 2
    assert done.stderr.startswith("run_all.sh: unknown word '07'")
    shutil.copytree(course.lesson, course.lesson.with_name("lesson02_toy"))
    course.notebook.write_text('{"cells": [')
    (course.lesson.with_name("lesson02_toy") / "checks.py").write_text("")
    done = todo(course)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "lesson01_toy/lesson.ipynb cannot be read as a notebook" in line
    assert "1 of 2 lessons: 0 of 0 exercises right" in done.stdout


@pytest.mark.parametrize("text", ["{", "[]", '{"worksheets": []}', '{"cells": [1]}', "[" * 10**5])
def test_what_is_no_notebook_is_said(tmp_path, text):
    path = tmp_path / "lesson.ipynb"
    path.write_text(text)
    with pytest.raises(ValueError, match="cannot be read as a notebook"):
        read_cells(path)
    with pytest.raises(ValueError, match="no notebook at"):
        read_cells(tmp_path / "other.ipynb")


def test_checks_that_do_not_load_show_their_last_words(course):
    (course.lesson / "checks.py").write_text("1 / 0")
    done = todo(course)
    assert done.returncode == 1
    assert done.stderr.startswith("run_all.sh: lesson 01 could not be judged:")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.full
def test_watching_judges_again_when_a_notebook_is_saved(course):
    write(course, {"01.1": ANSWERS["01.1"]})
    process = subprocess.Popen(
        [sys.executable, "-m", "shared.cli.command", "--no-setup", "todo", "--watch"],
        cwd=course.root,
        env=course.environment(COURSE_TEST=str(course.root)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first = lines_until(process.stdout, "watching")
        assert "01.1 square     3 points  right" in first
        write(course, {"01.1": "def square(x): return 2 * x"})
        second = lines_until(process.stdout, "watching")
        assert second[1].endswith("lessons/lesson01_toy/lesson.ipynb was saved")
        assert "01.1 square     3 points  wrong: it doubles" in second
        write(course, {"01.1": ANSWERS["01.8"].replace("endless", "square")})
        lines_until(process.stdout, "was saved")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)  # while the endless loop is judged
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said == "run_all.sh: stopped; no process was left behind\n"
    assert not holders(f"COURSE_TEST={course.root}")


def lines_until(stream, sign):
    """The lines that a program prints, up to the one with the sign."""
    lines = []
    for line in stream:
        lines.append(line.rstrip("\n"))
        if sign in line:
            return lines
    raise AssertionError(f"it ended before {sign!r}: {lines}")


def holders(mark):
    """Processes with a mark in their environment, but for this one."""
    found = []
    for entry in os.scandir("/proc"):
        try:
            with open(f"{entry.path}/environ") as environment:
                found += [entry.name] * (mark in environment.read())
        except OSError:
            continue
    return found


def test_the_command_needs_no_torch():
    code = "import shared.cli.todo, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_long_text_is_cut_where_no_mistake_was_recognised():
    long = "very " * 100
    recognised = ExerciseStatus("01.1", "f", 1, Outcome.WRONG, Fault("x", 0, 1, mistake=long))
    assert long.strip() in exercise_line(recognised, 6)
    other = ExerciseStatus("01.1", "f", 1, Outcome.WRONG, Fault("x", 0, 1, seen=long))
    assert len(exercise_line(other, 6)) < 200
    assert exercise_line(other, 6).endswith(" ...")


def test_a_standing_travels_as_json():
    status = ExerciseStatus("01.1", "f", 2, Outcome.WRONG, Fault("x", 0, 1, "a", "b", "c", "d"))
    assert ExerciseStatus.from_record(status.record()) == status


def test_names_that_only_another_cell_defines():
    cells = Cells(
        setup="import math",
        exercises={"01.1": "def f(x, local=1):\n    return math.pi + g(x) + k + print(local) + x"},
        others=["def g(): ...", "x = local = print = math = 1", "%magic\nk = 1"],
    )
    assert names_from_other_cells("01.1", cells) == ["g", "k"]
