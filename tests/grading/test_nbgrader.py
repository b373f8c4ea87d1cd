"""The real nbgrader, in an environment of its own, on three exercises of one of our lessons.

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
from solutions.grading.intake.known import KnownAnswers, hand_in
from solutions.grading.intake.lesson import read_exercises
from solutions.student_edition import write_edition

LESSON = "lesson02_attention"
TAKEN = ("02.1", "02.2", "02.3")  # 3, 1 and 1 points; the other three take their time
(PRISTINE,) = read_exercises(ROOT, ["02"]).values()
KNOWN, STUBS = KnownAnswers(ROOT, PRISTINE), PRISTINE.stubs
REFERENCES = {each.exercise: KNOWN.cell(each) for each in KNOWN.references()}
NO_NETWORK = ("NewConnectionError", "name resolution", "Network is unreachable", "ConnectTimeout")
pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


def is_taken(cell) -> bool:
    """Whether a cell is prose, the setup, or belongs to one of the exercises."""
    slug = cell["metadata"].get("nbgrader", {}).get("grade_id", "").partition("-")[2]
    setup = "setup" in cell["metadata"].get("tags", [])
    return cell["cell_type"] == "markdown" or setup or slug.replace("-", ".") in TAKEN


class NbgraderClass:
    """A folder where nbgrader is run, and the environment to run it in."""

    def __init__(self, place):
        self.folder, self.edition = place / "grading", place / "edition"
        write_edition(self.edition)
        venv.create(place / "venv", with_pip=False, symlinks=True)
        self.programs = place / "venv" / "bin"
        version = sysconfig.get_python_version()
        site = place / "venv" / "lib" / f"python{version}" / "site-packages"
        packages = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
        quick = "import shared.exercises.quick_nbformat"  # five programs start sooner
        lines = [str(self.edition), *sorted(packages), quick]
        (site / "class.pth").write_text("\n".join(lines) + "\n")
        self.install()
        source = self.folder / "source" / LESSON
        source.mkdir(parents=True)
        for path in (self.edition / "lessons" / LESSON).glob("*.*"):
            (source / path.name).write_bytes(path.read_bytes())
        config = ROOT / "solutions" / "nbgrader_config.py"
        (self.folder / config.name).write_bytes(config.read_bytes())
        self.notebook = source / "lesson.ipynb"
        content = json.loads(self.notebook.read_text())
        content["cells"] = [cell for cell in content["cells"] if is_taken(cell)]
        self.notebook.write_text(json.dumps(content))

    def install(self):
        """pip sees the course's packages beside it and adds what the guide installs."""
        guide = (ROOT / "solutions" / "README.md").read_text()
        [pinned] = set(re.findall(r"nbgrader==[\d.]+", guide))
        words = ["-m", "pip", "install", "-q", "--disable-pip-version-check", pinned]
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
def nbgrader(tmp_path_factory):
    """A class whose lesson is released and in which two have handed in.

    In the source 02.3 has its answer, between markers.
    """
    school = NbgraderClass(tmp_path_factory.mktemp("nbgrader"))
    head, _, _ = STUBS["02.3"].rpartition("    raise NotImplementedError")
    region = f"{head}    ### BEGIN SOLUTION\n    return secret\n    ### END SOLUTION\n"
    school.notebook.write_bytes(hand_in(school.notebook.read_bytes(), {"02.3": region}))
    school.run("nbgrader", "generate_assignment", LESSON)
    release = (school.folder / "release" / LESSON / "lesson.ipynb").read_bytes()
    school.submit("right", hand_in(release, {id: REFERENCES[id] for id in TAKEN}))
    wrong = {"02.1": KNOWN.cell(next(KNOWN.mistakes())), "02.2": REFERENCES["02.2"]}
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
        if "### BEGIN SOLUTION" not in before.source:
            assert before.source == after.source
        assert before.get("outputs") == after.get("outputs"), "the finished page stays readable"
        marks = after.metadata.get("nbgrader", {})
        assert marks.get("locked", False) is after.source.startswith("check(")
        if marks.get("grade"):
            assert after.metadata.editable is False
    stubs = [c.source for c in release.cells if c.source.startswith("@exercise(")]
    pristine = [STUBS[id].rstrip() for id in TAKEN]
    assert [stub.rstrip() for stub in stubs] == pristine, "signature and contract stay"
    assert "secret" not in json.dumps(release)


def test_an_answer_without_markers_is_refused(nbgrader):
    source = nbgrader.notebook.read_bytes()
    elsewhere = ("--force", "--no-db", "--CourseDirectory.release_directory", "elsewhere")
    try:
        nbgrader.notebook.write_bytes(hand_in(source, {"02.2": REFERENCES["02.2"]}))
        done = nbgrader.run("nbgrader", "generate_assignment", LESSON, *elsewhere, check=False)
    finally:
        nbgrader.notebook.write_bytes(source)
    assert done.returncode != 0
    assert "an answer not marked BEGIN SOLUTION would get out" in done.stdout


def test_validate_tells_right_from_unsolved(nbgrader):
    both = (f"{folder}/{LESSON}/lesson.ipynb" for folder in ("submitted/right", "release"))
    said = nbgrader.run("nbgrader", "validate", *both, check=False).stdout
    right, _, unsolved = said.partition("Success! Your notebook passes all the tests.")
    assert unsolved, said
    assert "VALIDATION FAILED" not in right
    assert "VALIDATION FAILED ON 3 CELL(S)!" in unsolved
    assert "02.1 scaled_dot_product_attention: not solved yet" in unsolved


def test_autograde_gives_the_points(nbgrader):
    """All points; one for the right exercise beside a mistake, a stub and a changed check."""
    nbgrader.run("nbgrader", "autograde", LESSON)
    nbgrader.run("nbgrader", "export")
    with (nbgrader.folder / "grades.csv").open() as file:
        rows = {row["student_id"]: row for row in csv.DictReader(file)}
    scores = {name: (float(row["score"]), float(row["max_score"])) for name, row in rows.items()}
    assert scores == {"right": (5.0, 5.0), "wrong": (1.0, 5.0)}


def test_nbgrader_is_none_of_the_courses_pins():
    listing = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    everything = [*listing["dependencies"], *listing["optional-dependencies"]["dev"]]
    assert not [each for each in everything if "nbgrader" in each]
