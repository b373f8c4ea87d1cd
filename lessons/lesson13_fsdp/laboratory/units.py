"""Lesson 13: flat units under observation."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons.lesson13_fsdp.laboratory.sharded_modules import HALF, Observed
from shared.exercises.noting import noted_waits
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.exercises.wrong import Wrong
from shared.measuring.live import LiveBytes, count_live_bytes, settle
from shared.measuring.traffic import Call, Traffic, count_traffic


@dataclass(frozen=True)
class UnitCase:
    """Parameters of some shapes on some ranks, or on pairs of them."""

    world_size: int
    shapes: tuple[tuple[int, ...], ...] = ((37, 29), (11,), (3, 5, 7))
    dtype: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    frozen: bool = False
    pairs: bool = False

    @property
    def computes(self) -> torch.dtype:
        """What the parameters compute in."""
        return self.compute or self.dtype

    @property
    def num_ranks(self) -> int:
        """How many ranks share a unit."""
        return 2 if self.pairs else self.world_size

    def place(self, rank: int) -> int:
        """A rank's place in its group: pairs are no neighbours, but 0 with 2 and 1 with 3."""
        return rank // 2 if self.pairs else rank


@dataclass
class UnitSeen:
    """What a rank saw of a unit: tensors, live bytes, calls and waits by the moment."""

    first: list[Tensor] = field(default_factory=list)  # the group's first rank's parameters
    kinds: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)
    grads: list[list[Tensor | None]] = field(default_factory=list)  # of the ranks of the group


UNIT_CASES = (
    UnitCase(3),
    UnitCase(4, pairs=True),
    UnitCase(2, dtype=HALF),
    UnitCase(2, compute=HALF),
    UnitCase(2, frozen=True),
    UnitCase(1, dtype=torch.float64),
    UnitCase(1, dtype=torch.float16),
)


SLACK = 64  # bytes of small things that may be alive besides


