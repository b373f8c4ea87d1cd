"""What every rank says about its machine before a run, and in what it differs from the others."""

import os
import platform
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist

from shared.clusters.addresses import Meeting, Reached, own_address
from shared.clusters.links import NO_TIME, LinkTable
from shared.ranks.agreement import gathered
from shared.ranks.group import Rank

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_DISTRIBUTED_", "UCX_")
# torchrun sets it in every rank, and so it says nothing
BY_LAUNCHER = ("TORCH_NCCL_ASYNC_ERROR_HANDLING",)
# what nodes may well have each their own of: names of interfaces and cards, files, logs
BY_NODE = re.compile(
    r"(GLOO|NCCL)_SOCKET_IFNAME|NCCL_IB_HCA|NCCL_(CONF|TOPO)\w*_FILE|NCCL_DEBUG\w*"
)
MUST_AGREE = ("python", "torch", "cuda", "nccl", "device")
GIB = 2**30


@dataclass(frozen=True)
class Report:
    """One rank's machine; `free` memory and `disk` are bytes, `network` tells networks apart."""

    rank: int
    host: str
    network: str
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
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Any) -> "Report":
        """A report again, from a dict of its fields; raises TypeError or ValueError otherwise."""
        given = cls(**found)
        numbers = {name: int(getattr(given, name)) for name in ("rank", "cores", "free", "disk")}
        words = {name: str(value) for name, value in vars(given).items() if name not in numbers}
        variables = {str(name): str(value) for name, value in dict(given.variables).items()}
        checked: dict[str, Any] = {**words, **numbers, "variables": variables}
        return cls(**checked)


def reports_of_all(meeting: Meeting, mine: Report) -> list[Report]:
    """Every rank's report, before there is a group; every rank calls it."""
    return meeting.gathered("report", asdict(mine), Report.of)


def own_report(rank: int, device: torch.device, folder: Path) -> Report:
    """Look at this rank's machine; `folder` is where the run will save. Needs no group."""
    address, interface = own_address()
    cuda, space = device.type == "cuda", Path("/proc/self/ns/net")
    return Report(
        rank=rank,
        host=socket.gethostname(),
        network=f"{socket.gethostname()} {os.readlink(space) if space.is_symlink() else ''}",
        address=address,
        interface=interface,
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda or "-",
        nccl=".".join(map(str, torch.cuda.nccl.version())) if cuda else "-",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        free=torch.cuda.mem_get_info(device)[0] if cuda else _free_memory(),
        disk=shutil.disk_usage(_existing(folder)).free,
        variables=set_variables(),
    )


def set_variables() -> dict[str, str]:
    """The variables of NCCL, gloo and torch's groups that somebody set for this process."""
    names = [n for n in sorted(os.environ) if n.startswith(PREFIXES) and n not in BY_LAUNCHER]
    return {name: os.environ[name] for name in names}


