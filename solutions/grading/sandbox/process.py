"""One run of judge.py, started, listened to and ended."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.ranks.logs import last_words
from shared.ranks.visible import VISIBLE
from solutions.grading.results import Limits, Stop
from solutions.grading.sandbox import bubblewrap
from solutions.grading.sandbox.cgroup import cgroup

MAX_READ = 4 << 20  # bytes that one run may report
MAX_LOG = 1 << 16  # characters of its complaints that are looked at, from their end
STARTING = 120.0  # seconds for the interpreter, torch and the setup cell
ENDING = 20.0  # seconds for the judge to end and clear away what an exercise has left


@dataclass
class Report:
    """What a run said, the limit that ended it (None for none), and what it complained of.

    `paths` are names for the folders that it saw, some of which differ from run to run.
    """

    events: list[dict[str, Any]]
    stop: Stop | None
    log: str
    paths: Mapping[str, str]


def run_judge(
    workspace: Path,
    course: Path,
    job: Mapping[str, Any],
    limits: Limits,
    *,
    confined: bool,
    seed: int,
    closing: threading.Event,
) -> Report:
    """Give judge.py a job and collect what it says until it ends or is ended; never raises for it.

    `workspace` holds this copy of the course and the caches, which a sandbox has elsewhere.
    """
    shared = {course: bubblewrap.COURSE, workspace / "caches": "/caches"}
    with tempfile.TemporaryDirectory(prefix="run_", dir=workspace) as name:
        folder, home = Path(name), bubblewrap.HOME if confined else f"{name}/home"
        (folder / "home").mkdir()
        seen_at, caches = shared.values() if confined else map(str, shared)
        places = {"course": seen_at, "caches": caches, "confined": confined}
        (folder / "job.json").write_text(json.dumps({**job, **places}))
        (folder / "seccomp").write_bytes(bubblewrap.refused_calls())
        reader, writer = os.pipe()
        argv = [sys.executable, f"{seen_at}/judge.py", str(writer)]
        seen = environment(Path(home), seed)
        with cgroup(limits) as before, (folder / "seccomp").open("rb") as calls:
            if confined:
                rules = calls.fileno()
                argv = bubblewrap.command(argv, shared.items(), seen, limits, seccomp=rules)
            else:
                argv = [*bubblewrap.limited(limits), *argv]
            process = _start(folder, [*before, *argv], seen, (writer, calls.fileno()))
            try:
                seconds = limits.exercise_seconds + ENDING
                said, stop = _listen(reader, seconds, closing, first=STARTING + seconds)
            finally:
                os.close(reader)
                process.kill()  # bubblewrap's end is the end of all that it holds
                process.wait()
        events = [event for event in map(_event, said.split(b"\n")) if event is not None]
        errors = (folder / "errors").read_text(errors="replace")
        complaint = "\n".join(last_words(errors[-MAX_LOG:]))[-2000:]
        return Report(events, stop, complaint, {home: "<home>", seen_at: "<course>"})


def _start(
    folder: Path, argv: list[str], seen: Mapping[str, str], files: tuple[int, int]
) -> subprocess.Popen[bytes]:
    """Start the judge, who reads the job; the first of the open files is the pipe he writes to."""
    with (folder / "job.json").open("rb") as given, (folder / "errors").open("wb") as log:
        process = subprocess.Popen(
            argv,
            cwd=folder / "home",
            env=seen,
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=files,
            start_new_session=True,
        )
    os.close(files[0])
    return process


def environment(home: Path, seed: int) -> dict[str, str]:
    """All that an answer sees of an environment."""
    prefixes = (sys.prefix, sys.base_prefix)
    folders = bubblewrap.interpreter_folders()
    elsewhere = [each for each in folders if not each.startswith(prefixes)]
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(elsewhere),
        "HOME": str(home),
        "TMPDIR": str(home),
        "USER": "student",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        VISIBLE: "",  # answers fork ranks; the judge fell over the first backward beside a GPU
        "MALLOC_ARENA_MAX": "2",
        "MPLCONFIGDIR": str(home / ".cache" / "matplotlib"),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_HANDLE_STRICT": "1",
        "TORCH_HANDLE_SEED": str(seed),
    }


def _listen(
    reader: int, patience: float, closing: threading.Event, first: float = 0.0
) -> tuple[bytes, Stop | None]:
    """What comes until the other side ends or is silent for so long, or the grader is closed.

    The judge speaks before and after each exercise, unless an answer has stopped it; `first` is the
    longer patience until it speaks at all.
    """
    said, heard, waits = b"", time.monotonic(), max(first, patience)
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if selector.select(0.2):
                data = os.read(reader, 1 << 16)
                if not data:
                    return said, None
                said, heard = said + data, time.monotonic()
            for passed, stop in (
                (closing.is_set(), Stop.CLOSING),
                (time.monotonic() > heard + (patience if said else waits), Stop.TIME),
                (len(said) > MAX_READ, Stop.OUTPUT),
            ):
                if passed:
                    return said, stop


def _event(line: bytes) -> dict[str, Any] | None:
    """A line of the judge's, None for what it cannot have written."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
