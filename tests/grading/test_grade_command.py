"""The command: one call grades a class, a second one what changed, and nothing is ever lost.

Most tests give it a judge that runs nothing; the last one runs notebooks.
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
import threading
import time
import zipfile
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from solutions import grade
from solutions.grading.intake.known import hand_in
from solutions.grading.intake.lesson import read_exercises
from solutions.grading.results import Outcome
from solutions.grading.verdicts import make_verdict

COURSE = Path(__file__).resolve().parents[2]
LESSON = read_exercises(COURSE, ["02"])["02"]
PRISTINE = (COURSE / "lessons/lesson02_attention/lesson.ipynb").read_bytes()
PADDING = (
    '@exercise("02.2")\ndef padding_mask(tokens, pad_id=0):\n'
    "    return (tokens != pad_id)[:, None, None]\n"
)


class Judge:
    """Stands in for the workspace where notebooks run: an answer is right that says `return`.

    What else it does with an answer, `act` does, which may fail, or give another outcome.
    """

    promise, closing = "nothing is run here", threading.Event()

    def __init__(self, act=lambda answers: None, **texts):
        self.act, self.graded, self.texts = act, [], texts

    def grade(self, answers, lesson, limits):
        self.graded.append(answers.student)
        given = self.act(answers)
        verdicts = []
        for exercise in lesson.exercises:
            right = "return" in answers.cells.get(exercise.id, "")
            outcome = given or (Outcome.RIGHT if right else Outcome.UNSOLVED)
            said = f"it is {outcome}"
            verdicts.append(make_verdict(answers, exercise, outcome, said, **self.texts))
        return verdicts


def submit(path: Path, cell: str = "", *, before: str = "") -> None:
    """Store the pristine lesson 02 with this cell for 02.2, and with a cell of one's own."""
    content = json.loads(hand_in(PRISTINE, {"02.2": cell} if cell else {}))
    content["cells"].insert(0, {"cell_type": "code", "source": before, "metadata": {}})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def a_class(tmp_path):
    """Four students: one answer, none, something that is no notebook, and an empty folder."""
    folder = tmp_path / "in"
    submit(folder / "Ada/lessons/lesson02_attention/lesson.ipynb", PADDING)
    submit(folder / "Bo/02.ipynb")
    for name in ("Cy", "Di"):
        (folder / name).mkdir()
    (folder / "Cy/02.ipynb").write_text("no notebook")
    return folder


def run(folder: Path, out: Path, *words: str, judge: Judge | None = None) -> tuple[int, Judge]:
    judge = judge or Judge()
    words = (str(folder), "--out", str(out), *words)
    return grade.main(words, open_judge=lambda _: nullcontext(judge)), judge


