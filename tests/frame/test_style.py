"""The tools of pyproject.toml find nothing, and nothing has outgrown its reader."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FILES = sorted(
    path
    for folder in ("shared", "solutions", "lessons", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if ".ipynb_checkpoints" not in path.parts
)
TEXT_FILES = sorted(
    path
    for path in ROOT.glob("*")
    if path.is_file() and path.suffix in ("", ".md", ".sh", ".toml", ".yml", ".yaml")
)
MAX_MODULE, MAX_SCRIPT, MAX_FUNCTION, MAX_LOOP = 300, 150, 40, 60
COUNTED = [path for path in PYTHON_FILES if path.is_relative_to(ROOT / "shared")]
COUNTED += [path for path in PYTHON_FILES if path.is_relative_to(ROOT / "solutions")]
COUNTED += sorted((ROOT / "lessons").glob("*/train.py"))


def name_of(path: Path) -> str:
    """A test's id."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "--no-cache", "."],
        ["ruff", "format", "--no-cache", "--check", "."],
        ["ty", "check"],
        ["codespell_lib"],
    ],
    ids=["ruff-check", "ruff-format", "ty", "codespell"],
)
def test_the_tools_find_nothing(command):
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: it comes with the extra [dev]")
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", COUNTED, ids=name_of)
def test_modules_and_functions_stay_short(path):
    text = path.read_text(encoding="utf-8")
    most = MAX_SCRIPT if path.name == "train.py" else MAX_MODULE
    if "mistakes" not in path.parts:
        assert len(text.splitlines()) <= most
    long = {
        node.name: size
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and (size := num_code_lines(node)) > (MAX_LOOP if "train" in node.name else MAX_FUNCTION)
    }
    assert not long


def num_code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function's body; signature and docstring are for the reader."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1 if body else 0


def test_no_module_is_called_utils():
    assert not [path for path in PYTHON_FILES if "util" in path.stem]


@pytest.mark.parametrize(
    "path",
    [*PYTHON_FILES, *TEXT_FILES, *sorted((ROOT / "lessons").glob("*/lesson.ipynb"))],
    ids=name_of,
)
def test_no_machine_of_ours_and_no_package_registry_is_named(path):
    text = path.read_text(encoding="utf-8")
    hosts = ("pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org")
    assert not [host for host in hosts if host in text]
    assert not re.search(r"/(?:root|work|home)/[a-z]", text)
