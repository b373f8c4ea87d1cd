"""Layers and a loss over ranks, observed in several groups."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
from torch import Tensor, nn

from shared.exercises.rank_cases import RankCases, RankGroups
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import Call, count_traffic
from shared.tensor_parallel.marks import cut_dim

F64, BF16 = torch.float64, torch.bfloat16
HANG = "not every rank takes part in each message: the others wait for it"
IN_GROUPS = {
    "is not part of group": (
        "the message's root is rank 0 of all ranks, which not every group has",
        "group_src=0 and group_dst=0 count inside of the group, src=0 and dst=0 do not",
    ),
    IndexError: (
        "a rank's number among all ranks counts, not that in its group",
        "dist.get_rank(group)",
    ),
}


@dataclass(frozen=True)
class World(RankGroups):
    """Ranks on which an answer is tried; with two groups, one is of even ranks, one of odd ones."""

    dtype: torch.dtype = F64
    bias: bool = True
    frozen: bool = False
    frozen_bias: bool = False
    given: bool = True  # a message is given to the layer, not None
    ignore: int = -100
    large: bool = False


LAYERS = (
    World(3),
    World(2, given=False),
    World(4, groups=2, bias=False),
    World(2, BF16, frozen=True),
    World(1, frozen_bias=True),
)
LOSSES = (
    World(3),
    World(2, large=True),
    World(2, BF16, ignore=3),
    World(4, groups=2),
    World(1),
    World(2, groups=2),
)


def cases_of(worlds: tuple[World, ...], observe: Callable[[World, int], Any]) -> Callable:
    """What each rank saw in a world: ranks start once for all worlds of one size."""
    groups = {
        ranks: RankCases(
            ranks, {w: functools.partial(observe, w) for w in worlds if w.ranks == ranks}
        )
        for ranks in {w.ranks for w in worlds}
    }
    return lambda world: groups[world.ranks].seen(
        world, apart=HANG, known=IN_GROUPS if world.groups > 1 else None
    )


# 14.2 and 14.3


@dataclass
class Layer:
    """What one rank saw of a layer that was cut, in two steps."""

    whole: dict[str, Tensor]  # this rank's own layer, before
    touched: bool  # and whether it was changed
    names: list[str]
    parts: dict[str, Tensor]
    trained: dict[str, bool]
    marks: dict[str, int | None]  # the dim that a parameter says it is cut along
    nbytes: int  # of the memory behind the weight
    entered: list[tuple[tuple[int, ...], bool]] = field(default_factory=list)  # shape, right group
    x: list[Tensor] = field(default_factory=list)
    y: list[Tensor] = field(default_factory=list)
    upstream: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    now: list[dict[str, Tensor]] = field(default_factory=list)  # parameters before each step
    ops: list[str] = field(default_factory=list)
    error: str = ""


RATE = 0.5
FACTOR = 2.5  # what the given message multiplies by, which is no number of ranks


@once_an_answer
def layers(answer: Callable[..., nn.Module], columns: bool) -> Callable[[World], list[Layer]]:
    """An answer to 14.2 (`columns`) or 14.3 in every world, with a message that only multiplies."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Layer:
        group = world.group(rank)
        seed_all(seed + rank)
        linear = nn.Linear(12, 24, bias=world.bias, dtype=world.dtype)
        linear.weight.requires_grad_(not world.frozen)
        if linear.bias is not None:
            linear.bias.requires_grad_(not world.frozen_bias)
        whole = {n: p.detach().clone() for n, p in linear.named_parameters()}
        entered: list[tuple[tuple[int, ...], bool]] = []

        def message(x: Tensor, given: Any = None) -> Tensor:
            entered.append((tuple(x.shape), given is group))
            return FACTOR * x

        give = message if world.given or not columns else None
        layer = answer(linear, group, give)
        own = dict(layer.named_parameters())
        touched = any(not torch.equal(p, whole[n]) for n, p in linear.named_parameters())
        parts = {n: p.detach().clone() for n, p in own.items()}
        trained = {n: p.requires_grad for n, p in own.items()}
        marks = {n: cut_dim(p) for n, p in own.items()}
        weight = own.get("weight", torch.empty(0))
        held = weight.untyped_storage().nbytes()
        seen = Layer(whole, touched, [*own], parts, trained, marks, held)
        seen.entered = entered
        with count_traffic() as traffic:
            try:
                for step in range(2):
                    _train(layer, world, rank, columns, seed + step, seen)
            except NotImplementedError:
                raise
            except Exception as error:  # the parts, which are looked at first, say more
                seen.error = f"{type(error).__name__}: {error}"
        seen.ops = traffic.ops
        return seen

    return cases_of(LAYERS, observe)


