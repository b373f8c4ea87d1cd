"""The house's rules, read from the imports and the folders. A failure lists all offenders."""

import ast
import importlib.metadata
import json
import re
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from solutions.built import BUILT, NEEDED_BEFORE, built_in
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.lesson import read_lessons

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted(path.name for path in (ROOT / "lessons").glob("lesson*"))
LAYERS = {"shared": 0, "solutions": 1, "lessons": 2}
MODULES = sorted(
    path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if "runs" not in path.parts
)


@cache
def imported(path: Path) -> set[str]:
    """The modules and names that a file imports anywhere in it, dotted in full."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(path: Path) -> str:
    """The name by which a file or folder of the course is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_imports_point_left_only():
    offenders = []
    for path in MODULES:
        own = LAYERS[path.relative_to(ROOT).parts[0]]
        for name in sorted(imported(path)):
            other = LAYERS.get(name.split(".")[0], 0)
            home = ".".join(path.relative_to(ROOT).parts[:2])
            abroad = other == LAYERS["lessons"] and not f"{name}.".startswith(f"{home}.")
            if other > own or abroad:  # a lesson imports no other lesson
                offenders.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not offenders, "\n".join(offenders)


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


def rooms_graph(folder: str) -> dict[str, dict[str, str]]:
    """For each package and module of a folder, those beside it that it imports, and one place."""
    rooms = [p for p in (ROOT / folder).iterdir() if p.is_dir() or p.suffix == ".py"]
    graph: dict[str, dict[str, str]] = {}
    for room in rooms:
        files = sorted(room.rglob("*.py")) if room.is_dir() else [room]
        if not files or room.stem == "__init__":
            continue
        needs = graph.setdefault(room.stem, {})
        for path in files:
            for other in rooms:
                name = dotted(other)
                found = any(f"{each}.".startswith(f"{name}.") for each in imported(path))
                if found and other != room:
                    needs[other.stem] = f"{path.relative_to(ROOT)} imports {name}"
    return graph


@pytest.mark.parametrize("folder", ["shared", "solutions", "solutions/grading"])
def test_packages_import_each_other_in_no_circle(folder):
    graph = rooms_graph(folder)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]
        places = [graph[a][b] for a, b in pairwise(circle)]
        raise AssertionError("\n".join(places)) from None


def test_a_package_of_shared_imports_only_what_contributing_lists_below_it():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", page, re.MULTILINE)
    graph = rooms_graph("shared")
    assert sorted(listed) == sorted(graph), "CONTRIBUTING lists what is there, each once"
    upward = [
        place
        for room, needs in graph.items()
        for other, place in needs.items()
        if listed.index(other) < listed.index(room)
    ]
    assert not upward, "\n".join(upward)


def test_a_part_of_the_grader_imports_only_what_stands_with_it_or_above():
    """In the docstring of solutions/grading; what runs beside an answer imports nothing of ours."""
    grading = ROOT / "solutions" / "grading"
    listing = (grading / "__init__.py").read_text(encoding="utf-8")
    lines = re.findall(r"^((?:\w+/?(?:, )?)+)  ", listing, re.MULTILINE)
    rank = {name: n for n, line in enumerate(lines) for name in re.findall(r"\w+", line)}
    graph = rooms_graph("solutions/grading")
    assert sorted(rank) == sorted(graph), "the docstring lists what is there, each once"
    pairs = [(rank[a], rank[b], place) for a in graph for b, place in graph[a].items()]
    assert [place for own, other, place in pairs if other > own] == []
    inside = grading.glob("sandbox/inside/*.py")
    assert not [name for path in inside for name in imported(path) if name.split(".")[0] in LAYERS]


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
        for number, lesson in read_lessons(ROOT).items()
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
