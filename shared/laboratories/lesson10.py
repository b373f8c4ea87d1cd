"""Lesson 10: ZeRO's stages under observation, beside one process that has everything."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn

from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed
from shared.laboratories.lesson06_nets import Case, clone
from shared.laboratories.lesson09 import through_a_file
from shared.laboratories.lesson10_nets import Sums
from shared.laboratories.lesson10_twin import RATES, SETTINGS, groups_of
from shared.measuring.live import LiveBytes, count_live_bytes
from shared.measuring.traffic import Call, count_traffic

BUCKET = 700  # elements: Sums' parameters in several buckets
NET_BUCKET = 60  # the net's in several: its largest have 49 elements
HALF, FULL = torch.bfloat16, torch.float32

VALUES = (Case(3, tied=True, frozen=True), Case(2, frozen=True), Case(1, tied=True))
UNUSED = Case(3, skipped=frozenset({(1, 0), (0, 1), (2, 1), (1, 3), (0, 4), (1, 4), (2, 4)}))
IDLE = Case(2, skipped=frozenset({(0, 2), (1, 2), (0, 4), (1, 4)}))  # a layer that nobody uses
TWICE = Case(2, quiet=1)
GROUPS, RESUMED, EXCHANGED, CLOSURE = "groups", "resumed", "exchanged", "closure"
SIZES = ((3, FULL), (2, HALF), (4, HALF), (1, HALF))  # where bytes are counted


@dataclass
class Trained:
    """What one rank saw of some steps: weights by name at the start and after each step.

    `output` is a loss of the trained net, without gradients; `joined` are the weights of a group
    that joined late, and `closed` is what was seen of a closure.
    """

    seed: int
    started: dict[str, Tensor]
    steps: list[dict[str, Tensor]] = field(default_factory=list)
    output: Tensor = field(default_factory=lambda: torch.zeros(()))
    lacking: list[str] = field(default_factory=list)  # names that full_state_dict() has not
    joined: list[Tensor] = field(default_factory=list)
    closed: list[dict[str, bool]] = field(default_factory=list)


@dataclass
class Bytes:
    """One rank's live bytes beyond what was there before, at the moments of the second step."""

    numel: int
    units: list[int]  # elements of each layer
    largest: int  # elements of the largest parameter
    moments: dict[str, int]
    calls: list[Call]


Make = Callable[..., torch.optim.Optimizer]


