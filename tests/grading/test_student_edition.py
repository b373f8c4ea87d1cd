"""The student edition: what is in it, what is not, and that it works on its own."""

import itertools
import json
import re
import shutil
import subprocess
import sys

import pytest

from shared.errors import InputError
from shared.exercises.lessons import ROOT
from solutions import edition_trial, student_edition
from solutions.grading.intake.answer_cells import AnswerCells, hand_in
from solutions.grading.intake.lesson import read_lessons


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    """The edition of this course as of HEAD, written once and left alone."""
    folder = tmp_path_factory.mktemp("class") / "edition"
    assert student_edition.write_edition(folder) > 100
    return folder


@pytest.fixture
def copy(edition, tmp_path):
    """An edition to spoil."""
    return shutil.copytree(edition, tmp_path / "edition")


def cut(folder, choose):
    """Leave the cells of lesson 02's notebook that `choose` takes of them, given their starts."""
    path = next(folder.glob("lessons/02_*/lesson.ipynb"))
    notebook = json.loads(path.read_text())
    starts = ["".join(cell["source"])[:9] for cell in notebook["cells"]]
    notebook["cells"] = choose(notebook["cells"], starts)
    path.write_text(json.dumps(notebook))


def test_no_answers(edition):
    *findings, stay = student_edition.read_over(edition)
    assert [each.problem for each in findings] == ["", "", ""]
    assert "later lessons import them: 01.1 01.2 01.4 02.1 02.2 02.3 02.4a" in stay.what
    there = {path.name for path in edition.iterdir()}
    assert {"README.md", "lessons", "run_all.sh", ".gitignore"} <= there
    assert there.isdisjoint({"solutions", ".git", ".gitattributes", ".ci"})
    assert (edition / "run_all.sh").stat().st_mode & 0o100
    tests = {path.stem: path.read_text() for path in (edition / "tests").rglob("test_*.py")}
    needy = {n for n, t in tests.items() if re.search(r"train\.py|solutions|load_checks", t)}
    assert needy == {"test_links"}, "the others run scripts or checks, which need answers"


def test_what_is_left_out_is_there():
    """What was renamed must not leave its line behind, and so get out under its new name."""
    lines = (ROOT / ".gitattributes").read_text().splitlines()
    names = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert {"solutions", "shared/exercises/mistakes.py", "tests/grading"} <= set(names)
    assert [name for name in names if not list(ROOT.glob(name))] == []


def commit(course):
    """Put what is in a folder under git."""
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "as it is"]):
        subprocess.run(["git", "-C", str(course), *who, *words], check=True)


def test_what_is_not_committed_is_named_and_does_not_get_out(tmp_path):
    course, folder = tmp_path / "course", tmp_path / "edition"
    (course / "solutions").mkdir(parents=True)
    (course / "solutions/answers.py").touch()
    (course / "README.md").write_text("old")
    with pytest.raises(InputError, match="made from a git checkout, and git says: fatal: "):
        student_edition.write_edition(folder, course)
    commit(course)
    with pytest.raises(InputError, match=r"no \.gitattributes leaves solutions/ out"):
        student_edition.write_edition(folder, course)
    assert not folder.exists()
    (course / ".gitattributes").write_text("solutions export-ignore\n")
    commit(course)
    assert student_edition.not_committed(course) == ""
    (course / "README.md").write_text("new")
    (course / "grades.csv").touch()
    assert student_edition.write_edition(folder, course) == 2
    assert (folder / "README.md").read_text() == "old"
    assert "edition: README.md, grades.csv (2)\n" in student_edition.not_committed(course)


def test_what_cannot_be_used_is_named_in_one_line(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    bad = {tmp_path: "is not empty", tmp_path / "notes.txt": "is a file"}
    bad |= {ROOT: "lies inside the course", ROOT / "runs/edition": "lies inside the course"}
    for folder, said in bad.items():
        assert student_edition.main([str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert said in line
    assert student_edition.main([str(tmp_path / "new"), "--try", "77"]) == 2
    assert "error: there is no lesson '77' in the course (lessons: 01" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_answer_that_got_in_is_found(copy):
    answers = AnswerCells(ROOT, read_lessons(ROOT, ["01"])["01"]).references
    path = next(copy.glob("lessons/01_*/lesson.ipynb"))
    path.write_bytes(hand_in(path.read_bytes(), {"01.3": answers["01.3"]}))
    with (copy / "shared/measuring/timing.py").open("a") as module:
        module.write("\nfrom solutions import grade\n")
    assert {what: problem for what, problem in student_edition.read_over(copy) if problem} == {
        "notebooks and their stored outputs are as they were": str(path.relative_to(copy)),
        "nothing imports solutions unguarded": "shared/measuring/timing.py",
        "every exercise cell is an empty stub": "01.3",
    }


@pytest.mark.timeout(600)
def test_the_edition_works_on_its_own(copy):
    """Lesson 02 a little beyond its last check, with two cells that use what is unsolved."""
    cut(copy, lambda cells, starts: cells[: len(starts) - starts[::-1].index('check("02') + 4])
    trial = edition_trial.try_out(copy, ROOT, read_lessons(ROOT, ["02"]))
    found = list(itertools.islice(trial, 7))
    assert [each.problem for each in found] == [""] * 7
    assert [each.what.removeprefix("02: ") for each in found[1:]] == [
        "./run_all.sh names the exercise that the script needs first (02.5)",
        "Run All stops at the first use of an unsolved exercise (02.2)",
        "./run_all.sh todo lists 6 exercises as open",
        "nbval lists 6 checks and 2 cells that use what is unsolved",
        "./run_all.sh todo lists 6 exercises as right",
        "the script runs with --mine",
    ]


def test_a_cell_that_fails_for_a_reason_of_its_own_is_no_item_of_a_to_do_list(copy, tmp_path):
    def choose(cells, starts):
        setup = next(cell for cell in cells if cell["cell_type"] == "code")
        stub, check = (cells[starts.index(each)] for each in ("@exercise", 'check("02'))
        return [setup, stub, check, {**setup, "id": "x", "source": ["1 / 0"], "metadata": {}}]

    cut(copy, choose)
    trial = edition_trial.EditionCopy(copy, tmp_path / "trial")
    what, problem = edition_trial.strict_form(trial, read_lessons(ROOT, ["02"])["02"])
    assert what.startswith("02: nbval lists 1 checks and 1 cells that use")
    assert re.match(r"cell 3 fails:(?s:.*)ZeroDivisionError", problem)


def test_writing_and_reading_over_need_no_torch():
    code = "import sys, solutions.student_edition; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
