"""Every lesson's notebook as a learner meets it: its shape, reading mode, the to-do list."""

import os
import re
import subprocess
import sys

import nbformat
import pytest

from shared.cli.notebooks import CHECK, execute, normalise
from shared.exercises.lessons import ROOT

PATHS = sorted((ROOT / "lessons").glob("*/lesson.ipynb"))
BY_NAME = pytest.mark.parametrize("path", PATHS, ids=[path.parent.name for path in PATHS])
SECTIONS = [
    "The question",
    "The idea",
    "Build it",
    "Prove it",
    "Measure it",
    "What people get wrong",
    "Run it",
    "Where this goes",
]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@BY_NAME
def test_the_notebook_has_the_courses_shape(path):
    notebook = nbformat.read(path, as_version=4)
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    headings = re.findall(r"^## (.+)$", "\n".join(prose), re.MULTILINE)
    assert headings == SECTIONS
    assert prose[0].startswith(f"# Lesson {path.parent.name[:2]}: ")
    assert path.stat().st_size < 1_000_000
    setups = [c for c in code_cells(notebook) if "setup" in c.metadata.get("tags", [])]
    assert setups == code_cells(notebook)[:1], "the first code cell, and no other, is the setup"


@BY_NAME
def test_outputs_are_stored_and_most_cells_are_compared(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert all(cell.execution_count for cell in cells), "nbval compares nothing in a cell never run"
    ignored = [c for c in cells if "nbval-ignore-output" in c.metadata.get("tags", [])]
    assert len(ignored) <= len(cells) / 3, f"{len(ignored)} of {len(cells)} cells are not compared"
    known = {"setup", "nbval-ignore-output"}
    tags = {tag for cell in cells for tag in cell.metadata.get("tags", [])}
    assert tags <= known, f"tags that could hide a failure: {tags - known}"


@BY_NAME
def test_the_stored_file_is_normalised_and_clean(path):
    notebook = nbformat.read(path, as_version=4)
    again = normalise(nbformat.read(path, as_version=4))
    assert nbformat.writes(again, version=4).strip() == path.read_text().strip()
    for cell in code_cells(notebook):
        magic = re.search(r"^\s*[!%]|get_ipython\(", cell.source, re.MULTILINE)
        assert not magic, f"a magic or shell command: {cell.source[:80]!r}"
        errors = [o for o in cell.outputs if o.output_type == "error"]
        assert not errors, f"a stored error under {cell.source[:80]!r}"
        texts = [str(o) for o in cell.outputs if o.output_type == "stream" and o.name == "stderr"]
        assert not texts, f"something on stderr: {texts[0][:200]}"
        assert str(ROOT) not in str(cell.outputs), "a path of this machine in an output"


@BY_NAME
def test_reading_mode_runs_from_top_to_bottom_with_nothing_solved(path):
    notebook = execute(nbformat.read(path, as_version=4), path.parent, "reading")
    checks = [cell for cell in code_cells(notebook) if CHECK.search(cell.source)]
    assert checks
    for cell in checks:
        said = "".join(output.get("text", "") for output in cell.outputs)
        assert "not solved yet" in said, f"{cell.source}: {said}"


@BY_NAME
def test_nbval_is_the_learners_to_do_list(path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TORCH_HANDLE_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", str(path), "-rA", "-q"],
        cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = re.findall(r"^(PASSED|FAILED) .*::Cell (\d+)", done.stdout, re.MULTILINE)
    failed = {int(number) for result, number in lines if result == "FAILED"}
    cells = code_cells(nbformat.read(path, as_version=4))
    to_do = {n for n, cell in enumerate(cells) if CHECK.search(cell.source)}
    assert len(lines) == len(cells), done.stdout[-6000:] + done.stderr
    assert failed == to_do, done.stdout[-6000:]


def test_there_are_notebooks():
    assert PATHS
