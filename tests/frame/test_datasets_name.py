"""`import datasets` is the Hugging Face package, wherever the course is run from."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from shared.cli.notebooks import execute
from shared.exercises.lessons import ROOT
from shared.ranks.torchrun import torchrun_command

LESSON = sorted((ROOT / "lessons").glob("lesson01_*"))[0]
PROBE = "import importlib.util; print(importlib.util.find_spec('datasets').origin)"
SITE = Path(sysconfig.get_paths()["purelib"])


def in_site_packages(origin: str) -> bool:
    return Path(origin.strip().splitlines()[-1]).is_relative_to(SITE)


def probe(*command: str, folder: Path) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "RANK"}
    done = subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


def test_under_pytest():
    assert in_site_packages(importlib.util.find_spec("datasets").origin)


def test_from_the_root_and_from_a_lesson():
    for folder in (ROOT, LESSON):
        assert in_site_packages(probe(sys.executable, "-c", PROBE, folder=folder))


def test_in_a_notebook_kernel():
    notebook = execute(new_notebook(cells=[new_code_cell(PROBE)]), LESSON, "reading")
    assert in_site_packages(notebook.cells[0].outputs[0].text)
    assert nbformat.validate(notebook) is None


def test_under_torchrun(tmp_path):
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    assert in_site_packages(probe(*torchrun_command(script, 1), folder=ROOT))


def test_the_folder_can_never_be_a_package():
    assert not list((ROOT / "datasets").rglob("*.py"))
