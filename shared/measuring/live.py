"""Bytes of all tensors that are alive, counted over storages while a program runs."""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NEGLIGIBLE_BYTES = 16  # bytes; smaller storages (step counts, losses) are not counted
NEGLIGIBLE_IN_A_MODEL = 1024  # bytes; for models: smaller storages are inputs, losses, step counts
SETTLE = 0.005  # seconds
TASKS = Path("/proc/self/task")  # Linux: a folder for each thread


class LiveBytes:
    """The storages that came into being inside `count_live_bytes`, and how many bytes are alive.

    `at_collectives` is what was alive at the start of each operation of torch.distributed, with
    its name. A storage counts with its size of now: one that was resized to 0 counts with 0, and
    views count once. Storages below `negligible` bytes are left out. `made` only grows: the bytes
    of all storages as they came.
    """

    def __init__(self, negligible: int = NEGLIGIBLE_BYTES) -> None:
        self.negligible = negligible
        self._known: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}
        self.at_collectives: list[tuple[str, int]] = []
        self.made = 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count these from now on."""
        for tensor in tensors:
            if tensor.device.type == "meta":  # has a size, and no memory
                continue
            storage = tensor.untyped_storage()
            known = self._known.get(storage._cdata)
            if known is None or known[0].expired():
                self._known[storage._cdata] = StorageWeakRef(storage), tensor.dtype
                self.made += storage.nbytes()

    def now(self, dtype: torch.dtype | None = None) -> int:
        """The bytes that are alive now: all, or those of the tensors of one dtype."""
        total = 0
        for address, (reference, kind) in list(self._known.items()):
            if dtype not in (None, kind):
                continue
            if reference.expired():
                del self._known[address]
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            size = 0 if storage is None else storage.nbytes()
            total += size if size >= self.negligible else 0
        return total


@contextlib.contextmanager
def count_live_bytes(
    already: Iterable[Tensor] = (), negligible: int = NEGLIGIBLE_BYTES
) -> Generator[LiveBytes]:
    """Watch every operation inside the block, and count what it makes and what is `already` there.

    Exact on any device for tensors that operators made in this thread, backward included; what a
    kernel allocates and frees inside itself is not seen. Every operator passes through Python, and
    each message waits for some milliseconds: take times in another run.
    """
    live = LiveBytes(negligible)
    live.add(already)
    with _Watch(live):
        yield live


class PeakOfLive(TorchDispatchMode):
    """The most bytes of some live storages after any operator.

    They are counted again only where, with all that was made since, they could be more than that.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live, self.most = live, 0
        self.surplus = live.now() - live.made  # of the last count; it shrinks as storages go

    def take(self) -> int:
        """The most until now; from here on it is counted anew."""
        most, self.most = self.most, 0
        return most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.live.made + self.surplus > self.most:
            now = self.live.now()
            if now > self.most:  # or so it seems: gloo's thread may hold what has been sent
                settle(0)
                now = self.live.now()
            self.most, self.surplus = max(self.most, now), now - self.live.made
        return result


def settle(least: float, most: float = 2.0) -> None:
    """Sleep until all other threads of this process wait for something, `most` seconds at most.

    When wait() returns, gloo's thread may still hold what was sent, for longer where other programs
    keep the cores busy. Sleeps for `least` seconds at the least, on systems without /proc for just
    that.
    """
    end = time.monotonic() + most
    time.sleep(least)
    while _others_run() and time.monotonic() < end:
        time.sleep(0.001)


def _others_run() -> bool:
    """Whether another thread is running or is ready to run."""
    own = str(threading.get_native_id())
    tasks = os.listdir(TASKS) if TASKS.is_dir() else ()  # fifty beside many groups
    return any(_runs(task) for task in tasks if task != own)


def _runs(task: str) -> bool:
    try:
        file = os.open(f"{TASKS}/{task}/stat", os.O_RDONLY)  # io's open asks for more
    except OSError:
        return False  # it has ended
    try:
        return os.read(file, 512).rpartition(b")")[2].startswith(b" R")
    except OSError:
        return False
    finally:
        os.close(file)


class _Watch(TorchDispatchMode):
    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see shared.measuring.traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.split("::")[1].strip("_")
            settle(SETTLE)
            self.live.at_collectives.append((name, self.live.now()))
        result = func(*args, **(kwargs or {}))
        self.live.add(x for x in tree_leaves(result) if type(x) is Tensor)
        return result


def live_tensors() -> list[Tensor]:
    """All tensors that Python can reach, gradients included."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return tensors + [x.grad for x in tensors if x.is_leaf and x.grad is not None]


def live_storages() -> list[torch.UntypedStorage]:
    """The storages of all tensors that Python can reach, gradients included."""
    real = (x for x in live_tensors() if x.device.type != "meta" and not isinstance(x, FakeTensor))
    return [x.untyped_storage() for x in real]
