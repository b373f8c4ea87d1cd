"""One notebook under `pytest --nbval`: started, watched, ended, and what its cells said."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solutions.grading.results import Stop

MAX_EVENTS = 8 << 20  # bytes that one run may report
TICK = 0.2  # seconds between two looks at what the processes use


@dataclass
class Report:
    """The lines that came, the limit that ended the run (None when none did), pytest's output."""

    events: list[dict[str, Any]] = field(default_factory=list)
    stop: Stop | None = None
    log: str = ""


def run_notebook(
    notebook: Path,
    plan: dict[str, Any],
    *,
    course: Path,
    exercise_seconds: float,
    total_seconds: float,
    watch: Callable[[int], Stop | None],
    end: Callable[[int], None],
) -> Report:
    """Run a notebook whose kernel starts as the plan says; never raises for what it does.

    `watch` is asked every tick, with the number of the process, which limit was passed; `end` ends
    what the process has started, whatever that is.
    """
    reader, writer = os.pipe()
    plan_file = notebook.with_suffix(".plan")
    plan_file.write_text(json.dumps({**plan, "pipe": writer}))
    log = notebook.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            pytest_command(notebook, plan_file, exercise_seconds),
            cwd=notebook.parent,
            env=environment(course, notebook.parent),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            start_new_session=True,
        )
    os.close(writer)
    report = Report()
    try:
        deadline = time.monotonic() + total_seconds
        _listen(reader, report, deadline, lambda: watch(process.pid))
    finally:
        os.close(reader)
        _end(process, end)
    report.log = log.read_text(errors="replace")[-4000:]
    return report


def pytest_command(notebook: Path, plan_file: Path, exercise_seconds: float) -> list[str]:
    """The command that runs a notebook under nbval, with no plugin that it does not need."""
    left_out = ("cacheprovider", "xdist", "timeout", "doctest", "junitxml", "faulthandler")
    return [
        sys.executable,
        *("-m", "pytest", "-q", "--no-header", "--tb=short", "--color=no", "-s"),
        *("-c", os.devnull, f"--rootdir={notebook.parent}"),
        *(word for name in left_out for word in ("-p", f"no:{name}")),
        *("-p", "shared.exercises.quick_nbformat", "-p", "nbval.plugin"),
        *("-p", "solutions.grading.sandbox.nbval_plugin"),
        "--nbval",
        f"--nbval-cell-timeout={exercise_seconds:g}",
        f"--grading-plan={plan_file}",
        str(notebook),
    ]


def environment(course: Path, desk: Path) -> dict[str, str]:
    """The environment of pytest: what it needs of the grader's. The kernel gets its own."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(course),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "JUPYTER_PLATFORM_DIRS": "1",
        "HOME": str(desk),
        "TMPDIR": str(desk),
    }


def _listen(reader: int, report: Report, deadline: float, watch: Callable[[], Stop | None]) -> None:
    """Collect lines until pytest closes the pipe, a limit is passed or time is up."""
    buffer = bytearray()
    read = 0
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if selector.select(TICK):
                data = os.read(reader, 1 << 16)
                if not data:
                    return
                read += len(data)
                buffer += data
                *lines, rest = bytes(buffer).split(b"\n")
                buffer = bytearray(rest)
                report.events += [json.loads(line) for line in lines]
            report.stop = watch()
            if report.stop is None and time.monotonic() > deadline:
                report.stop = Stop.TIME
            if report.stop is None and read > MAX_EVENTS:
                report.stop = Stop.OUTPUT
            if report.stop is not None:
                return


def _end(process: subprocess.Popen[bytes], end: Callable[[int], None]) -> None:
    """Leave no process of the run: first what it started, then itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=0.1)
    end(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end(process.pid)
