"""Engines under observation, and what each rank saw of every step."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.exercises import nets
from shared.exercises.nets import Case, Grads, Net, clone, descend, grads_of
from shared.exercises.noting import noted_handles
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed
from shared.measuring.traffic import count_traffic
from shared.ranks.watching import IdleWatch

SMALL = 0.0005  # a bucket_cap_mb of 524 bytes, so that small models have several buckets
STILL = 0.6  # seconds without any work after which a rank counts as waiting
MEETING, INTERRUPTED = "who ends backward first", "an exception inside no_sync()"
NESTED, TWO = "no_sync() within no_sync()", "two models in one backward"
Wrap = Callable[[nn.Module], Any]
# What torch says, what it means here, and what to do.
KNOWN_ERRORS = {
    "context manager protocol": (
        "no_sync() gives no context manager: `with ddp.no_sync():` cannot enter it",
        "@contextlib.contextmanager above a function with one yield makes one",
    ),
    "Expected parameter `tensor`": (
        "torch.distributed is handed something that is no tensor, None perhaps",
        "which parameters have no .grad, and when?",
    ),
    "before Module.__init__()": (
        "the base class is not set up",
        "super().__init__(module) comes first in __init__",
    ),
}


@dataclass
class Step:
    """What one rank saw of one step; messages are (operation, bytes), in order.

    `quiet` counts those while no_sync was on, `at_first_layer` those that had left when backward
    came to the first layer, `in_backward` the all-reduces that had left when backward was over.
    `unwaited` counts the handles of all-reduces on which nobody waited; `own` are the gradients as
    they were before no_sync ended and right after it.
    """

    grads: Grads
    messages: list[tuple[str, int]]
    quiet: int
    at_first_layer: int
    in_backward: int
    unwaited: int
    own: list[Grads] = field(default_factory=list)

    def sent(self) -> list[int]:
        """Return the bytes of each all-reduce, in order."""
        return [size for op, size in self.messages if op == "all_reduce"]


@dataclass
class Seen:
    """What one rank saw of a run.

    `moved` names what anything but the optimizer has changed; `torch_ddp` says that torch's own
    DDP is inside.
    """

    seed: int
    initial: dict[str, Tensor]
    started: dict[str, Tensor]
    keys: list[str]
    steps: list[Step]
    moved: list[str] = field(default_factory=list)
    torch_ddp: bool = False


class Engines:
    """One engine on its cases: those of one row are tried by one group of ranks, in order.

    `one_each` says that each gradient is to travel as a message of its own.
    """

    def __init__(self, wrap: Wrap, *rows: Sequence[Case | str], one_each: bool) -> None:
        self.wrap, self.one_each, self.seed = wrap, one_each, fresh_seed()
        special = {MEETING: self._meet, INTERRUPTED: self._interrupted}
        special |= {NESTED: self._nested, TWO: self._two}
        self.group_of: dict[Case | str, RankCases] = {}
        for row in rows:
            n = max(case.world_size for case in row if isinstance(case, Case))
            tries: dict[Any, Callable[[int], Any]] = {
                case: special[case]
                if isinstance(case, str)
                else functools.partial(self._train, case)
                for case in row
            }
            self.group_of |= dict.fromkeys(row, RankCases(n, tries))

    def trained(self, case: Case, *, apart: str) -> list[Seen]:
        """Return what each rank saw of a case; `apart` names the mistake where they hang."""
        return self.group_of[case].seen(case, apart=apart, known=KNOWN_ERRORS)

    def interrupted(self, *, apart: str) -> list[bool]:
        """Return by rank whether the step after an exception in no_sync() is sent in backward."""
        return self.group_of[INTERRUPTED].seen(INTERRUPTED, apart=apart, known=KNOWN_ERRORS)

    def quiet_when_nested(self, *, apart: str) -> list[bool]:
        """Return by rank whether nothing is sent after a no_sync() within another one."""
        return self.group_of[NESTED].seen(NESTED, apart=apart, known=KNOWN_ERRORS)

    def two_apart(self, *, apart: str) -> list[bool]:
        """Return by rank whether two models in one backward get the gradients of each alone."""
        return self.group_of[TWO].seen(TWO, apart=apart, known=KNOWN_ERRORS)

    def rendezvous(self, *, apart: str) -> list[bool]:
        """Return by rank whether rank 0's backward ended before rank 1's had begun."""
        return self.group_of[MEETING].seen(MEETING, apart=apart, known=KNOWN_ERRORS)

    def _wrapped(self, case: Case, rank: int) -> tuple[Net, dict[str, Tensor], Any]:
        """Return a net whose weights differ on every rank, its first state, and the engine."""
        torch.manual_seed(self.seed + rank)
        net = case.net()
        initial = clone(net.state_dict())
        return net, initial, self.wrap(net)

    def _train(self, case: Case, rank: int) -> Seen:
        net, initial, ddp = self._wrapped(case, rank)
        seen = Seen(self.seed, initial, clone(net.state_dict()), list(ddp.state_dict()), [])
        inside = ddp.modules() if isinstance(ddp, nn.Module) else ()
        torch_ddp = nn.parallel.DistributedDataParallel
        seen.torch_ddp = any(isinstance(each, torch_ddp) for each in inside)
        for step in range(case.steps):
            net.zero_grad(set_to_none=not case.keep)
            seen.steps.append(self._step(rank, net, ddp, case, step))
            descend(net)
        if case.steps:
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter += rank
            net.zero_grad()
            weights = clone(net.state_dict())
            self._step(rank, net, ddp, case, 0)
            seen.moved = [n for n, x in weights.items() if (net.state_dict()[n] != x).any()]
        return seen

    def _step(self, rank: int, net: Net, ddp: Any, case: Case, step: int) -> Step:
        """Forward, backward, finish, under observation."""
        marks: list[int] = []
        own: list[Grads] = []
        with count_traffic() as traffic, noted_handles() as handles:
            net.on_mark = lambda: marks.append(len(traffic.calls))
            if case.quiet:
                with ddp.no_sync():
                    for part in range(case.quiet):
                        case.loss(ddp, self.seed, rank, step, part).backward()
                    own.append(grads_of(net))
                own.append(grads_of(net))
            quiet = len(traffic.calls)
            loss = case.loss(ddp, self.seed, rank, step, case.quiet)
            marks.clear()
            loss.backward()
            in_backward = traffic.count("all_reduce")
            if case.old:
                nets.leave_old_gradients(net)
            ddp.finish_gradient_sync()
            left = handles.num_untouched()
        messages = [(call.op, call.num_bytes) for call in traffic.calls]
        return Step(grads_of(net), messages, quiet, marks[0], in_backward, left, own)

    def _interrupted(self, rank: int) -> bool:
        _, _, ddp = self._wrapped(Case(), rank)
        with contextlib.suppress(KeyError), ddp.no_sync():
            raise KeyError("a batch that cannot be read")
        with count_traffic() as traffic:
            Case().loss(ddp, self.seed, rank, 0).backward()
        sent_in_backward = bool(traffic.calls)
        ddp.finish_gradient_sync()
        return sent_in_backward

    def _nested(self, rank: int) -> bool:
        _, _, ddp = self._wrapped(Case(), rank)
        with count_traffic() as traffic, ddp.no_sync():
            with ddp.no_sync():
                pass
            Case().loss(ddp, self.seed, rank, 0).backward()
        return not traffic.calls

    def _two(self, rank: int) -> bool:
        """Two models: each for itself, the second while the first is under no_sync; then both."""
        both, case = [self._wrapped(Case(), rank) for _ in range(2)], Case()
        local = next(nets.twin_steps(case, self.seed, clone(both[0][0].state_dict())))
        want = nets.flat_grads(nets.mean_of(local))
        got, sent = [], []
        for number, (net, _, ddp) in enumerate(both):
            quiet = both[0][2].no_sync() if number else contextlib.nullcontext()
            with count_traffic() as traffic, quiet:
                case.loss(ddp, self.seed, rank, 0).backward()
            sent.append(len(traffic.calls))
            ddp.finish_gradient_sync()
            got.append(nets.flat_grads(grads_of(net)))
            net.zero_grad()
        torch.stack([case.loss(ddp, self.seed, rank, 0) for _, _, ddp in both]).sum().backward()
        for net, _, ddp in both:
            ddp.finish_gradient_sync()
            got.append(nets.flat_grads(grads_of(net)))
        right = (each.shape == want.shape and torch.allclose(each, want) for each in got)
        return all(right) and all(sent)

    def _meet(self, rank: int) -> bool:
        """Rank 1 begins its backward when rank 0 has ended its own, or waits in it.

        A rank waits when it has not used the processor for a while although nothing kept it from
        that; where this cannot be seen, after some seconds.
        """
        _, _, ddp = self._wrapped(Case(), rank)
        loss = Case().loss(ddp, self.seed, rank, 0)
        store, done = dist.distributed_c10d._get_default_store(), ["rank 0's backward has ended"]
        first = torch.tensor(os.getpid())
        dist.broadcast(first, 0)
        watch, patience = IdleWatch(), time.monotonic() + 5
        while rank == 1 and not store.check(done) and time.monotonic() < patience:
            if watch.idle_seconds({0: int(first)}) > STILL:
                break
            time.sleep(0.02)
        came = rank == 0 or store.check(done)
        loss.backward()
        if rank == 0:
            store.set(done[0], "")
        ddp.finish_gradient_sync()
        return came


class AfterBackward:
    """average_gradients, in the place of an engine."""

    def __init__(self, net: nn.Module, answer: Any) -> None:
        with torch.no_grad():
            for tensor in [*net.parameters(), *net.buffers()]:
                dist.broadcast(tensor, 0)
        self.net, self.answer = net, answer

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the net makes of it."""
        return self.net(*args, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Average."""
        self.answer(self.net)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the net's."""
        return self.net.state_dict()


MIXED, OLD = Case(2, mixed=True), Case(2, frozen=True, steps=1, old=True)
# Gradients of a norm far above 1: an answer that clips them to 1 is caught whatever the seed.
STEEP = Case(2, tied=True, frozen=True, keep=True, steepness=100)
AVERAGED = (Case(3, tied=True, frozen=True), STEEP, MIXED)
FLAT = (AVERAGED[0], MIXED)
UNUSED = Case(3, skipped=frozenset({(1, 0), (0, 1), (2, 1)}))
START = Case(2, tied=True, frozen=True, steps=0)
PLAIN = Case(2, steps=1)
VALUES = (
    Case(2, tied=True, frozen=True),
    Case(3, tied=True),
    Case(2, frozen=True, keep=True, steps=3),
)
ALONE = Case(1, skipped=frozenset({(0, 2)}), steps=4)
ALONE_MIXED = Case(1, skipped=frozenset({(0, 2)}), steps=4, mixed=True)
LEFT_OUT = Case(2, skipped=frozenset({(0, 0), (1, 1), (0, 2), (1, 2)}), steps=4)
ACCUMULATING = Case(2, tied=True, quiet=2)
NOT_IN_THE_LAST = Case(2, quiet=1, skipped=frozenset({(0, 0, 1), (1, 0, 1), (1, 1, 1)}))
# What can hang comes in rows of its own, after what finds the reason.
ROWS = (
    (START, MEETING, PLAIN, VALUES[0], VALUES[2]),
    (VALUES[1],),
    (ALONE,),
    (LEFT_OUT, ACCUMULATING, NOT_IN_THE_LAST, INTERRUPTED, NESTED),
    (TWO, Case(2, steps=0)),
)


@once_an_answer
def averaged(average_gradients: Any) -> Engines:
    """Return the laboratory of an answer to 06.2, one for all its checks."""
    rows = [[case] for case in (*AVERAGED, ALONE, UNUSED, OLD)]
    return Engines(lambda net: AfterBackward(net, average_gradients), *rows, one_each=True)


@once_an_answer
def averaged_flat(average_gradients_flat: Any) -> Engines:
    """Return the laboratory of an answer to 06.2b, one for all its checks."""
    rows = [[case] for case in (*FLAT, ALONE_MIXED, UNUSED, OLD)]
    return Engines(lambda net: AfterBackward(net, average_gradients_flat), *rows, one_each=False)


@once_an_answer
def overlapped(OverlappedDDP: Any) -> Engines:
    """Return the laboratory of an answer to 06.3, one for all its checks."""
    return Engines(OverlappedDDP, *ROWS, one_each=True)


@once_an_answer
def bucketed(BucketedDDP: Any) -> Engines:
    """Return the laboratory of an answer to 06.4, one for all its checks, with small buckets."""
    return Engines(functools.partial(BucketedDDP, bucket_cap_mb=SMALL), *ROWS, one_each=False)


def wrap_alone(BucketedDDP: Any, cap_mb: float) -> None:
    """Wrap a layer on one rank."""
    BucketedDDP(nn.Linear(2, 2), cap_mb)
