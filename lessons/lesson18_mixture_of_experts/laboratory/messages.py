"""Answers on several ranks: the balancing loss, the message, the way there and back."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.exercises.expecting import expect
from shared.exercises.rank_cases import RankCases, RankGroups
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import Call, count_traffic
from shared.mixture_of_experts.routing import Routing

HANG = "not every rank takes part in each message: the others wait for it"
LENGTHS = (
    "the ranks' counts differ in length, or not every rank takes part: an expert that no token "
    "of a rank chose has a place in its counts, too"
)
WIDTH = 3


@dataclass(frozen=True)
class World(RankGroups):
    """Ranks on which an answer is tried; with two groups, one is of even ranks, one of odd ones."""

    experts: int = 4
    k: int = 2
    dtype: torch.dtype = torch.float64
    empty: bool = False  # one rank has no rows
    idle: bool = False  # and gets none


BALANCES = (World(3), World(4, groups=2, k=1), World(1))
WORLDS = (
    World(2),
    World(3, experts=6),
    World(4, groups=2, empty=True),
    World(1),
    World(2, empty=True),
    World(3, experts=6, empty=True, idle=True),
)


def _cases(
    worlds: tuple[World, ...], observe: Callable[[World, int], Any], apart: str = HANG
) -> Callable:
    groups = {
        ranks: RankCases(
            ranks, {w: functools.partial(observe, w) for w in worlds if w.ranks == ranks}
        )
        for ranks in {w.ranks for w in worlds}
    }
    known = {
        "invalid gradient": (
            "backward hands on gradients of the rows that came: they have to travel back",
            "the same message the other way, with both lists swapped",
        ),
        "tensor splits not equal to group": (
            "a message goes over all ranks: the group is left out, in forward or in backward",
            "group=group in both, and dist.get_world_size(group) where ranks are counted",
        ),
        "must be contiguous": (
            "a gradient is taken to lie in one piece, as rows do: some are views, as that of a sum",
            ".contiguous() before the message, in backward as well",
        ),
        "plit sizes": (
            "the lists do not fit the rows: what comes back has the lists swapped, and they are of "
            "the group's ranks",
            "backward sends `receive` and receives `send`, in the same group",
        ),
    }
    return lambda w: groups[w.ranks].seen(w, apart=apart, known=known)


@dataclass
class Balance:
    """What one rank saw of the loss."""

    routing: Routing
    loss: Tensor
    gradient: Tensor | None
    calls: list[Call]


@once_an_answer
def balances(answer: Callable[..., Tensor]) -> Callable[[World], list[Balance]]:
    """An answer to 18.1b on several ranks, each with tokens of its own."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Balance:
        group = world.group(rank)
        seed_all(seed + rank)
        logits = torch.randn(
            9 + 3 * rank, world.experts, dtype=torch.float64
        ) + rank * torch.arange(4)
        logits[:, -1] -= 20 * (rank == 0)  # nobody on this rank chooses the last expert
        probabilities = logits.softmax(-1).requires_grad_()
        weights, experts = probabilities.topk(world.k, -1)
        routing = Routing(experts, weights, probabilities)
        with count_traffic() as traffic:
            loss = answer(routing, group) if world.groups > 1 else answer(routing)
        gradient = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, probabilities, allow_unused=True)
        return Balance(
            Routing(experts, weights.detach(), probabilities.detach()),
            loss.detach(),
            gradient,
            traffic.calls,
        )

    return _cases(BALANCES, observe, LENGTHS)


def _send(world: World, place: int, seed: int) -> Tensor:
    """Rows that each rank of a group has for each rank: [from, to], some 0."""
    n = len(world.members(0))
    draw = torch.Generator().manual_seed(seed + 77 + place)
    table = torch.randint(0, 5, (n, n), generator=draw)
    table[0, -1] = 6  # never a symmetric table: sending and receiving differ
    if world.empty:
        table[-1] = 0
    if world.idle:
        table[:, -1] = 0
    return table


