"""The two conjugate messages, observed in several groups."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lessons.lesson14_tensor_parallel.laboratory.layers import BF16, World, cases_of
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import Call, count_traffic

MESSAGES = (World(3), World(2, BF16), World(4, groups=2), World(1), World(2, groups=2))
LATE = 0.05  # seconds by which a group's last rank comes later than the others


@dataclass
class Message:
    """What one rank saw of a message: its values, its gradient, and what was sent."""

    x: Tensor
    y: Tensor
    moved: bool  # y changed after it had been returned
    changed: bool  # x was written to
    gradient: Tensor | None
    upstream: Tensor
    beside: Tensor  # the gradient that another branch was handed, in the same tensor
    other_use: Tensor | None  # x's gradient where only another use of it counts, by ones
    forward: list[Call]
    backward: list[Call]


@once_an_answer
def messages(answer: Callable[..., Tensor]) -> Callable[[World], list[Message]]:
    """An answer to 14.1 in every world; the numbers lie in memory in two orders."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Message:
        group, members = world.group(rank), world.members(rank)
        seed_all(seed + rank)
        x, upstream = _drawn(world, members.index(rank)), _drawn(world, members.index(rank))
        leaf, other = x.clone().requires_grad_(), torch.zeros_like(x, requires_grad=True)
        given = leaf * 1
        is_last = len(members) > 1 and rank == members[-1]
        time.sleep(LATE * is_last)
        with count_traffic() as forward:
            y = answer(given, group) if world.groups > 1 else answer(given)
        at_once = y.detach().clone()
        time.sleep(LATE * is_last)
        with count_traffic() as backward:
            (y + other).backward(upstream)  # both branches get the same gradient
        assert other.grad is not None
        with torch.no_grad():
            answer(x.clone(), group)
        changed = not torch.equal(given.detach(), x)
        moved = not torch.equal(at_once, y.detach())
        beside = _gradient_beside(answer, x, group)
        calls = forward.calls, backward.calls
        grads = leaf.grad, upstream, other.grad, beside
        return Message(x, y.detach(), moved, changed, *grads, *calls)

    return cases_of(MESSAGES, observe)


def _drawn(world: World, place: int) -> Tensor:
    """Numbers that every second rank of a group has in memory in another order."""
    if place % 2:
        return torch.randn(5, 3, 2, dtype=world.dtype).transpose(0, 2)
    return torch.randn(2, 3, 5, dtype=world.dtype)


def _gradient_beside(answer: Callable[..., Tensor], x: Tensor, group: object) -> Tensor | None:
    """The gradient of an x that is used beside the message, which itself adds nothing."""
    leaf = x.detach().clone().requires_grad_()
    given = leaf * 1
    (0 * answer(given, group) + given).sum().backward()
    return leaf.grad


def by_memory(tensors: list[Tensor], like: Tensor) -> Tensor:
    """The sum of the numbers in the order of memory, read as `like` lies there."""
    total = torch.stack([x.as_strided((x.numel(),), (1,)) for x in tensors]).sum(0)
    return total.as_strided(like.shape, like.stride())
