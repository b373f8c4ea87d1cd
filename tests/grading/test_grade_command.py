"""The command: one call grades a class, a second one what changed, and nothing is ever lost.

Most tests give it a judge that runs nothing; those at the end run notebooks.
"""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from solutions import grade
from solutions.grading.intake.lesson import read_lessons
from solutions.grading.results import Outcome
from solutions.grading.verdicts import make_verdict

COURSE = Path(__file__).resolve().parents[2]
LESSON = read_lessons(COURSE, ["02"])["02"]
PRISTINE = json.loads((COURSE / "lessons/02_attention/lesson.ipynb").read_bytes())
PADDING = (
    '@exercise("02.2")\ndef padding_mask(tokens, pad_id=0):\n'
    "    return (tokens != pad_id)[:, None, None]\n"
)
NUM_EXERCISES = len(LESSON.exercises)


class Judge:
    """Stands in for the workspace where notebooks run: an answer is right that says `return`."""

    promise = "nothing is run here"

    def __init__(self, **by_word):
        self.by_word, self.graded, self.opened = by_word, [], 0

    def __call__(self, course, slots):
        self.opened += 1
        self.slots = slots
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def grade(self, answers, lesson, limits):
        self.graded.append(answers.student)
        for word, act in self.by_word.items():
            if word in str(answers.cells):
                act()
        verdicts = []
        for exercise in lesson.exercises:
            source = answers.cells.get(exercise.id, "")
            passed = 2 * ("return" in source)
            outcome = Outcome.RIGHT if passed else Outcome.UNSOLVED
            verdicts.append(
                make_verdict(answers, exercise, outcome, str(outcome), passed=passed, total=2)
            )
        return verdicts