def _train(
    layer: nn.Module, world: World, rank: int, columns: bool, seed: int, seen: Layer
) -> None:
    """One step, with other inputs on each rank where they are parts."""
    own, n = dict(layer.named_parameters()), len(world.members(rank))
    seed_all(seed + 10 + (0 if columns else 100 * rank))
    x = torch.randn(2, 3, 12 if columns else 12 // n, dtype=world.dtype)
    x.requires_grad_()
    y = layer(x)
    seed_all(seed + 20 + (100 * rank if columns else 0))
    upstream = torch.randn(y.shape, dtype=y.dtype)
    seen.now.append({n: p.detach().clone() for n, p in own.items()})
    layer.zero_grad()
    y.backward(upstream)
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in own.items()}
    seen.gradients.append(grads | {"x": x.grad})
    seen.x.append(x.detach())
    seen.y.append(y.detach())
    seen.upstream.append(upstream)
    with torch.no_grad():
        for p in own.values():
            if p.grad is not None:
                p -= RATE * p.grad


def refusal(answer: Callable[..., nn.Module], columns: bool) -> list[str]:
    """What each of two ranks says to 7 features that are to be cut; "" where nothing is raised."""

    def observe(world: World, rank: int) -> str:
        linear = nn.Linear(4, 7) if columns else nn.Linear(7, 4)
        try:
            answer(linear, None, lambda x, group: x)
        except NotImplementedError:
            raise
        except Exception as error:
            return f"{type(error).__name__ if not isinstance(error, ValueError) else ''}: {error}"
        return ""

    return cases_of((World(2),), observe)(World(2))


# 14.5


@dataclass
class Loss:
    """What one rank saw of the loss: whole logits as all know them, its own part's gradient."""

    logits: Tensor
    targets: Tensor
    loss: Tensor
    upstream: Tensor
    gradient: Tensor | None
    forward: list[Call]
    backward: list[Call]
    outside: str  # what a target beyond the vocabulary is met with
    changed: bool  # logits without a gradient were written to


PART = 7  # tokens of the vocabulary on each rank
ABOVE = 2000.0  # by which the second group's logits are larger than the first's


@once_an_answer
def said_of_foreign(loss: Callable[[Tensor], Any], targets: Tensor, size: int) -> str:
    """What is wrong with a loss's answer to tokens outside a vocabulary; "" for a ValueError."""
    for token in (-1, size):
        bad = targets.clone()
        bad[0, 0] = token
        try:
            loss(bad)
        except ValueError:
            continue
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"{token} is accepted"
    return ""


def losses(answer: Callable[..., Tensor]) -> Callable[[World], list[Loss]]:
    """An answer to 14.5 in every world."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Loss:
        group, members = world.group(rank), world.members(rank)
        seed_all(seed + rank % world.groups)
        n = len(members)
        whole = 3 * torch.randn(3, 4, n * PART, dtype=world.dtype)
        if world.large:  # each part on a level of its own, and the largest beyond what exp can do
            whole += torch.tensor([-900.0, 900.0], dtype=world.dtype).repeat_interleave(PART)
        # A group far above the others: beside its largest logit nothing is left of theirs.
        whole += ABOVE * (rank % world.groups)
        targets = torch.randint(n * PART, (3, 4))
        targets.view(-1)[: 2 * n] = torch.arange(2 * n) % n * PART + torch.arange(2 * n) // n
        targets[2, 2:] = world.ignore
        mine = slice(members.index(rank) * PART, (members.index(rank) + 1) * PART)
        part = whole[..., mine].clone().requires_grad_()
        more: dict[str, Any] = {"group": group} if world.groups > 1 else {}
        if world.ignore != -100:
            more["ignore_index"] = world.ignore
        with count_traffic() as forward:
            loss = answer(part * 1, targets, **more)
        upstream = torch.randn(targets.shape, dtype=loss.dtype)
        with count_traffic() as backward:
            if loss.requires_grad and loss.shape == targets.shape:
                loss.backward(upstream)
        given = part.detach().clone()
        answer(given, targets, **more)
        changed = not torch.equal(given, part)
        outside = said_of_foreign(lambda bad: answer(part.detach(), bad, **more), targets, n * PART)
        calls = forward.calls, backward.calls
        return Loss(whole, targets, loss.detach(), upstream, part.grad, *calls, outside, changed)

    return cases_of(LOSSES, observe)