@dataclass
class Exchanged:
    """What one rank saw of a message."""

    rows: Tensor
    table: Tensor  # [from, to] of its group
    came: Tensor
    gradient: Tensor | None
    upstream: Tensor
    forward: list[Call]
    backward: list[Call]


@once_an_answer
def exchanges(answer: Callable[..., Tensor]) -> Callable[[World], list[Exchanged]]:
    """An answer to 18.3a on several ranks."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Exchanged:
        group, members = world.group(rank), world.members(rank)
        me, table = members.index(rank), _send(world, rank % world.groups, seed)
        seed_all(seed + rank)
        rows = torch.randn(int(table[me].sum()), WIDTH, dtype=world.dtype)
        send, receive = table[me].tolist(), table[:, me].tolist()
        leaf = rows.clone().requires_grad_()
        with count_traffic() as forward:
            came = answer(leaf * 1, send, receive, group)
        upstream = torch.randn(WIDTH, sum(receive), dtype=world.dtype).T  # not contiguous
        with count_traffic() as backward:
            if came.requires_grad:
                came.backward(upstream)
        calls = forward.calls, backward.calls
        return Exchanged(rows, table, came.detach(), leaf.grad, upstream, *calls)

    return _cases(WORLDS, observe)


@dataclass
class Dispatched:
    """What one rank saw of the way there and back."""

    counts: Tensor  # rows of each rank of the group for each expert
    rows: Tensor
    own_counts: Tensor
    came: Tensor
    back: Tensor
    gradient: Tensor | None
    opened: list[Call]
    calls: list[Call]


def rows_of(world: World, rank: int, counts: Tensor) -> Tensor:
    """Rows that tell where they are from: rank, expert, number."""
    expert = torch.arange(world.experts).repeat_interleave(counts)
    number = torch.arange(len(expert))
    return torch.stack([torch.full_like(expert, rank), expert, number], 1).double()


def _counts(world: World, seed: int) -> Tensor:
    n = len(world.members(0))
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (n, world.experts), generator=draw)
    counts[0, 1], counts[0, -1], counts[-1, 0] = 5, 0, 3
    if world.empty:
        counts[-1] = 0
    if world.idle:
        counts[:, -(world.experts // n) :] = 0
    return counts


@once_an_answer
def dispatches(answer: Callable[..., Any]) -> Callable[[World], list[Dispatched]]:
    """An answer to 18.3b on several ranks; an expert multiplies its rows by its number plus 2."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Dispatched:
        group, members = world.group(rank), world.members(rank)
        me, counts = members.index(rank), _counts(world, seed + world.number(rank))
        rows = rows_of(world, me, counts[me])
        leaf = rows.clone().requires_grad_()
        with count_traffic() as opened:
            way = (
                answer(counts[me].clone(), group)
                if world.groups > 1
                else answer(counts[me].clone())
            )
        own = world.experts // len(members)
        with count_traffic() as traffic:
            came = way.dispatch(leaf * 1)
            experts = torch.arange(me * own, (me + 1) * own)
            wanted = counts[:, me * own : (me + 1) * own].sum(0)
            outputs = came * (2 + experts.repeat_interleave(wanted)[:, None])
            back = way.combine(outputs)
            if back.requires_grad:
                back.sum().backward()
        expect(
            isinstance(way.counts, Tensor) and not way.counts.is_floating_point(),
            expected="counts is an integer tensor",
            seen=getattr(way.counts, "dtype", type(way.counts).__name__),
        )
        own_counts = way.counts.clone()
        return Dispatched(
            counts, rows, own_counts, came.detach(), back.detach(), leaf.grad, opened.calls,
            traffic.calls,
        )  # fmt: skip

    return _cases(WORLDS, observe)


@once_an_answer
def refusals(answer: Callable[..., Any]) -> str:
    """What an answer to 18.3b does with 5 experts on 2 ranks."""

    def work(rank: int) -> str:
        try:
            answer(torch.ones(5, dtype=torch.int64))
        except NotImplementedError:
            raise
        except ValueError as error:
            return str(error)
        except Exception as other:
            return type(other).__name__
        return "nothing"

    return RankCases(2, {"five": work}).seen("five", apart=HANG)[0]
