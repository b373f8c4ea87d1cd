"""The real nbgrader, in an environment of its own, on one of our lessons.

Its environment is a class's: the packages of the course, the student edition, and nbgrader on top.
"""

import csv
import json
import os
import re
import subprocess
import sysconfig
import tomllib
import venv

import nbformat
import pytest

from shared.exercises.lessons import ROOT
from solutions import student_edition
from solutions.grading.answer_cells import AnswerCells, hand_in
from solutions.grading.intake.lesson import read_lessons

LESSON = "02_attention"
NO_NETWORK = ("NewConnectionError", "name resolution", "Network is unreachable", "ConnectTimeout")
pytestmark = pytest.mark.timeout(600)


def pinned() -> str:
    """The version that the guide installs: "nbgrader==..."."""
    found = re.findall(r"nbgrader==[\d.]+", (ROOT / "solutions" / "README.md").read_text())
    assert len(set(found)) == 1, found
    return found[0]


class NbgraderClass:
    """A folder where nbgrader is run, and the environment to run it in."""

    def __init__(self, place):
        self.folder, self.edition = place / "grading", place / "edition"
        student_edition.write_edition(self.edition)
        venv.create(place / "venv", with_pip=False, symlinks=True)
        self.programs = place / "venv" / "bin"
        version = sysconfig.get_python_version()
        site = place / "venv" / "lib" / f"python{version}" / "site-packages"
        packages = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
        (site / "class.pth").write_text("\n".join([str(self.edition), *sorted(packages)]) + "\n")
        self.install()
        source = self.folder / "source" / LESSON
        source.mkdir(parents=True)
        for path in (self.edition / "lessons" / LESSON).glob("*.*"):
            (source / path.name).write_bytes(path.read_bytes())
        config = ROOT / "solutions" / "nbgrader_config.py"
        (self.folder / config.name).write_bytes(config.read_bytes())
        self.notebook = source / "lesson.ipynb"
        # To the last check: what is measured after it is no matter of points, and takes its time.
        content = json.loads(self.notebook.read_text())
        checks = [n for n, c in enumerate(content["cells"]) if "points" in str(c["metadata"])]
        content["cells"] = content["cells"][: checks[-1] + 1]
        self.notebook.write_text(json.dumps(content))

    def install(self):
        """pip sees the course's packages beside it and adds nbgrader and a few more."""
        words = ["-m", "pip", "install", "-q", "--disable-pip-version-check", pinned()]
        done = self.run("python", *words, folder=self.edition, check=False)
        if done.returncode and any(words in done.stdout for words in NO_NETWORK):
            assert not os.environ.get("CI"), f"nbgrader must be tried here:\n{done.stdout}"
            pytest.skip("nbgrader cannot be installed: no network")
        assert done.returncode == 0, done.stdout

    def run(self, program, *words, folder=None, check=True):
        """Run a program of the environment, as from a shell in which it was activated."""
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_HANDLE", "PYTEST"))}
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [self.programs / program, *words],
            cwd=folder or self.folder,
            env={**keep, "PATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout
        return done

    def submit(self, student, notebook):
        """Put a student's notebook where nbgrader collects them."""
        folder = self.folder / "submitted" / student / LESSON
        folder.mkdir(parents=True)
        (folder / "lesson.ipynb").write_bytes(notebook)


@pytest.fixture(scope="module")
def answers():
    """The references and mistakes of the lesson as exercise cells."""
    return AnswerCells(ROOT, read_lessons(ROOT, [LESSON[:2]])[LESSON[:2]])


@pytest.fixture(scope="module")
def nbgrader(tmp_path_factory, answers):
    """A class whose lesson is released and in which two have handed in."""
    school = NbgraderClass(tmp_path_factory.mktemp("nbgrader"))
    school.run("nbgrader", "generate_assignment", LESSON)
    release = (school.folder / "release" / LESSON / "lesson.ipynb").read_bytes()
    school.submit("right", hand_in(release, answers.references))
    mistake = next(each.cell for each in answers.mistakes if each.exercise == "02.1")
    wrong = {"02.1": mistake, "02.2": answers.references["02.2"]}
    handed_in = json.loads(hand_in(release, wrong))
    for cell in handed_in["cells"]:
        if "".join(cell["source"]).startswith('check("02.3"'):
            cell["source"] = ["print('right')"]
    school.submit("wrong", json.dumps(handed_in).encode())
    return school


def test_the_release_holds_the_stubs_and_locks_the_checks(nbgrader):
    source, release = (
        nbformat.read(nbgrader.folder / name / LESSON / "lesson.ipynb", as_version=4)
        for name in ("source", "release")
    )
    for before, after in zip(source.cells, release.cells, strict=True):
        assert before.source == after.source
        assert before.get("outputs") == after.get("outputs"), "the finished page stays readable"
        marks = after.metadata.get("nbgrader", {})
        assert marks.get("locked", False) is after.source.startswith("check(")
        if marks.get("grade"):
            assert after.metadata.editable is False
    stubs = [c.source for c in release.cells if c.source.startswith("@exercise(")]
    assert len(stubs) == 6
    assert all(stub.rstrip().endswith("raise NotImplementedError") for stub in stubs)


def test_answers_between_markers_are_taken_out_and_others_refused(nbgrader, answers):
    pristine = nbgrader.notebook.read_bytes()
    stub = answers.lesson.stubs["02.3"]
    head, _, _ = stub.rpartition("    raise NotImplementedError")
    region = f"{head}    ### BEGIN SOLUTION\n    return secret\n    ### END SOLUTION\n"
    command = (
        "generate_assignment",
        LESSON,
        "--force",
        "--no-db",
        "--CourseDirectory.release_directory",
    )
    try:
        nbgrader.notebook.write_bytes(hand_in(pristine, {"02.3": region}))
        nbgrader.run("nbgrader", *command, "once")
        released = (nbgrader.folder / "once" / LESSON / "lesson.ipynb").read_text()
        cells = [c.source for c in nbformat.reads(released, as_version=4).cells]
        assert stub.rstrip() in [cell.rstrip() for cell in cells], "signature and contract stay"
        assert "secret" not in released
        nbgrader.notebook.write_bytes(hand_in(pristine, {"02.3": answers.references["02.3"]}))
        done = nbgrader.run("nbgrader", *command, "twice", check=False)
        assert done.returncode != 0
        assert "an answer not marked BEGIN SOLUTION would get out" in done.stdout
    finally:
        nbgrader.notebook.write_bytes(pristine)


def test_validate_tells_right_from_unsolved(nbgrader):
    right = f"submitted/right/{LESSON}/lesson.ipynb"
    assert (
        "Success! Your notebook passes all the tests."
        in nbgrader.run("nbgrader", "validate", right).stdout
    )
    said = nbgrader.run(
        "nbgrader", "validate", f"release/{LESSON}/lesson.ipynb", check=False
    ).stdout
    assert "VALIDATION FAILED ON 6 CELL(S)!" in said
    assert "02.1 scaled_dot_product_attention: not solved yet" in said


def test_autograde_gives_the_points(nbgrader):
    """13 points for all; one for the right exercise beside a mistake, stubs and a changed check."""
    nbgrader.run("nbgrader", "autograde", LESSON)
    nbgrader.run("nbgrader", "export")
    with (nbgrader.folder / "grades.csv").open() as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    scores = {name: (float(row["score"]), float(row["max_score"])) for name, row in rows.items()}
    assert scores == {"right": (13.0, 13.0), "wrong": (1.0, 13.0)}


def test_nbgrader_is_none_of_the_courses_pins():
    listing = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = [*listing["dependencies"], *listing["optional-dependencies"]["dev"]]
    assert not [each for each in everything if "nbgrader" in each]
