"""The house's rules, read from the imports and the folders."""

import ast
import re
from pathlib import Path

import pytest

from shared.exercises.lessons import ROOT

LESSONS = sorted(path.name for path in (ROOT / "lessons").iterdir() if path.is_dir())
LAYERS = {"shared": 0, "solutions": 1, "lessons": 2}
MODULES = sorted(
    path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if "runs" not in path.parts
)


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it, submodules of `from` imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=[str(p.relative_to(ROOT)) for p in MODULES])
def test_imports_point_left_only(path):
    own = LAYERS[path.relative_to(ROOT).parts[0]]
    for name in imported(path):
        other = LAYERS.get(name.split(".")[0])
        assert other is None or other <= own, f"{path} imports {name}"
        assert other != LAYERS["lessons"], "lesson folders are leaves"


def home(name: str) -> int:
    """The lesson that introduces an imported solution module or part of shared/; 0: the frame."""
    solution = re.match(r"solutions\.(?:mistakes\.|alternatives\.)?lesson(\d\d)", name)
    if solution:
        return int(solution.group(1))
    introduced = {
        "shared.model.embeddings": 1,
        "shared.model.attention": 2,
        "shared.model": 3,
        "shared.data.sampling": 7,
        "shared.data": 4,
        "shared.training.loop": 4,
        "shared.training.decoding": 4,
        "shared.training.checkpoint_files": 4,
        "shared.training.reference_run": 4,
        "shared.measuring.traffic": 5,
        "shared.measuring.bandwidth": 5,
        "shared.ranks.links": 5,
        "shared.measuring.trace": 6,
        "shared.engines": 6,
        "solutions.ddp_buckets": 6,
        "shared.experiments.lesson07_next_character": 7,
        "shared.experiments.lesson07_pitfalls": 7,
        "shared.restarting": 8,
        "shared.training.precision": 9,
        "shared.measuring.model_states": 9,
        "shared.measuring.casts": 9,
    }
    for prefix, lesson in introduced.items():
        if name == prefix or name.startswith(f"{prefix}."):
            return lesson
    return 0


@pytest.mark.parametrize(
    "path", sorted((ROOT / "solutions").rglob("lesson[0-9]*.py")), ids=lambda p: p.stem
)
def test_a_solution_imports_nothing_of_a_later_lesson(path):
    own = int(path.stem[len("lesson") :][:2])
    later = {name for name in imported(path) if home(name) > own}
    assert not later


def test_lessons_solutions_mistakes_and_readme_rows_match():
    assert LESSONS
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", name) for name in LESSONS)
    numbers = [int(name[:2]) for name in LESSONS]
    assert numbers == list(range(1, len(numbers) + 1))
    stems = {f"lesson{name}" for name in LESSONS}
    assert {p.stem for p in (ROOT / "solutions").glob("lesson*.py")} == stems
    assert {p.stem for p in (ROOT / "solutions" / "mistakes").glob("lesson*.py")} == stems
    rows = re.findall(r"^\|.*\(lessons/([^)/]+)/?[^)]*\)", (ROOT / "README.md").read_text(), re.M)
    assert sorted(set(rows)) == LESSONS
    assert len(rows) == len(LESSONS), "one README row a lesson"


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_folder_is_a_leaf_with_its_three_files(name):
    folder = ROOT / "lessons" / name
    assert {"lesson.ipynb", "checks.py", "train.py"} <= {p.name for p in folder.iterdir()}
    assert not (folder / "__init__.py").exists()


SMALL = {"shared": 300, "solutions": 300, "lessons": 300}


@pytest.mark.parametrize("path", MODULES, ids=[str(p.relative_to(ROOT)) for p in MODULES])
def test_modules_and_functions_stay_small(path):
    text = path.read_text()
    count = len(text.splitlines())
    if path.name == "train.py":
        assert count <= 150, f"a script has at most 150 lines, this one {count}"
    if path.name not in ("checks.py",) and "mistakes" not in path.parts:
        assert count <= SMALL[path.relative_to(ROOT).parts[0]], f"{count} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            docstring = ast.get_docstring(node, clean=False) or ""
            length -= docstring.count("\n")
            assert length <= 60, f"{node.name} in {path.name} has {length} lines"


PACKAGES = {
    str(p.parent.relative_to(ROOT)).replace("/", ".")
    for layer in ("shared", "solutions")
    for p in (ROOT / layer).rglob("*.py")
}


def test_pyproject_names_every_package():
    import tomllib

    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(named) == PACKAGES


def test_the_top_level_is_what_was_agreed():
    allowed = {"lessons", "solutions", "shared", "datasets", "tests", "runs", "run_all.sh"}
    allowed |= {"environment.yml", "README.md", "pyproject.toml", "LICENSE"}
    allowed |= {"CONTRIBUTING.md", "AGENTS.md"}
    found = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    assert {name for name in found - allowed if not name.endswith(".egg-info")} == set()