class UnitTrial:
    """Takes a unit through its moments on one rank, and notes what is seen."""

    def __init__(self, case: UnitCase, live: LiveBytes, traffic: Traffic, waits: list[int]) -> None:
        self.case, self.live, self.traffic, self.waits = case, live, traffic, waits
        self.seen = UnitSeen()
        self.parameters = [
            nn.Parameter(torch.randn(shape).to(case.dtype), requires_grad=not case.frozen)
            for shape in case.shapes
        ]

    def note(self, name: str) -> None:
        """Write down what is alive now, and what was sent and waited for so far."""
        settle(0.02)
        self.seen.bytes[name], self.seen.waits[name] = self.live.now(), len(self.waits)
        self.seen.calls[name] = list(self.traffic.calls)

    def comes_down_to(self, most: int) -> bool:
        """Whether no more bytes are alive soon: gloo's thread may hold a tensor for a while.

        For less than a second: ranks that are quiet for longer are taken to wait for each other.
        """
        end = time.monotonic() + 0.5
        while self.live.now() > most:
            if time.monotonic() > end:
                return False
            settle(0.02)
        return True

    def elements(self) -> int:
        """How many elements the parameters have now."""
        return sum(p.numel() for p in self.parameters)

    def begin(self, unit: Any) -> None:
        """The shard, and the unit gathered for the first time, twice over."""
        seen, shard = self.seen, unit.shard
        seen.kinds = {
            "parameter": isinstance(shard, nn.Parameter),
            "dtype": shard.dtype,
            "trained": shard.requires_grad,
            "left": self.elements(),
        }
        seen.tensors["shard"] = [shard.detach().clone()]
        self.traffic.calls.clear()
        self.note("start")
        seen.kinds["whole at the start"] = unit.is_whole
        self.waits.clear()
        unit.gather()
        seen.waits["gather"] = len(self.waits)
        seen.kinds["whole on its way"] = unit.is_whole
        unit.wait()
        seen.kinds["whole"] = unit.is_whole
        seen.kinds["computes"] = self.parameters[0].dtype
        unit.gather()
        unit.wait()
        self.note("whole")
        seen.tensors["whole"] = [p.detach().clone() for p in self.parameters]

    def free(self, unit: Any, rank: int) -> Tensor:
        """The unit freed while autograd has saved views of it; the loss that needs them."""
        flat = [p.view(-1) for i, p in enumerate(self.parameters) if (rank, i) != (1, 1)]
        loss = torch.stack([(x * x).sum().float() * (rank + 1) for x in flat]).sum()
        del flat
        unit.free()
        self.seen.kinds["left after free"] = self.elements()
        self.seen.kinds["whole after free"] = unit.is_whole
        self.note("free")
        return loss

    def reduce(self, unit: Any, loss: Tensor, quiet: bool) -> None:
        """A backward, and its reduction, twice; a quiet rank has no gradient in the second."""
        seen = self.seen
        unit.gather()
        unit.wait()
        loss.backward(retain_graph=True)
        seen.tensors["own grads"] = [
            torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters
        ]
        unit.free()
        self.traffic.calls.clear()
        self.waits.clear()
        settle(0.02)
        whole = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        before = self.live.now()
        unit.reduce()
        seen.waits["reduce"] = len(self.waits)
        seen.kinds["gradients left"] = sum(p.grad is not None for p in self.parameters)
        unit.finish()
        self.took_part()
        seen.calls["reduce"] = list(self.traffic.calls)
        seen.kinds["grad"] = unit.shard.grad is not None and unit.shard.grad.dtype
        room = before - whole + unit.shard.nbytes + SLACK
        seen.kinds["whole gradients kept"] = not self.comes_down_to(room)
        seen.tensors["grad"] = [] if unit.shard.grad is None else [unit.shard.grad.clone()]
        unit.gather()
        unit.wait()
        if not quiet:
            loss.backward()
        unit.free()
        self.traffic.calls.clear()
        unit.reduce()
        unit.finish()
        self.took_part()
        unit.finish()  # nothing is on its way: nothing happens
        seen.tensors["twice"] = [] if unit.shard.grad is None else [unit.shard.grad.clone()]

    def took_part(self) -> None:
        """Say so where this rank has sent nothing: the others wait for it, and cannot say why."""
        gathered = self.case.num_ranks > 1 and self.seen.calls["whole"]
        if gathered and not self.traffic.calls:
            raise Wrong(
                "a rank that lacks a gradient sends nothing: one that is None counts as zeros",
                "a message from every rank of the group in reduce()",
                "none from a rank on which a gradient is None",
            )

    def update(self, unit: Any) -> None:
        """The shard changed as an optimizer changes it, and the unit gathered anew."""
        with torch.no_grad():
            unit.shard.add_(1e-4)
        self.seen.tensors["shard at the end"] = [unit.shard.detach().clone()]
        self.seen.tensors["full"] = [x.clone() for x in unit.full(unit.shard)]
        unit.gather()
        unit.wait()
        self.seen.tensors["after an update"] = [p.detach().clone() for p in self.parameters]
        unit.free()
        flat = torch.zeros(unit.shard.numel() * self.case.num_ranks)
        unit.own_part(flat).fill_(1)
        self.seen.kinds["own part written"] = int(flat.sum()) == unit.shard.numel()
        for piece in unit.pieces(flat):
            piece.fill_(2)
        size = sum(math.prod(shape) for shape in self.case.shapes)
        self.seen.kinds["pieces written"] = bool((flat[:size] == 2).all())


def observe_unit(answer: Callable[..., Any], case: UnitCase, seed: int, rank: int) -> UnitSeen:
    """What a rank sees of an answer's unit."""
    seed_all(seed + rank)
    group = None
    if case.pairs:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[rank % 2]
    with count_live_bytes() as live, noted_waits() as waits, count_traffic() as traffic:
        trial = UnitTrial(case, live, traffic, waits)
        originals: list[Any] = [None] * case.num_ranks
        own = [p.detach().clone() for p in trial.parameters]
        dist.all_gather_object(originals, own, group=group)
        trial.seen.first, originals, own = originals[0], [], []
        unit = answer(trial.parameters, case.compute, group)
        trial.begin(unit)
        loss = trial.free(unit, case.place(rank))
        if not case.frozen:
            trial.reduce(unit, loss, quiet=1 < case.num_ranks == 1 + case.place(rank))
        trial.update(unit)
    grads: list[Any] = [None] * case.num_ranks
    dist.all_gather_object(grads, trial.seen.tensors.pop("own grads", []), group=group)
    trial.seen.grads = grads
    return trial.seen


@once_an_answer
def observed_unit(answer: Any) -> Observed:
    """The laboratory of 13.1."""
    seed = fresh_seed()
    rows: dict[int, dict[Any, Callable[[int], Any]]] = {n: {} for n in (1, 2, 3, 4)}
    for case in UNIT_CASES:
        rows[case.world_size][case] = functools.partial(observe_unit, answer, case, seed)
    return Observed(rows)
