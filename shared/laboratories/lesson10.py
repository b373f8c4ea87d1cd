"""Lesson 10: ZeRO's stages under observation, beside one process that has everything."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.laboratories.lesson06_nets import clone
from shared.laboratories.lesson09_masters import through_a_file
from shared.laboratories.lesson10_nets import (
    Nested,
    Sums,
    flat,
    numbers,
    rounded_since,
    whole_gradients,
)
from shared.laboratories.lesson10_twin import (
    CHANGES,
    DROPPED,
    JOINS,
    SETTINGS,
    Course,
    change,
    groups_of,
)
from shared.measuring.live import CRUMB, LiveBytes, count_live_bytes, settle
from shared.measuring.traffic import Call, count_traffic

BUCKET = 700  # elements: Sums' parameters in several buckets
NET_BUCKET = 60  # the net's in several: its largest have 49 elements
HALF = torch.bfloat16

VALUES = (
    Course(3, frozen=True),  # 220 trained numbers and then 171: both need a zero at their end
    Course(2, tied=True, frozen=True),
    Course(1, tied=True),
    Course(2, quiet=1, kind=torch.optim.Adam),
    Course(2, closed=True),
)
GROUPS = Course(2, grouped=True)
SKIPPED = frozenset({(1, 0), (0, 1), (2, 1), (1, 3), (0, 4), (1, 4), (2, 4)})
UNUSED = Course(3, skipped=SKIPPED, absent=(2, 3))
IDLE = Course(2, skipped=frozenset({(0, 2), (1, 2), (0, 4), (1, 4)}))  # a layer that nobody uses
RESUMED, EXCHANGED = "resumed", "exchanged"


@dataclass(frozen=True)
class Size:
    """Where bytes are counted: so many ranks, a dtype and a model."""

    world_size: int
    dtype: torch.dtype
    model: Callable[[torch.dtype], Any] = Sums


SIZES = (Size(3, torch.float32), Size(2, HALF), Size(4, torch.float16), Size(1, HALF))
NESTED = Size(2, torch.float32, Nested)  # float32: no master of a frozen parameter


@dataclass
class Trained:
    """What one rank saw of some steps: weights by name, its own, at the start, after each step.

    `output` is a loss of the trained net, without gradients; `joined` are the weights of a group
    that joined late, and `told` is what was seen of closures.
    """

    seed: int
    own: dict[str, Tensor]
    started: dict[str, Tensor]
    lacking: list[str]  # names that full_state_dict() has not
    steps: list[dict[str, Tensor]] = field(default_factory=list)
    output: Tensor = field(default_factory=lambda: torch.zeros(()))
    joined: dict[str, Tensor] = field(default_factory=dict)
    told: list[dict[str, bool]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # whole gradients after the last backward


@dataclass
class Bytes:
    """One rank's live bytes beyond what was there before, at the moments of the second step."""

    numel: int
    trained: int
    outside: int  # elements of parameters that are in no layer
    unit: int  # elements of the largest layer
    moments: dict[str, int]
    calls: list[Call]


Make = Callable[..., torch.optim.Optimizer]


