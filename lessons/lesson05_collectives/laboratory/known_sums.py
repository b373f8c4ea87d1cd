"""Lesson 05: tensors whose sums are known, and collectives on one to seven ranks."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.lesson05_collectives.laboratory.failed_exchanges import (
    expect_paired,
    report_exchange,
    report_sub_groups,
)
from shared.exercises.expecting import recognise
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed
from shared.measuring.traffic import Call, count_traffic
from shared.ranks.failures import RankFailed

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16]
DTYPES += [torch.uint8, torch.bool, torch.complex64]
GROUPS = ([1, 2, 4], [0, 3])


@dataclass(frozen=True)
class Case:
    """A tensor of some shape and dtype on each of n ranks; `rest` is what the answer is also given.

    Two dimensions lie in memory by columns: not contiguous. `noise` is for numbers whose sum
    depends on the order of additions. In `sub_groups` of five ranks 1, 2 and 4 are one group, 0
    and 3 another.
    """

    n: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    rest: tuple[Any, ...] = ()
    noise: bool = False
    sub_groups: bool = False

    def tensor(self, rank: int, seed: int) -> Tensor:
        """One rank's tensor: whole numbers whose sum over five ranks is exact in every dtype.

        No number is zero, and at no place do two of five ranks have the same one: whose tensor it
        is must not be left to chance.
        """
        generator = torch.Generator().manual_seed(seed + rank)
        if self.noise:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        numbers = 5 * torch.randint(0, 10, self.shape, generator=generator) + rank % 5 + 1
        if len(self.shape) == 2:
            numbers = numbers.T.contiguous().T
        if self.dtype == torch.int64:
            numbers += 2**55  # no floating-point dtype has digits for that
        return numbers < 10 if self.dtype == torch.bool else numbers.to(self.dtype)

    def members(self, rank: int) -> Sequence[int]:
        """The ranks of the group that a rank is in."""
        if not self.sub_groups:
            return range(self.n)
        return next(members for members in GROUPS if rank in members)


def of_every_dtype(n: int, shape: tuple[int, ...], *rest: Any) -> list[Case]:
    """The case in each dtype that torch can add."""
    return [Case(n, shape, dtype, rest) for dtype in DTYPES]


@dataclass
class Exchange:
    """What n ranks made of a case: by rank what was given, what came out, and the messages.

    Messages are counted where numbers are float64 or float32 and all ranks are one group.
    """

    case: Case
    given: list[Tensor]
    came: list[Any]
    calls: list[list[Call]]

    def given_to_group_of(self, rank: int) -> list[Tensor]:
        """The tensors that were given to a rank and the others in its group."""
        return [self.given[member] for member in self.case.members(rank)]

    def total(self, rank: int = 0) -> Tensor:
        """What one process gets when it adds the tensors of a rank's group."""
        return functools.reduce(torch.add, self.given_to_group_of(rank))

    def chunk_of_sum(self, rank: int) -> Tensor:
        """A rank's part of that sum, which is padded with zeros to n equal chunks."""
        flat, members = self.total(rank).reshape(-1), self.case.members(rank)
        padded = torch.cat([flat, flat.new_zeros(-len(flat) % len(members))])
        return padded.view(len(members), -1)[members.index(rank)]

    def chunks_in_order(self, rank: int) -> Tensor:
        """The tensors of a rank's group, flat, one behind the other."""
        return torch.cat([chunk.reshape(-1) for chunk in self.given_to_group_of(rank)])

    def of_source(self, rank: int) -> Tensor:
        """The tensor of the source of a broadcast in a rank's group."""
        return self.given_to_group_of(rank)[self.case.rest[0]]


def returned(answer: Any, own: Tensor, *rest: Any) -> Any:
    """Call an answer that returns a new tensor, and return that."""
    came = answer(own, *rest)
    if isinstance(came, Tensor) and came.numel():
        places = [each.untyped_storage().data_ptr() for each in (came, own)]
        recognise(
            {"what is returned is the caller's own memory, not a new tensor": len({*places}) == 1},
            expected="a tensor of its own, also where there is one rank alone",
            seen="a view of the input",
            hint=".clone()",
        )
    return came


def returned_twice(answer: Any, own: Tensor, *rest: Any) -> Any:
    """The same, and another call after it, which must leave the first result alone."""
    came = returned(answer, own, *rest)
    if isinstance(came, Tensor):
        before = came.clone()
        answer(torch.zeros_like(own), *rest)
        recognise(
            {"the next call writes into what this one returned": not torch.equal(came, before)},
            expected="a new tensor from every call",
            seen="other numbers in the first result after the second call",
            hint="a buffer that is kept between calls belongs to all results at once",
        )
    return came


def overwritten(answer: Any, own: Tensor, *rest: Any) -> Tensor:
    """Call an answer that overwrites its argument; return what is in the caller's memory."""
    memory = own.detach()  # `tensor.data = ...` would give `own` another
    trains = own.requires_grad
    answer(own, *rest)
    recognise(
        {
            "the parameter no longer requires a gradient: it would not be trained": (
                own.requires_grad != trains
            )
        },
        expected=f"requires_grad={trains}, as before",
        seen=f"requires_grad={own.requires_grad}",
        hint="tensor.detach() shares the memory, and tensor stays what it was",
    )
    return memory


