"""The tools of pyproject.toml find nothing, and nothing has outgrown its reader."""

import ast
import importlib.util
import re
import shutil
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
NOTEBOOKS = sorted((ROOT / "lessons").glob("*/lesson.ipynb"))
SHELL_SCRIPTS = sorted(
    p for p in (ROOT / "lessons").rglob("*.s*") if p.suffix in (".sh", ".sbatch")
)
SHELL_SCRIPTS.append(ROOT / "run_all.sh")
MAX_MODULE, MAX_LABORATORY, MAX_SCRIPT, MAX_FUNCTION, MAX_LOOP = 300, 400, 150, 40, 60


def name_of(path: Path) -> str:
    """How a failure names a file."""
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


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if not (shellcheck := shellcheck or shutil.which("shellcheck")):
        pytest.skip("shellcheck is not installed: it comes with the extra [dev]")
    done = subprocess.run([shellcheck, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_modules_and_functions_stay_short():
    offenders = [
        f"{name_of(path)}: {what}"
        for path in PYTHON_FILES
        if not path.is_relative_to(ROOT / "tests")
        for what in too_long(path)
    ]
    assert not offenders, "\n".join(offenders)


def too_long(path: Path) -> list[str]:
    """What in a file has outgrown its limit; checks and known mistakes are lists of any length."""
    text = path.read_text(encoding="utf-8")
    is_list = path.name == "checks.py" or "mistakes" in path.parts
    lines, most = len(text.splitlines()), MAX_SCRIPT if path.name == "train.py" else MAX_MODULE
    most = MAX_LABORATORY if "laboratory" in f"{path.parent.name} {path.stem}" else most
    found = [] if is_list or lines <= most else [f"{lines} lines, at most {most}"]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            most = MAX_LOOP if "train" in node.name or path.name == "checks.py" else MAX_FUNCTION
            if (lines := num_code_lines(node)) > most:
                found.append(f"{node.name} has {lines} lines, at most {most}")
    return found


def num_code_lines(function: ast.FunctionDef) -> int:
    """Lines of a function's body; signature and docstring are for the reader."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1 if body else 0


def test_no_module_is_called_utils():
    assert not [path for path in PYTHON_FILES if "util" in path.stem]


def test_no_machine_of_ours_and_no_package_registry_is_named():
    hosts = ("pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org")
    ours = re.compile("|".join([*map(re.escape, hosts), r"/(?:root|work|home)/[a-z]\w*"]))
    named = [
        f"{name_of(path)}: {found}"
        for path in [*PYTHON_FILES, *TEXT_FILES, *NOTEBOOKS]
        for found in ours.findall(path.read_text(encoding="utf-8"))
    ]
    assert not named, "\n".join(named)
