"""The folder of a grading, with its copy of the course, and in it a folder for each run."""

import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

from solutions.grading.results import Limits, Stop
from solutions.grading.sandbox.confine import (
    INSIDE,
    Layers,
    exact_process_count,
    interpreter_folders,
    make_plan,
)
from solutions.grading.sandbox.session import Report, run_notebook
from solutions.grading.sandbox.watch import MAX_FILES, Watch, end_all

ROOT = Path(__file__).resolve().parents[3]
COURSE, CACHES = "course", "caches"


def copy_course(workspace: Path, course: Path) -> None:
    """Put into a workspace what all runs share and none may change.

    Of the course shared/, the lessons and the data, never solutions/; beside it what runs in the
    kernel (sandbox/inside/); and matplotlib's list of fonts, which takes a second to make.
    """
    workspace.chmod(0o755)
    copy = workspace / COURSE
    leave = shutil.ignore_patterns("__pycache__", "*.pyc", "lesson.ipynb")
    for name in ("shared", "lessons", "datasets"):
        if (course / name).is_dir():
            shutil.copytree(course / name, copy / name, ignore=leave)
    for path in INSIDE.glob("[!_]*.py"):
        shutil.copy(path, copy / path.name)
    compileall.compile_dir(copy, quiet=2)
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    fonts = workspace / CACHES / "matplotlib"
    fonts.mkdir(parents=True)
    subprocess.run(
        [sys.executable, "-c", "import matplotlib.font_manager"],
        env={**os.environ, "MPLCONFIGDIR": str(fonts)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,  # without the list each kernel makes its own
    )


def remove(folder: Path) -> None:
    """Remove a folder in which nothing runs any more, whatever rights were taken from it."""
    for parent, names, _ in os.walk(folder):
        for path in (os.path.join(parent, name) for name in names):
            if not os.path.islink(path):  # a link may lead outside
                os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


class RunFolder:
    """A folder for one run: `home` is the kernel's, the rest the grader's."""

    def __init__(self, workspace: Path, slot: int, layers: Layers, limits: Limits) -> None:
        self._workspace, self._slot, self._layers, self._limits = workspace, slot, layers, limits

    def __enter__(self) -> "RunFolder":
        self._folder = Path(tempfile.mkdtemp(prefix=f"run{self._slot}_", dir=self._workspace))
        self._folder.chmod(0o755)  # the kernel's user passes through, and cannot read its name
        self.home.mkdir()
        shutil.copytree(self._workspace / CACHES, self.home / ".cache")
        return self

    def __exit__(self, *_: object) -> None:
        remove(self._folder)

    @property
    def home(self) -> Path:
        return self._folder / "home"

    @property
    def notebook(self) -> Path:
        return self._folder / "graded.ipynb"

    @property
    def key_file(self) -> Path:
        return self.home / "key"

    @cached_property
    def _course(self) -> Path:
        return self._workspace / COURSE

    def names(self) -> dict[str, str]:
        """Names for the folders, which differ from run to run, to be used in messages."""
        return {str(self.home): "<home>", str(self._course): "<course>"}

    def guard_options(self, number: str) -> dict[str, Any]:
        """The options to start the guard with, in the lesson of that number."""
        return {
            "key_file": str(self.key_file),
            "home": str(self.home),
            "number": number,
            "output": self._limits.output,
            "folder_size": self._limits.folder_size,
            "num_files": MAX_FILES,
            "alone": self._layers.namespaces,
        }

    def run(self, num_exercises: int, seed: int, closing: Event) -> Report:
        """Run the notebook that was put here and return its report.

        It ends early once `closing` is set; no process of it is left.
        """
        self.notebook.chmod(0o600)
        connection = self.home / "kernel.json"
        argv = [sys.executable, str(self._course / "kernel.py"), str(connection), str(self._course)]
        plan = make_plan(
            self._layers,
            self.home,
            self._course,
            argv,
            self._environment(seed),
            self._limits,
            self._slot,
            owned=[connection, *self.home.rglob("*")],
        )
        inner = self._folder / "plan.json"
        inner.write_text(json.dumps(plan))
        inner.chmod(0o600)
        launcher = [sys.executable, "-I", "-S", str(self._course / "enter.py"), str(inner)]
        search = not self._layers.namespaces
        watch = Watch(self.home, self._limits, count=not exact_process_count(self._layers))
        return run_notebook(
            self.notebook,
            {"connection": str(connection), "command": launcher},
            course=ROOT,
            exercise_seconds=self._limits.exercise_seconds,
            total_seconds=300 + 2 * num_exercises * (self._limits.exercise_seconds + 10),
            watch=lambda pid: Stop.CLOSING if closing.is_set() else watch(pid),
            end=lambda pid: end_all(pid, self.home, search=search),
        )

    def _environment(self, seed: int) -> dict[str, str]:
        """All that the kernel sees of an environment."""
        prefixes = (sys.prefix, sys.base_prefix)
        elsewhere = [each for each in interpreter_folders() if not each.startswith(prefixes)]
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": os.pathsep.join(elsewhere),
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
            "MPLCONFIGDIR": str(self.home / ".cache" / "matplotlib"),
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "TORCH_HANDLE_STRICT": "1",
            "TORCH_HANDLE_SEED": str(seed),
        }
