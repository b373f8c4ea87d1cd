"""A process that imports once what is slow, and forks ranks for every question.

Importing DeepSpeed or other frameworks takes seconds, logs, and leaves global state behind. So they
stay out of the process that asks (a notebook's, a test's), and every question has fresh ranks.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks

ROOT = Path(__file__).resolve().parents[2]
Task = Callable[..., Any]


class Host:
    """The program `python -m module`, which calls `serve`; started by the first question.

    `whose` begins the error when it is gone: "DeepSpeed's". A fork of the process that asks has a
    host of its own.
    """

    def __init__(self, module: str, whose: str) -> None:
        self.module, self.whose = module, whose
        self._processes: dict[int, subprocess.Popen] = {}  # by the process that asks

    def ask(self, task: str, world_size: int, timeout: float, given: dict[str, Any]) -> list[Any]:
        """What each rank returned: a task, called with its rank and `given`, which is JSON.

        `timeout` is for the ranks; a first call also waits for the import. Raises RuntimeError
        when a rank raised, with its error and traceback, and when the host is gone; the next
        question starts another.
        """
        asked = {"task": task, "world_size": world_size, "timeout": timeout, "given": given}
        question = json.dumps(asked) + "\n"
        process = self._process()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(question)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: its answer would be taken for the next question's
            _stop(self._processes.pop(os.getpid()))
            raise
        if not line:
            del self._processes[os.getpid()]
            raise RuntimeError(f"{self.whose} process ended with status {process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["results"]

    @contextlib.contextmanager
    def ended(self) -> Generator[None]:
        """End the host after the block, unless it was there before."""
        there = os.getpid() in self._processes
        try:
            yield
        finally:
            if not there and (process := self._processes.pop(os.getpid(), None)) is not None:
                _stop(process)

    def _process(self) -> subprocess.Popen:
        if os.getpid() in self._processes:
            return self._processes[os.getpid()]
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1"} | os.environ | {"DS_ACCELERATOR": "cpu"},
            start_new_session=True,  # Ctrl-C in the notebook is not for it
        )
        atexit.register(_stop, process)
        self._processes[os.getpid()] = process
        return process


def _stop(process: subprocess.Popen) -> None:
    """End it, and the ranks that it has started; also where it has ended."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)  # its session: nobody else would end its ranks
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # of a question that nobody has read
                pipe.close()
    process.wait(10)


def serve(tasks: Callable[[], Mapping[str, Any]], in_rank: Callable[..., Any]) -> None:
    """Answer one JSON line with another until the input ends; nothing else reaches stdout.

    `tasks()` imports what is slow and returns the tasks by name; `in_rank(rank, task, given)` runs
    one of them on a rank.
    """
    answers = os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    warnings.simplefilter("ignore")
    known = tasks()
    for line in sys.stdin:
        asked = json.loads(line)
        task, ranks = known[asked["task"]], asked["world_size"]
        try:
            results = run_ranks(in_rank, ranks, task, asked["given"], timeout=asked["timeout"])
            answer = {"results": results}
        except RankFailed as failed:
            answer = {"error": str(failed)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