class Stage:
    """An answer to one stage's exercise, on its cases: one group of ranks for each world size."""

    def __init__(self, stage: int, answer: Make) -> None:
        self.stage, self.answer, self.seed = stage, answer, fresh_seed()
        rows: dict[int, dict[Any, Callable[[int], Any]]] = {1: {}, 2: {}, 3: {}, 4: {}}
        for case in (*VALUES, UNUSED if stage < 3 else IDLE, TWICE):
            rows[case.world_size][case] = functools.partial(self._train, case)
        for case in SIZES:
            rows[case[0]][case] = functools.partial(self._bytes, case[1])
        if stage < 3:
            rows[2][GROUPS] = self._groups
        rows[2] |= {RESUMED: self._resumed, EXCHANGED: self._exchanged, CLOSURE: self._closed}
        self.cases = {n: RankCases(n, row) for n, row in rows.items()}
        self.at = {case: n for n, row in rows.items() for case in row}

    def seen(self, case: Any, apart: str) -> list[Any]:
        """What each rank saw of a case; `apart` names the mistake where they hang."""
        return self.cases[self.at[case]].seen(case, apart=apart)

    def make(self, net: nn.Module, **settings: Any) -> Any:
        """The answer over torch's AdamW."""
        settings = {**SETTINGS, **settings}
        if self.stage == 3:
            return self.answer(net, torch.optim.AdamW, **settings)
        settings["bucket_size"] = BUCKET if isinstance(net, Sums) else NET_BUCKET
        return self.answer(net.parameters(), torch.optim.AdamW, **settings)

    def weights(self, net: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        """The whole model's parameters, tied ones once."""
        whole = optimizer.full_state_dict() if self.stage == 3 else net.state_dict()
        return clone({name: whole[name] for name, _ in net.named_parameters()})

    def _train(self, case: Case, rank: int) -> Trained:
        torch.manual_seed(self.seed + rank)
        net = case.net()
        optimizer = self.make(net)
        share_buffers(net)
        seen = Trained(self.seed, self.weights(net, optimizer) | dict(net.named_buffers()))
        if self.stage == 3:
            seen.lacking = sorted({*net.state_dict()} - {*optimizer.full_state_dict()})
        for step, rate in enumerate(RATES):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            for part in range(case.quiet + 1):
                case.loss(net, self.seed, rank, step, part).backward()
            optimizer.step()
            seen.steps.append(self.weights(net, optimizer))
        with torch.no_grad():
            seen.output = case.loss(net, self.seed, 0, 99)
        return seen

    def _closed(self, rank: int) -> Trained:
        """Every step takes a closure, and is called where no gradients are recorded."""
        case = Case(2)
        torch.manual_seed(self.seed + rank)
        net = case.net()
        optimizer = self.make(net)
        share_buffers(net)
        seen = Trained(self.seed, self.weights(net, optimizer) | dict(net.named_buffers()))
        for step, rate in enumerate(RATES[:2]):
            optimizer.param_groups[0]["lr"] = rate
            told: list[tuple[bool, Tensor]] = []

            def closure(step: int = step, told: list[tuple[bool, Tensor]] = told) -> Tensor:
                recorded = torch.is_grad_enabled()
                with torch.enable_grad():
                    optimizer.zero_grad()
                    loss = case.loss(net, self.seed, rank, step)
                    loss.backward()
                told.append((recorded, loss.detach()))
                return loss

            with torch.no_grad():
                loss = optimizer.step(closure)
            given = told[0][1] if told else None
            back = (
                given is not None
                and loss is not None
                and bool(torch.as_tensor(loss).detach() == given)
            )
            recorded = bool(told) and told[0][0]
            seen.closed.append({"called": bool(told), "recorded": recorded, "returned": back})
            seen.steps.append(self.weights(net, optimizer))
        return seen

    def _groups(self, rank: int) -> Trained:
        """Two groups with settings of their own, and a third that joins after two steps."""
        torch.manual_seed(self.seed + rank)
        net = Case().net()
        *groups, last = groups_of(net)
        optimizer = self.answer(groups, torch.optim.AdamW, bucket_size=NET_BUCKET, **SETTINGS)
        for parameter in last["params"]:  # not the optimizer's yet
            dist.broadcast(parameter.detach(), 0)
        share_buffers(net)
        seen = Trained(self.seed, clone(net.state_dict()))
        for step in range(len(RATES)):
            if step == 2:
                for parameter in last["params"]:  # each rank's own numbers, until it joins
                    parameter.data += rank
                optimizer.add_param_group(last)
                seen.joined = [parameter.detach().clone() for parameter in last["params"]]
            optimizer.zero_grad()
            net.zero_grad()
            Case().loss(net, self.seed, rank, step).backward()
            optimizer.step()
            seen.steps.append(clone(dict(net.named_parameters())))
        with torch.no_grad():
            seen.output = Case().loss(net, self.seed, 0, 99)
        return seen

    def _resumed(self, rank: int) -> list[dict[str, Tensor]]:
        """The bf16 weights after five steps: in one go, and with a restart after three."""
        ends = []
        for restart in (False, True):
            torch.manual_seed(self.seed)
            net = Sums(HALF)
            optimizer = self.make(net, lr=1e-3)
            for step in range(5):
                if restart and step == 3:
                    saved = through_a_file(optimizer.state_dict())
                    weights = self.weights(net, optimizer)
                    net = Sums(HALF)
                    if self.stage < 3:  # stage 3's parts are in its state
                        net.load_state_dict(weights)
                    optimizer = self.make(net, lr=0.5)
                    optimizer.load_state_dict(saved)
                optimizer.zero_grad()
                net(torch.tensor(rank + step + 0.5, dtype=HALF)).backward()
                optimizer.step()
            ends.append(self.weights(net, optimizer))
        return ends

    def _exchanged(self, rank: int) -> str:
        """The type of the error that the other rank's state is met with; "" for none."""
        net = Case(2).net()
        optimizer = self.make(net)
        states: list[Any] = [None, None]
        dist.all_gather_object(states, through_a_file(optimizer.state_dict()))
        try:
            optimizer.load_state_dict(states[1 - rank])
        except Exception as error:
            return type(error).__name__
        return ""

    def _bytes(self, dtype: torch.dtype, rank: int) -> Bytes:
        torch.manual_seed(self.seed)
        with count_live_bytes() as live:
            net = Sums(dtype)
            numel = sum(p.numel() for p in net.parameters())
            units = [sum(p.numel() for p in layer.parameters()) for layer in net.layers]
            largest = max(p.numel() for p in net.parameters())
            optimizer = self.make(net)
            for step in range(2):
                with count_traffic() as traffic:
                    moments = one_step(net, optimizer, live, rank + step)
            if self.stage == 3:
                with torch.no_grad():
                    net(torch.tensor(1.0, dtype=dtype))
                time.sleep(0.02)
                moments["after an evaluation"] = live.now()
                optimizer.full_state_dict()
                time.sleep(0.02)
                moments["after full_state_dict"] = live.now()
        return Bytes(numel, units, largest, moments, traffic.calls)


def one_step(net: nn.Module, optimizer: Any, live: LiveBytes, value: float) -> dict[str, int]:
    """Train once; the live bytes after each part, and the most while something was sent in it."""
    dtype = next(net.parameters()).dtype
    moments = {}

    def note(name: str) -> None:
        moments[f"most in {name}"] = max((size for _, size in live.at_collectives), default=0)
        time.sleep(0.02)  # gloo's thread may hold a message for some milliseconds more
        moments[f"after {name}"] = live.now()
        live.at_collectives.clear()

    optimizer.zero_grad()
    note("zero_grad")
    loss = net(torch.tensor(1.0 + value, dtype=dtype))
    note("forward")
    loss.backward()
    del loss
    note("backward")
    optimizer.step()
    note("step")
    optimizer.zero_grad()
    note("end")
    return moments


def share_buffers(net: nn.Module) -> None:
    """Give every rank rank 0's buffers, of which an optimizer knows nothing."""
    for buffer in net.buffers():
        dist.broadcast(buffer, 0)


def flat(weights: dict[str, Tensor]) -> Tensor:
    """All weights in one vector."""
    return torch.cat([each.flatten() for each in weights.values()])


def row(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors in one vector; nothing for none."""
    return torch.cat([torch.zeros(0), *(each.flatten() for each in tensors)])


def messages(calls: Sequence[Call]) -> dict[str, int]:
    """The bytes on a ring by operation, the smallest messages (flags, counts) left out."""
    total: dict[str, float] = {}
    for call in calls:
        n = call.group_size
        share = {"reduce_scatter": (n - 1) / n, "all_gather": n - 1}
        if call.num_bytes > 16:
            share_of = share.get(call.op, 2 * (n - 1) / n)
            total[call.op] = total.get(call.op, 0) + share_of * call.num_bytes
    return {op: round(size) for op, size in total.items()}


@once_an_answer
def observed(stage: int, answer: Make) -> Stage:
    """The laboratory of an answer, one for all its checks."""
    return Stage(stage, answer)
