"""Tables of links, seconds of steps and recordings that are made to come apart in one known way."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons.lesson21_clusters.faults import STEPS, Fault, Seen, look_around, train
from shared.clusters.addresses import Meeting
from shared.clusters.links import measure_links
from shared.clusters.recordings import Call, Recording
from shared.clusters.report import Finding, disagreements, unreached
from shared.exercises.on_ranks import on_ranks
from shared.ranks.agreement import gathered
from shared.ranks.forked import run_ranks


class Table:
    """Seconds between ranks that are alike within a third, and what makes them unlike."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, below: int) -> int:
        """A rank."""
        return int(torch.randint(below, (), generator=self.generator))

    def plain(self) -> Tensor:
        """Nobody is odd."""
        draw = torch.Generator().manual_seed(self.seed)
        table = 0.9 + 0.3 * torch.rand(self.n, self.n, generator=draw, dtype=torch.float64)
        return table.fill_diagonal_(0)

    def wider(self, n: int) -> "Table":
        """The same with another number of ranks."""
        return Table(n, self.seed)

    def slowed(
        self, rank: int, slow: str, by: float, also: tuple[int, float] | None = None
    ) -> Tensor:
        """One rank's links slower in a direction; `also`: another rank's, in both."""
        table = self.plain()
        if slow in ("sending", "both"):
            table[rank] *= by
        if slow in ("receiving", "both"):
            table[:, rank] *= by
        if also is not None:
            table[also[0]] *= also[1]
            table[:, also[0]] *= also[1]
        return table

    def cable(self, a: int, b: int, by: float) -> Tensor:
        """One slow pair."""
        table = self.plain()
        table[a, b] *= by
        table[b, a] *= by
        return table

    def nodes(self, a_node: int, by: float) -> Tensor:
        """Ranks of a node are near each other, the others far."""
        node = torch.arange(self.n) // a_node
        return torch.where(node[:, None] == node, self.plain(), by * self.plain())


class Timeline:
    """Seconds of steps before the collective, alike within a third."""

    def __init__(self, ranks: int, steps: int, seed: int) -> None:
        self.ranks, self.steps, self.seed = ranks, steps, seed
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, below: int) -> int:
        """A rank."""
        return int(torch.randint(below, (), generator=self.generator))

    def plain(self) -> Tensor:
        """Nobody is late."""
        draw = torch.Generator().manual_seed(self.seed)
        return 0.9 + 0.3 * torch.rand(self.steps, self.ranks, generator=draw, dtype=torch.float64)

    def late(self, rank: int, times: int, by: float) -> Tensor:
        """A rank that takes so many times as long in so many steps, spread over the run."""
        seconds = self.plain()
        draw = torch.Generator().manual_seed(self.seed + 1)
        seconds[torch.randperm(self.steps, generator=draw)[:times], rank] *= by
        return seconds


def cut(seconds: Tensor, rank: int) -> Tensor:
    """All ranks' columns but one."""
    return seconds[:, torch.arange(seconds.shape[1]) != rank]


def recording(
    rank: int,
    members: Mapping[str, tuple[int, ...]],
    calls: Mapping[str, int],
    what: str,
    full: bool = False,
) -> Recording:
    """A rank's calls in several groups: how many in each, mixed as they may come."""
    own = {group: ranks for group, ranks in members.items() if rank in ranks}
    made = [
        Call(group, number, what, "train.py:80 in train")
        for number in range(1, max(calls.values()) + 1)
        for group, count in calls.items()
        if number <= count
    ]
    return Recording(rank, own, tuple(made), full)


def recordings(
    lists: Sequence[Sequence[str]],
    *,
    places: Sequence[str] = (),
    keep: Sequence[int] = (),
) -> list[Recording]:
    """One recording a rank, of one group of all: what each called, of which the last are kept."""
    members = {"1": tuple(range(len(lists)))}
    found = []
    for rank, calls in enumerate(lists):
        at = places[rank] if places else "train.py:80 in train"
        made = [Call("1", number, what, at) for number, what in enumerate(calls, 1)]
        kept = tuple(made[-keep[rank] :] if keep else made)
        found.append(Recording(rank, members, kept, len(kept) < len(made)))
    return found


def small_run(rank: int, name: str, ranks: int, timeout: float, steps: int = STEPS) -> Seen:
    """The script's training with a fault, of a model that computes next to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))

    def batch(step: int) -> Tensor:
        return torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(step))

    fault = Fault(name, here=rank == ranks - 1)
    seen = train(rank, model, batch, fault, steps, timeout)
    dist.barrier()  # nobody hangs up on those who still wait
    return seen


@dataclass
class Run:
    """All that the ranks of a run saw together; `links` are seconds of one number."""

    fault: str
    findings: list[Finding]
    links: Tensor
    seen: list[Seen]


def looked_at(rank: int, name: str, ranks: int, timeout: float) -> Run:
    """What the script does, in a forked rank: reports, links, training."""
    store = dist.PrefixStore("meeting", dist.distributed_c10d._get_default_store())
    meeting, fault = Meeting(store, rank, ranks), Fault(name, here=rank == ranks - 1)
    reports, reached = look_around(meeting, fault, torch.device("cpu"), Path.cwd())
    findings = [*unreached(reports, reached), *disagreements(reports)]
    links = measure_links(num_bytes=1 << 16).small
    steps = 0 if any(each.breaks for each in findings) else STEPS
    seen = small_run(rank, name, ranks, timeout, steps)
    return Run(name, findings, links, gathered(seen))


def whole_run(name: str, ranks: int = 3, timeout: float = 3.0) -> Run:
    """One run with a fault, as rank 0 has brought it together."""
    return run_ranks(looked_at, ranks, name, ranks, timeout)[0]


def evidence(run: Run) -> str:
    """What the ranks' own logs say of a run, without a verdict."""
    lines = [f"finding: {each.words}" for each in run.findings]
    for rank, each in enumerate(run.seen):
        calls = each.recording.calls
        last = f"last call no. {calls[-1].number}, {calls[-1].what}" if calls else "no call"
        lines.append(f"rank {rank}: {each.said or 'came to its end'}; {last}")
    steps = min(len(each.whole) for each in run.seen)
    for words, part in (("whole steps", "whole"), ("before the all_reduce", "own")):
        columns = [getattr(each, part)[1:steps] for each in run.seen]
        medians = [f"{1000 * statistics.median(each):.1f}" for each in columns if each]
        lines += [f"median ms, {words}: {', '.join(medians)}"] if medians else []
    return "\n".join(lines)


def recordings_of_a_fault(name: str, ranks: int = 3) -> tuple[Recording, ...]:
    """What torch recorded on every rank of a run with that fault."""
    args = name, ranks, 3.0
    seen = on_ranks(small_run, ranks, *args, apart="the ranks did not come back", timeout=60)
    return tuple(each.recording for each in seen)
