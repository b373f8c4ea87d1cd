"""The student edition: what is in it, what is not, and that it works on its own.

The last test runs lesson 02, cut short; TORCH_HANDLE_EDITION=03,04 has it run these, whole.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import xml.etree.ElementTree as ElementTree

import pytest

from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks.processes import supervise
from solutions import student_edition
from solutions.grading.intake.known import KnownAnswers, hand_in
from solutions.grading.intake.lesson import read_lessons

STOPPED = re.compile(r"exercise (\d\d)\.\d+[a-z]? \(\w+\) is not solved yet")
ASKED = os.environ.get("TORCH_HANDLE_EDITION", "")


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


def solved(number):
    """The references of a lesson as cells."""
    known = KnownAnswers(ROOT, read_lessons(ROOT, [number])[number])
    return {each.exercise: known.cell(each) for each in known.references()}


def test_no_answers(edition, tmp_path, capsys):
    assert student_edition.main([str(tmp_path / "again")]) == 0
    said = capsys.readouterr().out
    assert said.count("\nok ") == 4
    assert "later lessons import them: 01.1 01.2 01.4 02.1 02.2 02.3 02.4a" in said
    there = {path.name for path in edition.iterdir()}
    assert {"README.md", "lessons", "run_all.sh", ".gitignore"} <= there
    assert there.isdisjoint({"solutions", ".git", ".gitattributes", ".ci"})
    assert (edition / "run_all.sh").stat().st_mode & 0o100
    tests = {path.stem: path.read_text() for path in (edition / "tests").rglob("test_*.py")}
    needy = {n for n, t in tests.items() if re.search(r"train\.py|solutions|load_checks", t)}
    assert needy == {"test_links"}, "the others run scripts or checks, which need answers"


def test_nothing_imports_what_is_left_out(edition):
    imports = re.compile(r"^ *(?:from|import) ((?:shared|tests)\b[\w.]*)", re.MULTILINE)
    gone = [
        f"{path.relative_to(edition)}: {name}"
        for path in edition.rglob("*.py")
        for name in imports.findall(path.read_text(encoding="utf-8"))
        for place in [edition / name.replace(".", "/")]
        if not place.is_dir() and not place.with_suffix(".py").exists()
    ]
    assert gone == []


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
    assert (folder / "README.md").read_text().startswith("old\n")
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
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.full
def test_an_answer_that_got_in_is_found(copy):
    path = next(copy.glob("lessons/lesson01_*/lesson.ipynb"))
    path.write_bytes(hand_in(path.read_bytes(), {"01.3": solved("01")["01.3"]}))
    with (copy / "shared/measuring/timing.py").open("a") as module:
        module.write("\nfrom solutions import grade\n")
    assert {what: problem for what, problem in student_edition.read_over(copy) if problem} == {
        "notebooks and their stored outputs are as they were": str(path.relative_to(copy)),
        "nothing imports solutions unguarded": "shared/measuring/timing.py",
        "every exercise cell is an empty stub": "01.3",
    }


class Learner:
    """Runs commands in a copy of the edition, in an environment that knows it alone."""

    def __init__(self, root, place):
        self.root, self.place, self.log = root, place, place / "said.txt"
        venv.create(place / "venv", with_pip=False, symlinks=True)
        self.python = place / "venv" / "bin" / "python"
        site = next((place / "venv").glob("lib/*/site-packages"))
        # The packages of this environment; its .pth files, one of them the course's, do not count.
        packages = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
        (site / "edition.pth").write_text("\n".join([str(root), *sorted(packages)]) + "\n")

    def run(self, line, status):
        """Run a command line, which must end with this status; return what it said."""
        ours = ("TORCH_HANDLE", "PYTEST", "PYTHON", "JUPYTER", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env["PATH"] = f"{self.python.parent}{os.pathsep}{env['PATH']}"
        env |= {"OMP_NUM_THREADS": "1", "JUPYTER_DATA_DIR": str(self.place / "jupyter")}
        words = ["sh", "-c", f'cd "$0" && {line}', str(self.root)]
        outcome = supervise(words, env=env, log=self.log, time_limit=400)
        said = self.log.read_text(encoding="utf-8", errors="replace")
        assert (outcome.status, outcome.timed_out) == (status, False), said[-3000:]
        return said

    def cells(self, folder, status):
        """The code cells under nbval: the source, and what was said where one failed, else ""."""
        report = self.place / "report.xml"
        self.run(f"python -m pytest --nbval {folder} -q --junit-xml={report}", status)
        said = {}
        for case in ElementTree.parse(report).iter("testcase"):
            words = "".join(f"{each.get('message')}\n{each.text}" for each in case)
            said[case.get("name").split()[-1]] = re.sub(r"(?:#x1B|\x1b)\[[\d;]*m", "", words)
        cells = json.loads((self.root / folder / "lesson.ipynb").read_bytes())["cells"]
        code = ["".join(each["source"]) for each in cells if each["cell_type"] == "code"]
        return [(source, said[str(n)]) for n, source in enumerate(code)]


def cut_after_checks(path):
    """Leave two code cells after the last check, which use what is unsolved."""
    notebook = json.loads(path.read_text())
    checks = [n for n, c in enumerate(notebook["cells"]) if "".join(c["source"])[:6] == "check("]
    notebook["cells"] = notebook["cells"][: checks[-1] + 5]
    path.write_text(json.dumps(notebook))


@pytest.mark.full
@pytest.mark.timeout(3600 if ASKED else 600)
@pytest.mark.parametrize("number", ASKED.split(",") if ASKED else ["02"])
def test_the_edition_works_on_its_own(copy, tmp_path, number):
    lesson, learner = read_lessons(ROOT, [number])[number], Learner(copy, tmp_path)
    folder, count = f"lessons/{lesson.folder}", len(lesson.exercises)
    notebook = copy / folder / "lesson.ipynb"
    if not ASKED:
        cut_after_checks(notebook)
    links = learner.run("./run_all.sh --no-setup test tests/frame/test_links.py", 0)
    assert "Your own answers are tested" in links
    for line in (
        f"./run_all.sh --no-setup --preset tiny {number}",
        f"python -m shared.cli.notebooks {number} --mode reading --no-write",
    ):
        assert number in STOPPED.findall(learner.run(line, 1)), line
    todo = f"./run_all.sh --no-setup todo {number}"
    assert learner.run(todo, 1).count("  open\n") == count
    users = 0
    for source, words in learner.cells(folder, 1):
        if source.startswith("check("):
            assert "not solved yet" in words, source
        elif words:
            users += 1
            assert STOPPED.search(words) or "NameError: " in words, words
    assert users
    notebook.write_bytes(hand_in(notebook.read_bytes(), solved(number)))
    assert learner.run(todo, 0).count("  right\n") == count
    learner.run(f"python {folder}/train.py --mine --preset tiny --out runs/mine", 0)
    assert (copy / "runs/mine/metrics.json").exists()
    assert [words for _, words in learner.cells(folder, 0) if words] == []


def test_writing_and_reading_over_need_no_torch():
    code = "import sys, solutions.student_edition; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
