"""DeepSpeed in a process of its own, which imports it once and forks ranks for every question.

Importing DeepSpeed takes seconds, logs, and changes torch.distributed; so it stays out of the
notebook's process. `ask_deepspeed` starts the process at its first call and reuses it.
"""

import gc
import importlib.util
import json
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks.hosts import Host, serve

FOLDER = ROOT / "lessons" / "lesson10_zero"
FILES = {0: "", 1: "ds_zero1.json", 2: "ds_zero2.json", 3: "ds_zero3.json"}
OFFLOAD = "ds_zero3_offload.json"
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TOP_KEYS = (*BATCH_KEYS, "gradient_clipping", "zero_force_ds_cpu_optimizer")
STACK = {"layers": 24, "width": 48}  # square matrices, all small: what a threshold keeps is seen
STACK_SIZE = 24 * 48 * 48
Config = dict[str, Any]
HOST = Host(__name__, "DeepSpeed's")


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
    return HOST.ask(task, world_size, timeout, given)


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


def _tasks() -> dict[str, Any]:
    from lessons.lesson10_zero.experiments import checkpoints, deepspeed_tasks  # import DeepSpeed

    tasks = vars(deepspeed_tasks) | vars(checkpoints)
    with mock.patch.object(torch, "compile", lambda fn=None, **_: fn or (lambda inner: inner)):
        # A decorator here would import torch's compiler in every rank: seconds each.
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports torch._dynamo, once
    gc.collect()
    gc.freeze()  # what is here now is not what ranks count
    return tasks


def _in_rank(rank: int, task: Any, given: dict[str, Any]) -> Any:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": dist.get_world_size()}
    os.environ |= {name: str(value) for name, value in place.items()}
    return task(rank, **given)


if __name__ == "__main__":
    serve(_tasks, _in_rank)
