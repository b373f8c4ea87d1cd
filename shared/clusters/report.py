"""What every rank says about its machine before a run, and in what it differs from the others."""

import os
import platform
import shutil
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shared.clusters.addresses import own_address
from shared.ranks.agreement import gathered
from shared.ranks.group import Rank

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "UCX_")
MUST_AGREE = ("python", "torch", "cuda", "nccl", "device", "variables")
GIB = 2**30


@dataclass(frozen=True)
class Report:
    """One rank's machine. `clock` is seconds ahead of rank 0's; `free` and `disk` are bytes."""

    rank: int
    host: str
    address: str
    interface: str
    device: str
    python: str
    torch: str
    cuda: str
    nccl: str
    cores: int
    free: int
    disk: int
    clock: float
    variables: Mapping[str, str] = field(default_factory=dict)


def own_report(rank: Rank, folder: Path) -> Report:
    """Look at this rank's machine; `folder` is where the run will save. Collective (the clock)."""
    address, interface = own_address()
    cuda = rank.device.type == "cuda"
    return Report(
        rank=rank.rank,
        host=socket.gethostname(),
        address=address,
        interface=interface,
        device=torch.cuda.get_device_name(rank.device) if cuda else "cpu",
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "-",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else "-",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        free=torch.cuda.mem_get_info(rank.device)[0] if cuda else _free_memory(),
        disk=shutil.disk_usage(_existing(folder)).free,
        clock=clock_offset(rank),
        variables=set_variables(),
    )


def set_variables() -> dict[str, str]:
    """The variables of NCCL, gloo and torch's groups that this process sees."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def _free_memory() -> int:
    """MemAvailable; 0 where the system does not say."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return 1024 * int(found[0]) if found else 0


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return next(each for each in (folder, *folder.parents) if each.exists())


def clock_offset(rank: Rank, repeats: int = 5) -> float:
    """By how many seconds this rank's clock is ahead of rank 0's. Collective.

    Rank 0 answers with its time, which is compared with the middle of there and back; of several
    answers the one that came back first counts. Right to half of its time on the way.
    Source: F. Cristian 1989, "Probabilistic clock synchronization".
    """
    best = (float("inf"), 0.0)
    clock = torch.zeros(1, dtype=torch.float64, device=rank.device)
    for other in range(1, rank.world_size):
        for _ in range(repeats):
            if rank.is_main:
                dist.recv(clock, other)
                clock.fill_(time.time())
                dist.send(clock, other)
            elif rank.rank == other:
                sent = time.time()
                dist.send(clock, 0)
                dist.recv(clock, 0)
                theirs, back = clock.item(), time.time()
                best = min(best, (back - sent, (sent + back) / 2 - theirs))
    return best[1]


@dataclass(frozen=True)
class Finding:
    """Something that one rank, or some, have otherwise; `breaks` where it would break a run."""

    ranks: tuple[int, ...]
    words: str
    breaks: bool


def disagreements(
    reports: Sequence[Report], *, seconds: float = 1.0, memory: float = 0.5, disk: int = GIB
) -> list[Finding]:
    """In what the ranks differ: versions, devices and variables by majority; clock, memory, disk.

    A clock counts that is more than `seconds` away from the median, memory below the share `memory`
    of the median, a disk with less than `disk` bytes. A loopback address counts where the ranks
    are on several hosts, or where others have another one.
    """
    found: list[Finding] = []
    for key in MUST_AGREE:
        found += _minority(key, {each.rank: _value(each, key) for each in reports})
    clocks = sorted(each.clock for each in reports)
    memories = sorted(each.free for each in reports)
    for each in reports:
        ahead = each.clock - clocks[(len(clocks) - 1) // 2]
        if abs(ahead) > seconds:
            words = f"rank {each.rank}'s clock is {ahead:+.1f} s from the others'"
            found.append(Finding((each.rank,), words, breaks=False))
        if each.free < memory * memories[len(memories) // 2]:
            typical = f"{memories[len(memories) // 2] / GIB:.1f}"
            words = (
                f"rank {each.rank} has {each.free / GIB:.1f} GiB of memory free, others {typical}"
            )
            found.append(Finding((each.rank,), words, breaks=True))
        if each.disk < disk:
            words = f"rank {each.rank} has {each.disk / GIB:.2f} GiB of disk free"
            found.append(Finding((each.rank,), words, breaks=True))
    return found + _loopbacks(reports)


def _loopbacks(reports: Sequence[Report]) -> list[Finding]:
    inside = [each for each in reports if each.address.startswith("127.")]
    alone = len({each.host for each in reports}) == 1
    if not inside or (alone and len(inside) == len(reports)):
        return []
    return [
        Finding(
            (each.rank,),
            f"rank {each.rank} is to be reached at {each.address} ({each.interface}), where other"
            " machines reach themselves: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
            breaks=True,
        )
        for each in inside
    ]


def _value(report: Report, key: str) -> str:
    value: Any = getattr(report, key)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={each}" for name, each in value.items()) or "none set"
    return str(value)


def _minority(key: str, values: Mapping[int, str]) -> list[Finding]:
    """Who has another value than most; everybody, where no value has a majority."""
    (common, votes), *rest = Counter(values.values()).most_common()
    if not rest:
        return []
    ranks = [rank for rank, value in values.items() if value != common]
    if 2 * votes <= len(values):
        ranks = list(values)
    said = "; ".join(f"rank {rank}: {values[rank]}" for rank in ranks)
    others = "" if len(ranks) == len(values) else f"; the others: {common}"
    return [Finding(tuple(ranks), f"{key} differ: {said}{others}", breaks=True)]


def all_reports(rank: Rank, folder: Path) -> list[Report]:
    """Every rank's report, on every rank."""
    return gathered(own_report(rank, folder))