class Laboratory:
    """An answer on its cases; those on equally many ranks are tried by one group, in order."""

    def __init__(self, answer: Any, act: Callable[..., Any], cases: Sequence[Case]) -> None:
        self.answer, self.act, self.seed = answer, act, fresh_seed()
        tries = {case: functools.partial(self._observed, case) for case in cases}
        self.groups = {
            n: RankCases(n, {case: tries[case] for case in cases if case.n == n})
            for n in {case.n for case in cases}
        }

    def _observed(self, case: Case, rank: int) -> tuple[Any, list[Call]]:
        own, rest = case.tensor(rank, self.seed), case.rest
        if case.sub_groups:
            groups = [dist.new_group(members) for members in GROUPS]
            rest = (*rest, groups[rank not in GROUPS[0]])
            own.requires_grad_(self.act is overwritten)  # a parameter: autograd knows it
        if case.dtype not in (torch.float64, torch.float32) or case.sub_groups:
            act = returned_twice if self.act is returned else self.act
            return act(self.answer, own, *rest), []  # not counted: that takes time
        with count_traffic() as traffic:
            came = self.act(self.answer, own, *rest)
        return came, traffic.calls

    def __getitem__(self, case: Case) -> Exchange:
        """Return what came of a case; an exchange that failed is a finding."""
        try:
            came, calls = zip(*self.groups[case.n].outcome(case), strict=True)
        except RankFailed as failed:
            if case.sub_groups:
                report_sub_groups(failed)
            report_exchange(failed, case.n)
        expect_paired(calls)
        given = [case.tensor(rank, self.seed) for rank in range(case.n)]
        return Exchange(case, given, list(came), list(calls))


@once_an_answer
def laboratory(answer: Any, act: Callable[..., Any], cases: tuple[Case, ...]) -> Laboratory:
    """Return the laboratory of an answer, one for all its checks."""
    return Laboratory(answer, act, cases)


OWN_CHUNK = Case(3, (12,))
ODD = [
    Case(2, (7,)), Case(3, (7,)), Case(4, (3, 5)), Case(5, (3,)), Case(4, (8,)), Case(1, (3,)),
    Case(3, ()), Case(3, (0,)),
]  # fmt: skip
LONG = [Case(3, (300,)), Case(5, (301,), torch.float32)]
SEVEN_OF_EACH_DTYPE = of_every_dtype(4, (7,))
SUB_GROUPS = Case(5, (6,), sub_groups=True)


def scattered(ring_reduce_scatter: Any) -> Laboratory:
    """The answer to 05.1 on all of its cases."""
    cases = (OWN_CHUNK, *ODD, *LONG, *SEVEN_OF_EACH_DTYPE, SUB_GROUPS)
    return laboratory(ring_reduce_scatter, returned, cases)


ORDERS = [Case(3, (4,)), Case(2, (1,)), Case(4, (3,)), Case(5, (2,)), Case(1, (3,))]
CHUNKS = [Case(4, (30,)), Case(5, (7,), torch.float32)]
ANY_CHUNK = [*of_every_dtype(4, (3, 2)), Case(3, ()), Case(3, (0,))]
ONE_NUMBER = Case(5, (1,), sub_groups=True)


def gathered(ring_all_gather: Any) -> Laboratory:
    """The answer to 05.2 on all of its cases."""
    cases = (*ORDERS, *CHUNKS, *ANY_CHUNK, ONE_NUMBER)
    return laboratory(ring_all_gather, returned, cases)


ANY_SIZE = [
    Case(3, (12,)), Case(2, (7,)), Case(4, (3, 5)), Case(5, (3,)), Case(3, (0,)), Case(3, ()),
    Case(1, (3,)),
]  # fmt: skip
NOISE = Case(4, (1001,), torch.float32, noise=True)


def reduced(all_reduce: Any) -> Laboratory:
    """The answer to 05.3 or 05.5 on all of its cases."""
    cases = (*ANY_SIZE, *LONG, *SEVEN_OF_EACH_DTYPE, NOISE, SUB_GROUPS)
    return laboratory(all_reduce, overwritten, cases)


def from_rank(src: int, n: int, shape: tuple[int, ...], **options: Any) -> Case:
    """A case of the broadcast."""
    return Case(n, shape, rest=(src,), **options)


SOURCES = [
    from_rank(0, 4, (5,)), from_rank(2, 4, (5,)), from_rank(1, 2, (7,)), from_rank(4, 5, (1,)),
    from_rank(1, 3, (3, 5)), from_rank(0, 1, (2,)), from_rank(1, 3, ()), from_rank(0, 3, (0,)),
]  # fmt: skip
ROUNDS = [
    from_rank(2, 7, (6,)), from_rank(3, 5, (6,), dtype=torch.float32), from_rank(0, 4, (6,)),
]  # fmt: skip
FROM_1_OF_EACH_DTYPE = of_every_dtype(3, (7,), 1)
FROM_1_IN_SUB_GROUPS = from_rank(1, 5, (6,), sub_groups=True)


def spread(tree_broadcast: Any) -> Laboratory:
    """The answer to 05.4 on all of its cases."""
    cases = (*SOURCES, *ROUNDS, *FROM_1_OF_EACH_DTYPE, FROM_1_IN_SUB_GROUPS)
    return laboratory(tree_broadcast, overwritten, cases)


def num_rounds(peers: list[list[int]], src: int) -> int:
    """When the last rank has it, if a message takes one round and a rank sends one at a time."""
    arrived, waiting = {src: 0}, [src]
    while waiting:
        rank = waiting.pop(0)
        for place, peer in enumerate(peers[rank]):
            if peer not in arrived:
                arrived[peer] = arrived[rank] + place + 1
                waiting.append(peer)
    return max(arrived.values())