def hand_in(path: Path, **cells: str) -> None:
    """Store the pristine lesson 02 with these exercise cells, by "e02_2" for 02.2."""
    content = json.loads(json.dumps(PRISTINE))
    for cell in content["cells"]:
        id = cell["metadata"].get("nbgrader", {}).get("grade_id", "").replace("exercise-", "e")
        cell["outputs"] = []
        cell["source"] = cells.get(id.replace("-", "_"), cell["source"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def a_class(tmp_path):
    """Three students: one answer, none, and something that is no notebook."""
    folder = tmp_path / "in"
    hand_in(folder / "Ada/lessons/02_attention/lesson.ipynb", e02_2=PADDING)
    hand_in(folder / "Bo/02.ipynb")
    (folder / "Cy").mkdir()
    (folder / "Cy/02.ipynb").write_text("no notebook")
    return folder


def run(folder: Path, out: Path, *words: str, judge: Judge | None = None) -> tuple[int, Judge]:
    judge = judge or Judge()
    return grade.main([str(folder), "--out", str(out), *words], open_judge=judge), judge


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "grades.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_every_student_has_a_row_for_every_exercise_with_points_or_a_reason(a_class, tmp_path):
    status, judge = run(a_class, tmp_path / "out")
    assert status == 0
    assert sorted(judge.graded) == ["Ada", "Bo"]
    table = rows(tmp_path / "out")
    assert [(r["student"], r["exercise"]) for r in table] == [
        (who, exercise.id) for who in ("Ada", "Bo", "Cy") for exercise in LESSON.exercises
    ]
    points = {(r["student"], r["exercise"]): r["points"] for r in table if r["points"] != "0"}
    assert points == {("Ada", "02.2"): "1"}
    assert all(r["message"] for r in table)
    assert {r["message"] for r in table if r["student"] == "Cy"} == {
        "not JSON: Expecting value in line 1"
    }


def test_the_output_folder_holds_table_json_pages_and_picture(a_class, tmp_path, capsys):
    run(a_class, tmp_path / "out")
    names = {name for name in everything(tmp_path / "out") if not name.startswith(".graded")}
    assert names >= {"grades.csv", "grades.json", "class.png", "feedback/index.html"}
    assert (tmp_path / "out/points.csv").read_text() == (
        "student,lesson 02 of 13,all of 13\nAda,1,1\nBo,0,0\nCy,0,0\n"
    )
    assert len([name for name in names if name.endswith(".html")]) == 4
    content = json.loads((tmp_path / "out/grades.json").read_text(encoding="utf-8"))
    assert content["lessons"]["02"]["02.5"] == 5
    assert len(content["verdicts"]) == 3 * NUM_EXERCISES
    printed = capsys.readouterr().out
    assert "students: 3\nlesson 02: handed in by 3\n" in printed
    assert "nothing is run here" in printed
    assert "notebooks run: 2; known from an earlier run: 0" in printed


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_the_same_submissions_give_the_same_bytes(a_class, tmp_path, jobs):
    slow = Judge(padding_mask=lambda: time.sleep(0.2))  # the first one comes last
    run(a_class, tmp_path / "one", "--jobs", "1")
    run(a_class, tmp_path / "two", "--jobs", jobs, judge=slow)
    assert slow.slots == int(jobs)
    assert everything(tmp_path / "one") == everything(tmp_path / "two")


def test_a_second_run_grades_what_changed(a_class, tmp_path, capsys):
    run(a_class, tmp_path / "out")
    before = everything(tmp_path / "out")
    status, judge = run(a_class, tmp_path / "out")
    assert status == 0 and judge.graded == [] and judge.opened == 0
    assert everything(tmp_path / "out") == before
    assert "notebooks run: 0; known from an earlier run: 2" in capsys.readouterr().out

    hand_in(a_class / "Bo/02.ipynb", e02_2=PADDING.replace("tokens !=", "pad_id is not"))
    _, judge = run(a_class, tmp_path / "out")
    assert judge.graded == ["Bo"]
    assert sum(float(r["points"]) for r in rows(tmp_path / "out")) == 2

    _, judge = run(a_class, tmp_path / "out", "--again")
    assert sorted(judge.graded) == ["Ada", "Bo"]


@pytest.mark.parametrize("words", [("--timeout", "61"), ("--lessons", "02", "--again")])
def test_other_limits_grade_again(a_class, tmp_path, words):
    run(a_class, tmp_path / "out")
    _, judge = run(a_class, tmp_path / "out", *words)
    assert sorted(judge.graded) == ["Ada", "Bo"]


def test_outputs_and_other_cells_are_no_change(a_class, tmp_path):
    run(a_class, tmp_path / "out")
    path = a_class / "Bo/02.ipynb"
    content = json.loads(path.read_text())
    content["cells"].append({"cell_type": "code", "source": "print(1)", "outputs": [1]})
    path.write_text(json.dumps(content))
    _, judge = run(a_class, tmp_path / "out")
    assert judge.graded == []


def test_equal_answers_are_run_once_and_everybody_has_their_rows(a_class, tmp_path):
    hand_in(a_class / "Di/02.ipynb", e02_2=PADDING)
    hand_in(a_class / "Ed/02.ipynb")
    _, judge = run(a_class, tmp_path / "out")
    assert len(judge.graded) == 2
    points = {r["student"]: r["points"] for r in rows(tmp_path / "out") if r["exercise"] == "02.2"}
    assert points == {"Ada": "1", "Bo": "0", "Cy": "0", "Di": "1", "Ed": "0"}


def test_points_by_hand_hold_at_every_run_and_cost_none(a_class, tmp_path):
    table = tmp_path / "by_hand.csv"
    table.write_text("student,exercise,points,why\nCy,02.2,0.5,shown to me on paper\n")
    status, judge = run(a_class, tmp_path / "out")
    for _ in range(2):
        status, judge = run(a_class, tmp_path / "out", "--corrections", str(table))
        assert (status, judge.graded) == (0, [])
        (row,) = (
            r for r in rows(tmp_path / "out") if (r["student"], r["exercise"]) == ("Cy", "02.2")
        )
        assert row["points"] == "0.5"
        assert row["message"].startswith("points set by hand (the checks gave 0): shown to me on")
    page = (tmp_path / "out/feedback/Cy.html").read_text()
    assert "Points set by hand (the checks gave 0): shown to me on paper." in page
    table.write_text("student,exercise,points,why\nCyd,02.2,0.5,x\n")
    assert run(a_class, tmp_path / "out", "--corrections", str(table))[0] == 2


def test_who_handed_in_the_same_cells_is_named(a_class, tmp_path, capsys):
    hand_in(a_class / "Di/02.ipynb", e02_2=PADDING)
    hand_in(a_class / "Ed/02.ipynb", e02_2=PADDING + "# mine\n")
    hand_in(a_class / "Fy/02.ipynb")
    run(a_class, tmp_path / "out")
    assert "equal to the letter:\n  lesson 02: Ada, Di (exercises: 1)\n" in capsys.readouterr().out


def test_a_student_who_left_leaves_no_row_and_no_page(a_class, tmp_path):
    run(a_class, tmp_path / "out")
    shutil.rmtree(a_class / "Bo")
    run(a_class, tmp_path / "out")
    assert {r["student"] for r in rows(tmp_path / "out")} == {"Ada", "Cy"}
    assert "feedback/Bo.html" not in everything(tmp_path / "out")


def test_without_lessons_named_those_are_graded_that_somebody_handed_in(a_class, tmp_path):
    (a_class / "Ada/01.ipynb").write_text("{}")
    (a_class / "Bo/77.ipynb").write_text("{}")
    run(a_class, tmp_path / "out")
    found = {(r["student"], r["lesson"]): r["message"] for r in rows(tmp_path / "out")}
    assert {lesson for _, lesson in found} == {"01", "02"}
    assert found["Cy", "01"] == "no notebook of lesson 01 (handed in: 02)"
    run(a_class, tmp_path / "out", "--lessons", "1")
    assert {r["lesson"] for r in rows(tmp_path / "out")} == {"01"}


def test_a_reason_for_all_of_a_submission_stands_in_every_row(a_class, tmp_path):
    (a_class / "Bo/02.ipynb").unlink()
    (a_class / "Cy.zip").write_bytes(b"PK\x03\x04")
    (a_class / "Cy/02.ipynb").unlink()
    (a_class / "Cy").rmdir()
    run(a_class, tmp_path / "out")
    found = {(r["student"], r["message"]) for r in rows(tmp_path / "out") if r["student"] != "Ada"}
    assert ("Bo", "no notebook in it") in found
    assert any(who == "Cy" and "Cy.zip: no zip, or a damaged one" in why for who, why in found)
    assert len(found) == 2


def test_what_an_answer_borrows_is_said_where_points_are_lost(a_class, tmp_path):
    class Strict(Judge):
        def grade(self, answers, lesson, limits):
            return [
                make_verdict(answers, each, Outcome.WRONG, "NameError: name 'pad'")
                for each in lesson.exercises
            ]

    content = json.loads((a_class / "Bo/02.ipynb").read_text())
    for cell in content["cells"]:
        if "exercise-02-2" in str(cell["metadata"]):
            cell["source"] = PADDING.replace("tokens != pad_id", "pad(tokens)")
    content["cells"].insert(0, {"cell_type": "code", "source": "def pad(x): ...", "metadata": {}})
    (a_class / "Bo/02.ipynb").write_text(json.dumps(content))
    run(a_class, tmp_path / "out", judge=Strict())
    [row] = [r for r in rows(tmp_path / "out") if r["student"] == "Bo" and r["exercise"] == "02.2"]
    words = "uses pad (cell 1), but only exercise cells are graded: move it into this cell"
    assert row["message"] == f"{words}; NameError: name 'pad'"
    [page] = (tmp_path / "out/feedback").glob("Bo*.html")
    assert words in page.read_text()


def boom():
    raise OSError("no space left")


def test_a_failing_grader_is_one_students_row_is_said_and_is_tried_again(a_class, tmp_path, capsys):
    status, _ = run(a_class, tmp_path / "out", judge=Judge(tokens=lambda: None, pad_id=boom))
    assert status == grade.FAILED
    assert "the grader failed at" in capsys.readouterr().err
    messages = {r["message"] for r in rows(tmp_path / "out") if r["student"] == "Ada"}
    assert any(m.startswith("the grader failed (OSError: no space left)") for m in messages)
    status, judge = run(a_class, tmp_path / "out")
    assert status == 0 and "Ada" in judge.graded


def test_a_notebook_that_could_not_be_started_is_tried_again(a_class, tmp_path):
    class Broken(Judge):
        def grade(self, answers, lesson, limits):
            return [
                make_verdict(answers, each, Outcome.UNREADABLE, "the notebook could not be run")
                for each in lesson.exercises
            ]

    run(a_class, tmp_path / "out", judge=Broken())
    _, judge = run(a_class, tmp_path / "out")
    assert sorted(judge.graded) == ["Ada", "Bo"]


def test_a_damaged_store_is_graded_again(a_class, tmp_path):
    run(a_class, tmp_path / "out")
    before = everything(tmp_path / "out")
    for number, path in enumerate((tmp_path / "out/.graded").glob("*.json")):
        path.write_text(["", '[{"student": 3}]'][number])
    _, judge = run(a_class, tmp_path / "out")
    assert sorted(judge.graded) == ["Ada", "Bo"]
    assert everything(tmp_path / "out") == before


def test_after_ctrl_c_what_is_graded_is_kept(a_class, tmp_path, capsys):
    class Interrupted(Judge):
        def grade(self, answers, lesson, limits):
            if answers.student == "Bo":  # by then Ada's verdicts are stored
                while not list((tmp_path / "out/.graded").glob("*.json")):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)
            return super().grade(answers, lesson, limits)

    status, _ = run(a_class, tmp_path / "out", "--jobs", "2", judge=Interrupted())
    assert status == grade.INTERRUPTED
    assert "stopped; what was graded is kept" in capsys.readouterr().err
    assert not (tmp_path / "out/grades.csv").exists()
    status, judge = run(a_class, tmp_path / "out")
    assert status == 0 and judge.graded == ["Bo"]


def test_nothing_outside_the_output_folder_is_touched(a_class, tmp_path):
    before = everything(a_class)
    run(a_class, tmp_path / "out")
    assert everything(a_class) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


BAD_CALLS = {
    "no such folder": (["{tmp}/nowhere", "--out", "{tmp}/out"], "there is no folder"),
    "no --out": (["{tmp}/in"], "give a folder of submissions and --out"),
    "nothing": ([], "give a folder of submissions and --out"),
    "unknown lesson": (["{tmp}/in", "--out", "{tmp}/out", "--lessons", "2,99"], "no lesson '99'"),
    "out is a file": (["{tmp}/in", "--out", "{tmp}/in/Cy/02.ipynb"], "lie in one another"),
    "out has other things": (["{tmp}/in", "--out", "{tmp}/full"], "holds other things than grades"),
    "out is in use": (["{tmp}/in", "--out", "{tmp}/in/Ada"], "lie in one another"),
    "submissions in out": (["{tmp}/in", "--out", "{tmp}"], "lie in one another"),
    "out cannot be": (["{tmp}/in", "--out", "{tmp}/full/file/out"], "cannot be written"),
    "the course": ([str(COURSE), "--out", "{tmp}/out"], "is one copy of the course"),
    "one student's folder": (["{tmp}/empty", "--out", "{tmp}/out"], "holds no submission"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_call_is_one_line_and_status_2_and_writes_nothing(a_class, tmp_path, capsys, case):
    words, message = BAD_CALLS[case]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("x")
    (tmp_path / "empty").mkdir()
    before = everything(tmp_path)
    status = grade.main([word.format(tmp=tmp_path) for word in words], open_judge=Judge())
    assert status == grade.USAGE
    said = capsys.readouterr().err
    assert said.startswith("grade: ") and message in said and said.count("\n") == 1
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "words", [("--jobs", "0"), ("--jobs", "two"), ("--timeout", "-1"), ("--timeout", "nan")]
)
def test_a_wrong_number_is_named(a_class, tmp_path, capsys, words):
    with pytest.raises(SystemExit) as stopped:
        run(a_class, tmp_path / "out", *words)
    assert stopped.value.code == 2
    assert f"got {words[1]!r}" in capsys.readouterr().err


def test_a_class_that_holds_no_lesson_names_reasons(tmp_path, capsys):
    (tmp_path / "in/Ada").mkdir(parents=True)
    status, _ = run(tmp_path / "in", tmp_path / "out")
    assert status == grade.USAGE
    assert "no submission holds a lesson; name some with --lessons" in capsys.readouterr().err
    status, _ = run(tmp_path / "in", tmp_path / "out", "--lessons", "02")
    assert status == 0
    assert {r["message"] for r in rows(tmp_path / "out")} == {"no notebook in it"}


def test_two_gradings_do_not_write_into_one_folder(a_class, tmp_path, capsys):
    second = []
    judge = Judge(padding_mask=lambda: second.append(run(a_class, tmp_path / "out")[0]))
    status, _ = run(a_class, tmp_path / "out", "--jobs", "1", judge=judge)
    assert status == 0 and grade.USAGE in second
    assert "is being written by another grading" in capsys.readouterr().err


def test_the_grader_loads_neither_torch_nor_the_answers():
    code = "import sys, solutions.grade; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=COURSE, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "solutions.grading.sandbox.run" in loaded
    assert not loaded & {
        "torch",
        "shared.exercises.notebook",
        "shared.exercises.expecting",
        "shared.exercises.answers",
    }
    assert not [name for name in loaded if re.match(r"solutions\.(lesson\d|mistakes)", name)]


LOOP = (
    "import time\n"
    '@exercise("02.2")\ndef padding_mask(tokens, pad_id=0):\n'
    "    while True:\n        time.sleep(1)\n"
)
CAUSAL = (
    '@exercise("02.3")\ndef causal_mask(length, device=None):\n'
    "    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]\n"
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_notebooks_run_it_ends_them_and_keeps_what_is_graded(tmp_path, number):
    hand_in(tmp_path / "in/Ada/02.ipynb", e02_2=PADDING, e02_3=CAUSAL)
    hand_in(tmp_path / "in/Bo/02.ipynb", e02_2=LOOP)
    out = tmp_path / "out"
    temporary = Path(tempfile.mkdtemp(prefix="ctrl_c_"))  # pytest's are closed to other users
    temporary.chmod(0o755)
    command = [sys.executable, "-m", "solutions.grade", str(tmp_path / "in"), "--out", str(out)]
    grader = subprocess.Popen(
        [*command, "--jobs", "2", "--timeout", "250"],
        cwd=COURSE,
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 200
        while not list(out.glob(".graded/*.json")):
            assert grader.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(grader.pid).children(recursive=True)
        assert family, "Bo's notebook still runs"
        grader.send_signal(number)
        _, said = grader.communicate(timeout=60)
    finally:
        grader.kill()
        left = list(temporary.iterdir())
        shutil.rmtree(temporary)
    assert not left
    assert grader.returncode == grade.INTERRUPTED
    assert said.count("\n") <= 2 and "stopped; what was graded is kept" in said
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    [kept] = out.glob(".graded/*.json")
    verdicts = {each["exercise"]: each["points"] for each in json.loads(kept.read_text())}
    assert verdicts["02.2"] == verdicts["02.3"] == 1
