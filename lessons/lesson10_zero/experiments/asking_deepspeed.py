"""DeepSpeed in a process of its own, which imports it once and forks ranks for every question.

Importing DeepSpeed takes seconds, logs, and changes torch.distributed; so it stays out of the
notebook's process. `ask_deepspeed` starts the process at its first call and reuses it.
"""

import atexit
import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks

FOLDER = ROOT / "lessons" / "lesson10_zero"
FILES = {0: "", 1: "ds_zero1.json", 2: "ds_zero2.json", 3: "ds_zero3.json"}
OFFLOAD = "ds_zero3_offload.json"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TOP_KEYS = (*BATCH_KEYS, "gradient_clipping", "zero_force_ds_cpu_optimizer")
STACK = {"layers": 24, "width": 48}  # square matrices, all small: what a threshold keeps is seen
STACK_SIZE = 24 * 48 * 48
Config = dict[str, Any]


def ask_deepspeed(task: str, world_size: int, timeout: float = 480.0, **given: Any) -> list[Any]:
    """Run a function on forked ranks of the DeepSpeed process.

    Args:
        task: a function of `deepspeed_tasks` or `checkpoints`; each rank calls it with its number
            and `given`, which is JSON.
        world_size: the number of ranks, on the CPU.
        timeout: seconds for the ranks; a first call also waits for the import.

    Returns:
        What each rank returned, by rank.

    Raises:
        InputError: DeepSpeed is not installed.
        RuntimeError: a rank raised; the message has its error and traceback.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError("DeepSpeed is not installed here: pip install deepspeed")
    host = _host()
    assert host.stdin is not None
    assert host.stdout is not None
    asked = {"task": task, "world_size": world_size, "timeout": timeout, "given": given}
    host.stdin.write(json.dumps(asked) + "\n")
    host.stdin.flush()
    line = host.stdout.readline()
    if not line:
        del _hosts[os.getpid()]
        raise RuntimeError(f"DeepSpeed's process ended with status {host.wait()}")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["results"]


@contextlib.contextmanager
def deepspeed_ended() -> Generator[None]:
    """End DeepSpeed's process after the block, unless it was there before."""
    there = os.getpid() in _hosts
    try:
        yield
    finally:
        if not there and (host := _hosts.pop(os.getpid(), None)) is not None:
            _stop(host)


_hosts: dict[int, subprocess.Popen] = {}  # by the process that asks: a fork has its own


def _host() -> subprocess.Popen:
    """This process's DeepSpeed process, which ends when its input does."""
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


def read_file(name: str, **changed: Any) -> Config:
    """One of the lesson's JSON files as a dict, with some top-level keys replaced."""
    return json.loads((FOLDER / name).read_text()) | changed


def parity_config(stage: int, **zero: Any) -> Config:
    """The lesson's file for a stage, made comparable with plain float32 training of another batch.

    Precision, batch sizes and optimizer are taken out: the reference run has its own. `zero`
    replaces keys of zero_optimization. Stage 0 is stage 1's file with the stage changed.
    """
    config = read_file(FILES[stage] or FILES[1])
    for key in (*BATCH_KEYS, "optimizer", "bf16"):
        config.pop(key, None)
    config["zero_optimization"] |= {"stage": stage, **zero}
    return config


def counting_config(stage: int, **changed: Any) -> Config:
    """The lesson's file for a stage, for the `count` of `STACK`: buckets of a fiftieth of it.

    `changed` replaces keys of zero_optimization, and where it is no key of that section, sections.
    """
    config = read_file(FILES[stage] or FILES[1])
    del config["optimizer"]
    config["train_micro_batch_size_per_gpu"] = 1
    bucket = STACK_SIZE // 100 * 2  # an even number, as DeepSpeed wants it
    zero = config["zero_optimization"] | {"stage": stage, "reduce_bucket_size": bucket}
    config["zero_optimization"] = zero | {"allgather_bucket_size": bucket}
    for key, value in changed.items():
        outside = (isinstance(value, dict) and key != "offload_optimizer") or key in TOP_KEYS
        (config if outside else config["zero_optimization"])[key] = value
    return config


def _serve() -> None:
    """Answer one JSON line with another until the input ends; nothing else reaches stdout."""
    answers = os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    warnings.simplefilter("ignore")
    from lessons.lesson10_zero.experiments import checkpoints, deepspeed_tasks  # import DeepSpeed

    tasks = vars(deepspeed_tasks) | vars(checkpoints)
    with mock.patch.object(torch, "compile", lambda fn=None, **_: fn or (lambda inner: inner)):
        # A decorator here would import torch's compiler in every rank: seconds each.
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports torch._dynamo, once
    gc.collect()
    gc.freeze()  # what is here now is not what ranks count
    for line in sys.stdin:
        asked = json.loads(line)
        task = tasks[asked["task"]]
        try:
            results = run_ranks(
                _in_rank, asked["world_size"], task, asked["given"], timeout=asked["timeout"]
            )
            answer = {"results": results}
        except RankFailed as failed:
            answer = {"error": str(failed)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _in_rank(rank: int, task: Any, given: dict[str, Any]) -> Any:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}
    os.environ |= {name: str(value) for name, value in place.items()}
    return task(rank, **given)


if __name__ == "__main__":
    _serve()
