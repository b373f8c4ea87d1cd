"""Run every script and every notebook's first cell on other versions of torch; print who passes.

python -m tests.benchmarks.older_torch 2.9.1 2.11.0 2.12.1 [--lessons 06 20] [--python PYTHON]

Each version gets an environment of its own outside the repository, with the course's other pins:
2 GiB that are kept. Builds for the CPU alone; where pip's torch brings CUDA, name an index of those
by PIP_EXTRA_INDEX_URL. --python takes an environment that is there, whatever its torch.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.cli.command import all_lessons, find_lesson
from shared.errors import InputError
from shared.exercises.answers import read_cells
from shared.ranks.logs import last_words
from shared.results import format_table
from shared.script import ROOT

CACHE = Path.home() / ".cache" / "torch_handle" / "older_torch"


def environment(version: str, cache: Path) -> Path:
    """The Python of an environment with this torch, made where it is not there."""
    place = cache / f"{version}_python{sys.version_info[0]}.{sys.version_info[1]}"
    python = place / "bin" / "python"
    if (place / "whole").exists():
        return python
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    asked = [sys.executable, *pip, "--dry-run", "--ignore-installed", "--report", "-"]
    refuse_cuda(version, json.loads(_said([*asked, f"torch=={version}"])))
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    _said([str(python), *pip, *requirements(version)])
    (place / "whole").touch()
    return python


def refuse_cuda(version: str, report: Mapping[str, Any]) -> None:
    """Raise InputError where what pip would install has CUDA's libraries: gigabytes for nothing."""
    names = sorted(each["metadata"]["name"] for each in report["install"])
    if cuda := [name for name in names if name.startswith("nvidia-")]:
        raise InputError(
            f"pip's torch {version} is a CUDA build here ({len(cuda)} packages such as {cuda[0]}): "
            "name an index of CPU builds by PIP_EXTRA_INDEX_URL, or an environment by --python"
        )


def requirements(version: str) -> list[str]:
    """What the course pins, but for torch, which is of this version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    others = [each for each in project["dependencies"] if not each.startswith("torch==")]
    return [f"torch=={version}", *others]


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise InputError(f"{' '.join(command[1:4])}: {lines[-1]}")
    return done.stdout


def try_script(python: Path, lesson: str, folder: Path) -> str:
    """Run a lesson's script as run_all.sh does, tiny, on two CPU ranks: "passes", or its error."""
    options = ["--nproc=2", "--preset=tiny", "--device=cpu", f"--out={folder}"]
    command = [str(python), "-m", "shared.cli.runner", lesson, *options]
    return _ended(command, ROOT, folder / lesson / "run.log")


def try_first_cell(python: Path, lesson: str, folder: Path) -> str:
    """Run the first code cell of a notebook in its folder: "passes", or why not."""
    home = ROOT / "lessons" / lesson
    command = [str(python), "-c", read_cells(home / "lesson.ipynb").setup]
    return _ended(command, home, folder / "cell.log")


def _ended(command: list[str], where: Path, log: Path) -> str:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",
        "TORCH_HANDLE_IMPLEMENTATION": "solution",
    }
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return "passes"
    said = log.read_text("utf-8", "replace") if log.exists() else done.stdout + done.stderr
    return (last_words(said, 1) or [f"exit status {done.returncode}"])[-1]


def look_at(name: str, python: Path, lessons: list[str]) -> list[dict[str, str]]:
    """A row a lesson: what its script and its notebook's first cell came to."""
    rows = []
    for lesson in lessons:
        with tempfile.TemporaryDirectory(prefix="older_torch_") as folder:
            script = try_script(python, lesson, Path(folder))
            cell = try_first_cell(python, lesson, Path(folder))
        rows.append({"torch": name, "lesson": lesson[6:8], "script": script, "first cell": cell})
        print(f"{name} {lesson}: script {script}; first cell {cell}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--python", type=Path, action="append", default=[])
    parser.add_argument("--lessons", nargs="*", type=find_lesson, default=all_lessons())
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    rows, failed = [], False
    for version in args.versions:
        try:
            rows += look_at(version, environment(version, args.cache), args.lessons)
        except InputError as error:
            failed = True
            print(f"{version}: not tried: {error}", file=sys.stderr, flush=True)
    for python in args.python:
        try:
            name = _said([str(python), "-c", "import torch; print(torch.__version__)"]).strip()
            rows += look_at(name, python, args.lessons)
        except InputError as error:
            failed = True
            print(f"{python}: not tried: {error}", file=sys.stderr, flush=True)
    print(format_table(rows))
    passed = [row for row in rows if (row["script"], row["first cell"]) == ("passes", "passes")]
    print(f"{len(passed)} of {len(rows)} pass")
    return 1 if failed or len(passed) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
