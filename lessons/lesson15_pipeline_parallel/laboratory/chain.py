"""A chain of stages, with the answer on one side of every link."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import count_traffic
from shared.pipeline.transfer import Link

Answer = Callable[..., Any]
CHAIN = (3, 2, 4)  # the rows of each micro-batch
CHAIN_BACKWARDS = (1, 0, 2)
WIDTH = 4


@dataclass
class ChainSeen:
    """A rank's gradient and the messages that it sent."""

    gradient: Tensor
    sent: int
    sent_bytes: int


def weights(seed: int, number: int) -> list[Tensor]:
    """A matrix for each stage."""
    seed_all(seed)
    return [torch.randn(WIDTH, WIDTH).requires_grad_() for _ in range(number)]


def inputs(seed: int) -> list[Tensor]:
    """What the first stage begins with, by micro-batch."""
    seed_all(seed + 1)
    return [torch.randn(rows, WIDTH) for rows in CHAIN]


def stage(weight: Tensor, carry: Sequence[Tensor], last: bool) -> tuple[Tensor, Tensor]:
    """One stage; the second tensor goes on as it came, and the last stage does not use it."""
    h, memory = carry
    h = torch.tanh(h @ weight)
    return (h, memory) if last else (h + memory.mean(0), memory)


def chain_in_one_process(seed: int, number: int) -> list[Tensor]:
    """The gradients of all stages, as one process has them."""
    own = weights(seed, number)
    for x in inputs(seed):
        carry: tuple[Tensor, Tensor] = (x, x @ own[0])
        for i, weight in enumerate(own):
            carry = stage(weight, carry, i + 1 == number)
        carry[0].square().sum().backward()
    return [w.grad for w in own if w.grad is not None]


def _chain(answer: Answer, sends: bool, number: int, seed: int, rank: int) -> ChainSeen:
    links = {}
    for left in range(number - 1):
        groups = dist.new_group([left, left + 1]), dist.new_group([left, left + 1])
        if rank in (left, left + 1):
            links[2 * left + 1 - rank] = Link(2 * left + 1 - rank, *groups)
    before, behind = links.get(rank - 1), links.get(rank + 1)
    weight, last = weights(seed, number)[rank], behind is None
    kept: dict[int, tuple[Any, Any]] = {}
    with count_traffic() as traffic:
        for m, x in enumerate(inputs(seed)):
            shapes = [x.shape, x.shape]
            if before is None:
                came: Any = (x, x @ weight)
            elif sends:
                came = [before.receive(torch.empty(s), before.activations) for s in shapes]
                came = [each.requires_grad_() for each in came]
            else:
                came = answer(before, [tuple(s) for s in shapes])
            carry = stage(weight, came, last)
            if behind is None:
                kept[m] = came, carry[0].square().sum()
            elif sends:
                kept[m] = came, answer(behind, *carry)
            else:
                for each in carry:
                    behind.send(each.detach(), behind.activations)
                kept[m] = came, carry
        for m in CHAIN_BACKWARDS:
            _chain_back(*kept.pop(m), before if sends else None, None if sends else behind)
        for link in links.values():
            link.finish()
    assert weight.grad is not None
    return ChainSeen(weight.grad, traffic.count("send"), traffic.sent_bytes)


def _chain_back(came: Any, end: Any, before: Link | None, behind: Link | None) -> None:
    """Back through one stage; the links are those that the laboratory works itself."""
    if behind is None:
        end.backward()
    else:
        grads = [behind.receive(torch.empty_like(x), behind.gradients) for x in end]
        torch.autograd.backward(end, grads)
    if before is not None:
        for x in came:
            before.send(torch.zeros_like(x) if x.grad is None else x.grad, before.gradients)


@once_an_answer
def chain(answer: Answer, sends: bool, number: int) -> tuple[int, RankCases]:
    """A seed and the chain of so many ranks: one case, None."""
    seed = fresh_seed()
    work = functools.partial(_chain, answer, sends, number, seed)
    return seed, RankCases(number, {None: work})
