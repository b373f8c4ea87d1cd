"""Lesson 16: what people overlook in a step on a mesh, in words for each."""

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lessons.lesson16_parallelism_3d.laboratory.steps import (
    TIED,
    Seen,
    Twin,
    World,
    is_cut,
    joined,
    norm_of,
)

Place = dict[str, int]  # a rank's coordinates
Whole = dict[str, Tensor]  # gradients of the model by name
Part = Callable[[str, int | None, Place], Tensor]  # by name, dimension of the cut, place


def part_of(world: World, whole: Tensor, dim: int | None, place: Place) -> Tensor:
    """What one rank of tp has of a gradient."""
    return whole if dim is None else whole.chunk(world.tp, dim)[place["tp"]]


def divided_otherwise(world: World, twin: Twin) -> Iterator[tuple[str, Whole]]:
    """Gradients where a divisor is wrong, or one too many."""
    m, dp, counts = world.num_micro_batches, world.dp, twin.targets
    unequal = "those of one with few of them count more than others"
    divisors = {
        "": lambda r, i: twin.total,
        f"each replica divides by its own targets: {unequal}": lambda r, i: dp * sum(counts[r]),
        f"each micro-batch divides by its own targets: {unequal}": (
            lambda r, i: dp * m * counts[r][i]
        ),
        "positions without a target are counted in the divisor": lambda r, i: twin.positions,
    }
    factors = {
        "": 1.0,
        "gradients are divided by dp as well: the loss is one of all replicas' targets already": (
            1 / dp
        ),
        "gradients are dp times too large: a loss that is multiplied by dp supposes a mean": dp,
        "gradients are divided by the micro-batches as well: they have parts of one mean": 1 / m,
        "gradients are too large by the number of micro-batches": m,
    }
    for (words, divisor), (more, factor) in itertools.product(divisors.items(), factors.items()):
        if words or more:
            whole = twin.mean(lambda r, i, d=divisor, f=factor: f / d(r, i))
            yield words or more, joined(whole, world.tied)


def gradients(world: World, twin: Twin) -> Iterator[tuple[str, Part]]:
    """What mistakes that people make leave of the gradients on a rank."""
    right = joined(twin.right, world.tied)

    def of(whole: Callable[[Place], Whole]) -> Part:
        return lambda name, dim, place: part_of(world, whole(place)[name], dim, place)

    if twin.limit < norm_of(right):
        yield "the gradients are not clipped", of(lambda place: right)
    for factor in (1, world.dp) if twin.earlier else ():
        # They were sums already, and are added up once more.
        left = {name: factor * x for name, x in twin.earlier.items()}
        left |= {TIED: 2 * left[TIED]} if world.tied and world.pp > 1 else {}
        both = {name: x + left[name] for name, x in right.items()}
        yield "the last step's gradients are still there", of(lambda place, both=both: both)
    for words, whole in divided_otherwise(world, twin):
        yield words, of(lambda place, w=whole: w)
    if world.tied and world.pp > 1:
        uses = {True: twin.right["first"], False: twin.right["last"]}
        yield (
            "the tied embedding's gradients are not added up over its stages: each has its use's",
            of(lambda place: right | {TIED: uses[place["pp"] == 0]}),
        )
        yield (
            "the tied embedding has the mean of its stages' gradients: it is their sum",
            of(lambda place: right | {TIED: right[TIED] / 2}),
        )
    for factor in {1, world.dp} if world.dp > 1 else ():
        own = [joined(twin.of_replica(r, factor), world.tied) for r in range(world.dp)]
        words = "the replicas' gradients are not added up: each steps by its own"
        yield words, of(lambda place, own=own: own[place["dp"]])
    if world.tp > 1:
        words = "gradients are added up over tp as well: its layers have sent what they need"
        yield words, lambda name, dim, place: over_tp(world, right[name], dim)


def over_tp(world: World, whole: Tensor, dim: int | None) -> Tensor:
    """The sum of what the ranks of tp have of a gradient."""
    return world.tp * whole if dim is None else torch.stack(whole.chunk(world.tp, dim)).sum(0)


def norms(world: World, twin: Twin, each: Seen, place: Place) -> list[tuple[str, float]]:
    """What the norm comes to where it is taken of something else, on one rank."""
    whole = joined(twin.right, world.tied)
    squares = {name: square_of(x) for name, x in whole.items()}
    total = sum(squares.values())
    copies = sum(squares[name] for name in whole if not is_cut(name))
    mine = [part_of(world, whole[name], each.dims[name], place) for name in each.steps[0]]
    found = [
        (
            "what every rank of tp has a copy of counts tp times in the norm",
            total + (world.tp - 1) * copies,
        ),
        ("the norm is that of this rank's own gradients", sum(map(square_of, mine))),
    ]
    for factor in (1, world.dp):
        own = joined(twin.of_replica(place["dp"], factor), world.tied)
        words = "the norm is that of one replica's gradients: clip when all are added up"
        found.append((words, norm_of(own) ** 2))
    if world.tied:
        words = "the tied embedding counts on each of its stages in the norm"
        found.append((words, total + squares[TIED]))
        words = "the norm is taken before the tied embedding's gradients are added up"
        found.append((words, total - squares[TIED] + square_of(twin.right["first"])))
    found.append(("the norm is that after clipping", twin.limit**2))
    return [(words, math.sqrt(square)) for words, square in found]


def square_of(x: Tensor) -> float:
    return x.square().sum().item()


def losses(world: World, twin: Twin, place: Place) -> list[tuple[str, float]]:
    """What the loss comes to on one rank where its parts are not brought together."""
    own = sum(twin.losses[place["dp"]]) / twin.total
    last = place["pp"] == world.pp - 1
    summed = "the loss is added up over tp as well, whose ranks have the same"
    same = f"{summed}, or multiplied by dp" if world.dp == world.tp else ""
    found = {
        "the loss is known on the last stage alone: all ranks return it": twin.loss * last,
        "the loss is one replica's part": own,
        "the loss is one replica's part, and on the last stage alone": own * last,
        same or "the loss is dp times too large": world.dp * twin.loss,
        "the loss is divided by dp twice": twin.loss / world.dp,
        "the loss is divided by the micro-batches as well": twin.loss / world.num_micro_batches,
        summed: world.tp * twin.loss,
    }
    return list(found.items())