def rows(out: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Points and message by student and exercise."""
    table = csv.DictReader((out / "grades.csv").read_text(encoding="utf-8-sig").splitlines())
    return {(row["student"], row["exercise"]): (row["points"], row["message"]) for row in table}


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_every_student_has_points_or_a_reason_a_page_and_a_place_in_all_tables(
    a_class, tmp_path, capsys
):
    before, out = everything(a_class), tmp_path / "out"
    status, judge = run(a_class, out)
    assert (status, sorted(judge.graded)) == (0, ["Ada", "Bo"])
    found = rows(out)
    students = ("Ada", "Bo", "Cy", "Di")
    assert list(found) == [(who, each.id) for who in students for each in LESSON.exercises]
    assert {at for at, (points, _) in found.items() if points != "0"} == {("Ada", "02.2")}
    says = {"Ada": "it is right", "Bo": "it is not solved", "Cy": "not JSON", "Di": "no notebook"}
    assert all(found[who, "02.2"][1].startswith(message) for who, message in says.items())

    names = {name for name in everything(out) if not name.startswith(".graded")}
    pages = {f"feedback/{name}.html" for name in ("index", *students)}
    assert names == {"grades.csv", "points.csv", "grades.json", "class.png"} | pages
    assert (out / "points.csv").read_text(encoding="utf-8-sig") == (
        "student,lesson 02 of 13,all of 13\nAda,1,1\nBo,0,0\nCy,0,0\nDi,,0\n"
    )
    content = json.loads((out / "grades.json").read_text(encoding="utf-8"))
    assert content["lessons"]["02"]["02.5"] == 5
    assert len(content["verdicts"]) == len(found)
    printed = capsys.readouterr().out
    assert "students: 4\nlesson 02: handed in by 3\nnothing is run here\n" in printed
    assert "notebooks run: 2; known from an earlier run: 0" in printed
    assert everything(a_class) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_bad_input_has_a_line_each_and_the_others_are_graded(a_class, tmp_path, capsys):
    with (a_class / "Ed__02.ipynb").open("wb") as file:
        file.truncate(100_000_000)  # no bytes of it are on the disk
    with zipfile.ZipFile(a_class / "Fy.zip", "w") as archive:
        archive.writestr("../../02.ipynb", PRISTINE)
    table = tmp_path / "class.csv"
    table.write_bytes("name;id\nAda;1\nBo;2\nZoë;3\n".encode("cp1252"))
    status, judge = run(a_class, tmp_path / "out", "--roster", str(table))
    assert (status, sorted(judge.graded)) == (0, ["Ada", "Bo"])
    said, found = capsys.readouterr().out, rows(tmp_path / "out")
    assert "larger than 20 MB" in found["Ed", "02.2"][1]
    assert "'../../02.ipynb', which leads out" in found["Fy", "02.2"][1]
    assert "handed in nothing: Zoë\nnot in the roster: Cy\n" in said
    points = (tmp_path / "out/points.csv").read_text(encoding="utf-8-sig").splitlines()
    assert points[0] == "student,id,email,lesson 02 of 13,all of 13"
    assert (points[1], points[-1]) == ("Ada,1,,1,1", "Zoë,3,,,")

    table.write_text("name,id\nAda,1\nAda,2\nBo,3\n")
    status, judge = run(a_class, tmp_path / "twice", "--roster", str(table))
    assert (status, sorted(judge.graded)) == (0, ["Ada", "Bo"])
    assert "not in the roster, which has it twice: a column folder says" in capsys.readouterr().out
    points = (tmp_path / "twice/points.csv").read_text(encoding="utf-8-sig").splitlines()
    assert {"Ada,,,1,1", "Ada,1,,,", "Ada,2,,,", "Bo,3,,0,0"} <= {*points}

    table.write_text("name,id\n,1\n")
    assert run(a_class, tmp_path / "new", "--roster", str(table))[0] == grade.USAGE
    assert capsys.readouterr().err.endswith("line 2: there is no name\n")
    assert not (tmp_path / "new").exists(), "refused before anything is written"


def test_a_later_run_grades_what_changed_and_leaves_nothing_of_who_left(a_class, tmp_path, capsys):
    out = tmp_path / "out"
    run(a_class, out)
    before = everything(out)
    path = a_class / "Bo/02.ipynb"
    submit(path, before="print('another cell')")
    status, judge = run(a_class, out)
    assert (status, judge.graded) == (0, [])
    assert everything(out) == before
    assert "notebooks run: 0; known from an earlier run: 2" in capsys.readouterr().out

    slow = Judge(lambda answers: time.sleep(0.2 * (answers.student == "Ada")))  # comes last
    run(a_class, out, "--again", "--jobs", "2", judge=slow)
    assert sorted(slow.graded) == ["Ada", "Bo"]
    assert everything(out) == before, "the same bytes"

    submit(path, PADDING.replace("tokens !=", "pad_id is not"))
    _, judge = run(a_class, out)
    assert judge.graded == ["Bo"]
    assert [rows(out)[student, "02.2"][0] for student in ("Ada", "Bo")] == ["1", "1"]

    _, judge = run(a_class, out, "--timeout", "61")
    assert sorted(judge.graded) == ["Ada", "Bo"]

    shutil.rmtree(a_class / "Bo")
    run(a_class, out)
    assert {student for student, _ in rows(out)} == {"Ada", "Cy", "Di"}
    assert "feedback/Bo.html" not in everything(out)


def test_equal_answers_are_run_once_and_named(a_class, tmp_path, capsys):
    submit(a_class / "Ed/02.ipynb", PADDING)
    submit(a_class / "Fy/02.ipynb", PADDING + "# mine\n")
    submit(a_class / "Gil/02.ipynb")
    causal = LESSON.stubs["02.3"].replace("raise NotImplementedError", "return 1")
    (a_class / "Hal__02.ipynb").write_bytes(hand_in(PRISTINE, {"02.2": PADDING, "02.3": causal}))
    _, judge = run(a_class, tmp_path / "out")
    assert len(judge.graded) == 4
    right = {who for (who, _), (points, _) in rows(tmp_path / "out").items() if points == "1"}
    assert right == {"Ada", "Ed", "Fy", "Hal"}
    assert "equal to the letter:\n  02.2: Ada; Ed; Hal\n\n" in capsys.readouterr().out


def test_points_by_hand_hold_at_every_run_and_cost_none(a_class, tmp_path):
    table = tmp_path / "by_hand.csv"
    table.write_text("student,exercise,points,why\nCy,02.2,0.5,shown to me on paper\n")
    run(a_class, tmp_path / "out")
    said = "points set by hand (before: 0): shown to me on paper"
    for _ in range(2):
        status, judge = run(a_class, tmp_path / "out", "--corrections", str(table))
        assert (status, judge.graded) == (0, [])
        points, message = rows(tmp_path / "out")["Cy", "02.2"]
        assert points == "0.5" and message.startswith(said)
    assert said in (tmp_path / "out/feedback/Cy.html").read_text()


def test_without_lessons_named_those_are_graded_that_somebody_handed_in(a_class, tmp_path, capsys):
    (a_class / "Ada/01.ipynb").write_text("{}")
    (a_class / "Bo/77.ipynb").write_text("{}")
    (a_class / "Ed.rar").touch()
    run(a_class, tmp_path / "out")
    assert "Ed, 01.1 and 9 more: Ed.rar: it is a rar archive" in capsys.readouterr().out
    found = rows(tmp_path / "out")
    assert {id[:2] for _, id in found} == {"01", "02"}
    assert found["Cy", "01.1"] == ("0", "no notebook of lesson 01 (handed in: 02)")
    run(a_class, tmp_path / "out", "--lessons", "1")
    assert {id[:2] for _, id in rows(tmp_path / "out")} == {"01"}


def test_what_an_answer_borrows_is_said_where_points_are_lost(a_class, tmp_path):
    borrows = PADDING.replace("tokens != pad_id", "pad(tokens)")
    submit(a_class / "Bo/02.ipynb", borrows, before="def pad(x): ...")
    run(a_class, tmp_path / "out", judge=Judge(lambda answers: Outcome.WRONG, hint="four lines"))
    words = "uses pad (cell 1), but only exercise cells are graded: move it into this cell"
    assert rows(tmp_path / "out")["Bo", "02.2"] == ("0", f"{words}; it is wrong")
    assert f"This answer {words}. four lines" in (tmp_path / "out/feedback/Bo.html").read_text()


def no_space(answers):
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("act", "status", "message"),
    [
        (no_space, grade.FAILED, "the grader failed (OSError: no space left): grade"),
        (lambda _: Outcome.UNREADABLE, 0, "it is cannot be graded"),  # it could not be started
    ],
)
def test_what_is_the_graders_fault_is_said_and_tried_again(a_class, tmp_path, act, status, message):
    assert run(a_class, tmp_path / "out", judge=Judge(act))[0] == status
    assert rows(tmp_path / "out")["Ada", "02.2"][1].startswith(message)
    status, judge = run(a_class, tmp_path / "out")
    assert (status, sorted(judge.graded)) == (0, ["Ada", "Bo"])


def test_a_damaged_store_is_graded_again(a_class, tmp_path):
    run(a_class, tmp_path / "out")
    before = everything(tmp_path / "out")
    for damaged in ("", "[3]", '[{"student": 3}]'):
        for path in (tmp_path / "out/.graded").glob("*.json"):
            path.write_text(damaged)
        _, judge = run(a_class, tmp_path / "out")
        assert sorted(judge.graded) == ["Ada", "Bo"]
        assert everything(tmp_path / "out") == before


TO_OUT = ["{tmp}/in", "--out", "{tmp}/out"]
BAD_CALLS = {
    "no such folder": (["{tmp}/nowhere", *TO_OUT[1:]], "there is no folder"),
    "self-test of a folder": (["--self-test", "--lessons", "02", "03"], "takes no folder, got 03"),
    "no --out": (TO_OUT[:1], "give a folder of submissions and --out"),
    "unknown lesson": ([*TO_OUT, "--lessons", "2,99"], "no lesson '99'"),
    "no jobs": ([*TO_OUT, "--jobs", "0"], "a whole number from 1 up, got 0"),
    "negative time": ([*TO_OUT, "--timeout", "-1"], "seconds from 1 to 86400, got -1"),
    "no time": ([*TO_OUT, "--timeout", "nan"], "seconds from 1 to 86400, got nan"),
    "no corrections": ([*TO_OUT, "--corrections", "{tmp}/no.csv"], "no.csv cannot be read"),
    "out has other things": (["{tmp}/in", "--out", "{tmp}/full"], "holds other things than grades"),
    "out among submissions": (["{tmp}/in", "--out", "{tmp}/in/Ada"], "lie in one another"),
    "submissions in out": (["{tmp}/in", "--out", "{tmp}"], "lie in one another"),
    "out cannot be": (["{tmp}/in", "--out", "{tmp}/full/file/out"], "cannot be written"),
    "the course": ([str(COURSE), *TO_OUT[1:]], "is one copy of the course"),
    "empty folder": (["{tmp}/empty", *TO_OUT[1:]], "holds no submission"),
    "no lesson": (["{tmp}/none", *TO_OUT[1:]], "name some with --lessons\n  no notebook in it"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_wrong_call_is_said_and_has_status_2_and_writes_nothing(a_class, tmp_path, capsys, case):
    words, message = BAD_CALLS[case]
    for folder in ("full", "empty", "none/Ada"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "full/file").write_text("x")
    before = everything(tmp_path)
    assert grade.main([word.format(tmp=tmp_path) for word in words]) == grade.USAGE
    said = capsys.readouterr().err
    assert said.startswith("grade: ") and message in said
    assert said.count("\n") == 1 + message.count("\n")
    assert everything(tmp_path) == before


def test_two_gradings_do_not_write_into_one_folder(a_class, tmp_path, capsys):
    second = []
    judge = Judge(lambda _: second.append(run(a_class, tmp_path / "out")[0]))
    status, _ = run(a_class, tmp_path / "out", judge=judge)
    assert (status, second) == (0, [grade.USAGE] * 2)
    assert "is being written by another grading" in capsys.readouterr().err


def test_the_grader_loads_neither_torch_nor_the_answers():
    command = [sys.executable, "-c", "import sys, solutions.grade; print(*sys.modules)"]
    loaded = subprocess.check_output(command, cwd=COURSE, text=True).split()
    assert "solutions.grading.sandbox.run" in loaded
    kept_out = r"torch|shared\.exercises\.(notebook|expecting|answers)"
    kept_out += r"|solutions\.(lesson\d|mistakes).*"
    assert [name for name in loaded if re.fullmatch(kept_out, name)] == []


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_notebooks_run_it_ends_them_and_keeps_what_is_graded(tmp_path, number):
    submit(tmp_path / "in/Ada/02.ipynb", PADDING)
    endless = PADDING.replace("    return", "    __import__('time').sleep(1e6)\n    return")
    submit(tmp_path / "in/Bo/02.ipynb", endless)
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
    assert not left and not (out / "grades.csv").exists()
    assert grader.returncode == grade.INTERRUPTED
    assert said.count("\n") <= 2 and "stopped; what was graded is kept" in said
    assert psutil.wait_procs(family, timeout=5)[1] == []
    [kept] = out.glob(".graded/*.json")
    points = {each["exercise"]: each["points"] for each in json.loads(kept.read_text())}
    assert points["02.2"] == 1, "Ada's, whom the next run need not grade"