class Stage:
    """An answer to one stage's exercise, on its cases: one group of ranks for each world size."""

    def __init__(self, stage: int, answer: Make) -> None:
        self.stage, self.answer, self.seed = stage, answer, fresh_seed()
        self.others = (GROUPS, UNUSED) if stage < 3 else (IDLE,)
        self.sizes = (*SIZES, NESTED) if stage == 3 else SIZES
        rows: dict[int, dict[Any, Callable[[int], Any]]] = {1: {}, 2: {}, 3: {}, 4: {}}
        for course in (*VALUES, *self.others):
            rows[course.world_size][course] = functools.partial(self._train, course)
        for size in self.sizes:
            rows[size.world_size][size] = functools.partial(self._bytes, size)
        rows[2] |= {RESUMED: self._resumed, EXCHANGED: self._exchanged}
        self.cases = {n: RankCases(n, row) for n, row in rows.items()}
        self.at = {case: n for n, row in rows.items() for case in row}

    def seen(self, case: Any, apart: str) -> list[Any]:
        """What each rank saw of a case; `apart` names the mistake where they hang."""
        return self.cases[self.at[case]].seen(case, apart=apart)

    def make(self, net: nn.Module, groups: Any = None, kind: Any = None, **settings: Any) -> Any:
        """The answer over one of torch's optimizers, AdamW if none is named."""
        settings = {**SETTINGS, **settings}
        kind = kind or torch.optim.AdamW
        if self.stage == 3:
            units = {"units": net.layers} if isinstance(net, Nested) else {}
            return self.answer(net, kind, **units, **settings)
        settings["bucket_size"] = BUCKET if isinstance(net, Sums) else NET_BUCKET
        return self.answer(groups or net.parameters(), kind, **settings)

    def weights(self, net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        """The whole model's parameters, tied ones once; empty where memory or name is missing."""
        whole = optimizer.full_state_dict() if self.stage == 3 else net.state_dict()
        found = {name: whole.get(name, torch.empty(0)) for name, _ in net.named_parameters()}
        freed = {name for name, x in found.items() if x.untyped_storage().nbytes() < x.nbytes}
        return clone({name: x[:0] if name in freed else x for name, x in found.items()})

    def _train(self, case: Course, rank: int) -> Trained:
        seed_all(self.seed + rank)
        net = case.net()
        own = clone(dict(net.named_parameters()))
        groups = groups_of(net) if case.grouped else []
        late = groups.pop() if groups else {"params": []}
        optimizer = self.make(net, groups, case.kind)
        for each in (*late["params"], *net.buffers()):  # of which the optimizer knows nothing
            dist.broadcast(each.detach(), 0)
        whole = optimizer.full_state_dict() if self.stage == 3 else net.state_dict()
        lacking = sorted({*net.state_dict()} - {*whole})
        started = self.weights(net, optimizer) | dict(net.named_buffers())
        seen = Trained(self.seed, own, started, lacking)
        for step in range(len(CHANGES)):
            if step == JOINS and late["params"]:
                for parameter in late["params"]:  # each rank's own numbers, until it joins
                    parameter.data += rank
                net.zero_grad()
                optimizer.add_param_group(late)
                seen.joined = clone(dict(net.named_parameters()))
            change(optimizer.param_groups, step)
            self._step(case, rank, step, net, optimizer, seen)
            seen.steps.append(self.weights(net, optimizer))
        with torch.no_grad():
            seen.output = case.loss(net, self.seed, 0, 99)
        return seen

    def _step(
        self, case: Course, rank: int, step: int, net: nn.Module, optimizer: Any, seen: Trained
    ) -> None:
        if step == DROPPED:  # zero_grad() comes after it
            case.loss(net, self.seed, rank, step, -1).backward()
        told: list[tuple[bool, Tensor]] = []

        def closure() -> Tensor:
            recorded, loss = torch.is_grad_enabled(), torch.zeros(())
            with torch.enable_grad():
                optimizer.zero_grad()
                for part in range(case.quiet + 1) if (rank, step) != case.absent else ():
                    loss = case.loss(net, self.seed, rank, step, part)
                    loss.backward()
            told.append((recorded, loss.detach()))
            return loss

        if not case.closed:
            closure()
            seen.kept = whole_gradients(net)
            optimizer.step()
            return
        with torch.no_grad():
            loss = optimizer.step(closure)
        row = {"called": bool(told), "recorded": bool(told) and told[0][0]}
        row["returned"] = isinstance(loss, Tensor) and bool(told and loss == told[0][1])
        seen.told.append(row)

    def _resumed(self, rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
        """The bf16 weights after five steps, in one go and with a restart; what was lost in it."""
        ends, lost = [], set()
        for restart in (False, True):
            seed_all(self.seed)
            net = Sums(HALF)
            optimizer = self.make(net, lr=1e-3)
            for step in range(5):
                if restart and step == 3:
                    saved = through_a_file(optimizer.state_dict())
                    weights = self.weights(net, optimizer)
                    net = Sums(HALF)
                    if self.stage < 3:  # stage 3's parts are in its state
                        net.load_state_dict(weights)
                    optimizer = self.make(net, lr=0.5, weight_decay=0.9)
                    optimizer.load_state_dict(saved)
                    if rounded_since(saved, optimizer.state_dict()):
                        lost.add("bits")
                    if not torch.equal(flat(self.weights(net, optimizer)), flat(weights)):
                        lost.add("weights")
                optimizer.zero_grad()
                net(torch.tensor(rank + step + 0.5, dtype=HALF)).backward()
                optimizer.step()
            ends.append(self.weights(net, optimizer))
        return ends[0], ends[1], lost

    def _exchanged(self, rank: int) -> str:
        """The type of the error that the other rank's state is met with; "" for none."""
        net = Course().net()
        optimizer = self.make(net)
        states: list[Any] = [None, None]
        dist.all_gather_object(states, through_a_file(optimizer.state_dict()))
        try:
            optimizer.load_state_dict(states[1 - rank])
        except Exception as error:
            return "ValueError" if isinstance(error, ValueError) else type(error).__name__
        return ""

    def _bytes(self, size: Size, rank: int) -> Bytes:
        seed_all(self.seed)
        with count_live_bytes() as live:
            net = size.model(size.dtype)
            units = [numbers(layer.parameters()) for layer in net.layers]
            numel = numbers(net.parameters())
            trained = numbers(p for p in net.parameters() if p.requires_grad)
            optimizer = self.make(net)
            for step in range(2):
                with count_traffic() as traffic:
                    moments = one_step(net, optimizer, live, rank + step)
            net(torch.tensor(1.0, dtype=size.dtype)).backward()  # which zero_grad() throws away
            optimizer.zero_grad(set_to_none=False)
            note(moments, "a dropped backward", live)
            leaves = [x for x in tree_leaves(optimizer.state_dict()) if isinstance(x, Tensor)]
            leaves = [x for x in leaves if x.nbytes >= CRUMB]
            moments["state_dict"] = sum({x.data_ptr(): x.nbytes for x in leaves}.values())
            storages = [x.untyped_storage() for x in leaves]  # what torch.save writes
            moments["saved"] = sum({x.data_ptr(): x.nbytes() for x in storages}.values())
            del leaves, storages
            if self.stage == 3:
                with torch.no_grad():
                    net(torch.tensor(1.0, dtype=size.dtype))
                note(moments, "an evaluation", live)
                optimizer.full_state_dict()
                note(moments, "full_state_dict", live)
        return Bytes(numel, trained, numel - sum(units), max(units), moments, traffic.calls)


def one_step(net: nn.Module, optimizer: Any, live: LiveBytes, value: float) -> dict[str, int]:
    """Train once; the live bytes after each part, and the most while something was sent in it."""
    dtype = next(net.parameters()).dtype
    moments: dict[str, int] = {}
    optimizer.zero_grad(set_to_none=False)  # frees them all the same
    note(moments, "zero_grad", live)
    loss = net(torch.tensor(1.0 + value, dtype=dtype))
    note(moments, "forward", live)
    moments["in parameters"] = sum(p.untyped_storage().nbytes() for p in net.parameters())
    loss.backward()
    del loss
    note(moments, "backward", live)
    optimizer.step()
    note(moments, "step", live)
    return moments


def note(moments: dict[str, int], name: str, live: LiveBytes) -> None:
    """Write down the bytes that are alive now, and the most while something was sent before."""
    moments[f"most in {name}"] = max((size for _, size in live.at_collectives), default=0)
    settle(0.02)
    moments[f"after {name}"] = live.now()
    live.at_collectives.clear()


@once_an_answer
def observed(stage: int, answer: Make) -> Stage:
    """The laboratory of an answer, one for all its checks."""
    return Stage(stage, answer)
