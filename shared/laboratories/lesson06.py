"""Lesson 06: engines under observation, and what each rank saw of every step."""

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.exercises.on_ranks import PATIENCE, on_ranks
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed
from shared.laboratories.lesson06_nets import Case, Grads, Mixed, Net, clone, descend, grads_of
from shared.measuring.traffic import count_traffic

SMALL = 0.0005  # a bucket_cap_mb of 524 bytes, so that small models have several buckets
INTERRUPTED = "an exception inside no_sync()"
CAPS_MB = (0.2, 25.0, 0.6, 0.42)
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
    came to the first layer.
    """

    grads: Grads
    messages: list[tuple[str, int]]
    quiet: int
    at_first_layer: int

    def sent(self) -> list[int]:
        """Return the bytes of each all-reduce, in order."""
        return [size for op, size in self.messages if op == "all_reduce"]


@dataclass
class Seen:
    """What one rank saw of a run; `weights_moved`: by anything but the optimizer."""

    seed: int
    initial: dict[str, Tensor]
    started: dict[str, Tensor]
    keys: list[str]
    steps: list[Step]
    weights_moved: bool = False


class Engines:
    """One engine on its cases: those on equally many ranks are tried by one group, in order."""

    def __init__(self, wrap: Wrap, cases: Sequence[Case]) -> None:
        self.wrap, self.seed = wrap, fresh_seed()
        self.groups: dict[int, RankCases] = {}
        for n in {case.world_size for case in cases}:
            mine = [case for case in cases if case.world_size == n]
            tries: dict[Any, Callable[[int], Any]] = {
                c: functools.partial(self._train, c) for c in mine
            }
            if n == 2:
                tries[INTERRUPTED] = self._interrupted
            self.groups[n] = RankCases(n, tries)

    def trained(self, case: Case, *, apart: str) -> list[Seen]:
        """Return what each rank saw of a case; `apart` names the mistake where they hang."""
        return self.groups[case.world_size].seen(case, apart=apart, known=KNOWN_ERRORS)

    def interrupted(self, *, apart: str) -> list[bool]:
        """Return by rank whether the step after an exception in no_sync() is sent in backward."""
        return self.groups[2].seen(INTERRUPTED, apart=apart, known=KNOWN_ERRORS)

    def rendezvous(self, *, apart: str) -> list[bool]:
        """Return by rank whether rank 0's backward ended before rank 1's had begun."""
        with tempfile.TemporaryDirectory(prefix="rendezvous_") as folder:
            return on_ranks(
                self._meet, 2, Path(folder, "done"), apart=apart, known=KNOWN_ERRORS
            )  # no `quiet`: rank 1 sleeps while it waits

    def _wrapped(self, case: Case, rank: int) -> tuple[Net, dict[str, Tensor], Any]:
        """Return a net whose weights differ on every rank, its first state, and the engine."""
        torch.manual_seed(self.seed + rank)
        net = case.net()
        initial = clone(net.state_dict())
        return net, initial, self.wrap(net)

    def _train(self, case: Case, rank: int) -> Seen:
        net, initial, ddp = self._wrapped(case, rank)
        seen = Seen(self.seed, initial, clone(net.state_dict()), list(ddp.state_dict()), [])
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
            seen.weights_moved = any((net.state_dict()[n] != x).any() for n, x in weights.items())
        return seen

    def _step(self, rank: int, net: Net, ddp: Any, case: Case, step: int) -> Step:
        """Forward, backward, finish, under observation."""
        marks: list[int] = []
        with count_traffic() as traffic:
            net.on_mark = lambda: marks.append(len(traffic.calls))
            if case.quiet:
                with ddp.no_sync():
                    for part in range(case.quiet):
                        case.loss(ddp, self.seed, rank, step, part).backward()
            quiet = len(traffic.calls)
            loss = case.loss(ddp, self.seed, rank, step, case.quiet)
            marks.clear()
            loss.backward()
            ddp.finish_gradient_sync()
        messages = [(call.op, call.num_bytes) for call in traffic.calls]
        return Step(grads_of(net), messages, quiet, marks[0])

    def _interrupted(self, rank: int) -> bool:
        _, _, ddp = self._wrapped(Case(), rank)
        with contextlib.suppress(KeyError), ddp.no_sync():
            raise KeyError("a batch that cannot be read")
        with count_traffic() as traffic:
            Case().loss(ddp, self.seed, rank, 0).backward()
        sent_in_backward = bool(traffic.calls)
        ddp.finish_gradient_sync()
        return sent_in_backward

    def _meet(self, rank: int, done: Path) -> bool:
        """Rank 1 begins its backward when rank 0 has ended its own, or after some seconds."""
        _, _, ddp = self._wrapped(Case(), rank)
        loss = Case().loss(ddp, self.seed, rank, 0)
        if rank == 1:
            patience = time.monotonic() + PATIENCE / 2
            while not done.exists() and time.monotonic() < patience:
                time.sleep(0.005)
        came = done.exists()
        loss.backward()
        if rank == 0:
            done.touch()
        ddp.finish_gradient_sync()
        return came or rank == 0


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

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are averaged when asked for."""
        yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return the net's."""
        return self.net.state_dict()


