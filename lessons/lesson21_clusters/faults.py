"""Eight ways in which runs on clusters go wrong, injected into a small training on its last rank.

Real here: a rank with fewer batches, another collective, a slow rank, a write to a full device, an
allocation beyond all memory. Played, because one machine has one network and one torch: a port
that does not answer, an address of a network that nobody reaches, another version in the report.
"""

import errno
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # what the first optimizer imports takes seconds
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shared.clusters.addresses import Meeting, Reached, reach
from shared.clusters.recordings import Recording, recorded
from shared.clusters.report import Report, own_report, reports_of_all
from shared.ddp.averaging import average_flat

FAULTS = {
    "none": "nothing",
    "blocked_port": "a firewall in front of the last rank",
    "wrong_interface": "the last rank gives an address of a network that the others are not in",
    "versions": "another torch on the last rank",
    "batches": "the last rank has four batches fewer",
    "mismatch": "the last rank gathers a number that the others do not gather",
    "slow_node": "the last rank computes for longer",
    "full_disk": "the last rank's disk is full when it saves",
    "out_of_memory": "the last rank has no memory for a tensor",
}
PLAYED = ("blocked_port", "wrong_interface", "versions")
STEPS = 24
WHEN = 21  # the step in which it happens
LATE = ("batches", "mismatch", "full_disk", "out_of_memory")  # those that wait for it


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and whether it does so on this rank."""

    name: str
    here: bool

    def is_now(self, name: str, step: int = WHEN) -> bool:
        """Whether that fault happens here in this step."""
        return self.here and self.name == name and step == WHEN

    def report(self, true: Report) -> Report:
        """The report as the fault makes it look."""
        if self.is_now("versions"):
            return replace(true, torch="2.11.0")
        if self.is_now("wrong_interface"):
            return replace(true, address="198.51.100.77", interface="ib0")  # RFC 5737: nobody's
        return true

    def steps(self, steps: int) -> int:
        """How many batches this rank has."""
        return min(steps, WHEN - 1) if self.is_now("batches") else steps

    def slows(self, seconds: float) -> None:
        """Compute for longer, where that is the fault."""
        if self.here and self.name == "slow_node":
            time.sleep(max(0.1, 8 * seconds))

    def strikes(self, step: int, group: dist.ProcessGroup) -> None:
        """Go wrong in the step in which it is time for it."""
        if self.is_now("mismatch", step):
            parts = [torch.empty(1) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, torch.ones(1), group=group)
        if self.is_now("full_disk", step):
            save_to_a_full_disk()
        if self.is_now("out_of_memory", step):
            torch.empty(2**50)


def save_to_a_full_disk() -> None:
    """Write where every write finds the disk full (Linux has such a device)."""
    full = Path("/dev/full")
    if not full.exists():
        raise OSError(errno.ENOSPC, "No space left on device")
    with full.open("wb", buffering=0) as file:
        file.write(b"a checkpoint")


def words_of(error: Exception) -> str:
    """What was raised, on one line, without the place in gloo's sources."""
    text = str(error).splitlines()[0].split(" This is typically")[0]
    words = re.sub(r"\[[^]]*\.(cc|cpp):\d+\] ", "", text)
    return f"{type(error).__name__}: {words[:200].removeprefix('err == 0. ')}"


@dataclass
class Seen:
    """What one rank saw: its calls, what it raised, and seconds of every step.

    `own` are those before it waited for others, `whole` those of the step as people log it.
    """

    recording: Recording
    said: str
    own: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def look_around(
    meeting: Meeting, fault: Fault, device: torch.device, folder: Path
) -> tuple[list[Report], Reached]:
    """Every rank's report, and who reaches whom, before there is a group."""
    mine = fault.report(own_report(meeting.rank, device, folder))
    answers = not fault.is_now("blocked_port")
    return reports_of_all(meeting, mine), reach(meeting, mine.address, 1.0, answers)


def train(
    rank: int,
    model: nn.Module,
    batch: Callable[[int], torch.Tensor],
    fault: Fault,
    steps: int,
    timeout: float,
) -> Seen:
    """Train until it is done or something is raised; keep what was seen. Collective.

    The gradients are averaged by one all_reduce a step, in a group of their own whose calls give
    up after `timeout` seconds: the default group still works afterwards, and brings together what
    the ranks have seen.
    """
    group = dist.new_group(timeout=timedelta(seconds=timeout))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    dist.barrier()  # whoever came late to the start must not look like somebody who hangs
    own, whole, said = [], [], ""
    try:
        for step in range(1, fault.steps(steps) + 1):
            began = time.perf_counter()
            optimizer.zero_grad()
            tokens = batch(step)
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            fault.slows(time.perf_counter() - began)
            fault.strikes(step, group)
            own.append(time.perf_counter() - began)
            average_flat([p.grad for p in model.parameters() if p.grad is not None], group)
            optimizer.step()
            whole.append(time.perf_counter() - began)
    except (RuntimeError, OSError) as error:
        said = words_of(error)
    default = dist.distributed_c10d._get_default_group().group_name
    return Seen(recorded(leave_out=(default,)), said, own, whole)
