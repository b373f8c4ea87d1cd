"""Frameworks in a process of their own, which imports them once and forks ranks for each question.

Importing four frameworks takes seconds, and each leaves global state behind: so they stay out of
the notebook's process, and every question has fresh ranks.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shared.exercises.lessons import ROOT
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks

_hosts: dict[int, subprocess.Popen] = {}  # by the process that asks: a fork has its own


def ask(task: str, world_size: int = 2, timeout: float = 480.0, **given: Any) -> list[Any]:
    """What each rank returned: a function of `tasks`, called with its rank and `given`, as JSON.

    Raises RuntimeError with the rank's error, when one raised.
    """
    host = _host()
    assert host.stdin is not None
    assert host.stdout is not None
    asked = {"task": task, "world_size": world_size, "timeout": timeout, "given": given}
    host.stdin.write(json.dumps(asked) + "\n")
    host.stdin.flush()
    line = host.stdout.readline()
    if not line:
        del _hosts[os.getpid()]
        raise RuntimeError(f"the frameworks' process ended with status {host.wait()}")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["results"]


@contextlib.contextmanager
def host_ended() -> Generator[None]:
    """End the frameworks' process after the block, unless it was there before."""
    there = os.getpid() in _hosts
    try:
        yield
    finally:
        if not there and (host := _hosts.pop(os.getpid(), None)) is not None:
            _stop(host)


def _host() -> subprocess.Popen:
    """This process's host, which ends when its input does."""
    if os.getpid() in _hosts:
        return _hosts[os.getpid()]
    host = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1"} | os.environ | {"DS_ACCELERATOR": "cpu"},
        start_new_session=True,  # Ctrl-C in the notebook is not for it
    )
    atexit.register(_stop, host)
    _hosts[os.getpid()] = host
    return host


def _stop(host: subprocess.Popen) -> None:
    for pipe in (host.stdin, host.stdout):
        if pipe is not None:
            pipe.close()
    host.terminate()
    host.wait(10)


def _serve() -> None:
    """Answer one JSON line with another until the input ends; nothing else reaches stdout."""
    answers = os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    warnings.simplefilter("ignore")
    from lessons.lesson22_ecosystem import tasks  # imports the frameworks

    tasks.warm_up()
    for line in sys.stdin:
        asked = json.loads(line)
        work = getattr(tasks, asked["task"])
        try:
            ranks, timeout = asked["world_size"], asked["timeout"]
            results = run_ranks(_in_rank, ranks, work, asked["given"], timeout=timeout)
            answer = {"results": results}
        except RankFailed as failed:
            answer = {"error": str(failed)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _in_rank(rank: int, work: Any, given: dict[str, Any]) -> Any:
    """Frameworks read their place from the variables that torchrun sets."""
    n = dist.get_world_size()
    place: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
    }
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # looked at; the group is there
    os.environ |= {name: str(value) for name, value in place.items()}
    return work(rank, **given)


if __name__ == "__main__":
    _serve()