def _free_memory() -> int:
    """MemAvailable; 0 where the system does not say."""
    file = Path("/proc/meminfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return 1024 * int(found[0]) if found else 0


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return next(place for place in (folder, *folder.parents) if os.path.exists(place))


def clock_offsets(rank: Rank, repeats: int = 5) -> list[float]:
    """By how many seconds each rank's clock is ahead of rank 0's. Collective.

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
                clock.item()  # under NCCL recv only queues: wait until the question has come
                clock.fill_(time.time())
                dist.send(clock, other)
            elif rank.rank == other:
                sent = time.time()
                dist.send(clock, 0)
                dist.recv(clock, 0)
                theirs, back = clock.item(), time.time()
                best = min(best, (back - sent, (sent + back) / 2 - theirs))
    return gathered(best[1])


@dataclass(frozen=True)
class Finding:
    """Something that one rank, or some, have otherwise; `breaks` where it would break a run."""

    ranks: tuple[int, ...]
    words: str
    breaks: bool = True


def disagreements(
    reports: Sequence[Report], *, memory: float = 0.5, disk: int = GIB
) -> list[Finding]:
    """In what the ranks differ: versions, devices and variables by majority; memory and disk.

    Variables that name a node's own interfaces, cards or files may differ, and are told. Memory
    counts below the share `memory` of the median, a disk with less than `disk` bytes, and loopback
    where the ranks are on several networks.
    """
    found: list[Finding] = []
    for key in MUST_AGREE:
        found += _minority(key, {report.rank: getattr(report, key) for report in reports})
    for by_node in (False, True):
        told = {report.rank: _told(report.variables, by_node) for report in reports}
        found += _minority("variables", told, breaks=not by_node)
    typical = sorted(report.free for report in reports)[len(reports) // 2]
    several = len({report.network for report in reports}) > 1
    for report in reports:
        who, only = f"rank {report.rank}", (report.rank,)
        if report.free < memory * typical:
            words = (
                f"{who} has {report.free / GIB:.1f} GiB of memory free, others {typical / GIB:.1f}"
            )
            found.append(Finding(only, words))
        if report.disk < disk:
            found.append(Finding(only, f"{who} has {report.disk / GIB:.2f} GiB of disk free"))
        if several and report.address.startswith("127."):
            words = (
                f"{who} gives {report.address} ({report.interface}), where others reach themselves"
            )
            found.append(Finding(only, words))
    return found


def clock_findings(offsets: Sequence[float], seconds: float = 1.0) -> list[Finding]:
    """Ranks whose clock is more than `seconds` away from the median: their logs will mislead."""
    middle = sorted(offsets)[(len(offsets) - 1) // 2]
    return [
        Finding(
            (r,), f"rank {r}'s clock is {offset - middle:+.1f} s from the others'", breaks=False
        )
        for r, offset in enumerate(offsets)
        if abs(offset - middle) > seconds
    ]


def unreached(reports: Sequence[Report], table: Reached) -> list[Finding]:
    """The ranks that somebody does not get through to.

    A node that no other node reaches, and that reaches none, is said once, where most are not so.
    """
    cut = [rank for rank in range(len(reports)) if _is_cut_off(rank, reports, table)]
    cut = cut if 2 * len(cut) < len(reports) else []
    found = []
    for network in dict.fromkeys(reports[rank].network for rank in cut):
        own = [reports[rank] for rank in cut if reports[rank].network == network]
        ranks, first = tuple(report.rank for report in own), own[0]
        why = next(filter(None, table[first.rank]))
        where = f"node {first.host} (ranks {list(ranks)}) at {first.address} ({first.interface})"
        words = f"{where} reaches no other node, and none reaches it: {why}; a firewall before it?"
        found.append(Finding(ranks, words))
    for called, report in enumerate(reports):
        callers = {
            caller: row[called]
            for caller, row in enumerate(table)
            if row[called]
            and not ({caller, called} & {*cut} and _are_apart(caller, called, reports))
        }
        if callers:
            where = f"rank {called} at {report.address} ({report.interface})"
            words = f"{where} is not reached by {sorted(callers)}: {next(iter(callers.values()))}"
            found.append(Finding((called,), words))
    return found


def _are_apart(one: int, other: int, reports: Sequence[Report]) -> bool:
    return reports[one].network != reports[other].network


def _is_cut_off(rank: int, reports: Sequence[Report], table: Reached) -> bool:
    """Whether no call between a rank and another node comes through."""
    others = [other for other in range(len(reports)) if _are_apart(rank, other, reports)]
    return bool(others) and all(table[rank][other] and table[other][rank] for other in others)


def link_findings(
    table: LinkTable, named: Collection[int] = (), at_least: float = 0.0, factor: float = 4.0
) -> list[Finding]:
    """Links below `at_least` bytes a second, which break a run, and links with one slow direction.

    The two directions of a cable are each other's measure, also where there are two nodes and
    nobody is the odd one out: one that is `factor` times slower is told, but for ranks in `named`.
    What took no time was not measured.
    """
    speed, found = table.bandwidth, []
    pairs = [(a, b) for a, b in (table.large > NO_TIME).nonzero().tolist()]
    said = {pair: f"rank {pair[0]} to {pair[1]}: {speed[pair].item() / 1e6:.4g}" for pair in pairs}
    if slow := sorted((p for p in pairs if speed[p] < at_least), key=lambda p: speed[p].item()):
        words = f"links below {at_least / 1e6:g} MB/s: {'; '.join(said[p] for p in slow[:8])}"
        words += f" and {len(slow) - 8} more" * (len(slow) > 8)
        found.append(Finding(tuple(sorted({rank for pair in slow for rank in pair})), words))
    for a, b in pairs:
        if (b, a) in said and factor * speed[a, b] < speed[b, a] and not {a, b} & {*named}:
            words = f"one direction of a link is slow: {said[a, b]} MB/s, {said[b, a]} MB/s"
            found.append(Finding((a, b), words, breaks=False))
    return found


def _told(variables: Mapping[str, str], by_node: bool) -> str:
    """The variables that a node may have its own of, or the others."""
    chosen = {k: v for k, v in variables.items() if bool(BY_NODE.fullmatch(k)) == by_node}
    return ", ".join(f"{name}={value}" for name, value in chosen.items()) or "none set"


def _minority(key: str, values: Mapping[int, str], breaks: bool = True) -> list[Finding]:
    """Who has another value than most; everybody, where no value has a majority."""
    (common, votes), *rest = Counter(values.values()).most_common()
    if not rest:
        return []
    split = 2 * votes <= len(values)
    ranks = [rank for rank, value in values.items() if split or value != common]
    said = "; ".join(f"rank {rank}: {values[rank]}" for rank in ranks)
    others = "" if split else f"; the others: {common}"
    return [Finding(tuple(ranks), f"{key} differ: {said}{others}", breaks)]
