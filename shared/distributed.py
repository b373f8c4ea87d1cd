"""One process group, opened and closed by one context manager."""

import contextlib
import datetime
import os
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shared.errors import InputError

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Rank:
    """This process's place: its number in the world and on its machine, and its device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0


@contextlib.contextmanager
def process_group(device: str = "auto", timeout: float = 600.0) -> Generator[Rank]:
    """Join the group that torchrun describes, or one of a single process without it.

    `device` is "auto" (CUDA where there is one), "cpu" or "cuda"; CPU groups use gloo, CUDA
    groups NCCL. The group is torn down whatever happens inside.

    Raises InputError for a half-set launcher environment, for "cuda" without CUDA, and for more
    ranks on this machine than GPUs: NCCL refuses two ranks on one device.
    Source: docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
    """
    place = _place()
    chosen = _choose_device(device, place)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    with contextlib.ExitStack() as stack:
        options = {} if "RANK" in os.environ else _group_of_one(stack)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
            options["device_id"] = chosen
        wait = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, timeout=wait, **options)
        try:
            yield Rank(place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"], chosen, backend)
        finally:
            dist.destroy_process_group()


def _place() -> dict[str, int]:
    given = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    if not given:
        return {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing:
        raise InputError(
            f"{', '.join(given)} set but not {', '.join(missing)}: "
            "start with torchrun, or unset them to run as one process"
        )
    return {name: int(os.environ[name]) for name in LAUNCHER_VARIABLES}


def _choose_device(device: str, place: dict[str, int]) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device!r}: it can be auto, cpu or cuda")
    gpus = torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if place["LOCAL_WORLD_SIZE"] > gpus:
        raise InputError(
            f"{place['LOCAL_WORLD_SIZE']} ranks on this machine and {gpus} GPU(s): NCCL refuses "
            f"two ranks on one device; use --nproc_per_node={gpus}, or --device cpu (gloo)"
        )
    return torch.device("cuda", place["LOCAL_RANK"])


def _group_of_one(stack: contextlib.ExitStack) -> dict:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="group_"))
    return {"init_method": f"file://{Path(folder) / 'store'}", "rank": 0, "world_size": 1}
