"""One process group, opened and closed by one context manager."""

import atexit
import contextlib
import datetime
import faulthandler
import functools
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# Its functions have the group as a default argument, bound when it is imported, and torch imports
# it with the first optimizer: inside a group it would keep that group, and gloo's threads with it,
# until Python has ended; a thread that wants the interpreter's lock then ends the rank by SIGABRT.
import torch.distributed.nn.functional

from shared.errors import InputError, NoGroup
from shared.ranks.gpus import are_misnamed, chosen_by, take_gpu, why_none
from shared.ranks.visible import without_gpus

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
DTENSOR = "torch.distributed.tensor"
REMEMBER = (DTENSOR, "deepspeed")  # whose lru_caches have groups, or what has them
PATIENCE = 10.0  # seconds, before a rank says for whom it waits
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


def own_device(device: str = "auto") -> torch.device:
    """The device that `process_group` gives this rank, before there is a group; raises like it."""
    return _choose_device(device, _place())


@contextlib.contextmanager
def process_group(device: str = "auto", timeout: float = 600.0) -> Generator[Rank]:
    """Join the group that torchrun describes, or one of a single process without it.

    `device` is "auto" (CUDA where there is one), "cpu" or "cuda"; CPU groups use gloo, CUDA
    groups NCCL. A rank that waits for others says after ten seconds for whom. At the end the ranks
    wait for each other, then the group is torn down, the latter whatever happens inside. A rank
    that got SIGUSR1 (kill -USR1 PID) writes where it stands, and goes on, from here to the end of
    its process: that is how a hang is looked at.

    Raises InputError for a half-set or contradictory launcher environment, for a port in use, for
    ranks that never arrived, for "cuda" without CUDA, for "cpu" once torch has counted GPUs, for a
    GPU that cannot be used (`take_gpu`), for a CUDA_VISIBLE_DEVICES that names none, and for more
    ranks on this machine than GPUs: NCCL refuses two ranks on one device.
    Source: docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables".
    """
    if device == "cpu":
        without_gpus()  # or torch's own helpers take the GPU that is there: fully_shard, PowerSGD
    place = _place()
    chosen = _choose_device(device, place)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    with contextlib.ExitStack() as stack:
        _tell_stack_when_asked(place["RANK"])
        wait = datetime.timedelta(seconds=timeout)
        options: dict = {}
        if chosen.type == "cuda":
            take_gpu(chosen)
            options["device_id"] = chosen
        _let_groups_go()
        try:
            options |= _meet(wait) if "RANK" in os.environ else _group_of_one(stack)
            dist.init_process_group(backend, timeout=wait, **options)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise _no_group(error, place["WORLD_SIZE"], timeout) from error
        try:
            yield Rank(place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"], chosen, backend)
            _stay_until_rank_0_has_written()
        finally:
            _outlive_models(list(dist.distributed_c10d._world.pg_map))
            dist.destroy_process_group()
            _empty_caches()


def _empty_caches() -> None:
    """Take the groups out of what engines keep for the next time, where one was imported."""
    if DTENSOR in sys.modules:  # it remembers by mesh, and a mesh has its groups
        from torch.distributed.tensor import _redistribute, debug

        # Neither is there before torch 2.11.
        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
        getattr(_redistribute, "_planner_cache", {}).clear()
    if groups := sys.modules.get("deepspeed.utils.groups"):
        groups._release_process_group_references()
    if zero3 := sys.modules.get("deepspeed.runtime.zero.parameter_offload"):
        zero3.FWD_MODULE_STACK.clear()  # modules, whose hooks have the engine
    if DTENSOR in sys.modules or "deepspeed" in sys.modules:
        for held in gc.get_objects():
            if type(held) is functools._lru_cache_wrapper and held.__module__.startswith(REMEMBER):
                held.cache_clear()


_ended: list[dist.ProcessGroup] = []  # destroyed, and kept until the models that used them are gone


def _outlive_models(groups: list[dist.ProcessGroup]) -> None:
    """Let a model in DDP never be the last owner of a group.

    DDP's reducer would end gloo's threads with the interpreter's lock in its hand, and one that is
    just dropping a tensor waits for that lock: the rank hangs for ever, its work done. A group that
    Python owns lets go of the lock first. Models sit in cycles and in the frames of an error that
    ends the script: the latter are gone when exit handlers are called, the former are collected.
    """
    if not _ended:
        atexit.register(_let_groups_go)
    _ended.extend(groups)


def _let_groups_go() -> None:
    if _ended:
        gc.collect()
        _ended.clear()


def _stay_until_rank_0_has_written() -> None:
    """Wait for all: torchrun ends every rank when one dies, though it had nothing more to do."""
    with contextlib.suppress(RuntimeError):  # whoever is gone has said why, or torchrun says it
        dist.barrier()


def _meet(wait: datetime.timedelta) -> dict:
    """The store by which the ranks find each other, when all of them are there.

    After a restart by torchrun it is a part that the ranks before did not write to: torchrun keeps
    one store for all starts, and gloo would find the addresses of dead ranks in it
    ("connectFullMesh failed", or a hang; pytorch issue 135712). Several agents need not count the
    same number of restarts, so there the cure is another one: start each of them with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which gives every start a store of its own.
    """
    one_agent = os.environ.get("GROUP_WORLD_SIZE") == "1"
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_agent else "0"
    whole, rank, world_size = next(dist.rendezvous("env://", timeout=wait))
    store = dist.PrefixStore(f"start_{start}", whole)
    store.set(f"here_{rank}", "")
    _wait_for_all(store, rank, world_size, wait)
    return {"store": store, "rank": rank, "world_size": world_size}


def _wait_for_all(store: dist.Store, rank: int, num_ranks: int, wait: datetime.timedelta) -> None:
    """Wait until every rank is there; after ten seconds, say on each machine who is not.

    By looking: a wait of the store's own that ends prints torch's stack.
    """
    keys = [f"here_{number}" for number in range(num_ranks)]
    began, last = time.monotonic(), wait.total_seconds()
    patience = PATIENCE if os.environ["LOCAL_RANK"] == "0" else last
    while not store.check(keys):
        waited = time.monotonic() - began
        if waited > min(patience, last):
            missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
            missed = f"rank(s) {', '.join(missing)} of {num_ranks}"
            if waited > last:
                raise dist.DistStoreError(f"{missed} did not come")
            print(
                f"rank {rank} has waited {patience:g} s for {missed}, and waits up to {last:g} s:"
                " has one ended with an error, on another node perhaps? Then end this one too",
                file=sys.stderr,
                flush=True,
            )
            patience = last
        time.sleep(0.05)


def _place() -> dict[str, int]:
    said = dict(os.environ)
    if "RANK" in said and "LOCAL_SIZE" in said:  # what DeepSpeed's launcher calls it
        said.setdefault("LOCAL_WORLD_SIZE", said["LOCAL_SIZE"])
    given = [name for name in LAUNCHER_VARIABLES if name in said]
    if not given:
        return {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    wanted = LAUNCHER_VARIABLES + ADDRESS_VARIABLES
    missing = [name for name in wanted if name not in said]
    if missing:
        raise InputError(
            f"{', '.join(given)} set but not {', '.join(missing)}: "
            "start with torchrun, or unset them to run as one process"
        )
    for name in given:
        if not said[name].isdecimal():
            raise InputError(f"{name}={said[name]!r} is not a number: start with torchrun")
    port = said["MASTER_PORT"]
    if not port.isdecimal() or int(port) > 65_535:
        raise InputError(f"MASTER_PORT={port!r} is no port: give a number up to 65535")
    place = {name: int(said[name]) for name in LAUNCHER_VARIABLES}
    for number, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if place[number] >= place[count]:
            raise InputError(
                f"{number}={place[number]} and {count}={place[count]}: "
                f"ranks count from 0 to {place[count] - 1}; start with torchrun"
            )
    if place["LOCAL_WORLD_SIZE"] > place["WORLD_SIZE"]:
        raise InputError(
            f"LOCAL_WORLD_SIZE={place['LOCAL_WORLD_SIZE']} and WORLD_SIZE={place['WORLD_SIZE']}: "
            "one machine has more ranks than all together; start with torchrun"
        )
    return place


def _choose_device(device: str, place: dict[str, int]) -> torch.device:
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device!r}: it can be auto, cpu or cuda")
    # Not asked for the CPU: where NVML does not answer, torch counts for good, see without_gpus().
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and gpus == 0 and not are_misnamed()):
        return torch.device("cpu")
    if gpus == 0:
        raise InputError(
            f"--device {device}: torch sees no CUDA device here ({why_none()}); use --device cpu"
        )
    if place["LOCAL_WORLD_SIZE"] > gpus:
        raise InputError(
            f"{place['LOCAL_WORLD_SIZE']} ranks on this machine and {gpus} GPU(s){chosen_by()}: "
            f"NCCL refuses two ranks on one device; use --nproc_per_node={gpus}, or --device cpu "
            "(gloo)"
        )
    return torch.device("cuda", place["LOCAL_RANK"])


def _tell_stack_when_asked(rank: int) -> None:
    """On SIGUSR1 write this rank's Python stack to stderr, or to a file where launch() asks.

    From now on: a rank may hang behind its group as well, and the signal alone would end it.
    """
    folder = os.environ.get(STACKS)
    if folder is None:
        faulthandler.register(signal.SIGUSR1, all_threads=False)
    else:  # the name tells launch() whom to signal; faulthandler keeps the file open
        file = (Path(folder) / f"{rank}_{os.getpid()}").open("w")
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)


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
        f"started, and does that address reach rank 0? ({str(error).splitlines()[0]}) "
        "lessons/when_something_does_not_work.md has more"
    )


def _group_of_one(stack: contextlib.ExitStack) -> dict:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="group_"))
    return {"init_method": f"file://{Path(folder) / 'store'}", "rank": 0, "world_size": 1}