@once_an_answer
def averaging(answer: Any, cases: tuple[Case, ...]) -> Engines:
    """Return the laboratory of an answer to 06.2, one for all its checks."""
    return Engines(lambda net: AfterBackward(net, answer), cases)


@once_an_answer
def engines(answer: Any, cases: tuple[Case, ...], cap_mb: float | None = None) -> Engines:
    """Return the laboratory of an engine, one for all its checks."""
    small = {} if cap_mb is None else {"bucket_cap_mb": cap_mb}
    return Engines(lambda net: answer(net, **small), cases)


class Broadcasts:
    """An answer to 06.1: on models that agree, from rank src, and on models that do not."""

    SOURCES = ((0, 2), (2, 3))  # src, number of ranks
    DIFFERENCES = ("shape", "name", "requires_grad")

    def __init__(self, answer: Any) -> None:
        self.answer, self.seed = answer, fresh_seed()
        tries: dict[int, dict[Any, Callable[[int], Any]]] = {2: {}, 3: {}}
        for src, world_size in self.SOURCES:
            tries[world_size][src] = functools.partial(self._broadcast, src)
        for kind in self.DIFFERENCES:
            tries[2][kind] = functools.partial(self._mismatch, kind)
        self.groups = {n: RankCases(n, cases) for n, cases in tries.items()}

    def outcome(self, world_size: int, case: int | str, *, apart: str) -> list[Any]:
        """Return by rank what was seen of a source, or heard of a difference."""
        return self.groups[world_size].seen(case, apart=apart, known=KNOWN_ERRORS)

    def _broadcast(self, src: int, rank: int) -> tuple[dict, dict, bool]:
        """State before and after on this rank, and whether the tensors are the same objects."""
        torch.manual_seed(self.seed + rank)
        net = Net(tied=True, frozen=True).double()
        by_columns = net.last.weight.detach().T.contiguous().T
        net.last.weight = nn.Parameter(by_columns)
        before, objects = clone(net.state_dict()), [*net.parameters(), *net.buffers()]
        self.answer(net, src=src)
        after = [*net.parameters(), *net.buffers()]
        same = all(a is b for a, b in zip(objects, after, strict=True))
        return before, clone(net.state_dict()), same

    def _mismatch(self, kind: str, rank: int) -> tuple[str, str]:
        """What a rank hears when rank 1 has built another model: the error's name and words."""
        torch.manual_seed(self.seed + rank)
        net = Net().double()
        if rank == 1 and kind == "shape":
            net.middle.weight = nn.Parameter(torch.zeros(7, 8).double())
        if rank == 1 and kind == "name":
            net.extra = nn.Linear(2, 2).double()
        if rank == 1 and kind == "requires_grad":
            net.middle.weight.requires_grad_(False)
        try:
            self.answer(net)
        except NotImplementedError:
            raise
        except Exception as error:  # whatever it is, the check judges it
            name = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            return name, str(error)
        return "", "no error"


@once_an_answer
def broadcasts(answer: Any) -> Broadcasts:
    """Return the laboratory of an answer to 06.1, one for all its checks."""
    return Broadcasts(answer)


@once_an_answer
def bucket_messages(answer: Any) -> RankCases:
    """Return the messages of one step of the mixed model, in bytes, by bucket_cap_mb."""

    def sizes(cap_mb: float, rank: int) -> list[int]:
        ddp = answer(Mixed()) if cap_mb == 25 else answer(Mixed(), cap_mb)
        with count_traffic() as traffic:
            ddp(torch.ones(2, 230)).square().mean().backward()
            ddp.finish_gradient_sync()
        return [call.num_bytes for call in traffic.calls if call.op == "all_reduce"]

    return RankCases(2, {cap_mb: functools.partial(sizes, cap_mb) for cap_mb in CAPS_MB})
