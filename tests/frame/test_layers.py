"""The house's rules, read from the imports and the folders. A failure lists all offenders.

What imports alone can say stands in pyproject.toml: [tool.importlinter], and ruff's TID252.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

from shared.cli.changed import imports_of
from solutions.built import BUILT, NEEDED_BEFORE, built_in
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.lesson import read_exercises

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(path.name for path in (ROOT / "lessons").glob("lesson*"))
LAYERS = ("shared", "solutions", "lessons")
MODULES = sorted(
    path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if "runs" not in path.parts
)


@cache
def imported(path: Path) -> set[str]:
    """What a file imports."""
    return set(imports_of(path.read_text(encoding="utf-8")))


def dotted(path: Path) -> str:
    """The name by which a file or folder of the course is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_the_contracts_of_import_linter_are_kept():
    pytest.importorskip("importlinter", reason="it comes with the extra [dev]")
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", lint, "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_contributing_and_the_grader_list_their_rooms_as_the_contracts_do():
    """The grader's docstring begins with the lowest line; what a line has may import each other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    shared, grading = (each["layers"] for each in contracts if "containers" in each)
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE) == shared
    listing = (ROOT / "solutions/grading/__init__.py").read_text(encoding="utf-8")
    lines = re.findall(r"^((?:\w+/?(?:, )?)+)  ", listing, re.MULTILINE)
    assert [" : ".join(re.findall(r"\w+", line)) for line in lines[::-1]] == grading


def test_what_runs_beside_an_answer_imports_nothing_of_ours():
    inside = (ROOT / "solutions/grading/sandbox/inside").glob("*.py")
    assert not [name for path in inside for name in imported(path) if name.split(".")[0] in LAYERS]


def test_a_lesson_s_own_modules_are_imported_by_their_real_names():
    """A script's folder leads sys.path: `experiments.x` would be the same file once more."""
    short = {"checks", "experiments", "laboratory", "train"}
    codes = [(path, path.read_text(encoding="utf-8")) for path in MODULES]
    for path in (ROOT / "lessons").glob("*/lesson.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        codes += [(path, "".join(c["source"])) for c in cells if c["cell_type"] == "code"]
    begin = re.compile(rf"^\s*(?:from|import) ({'|'.join(sorted(short))})\b", re.MULTILINE)
    assert [
        f"{p.relative_to(ROOT)}: {m[0]}" for p, code in codes for m in begin.finditer(code)
    ] == []


def test_no_module_of_a_lesson_hides_one_that_is_installed():
    """A script's folder comes first in sys.path, for what torch and others import as well."""
    known = sys.stdlib_module_names | set(importlib.metadata.packages_distributions())
    known -= {"lessons", "shared", "solutions"}
    found = [p for p in (ROOT / "lessons").glob("*/*") if p.suffix == ".py" or p.is_dir()]
    assert [str(p.relative_to(ROOT)) for p in found if p.stem in known] == []


def test_shared_names_no_lesson():
    """What one lesson alone needs lives in its folder; gettext has a layout of its own."""
    named = [p for p in (ROOT / "shared").rglob("*") if re.match(r"lesson\d\d", p.name)]
    translations = ROOT / "shared" / "book" / "locale"
    assert [str(p.relative_to(ROOT)) for p in named if translations not in p.parents] == []


def test_a_solution_imports_nothing_of_a_later_lesson():
    offenders = [
        f"{path.relative_to(ROOT)} imports {name}, of lesson {built_in(name):02}"
        for path in sorted((ROOT / "solutions").rglob("lesson[0-9]*.py"))
        for name in sorted(imported(path))
        if built_in(name) > int(path.stem[len("lesson") :][:2])
    ]
    assert not offenders, "\n".join(offenders)


def test_what_lessons_built_is_there():
    """A module that was renamed or removed must not leave its line behind."""
    parts = [ROOT / name.replace(".", "/") for name in BUILT]
    gone = [p for p in parts if not p.is_dir() and not p.with_suffix(".py").exists()]
    assert not gone


def test_an_answer_in_shared_lies_in_a_module_of_its_lesson():
    """The table of solutions/built.py, by which a class gets the modules of earlier weeks whole."""
    known = [
        (number, each)
        for number, lesson in read_exercises(ROOT).items()
        for each in KnownAnswers(ROOT, lesson).references()
    ]
    assert [
        f"{each.module} holds {each.exercise}, and the table says lesson {built_in(each.module):02}"
        for number, each in known
        if each.module.startswith("shared.")
        and built_in(each.module) != NEEDED_BEFORE.get(each.exercise, int(number))
    ] == []


def test_lessons_solutions_mistakes_and_readme_rows_match():
    assert LESSONS
    assert all(re.fullmatch(r"lesson\d\d_[a-z0-9_]+", name) for name in LESSONS)
    numbers = [int(name.removeprefix("lesson")[:2]) for name in LESSONS]
    assert numbers == list(range(1, len(numbers) + 1))
    stems = set(LESSONS)
    assert {p.stem for p in (ROOT / "solutions").glob("lesson*.py")} == stems
    assert {p.stem for p in (ROOT / "solutions" / "mistakes").glob("lesson*.py")} == stems
    rows = re.findall(r"^\|.*\(lessons/([^)/]+)/?[^)]*\)", (ROOT / "README.md").read_text(), re.M)
    assert sorted(set(rows)) == LESSONS
    assert len(rows) == len(LESSONS), "one README row a lesson"


def test_a_lesson_folder_has_its_files():
    needed = {"lesson.ipynb", "checks.py", "train.py", "__init__.py"}
    found = {name: {p.name for p in (ROOT / "lessons" / name).iterdir()} for name in LESSONS}
    assert {name: needed - files for name, files in found.items() if not needed <= files} == {}
    tests = {path.name for path in (ROOT / "tests").glob("lesson*")}
    assert tests == set(LESSONS)


def test_a_script_takes_only_its_own_exercises_from_solutions():
    """Where there are no solutions, shared/exercises/mine.py stands in for these names alone."""
    offenders = []
    for name in LESSONS:
        checks = (ROOT / "lessons" / name / "checks.py").read_text(encoding="utf-8")
        exercises = re.findall(r'checks_for\(\s*"[\d.a-z]+",\s*(?:name=)?"(\w+)"', checks)
        own = {f"solutions.{name}.{each}" for each in exercises}
        taken = set(imported(ROOT / "lessons" / name / "train.py"))
        wrong = {each for each in taken if each.startswith("solutions")} - own
        offenders += [f"{name}/train.py imports {each}" for each in sorted(wrong)]
    assert not offenders, "\n".join(offenders)


def test_exactly_the_packages_of_the_course_are_installed():
    setuptools = pytest.importorskip("setuptools")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = project["tool"]["setuptools"]["packages"]["find"]
    found = set(setuptools.find_namespace_packages(str(ROOT), **asked))
    assert {name.split(".")[0] for name in found} == set(LAYERS), "datasets never"
    layers = [ROOT / layer for layer in LAYERS]
    packages = {dotted(path.parent) for layer in layers for path in layer.rglob("*.py")}
    assert packages <= found


def test_the_top_level_is_what_was_agreed():
    allowed = {"lessons", "solutions", "shared", "datasets", "tests", "runs", "run_all.sh"}
    allowed |= {"environment.yml", "README.md", "README.zh-CN.md", "pyproject.toml", "LICENSE"}
    allowed |= {"CONTRIBUTING.md", "AGENTS.md"}
    found = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert {name for name in found - allowed if not name.endswith(".egg-info")} == set()
