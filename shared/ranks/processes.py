"""Start a program and be sure that nothing of it is left, whatever happens.

torchrun puts every rank into a session of its own, Jupyter does the same with kernels: ending the
process group of the program that was started does not reach them. Each program is therefore started
with a token in its environment, which all that it starts inherit, and whoever carries the token at
the end is ended. Only the standard library is used: this runs before anything is installed.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOKENS = "COURSE_PROCESS_TOKENS"  # not TORCH_HANDLE_*: notebooks start kernels without those
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Outcome:
    """How a program ended: exit status, seconds, and what had to be done about it."""

    status: int
    seconds: float
    timed_out: bool = False
    num_left: int = 0


def supervise(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
    time_limit: float | None = None,
    tick: Callable[[float], None] | None = None,
    grace: float = 3.0,
) -> Outcome:
    """Run `command` to its end, its output in the file `log` (None: where ours goes).

    `tick(seconds)` is called ten times a second. After `time_limit` seconds, or when this process
    is interrupted, the program gets `grace` seconds to finish; then it and its family are killed.
    """
    token = uuid.uuid4().hex
    environment = dict(os.environ if env is None else env)
    environment[TOKENS] = f"{environment.get(TOKENS, '')} {token}".strip()
    process = None
    status: int | None = None
    num_left = 0
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(open(log, "wb")) if log else None
        try:
            with _stop_signals_held():  # Popen, interrupted, forgets the child that it has started
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT if stream else None,
                    start_new_session=True,
                )
            status = _wait(process, time_limit, tick)
        finally:
            if process is not None:
                num_left = _end(process, token, grace)
    seconds = time.monotonic() - began
    if status is None:
        return Outcome(process.wait(), seconds, timed_out=True)
    return Outcome(status, seconds, num_left=num_left)


def raise_on_stop_signals() -> None:
    """From here on Ctrl-C, kill and a closed terminal all raise KeyboardInterrupt, once.

    Also where SIGINT came in ignored, as it does in a script's background job: who sends it to
    this process means it.
    """

    def stop(number: int, _frame: object) -> None:
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)  # what follows is cleaning up: let it finish
        raise KeyboardInterrupt(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)


@contextlib.contextmanager
def _stop_signals_held() -> Generator[None]:
    """Let a stop signal that arrives inside the block act at its end; those ignored stay so."""
    if threading.current_thread() is not threading.main_thread():  # no signal is handled there
        yield
        return
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def _wait(
    process: subprocess.Popen[bytes],
    time_limit: float | None,
    tick: Callable[[float], None] | None,
) -> int | None:
    """Return the exit status, or None when the time limit came first."""
    began = time.monotonic()
    while True:
        try:
            return process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - began
            if tick:
                tick(seconds)
            if time_limit is not None and seconds > time_limit:
                return None


def _end(process: subprocess.Popen[bytes], token: str, grace: float) -> int:
    """End the program if it still runs, then all that it left; return how many were left."""
    family = _children(process.pid) if process.poll() is None else set()

    def alive() -> set[int]:
        return _holders(token) | {pid for pid in family if _exists(pid)}

    def ended_within(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while process.poll() is None or alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C would: it may clean up by itself
    # Also after a normal end: helpers such as multiprocessing's resource tracker need a moment.
    if ended_within(grace):
        return 0
    num_left = len(alive())
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        for pid in alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if ended_within(seconds):
            break
    return num_left


def _holders(token: str) -> set[int]:
    """Processes with the token in their environment. Linux only: elsewhere empty."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if token.encode() in entry.read_bytes():
                found.add(int(entry.parent.name))
    return found - {os.getpid()}


def _children(root: int) -> set[int]:
    """The process and its descendants by `ps`, for systems without /proc."""
    if Path("/proc/self/environ").exists():
        return set()
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False
    ).stdout
    parents = {int(pid): int(parent) for pid, parent in map(str.split, listing.splitlines())}
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
