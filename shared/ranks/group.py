"""One process group, opened and closed by one context manager."""

import atexit
import contextlib
import datetime
import faulthandler
import gc
import os
import signal
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shared.errors import InputError, NoGroup

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
STACKS = "TORCH_HANDLE_STACKS"  # the folder in which launch() looks for what a hung rank was doing


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


def current_rank() -> int:
    """This process's number in the world; 0 where there is no process group.

    For code that serves with and without ranks. Where there is a `Rank`, it is the argument.
    """
    return dist.get_rank() if dist.is_initialized() else 0


def current_world_size() -> int:
    """The number of ranks; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def process_group(device: str = "auto", timeout: float = 600.0) -> Generator[Rank]:
    """Join the group that torchrun describes, or one of a single process without it.

    `device` is "auto" (CUDA where there is one), "cpu" or "cuda"; CPU groups use gloo, CUDA
    groups NCCL. The group is torn down whatever happens inside. A rank that got SIGUSR1
    (kill -USR1 PID) writes where it stands, and goes on: that is how a hang is looked at.

    Raises InputError for a half-set or contradictory launcher environment, for a port in use, for
    ranks that never arrived, for "cuda" without CUDA, and for more ranks on this machine than
    GPUs: NCCL refuses two ranks on one device.
    Source: docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
    """
    place = _place()
    chosen = _choose_device(device, place)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    with contextlib.ExitStack() as stack:
        _tell_stack_when_asked(place["RANK"], stack)
        wait = datetime.timedelta(seconds=timeout)
        options = {} if "RANK" in os.environ else _group_of_one(stack)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
            options["device_id"] = chosen
        _let_groups_go()
        try:
            options |= _fresh_store(wait)
            dist.init_process_group(backend, timeout=wait, **options)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise _no_group(error, place["WORLD_SIZE"], timeout) from error
        try:
            yield Rank(place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"], chosen, backend)
        finally:
            _outlive_models(list(dist.distributed_c10d._world.pg_map))
            dist.destroy_process_group()


_ended: list[dist.ProcessGroup] = []  # destroyed, and kept until the models that used them are gone


def _outlive_models(groups: list[dist.ProcessGroup]) -> None:
    """Let a model in DDP never be the last owner of a group.

    DDP's reducer would end gloo's threads with the interpreter's lock in its hand, and one that is
    just dropping a tensor waits for that lock: the rank hangs for ever, its work done. A group that
    Python owns lets go of the lock first. Models sit in cycles, so they are collected before.
    """
    if not _ended:
        atexit.register(_let_groups_go)
    _ended.extend(groups)


def _let_groups_go() -> None:
    if _ended:
        gc.collect()
        _ended.clear()


def _fresh_store(wait: datetime.timedelta) -> dict:
    """After a restart by torchrun: a part of its store that the ranks before did not write to.

    torchrun keeps one store for all starts, and gloo would find the addresses of dead ranks in it
    ("connectFullMesh failed", or a hang; pytorch issue 135712). Several agents need not count the
    same number of restarts, so there the cure is another one: start each of them with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives every start a store of its own.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if count == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    store, rank, world_size = next(dist.rendezvous("env://", timeout=wait))
    return {
        "store": dist.PrefixStore(f"start_{count}", store),
        "rank": rank,
        "world_size": world_size,
    }


def _place() -> dict[str, int]:
    given = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    if not given:
        return {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    wanted = LAUNCHER_VARIABLES + ADDRESS_VARIABLES
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        raise InputError(
            f"{', '.join(given)} set but not {', '.join(missing)}: "
            "start with torchrun, or unset them to run as one process"
        )
    for name in given:
        if not os.environ[name].isdecimal():
            raise InputError(f"{name}={os.environ[name]!r} is not a number: start with torchrun")
    place = {name: int(os.environ[name]) for name in LAUNCHER_VARIABLES}
    for number, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if place[number] >= place[count]:
            raise InputError(
                f"{number}={place[number]} and {count}={place[count]}: "
                f"ranks count from 0 to {place[count] - 1}; start with torchrun"
            )
    return place


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


def _tell_stack_when_asked(rank: int, stack: contextlib.ExitStack) -> None:
    """On SIGUSR1 write this rank's Python stack to stderr, or to a file where launch() asks."""
    folder = os.environ.get(STACKS)
    if folder is None:
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    else:  # the name tells launch() whom to signal
        file = stack.enter_context((Path(folder) / f"{rank}_{os.getpid()}").open("w"))
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    stack.callback(faulthandler.unregister, signal.SIGUSR1)


def _no_group(error: Exception, world_size: int, timeout: float) -> NoGroup:
    """Say in one line why the ranks did not meet."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in str(error):
        return NoGroup(
            f"port {os.environ.get('MASTER_PORT')} is in use, by another run perhaps: give "
            "another MASTER_PORT, or let torchrun --standalone find a free one"
        )
    return NoGroup(
        f"{world_size} ranks did not meet at {address} within {timeout:g} s: are all of them "
        f"started, and does that address reach rank 0? ({str(error).splitlines()[0]})"
    )


def _group_of_one(stack: contextlib.ExitStack) -> dict:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="group_"))
    return {"init_method": f"file://{Path(folder) / 'store'}", "rank": 0, "world_size": 1}
