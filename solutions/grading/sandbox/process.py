"""One run of judge.py, started, listened to and ended."""

import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solutions.grading.results import Limits, Stop
from solutions.grading.sandbox import bubblewrap
from solutions.grading.sandbox.cgroup import cgroup

MAX_READ = 4 << 20  # bytes that one run may report
STARTING = 120.0  # seconds for the interpreter, torch and the setup cell


@dataclass(frozen=True)
class Place:
    """Where runs find the course's copy and the caches: below `folder`, or within the sandbox."""

    folder: Path
    confined: bool

    @property
    def course(self) -> str:
        return bubblewrap.COURSE if self.confined else str(self.folder / "course")

    @property
    def caches(self) -> str:
        return "/caches" if self.confined else str(self.folder / "caches")


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
    place: Place,
    job: Mapping[str, Any],
    limits: Limits,
    *,
    slot: int,
    seed: int,
    seconds: float,
    closing: threading.Event,
) -> Report:
    """Give judge.py a job and collect what it says until it ends or is ended; never raises for it.

    `seconds` are for all of the job's exercises together.
    """
    with (
        tempfile.TemporaryDirectory(prefix="run_", dir=place.folder) as name,
        cgroup(limits) as inside,
    ):
        folder = Path(name)
        home = Path(bubblewrap.HOME) if place.confined else folder / "home"
        (folder / "home").mkdir()
        (folder / "job.json").write_text(json.dumps(job))
        reader, writer = os.pipe()
        process = _start(place, folder, writer, environment(home, seed), limits, slot, inside)
        os.close(writer)
        try:
            said, stop = _listen(reader, time.monotonic() + STARTING + seconds, closing)
        finally:
            os.close(reader)
            process.kill()  # bubblewrap's end is the end of all that it holds
            process.wait()
        events = [event for event in map(_event, said.split(b"\n")) if event is not None]
        log = (folder / "errors").read_text(errors="replace")[-2000:]
        return Report(events, stop, log, {str(home): "<home>", place.course: "<course>"})


def _start(
    place: Place,
    folder: Path,
    pipe: int,
    seen: Mapping[str, str],
    limits: Limits,
    slot: int,
    before: Sequence[str],
) -> subprocess.Popen[bytes]:
    """Start judge.py, in the sandbox or without; it reads the job and writes to the pipe.

    `before` are words that come before its command.
    """
    argv = [sys.executable, f"{place.course}/judge.py", str(pipe)]
    rules = folder / "seccomp"
    rules.write_bytes(bubblewrap.no_memory_files())
    with (
        (folder / "job.json").open("rb") as given,
        (folder / "errors").open("wb") as log,
        rules.open("rb") as calls,
    ):
        if place.confined:
            inside = {"course": place.course, "caches": place.caches}
            reads = [(place.folder / name, where) for name, where in inside.items()]
            file = calls.fileno()
            argv = bubblewrap.command(argv, reads, seen, limits, slot=slot, seccomp=file)
        else:
            argv = [*bubblewrap.limited(limits), *argv]
        return subprocess.Popen(
            [*before, *argv],
            cwd=folder / "home",
            env=None if place.confined else seen,
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(pipe, calls.fileno()),
            start_new_session=True,
        )


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
        "MALLOC_ARENA_MAX": "2",
        "MPLCONFIGDIR": str(home / ".cache" / "matplotlib"),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_HANDLE_STRICT": "1",
        "TORCH_HANDLE_SEED": str(seed),
    }


def _listen(reader: int, deadline: float, closing: threading.Event) -> tuple[bytes, Stop | None]:
    """What comes until the other side ends, a limit is passed or the grader is closed."""
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if selector.select(0.2):
                data = os.read(reader, 1 << 16)
                if not data:
                    return said, None
                said += data
            for passed, stop in (
                (closing.is_set(), Stop.CLOSING),
                (time.monotonic() > deadline, Stop.TIME),
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
