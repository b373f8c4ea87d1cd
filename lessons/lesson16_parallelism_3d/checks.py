"""Lesson 16: what tells a right answer from a wrong one.

Meshes are held against views of torch, norms and clipping against torch.nn.utils on gradients that
one process has, a step against one process's; plans against all that the planner says.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace

import torch
from torch import Tensor

from lessons.lesson16_parallelism_3d.laboratory import all_plans as search_lab
from lessons.lesson16_parallelism_3d.laboratory import gradients as lab
from lessons.lesson16_parallelism_3d.laboratory import overlooked
from lessons.lesson16_parallelism_3d.laboratory import seconds as seconds_lab
from lessons.lesson16_parallelism_3d.laboratory import steps as steps_lab
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    accepted,
    alike,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
    without_group,
    wrong,
)
from shared.exercises.seeds import fresh_seed
from shared.planner.memory import gathered_bytes, memory_per_rank
from shared.planner.outcomes import Choice
from shared.planner.seconds import step_time
from shared.planner.variants import USABLE

# 16.1 build_mesh

exercise_16_1 = checks_for(
    "16.1",
    name="build_mesh",
    difficulty=2,
    minutes=20,
    hint=(
        "Write down the ranks of dp 2 x tp 2 x pp 2 as a box. A rank's coordinates are the digits "
        "of its number, the last axis of order is the last digit; the groups of an axis are the "
        "ranks that agree in the two other digits."
    ),
    forbidden=("shared.parallel3d.mesh.",),
)
DEFAULT = ("pp", "dp", "tp")
Groups = dict[str, list[list[int]]]


def mesh_cases() -> list[tuple[dict[str, int], tuple[str, ...]]]:
    """Sizes and orders: the default order first, then all orders with sizes that differ."""
    draw = random.Random(fresh_seed())
    fixed = [(2, 2, 2), (2, 4, 2), (3, 2, 4), (1, 3, 1), (4, 1, 3), (1, 1, 1)]
    cases = [(sizes, DEFAULT) for sizes in fixed]
    for order in itertools.permutations(DEFAULT):
        cases.append(((2, 3, 4), order))
        cases.append(((draw.randint(1, 4), draw.randint(2, 5), draw.randint(2, 3)), order))
    return [(dict(zip(("dp", "tp", "pp"), sizes, strict=True)), order) for sizes, order in cases]


def exchanged(one: str, other: str) -> Callable[[dict[str, int], tuple[str, ...]], Groups]:
    """What comes out where an axis has the size of another one, and the other way round."""
    return lambda sizes, order: lab.groups_of(sizes | {one: sizes[other], other: sizes[one]}, order)


def neighbours(sizes: dict[str, int], order: tuple[str, ...]) -> Groups:
    """What comes out where the box is cut as it stands, whatever the axis."""
    ranks = torch.arange(math.prod(sizes.values()))
    return {axis: ranks.view(-1, sizes[axis]).tolist() for axis in order}


WRONG_MESHES: dict[str, Callable[[dict[str, int], tuple[str, ...]], Groups]] = {
    "the first axis of order varies fastest: it is the last whose ranks are neighbours": (
        lambda sizes, order: lab.groups_of(sizes, order[::-1])
    ),
    "order is not used": lambda sizes, order: lab.groups_of(sizes, DEFAULT),
    "dp is always the outermost axis, whatever order says": (
        lambda sizes, order: lab.groups_of(sizes, ("dp", *(a for a in order if a != "dp")))
    ),
    "dp has the size of pp, and pp that of dp": exchanged("dp", "pp"),
    "dp has the size of tp, and tp that of dp": exchanged("dp", "tp"),
    "tp has the size of pp, and pp that of tp": exchanged("tp", "pp"),
    "the axis is moved to the front before the box is cut into groups: it belongs to the end": (
        lab.front_groups
    ),
    "the groups of every axis are neighbouring ranks: only the last axis of order has these": (
        neighbours
    ),
}


def in_any_order(groups: Groups) -> Groups:
    """Groups and their ranks sorted: which ranks are together, and nothing else."""
    return {axis: sorted(map(sorted, lists)) for axis, lists in groups.items()}


def in_any_orders(found: list[Groups], others: list[Groups]) -> bool:
    return [*map(in_any_order, found)] == [*map(in_any_order, others)]


@exercise_16_1.check("the groups of each axis, for every order")
def groups(answer) -> None:
    without_group(
        answer,
        2,
        2,
        2,
        mistake="it asks for a process group: a mesh is lists of numbers",
        expected="the groups, in one process without a process group",
        hint="world_size None is the product of the sizes",
    )
    cases = mesh_cases()
    found = [answer(*sizes.values(), order=order) for sizes, order in cases]
    for got in found:
        expect_lists(got)
    others = {words: [other(*each) for each in cases] for words, other in WRONG_MESHES.items()}
    for words, seen in alike(found, others, in_any_orders).items():
        if seen:
            expect_as(words, cases, found)
    for (sizes, order), got in zip(cases, found, strict=True):
        expect_groups(sizes, order, got)
        want = lab.groups_of(sizes, order)
        where = f"of {said(sizes)} in the order {order}"
        for axis in DEFAULT:
            expect_axis(axis, got[axis], want[axis], where)
        expect_equal(got, want, what=f"the groups {where}")
    want = lab.groups_of({"dp": 2, "tp": 3, "pp": 4}, ("tp", "pp", "dp"))
    got = answer(2, 3, 4, order=["tp", "pp", "dp"])
    expect_equal(got, want, what="the groups of dp 2 x tp 3 x pp 4 where order is a list")


def said(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def expect_as(words, cases, found) -> None:
    """Report a mistake that explains every case, at the first in which it shows."""
    for (sizes, order), got in zip(cases, found, strict=True):
        want = lab.groups_of(sizes, order)
        for axis in DEFAULT:
            if in_any_order(got)[axis] != in_any_order(want)[axis]:
                wrong(
                    words,
                    expected=f"{axis} of {said(sizes)} in the order {order} = {want[axis]}",
                    seen=f"{got[axis]}",
                )


def expect_lists(got) -> None:
    """Lists of lists of ranks by axis."""
    keys = isinstance(got, dict) and set(got) == set(DEFAULT)
    recognise(
        {"the keys are not the three axes": not keys},
        expected="a dict with the keys dp, tp and pp",
        seen=f"{list(got) if isinstance(got, dict) else type(got).__name__}",
    )
    for axis, lists in got.items():
        fine = type(lists) is list and all(type(group) is list for group in lists)
        fine = fine and all(type(rank) is int for group in lists for rank in group)
        recognise(
            {"the groups of an axis are no list of lists of ranks": not fine},
            expected=f"{axis}: a list of lists of int",
            seen=f"{lists}",
        )


def expect_groups(sizes, order, got) -> None:
    """Each rank is in one group of each axis."""
    n, where = math.prod(sizes.values()), f"of {said(sizes)} in the order {order}"
    for axis, lists in got.items():
        size, ranks = sizes[axis], sorted(rank for group in lists for rank in group)
        planes = len(lists) == size and all(len(group) == n // size for group in lists)
        recognise(
            {
                "an axis with one place has no groups: each rank is one of its own": (
                    size == 1 and ranks != [*range(n)]
                ),
                "a group holds the ranks that share their place on the axis: it is those that "
                "differ in it alone": planes and 1 < size != n // size,
                "a rank is in two groups of one axis": len(ranks) > len(set(ranks)),
                "a rank is in no group of an axis": ranks != [*range(n)],
            },
            expected=f"{axis} {where}: {n // size} lists of {size} ranks, which together are "
            f"0 to {n - 1}",
            seen=f"{lists}",
        )


def expect_axis(axis, got, want, where) -> None:
    """The right ranks are together, and what is left is their order."""
    as_sets = {frozenset(group) for group in got} == {frozenset(group) for group in want}
    recognise(
        {
            "the ranks of a group are not in the order of their places on the axis": (
                as_sets and any(group != sorted(group) for group in got)
            ),
            "the groups of an axis are not in the order of their first ranks": (
                as_sets and got != sorted(got)
            ),
        },
        expected=f"{axis} {where}: {want}",
        seen=f"{got}",
    )


@exercise_16_1.check("the number of ranks")
def number_of_ranks(answer) -> None:
    expect_equal(
        answer(2, 3, 1, world_size=6), answer(2, 3, 1), what="the mesh with its world_size"
    )
    for size, more in ((8, 6), (4, 6), (12, 6), (3, 6), (0, 6)):
        what = f"world_size {size} for {more} places"
        expect_raises(ValueError, answer, 2, 3, 1, what=what, mentions=[size], world_size=size)


@exercise_16_1.check("what is no mesh is refused")
def mesh_refuses(answer) -> None:
    for sizes, what in (((0, 2, 2), "dp 0"), ((2, 0, 2), "tp 0"), ((2, 2, 0), "pp 0")):
        expect_raises(ValueError, answer, *sizes, what=what, mentions=[0])
    expect_raises(ValueError, answer, -2, 1, -3, what="dp -2 and pp -3", mentions=[-2])
    for order, seen in (
        (("pp", "tp"), "tp"),
        (("pp", "dp", "dp"), "dp"),
        (("pp", "dp", "tp", "dp"), "dp"),
        (("pp", "cp", "tp"), "cp"),
    ):
        expect_raises(
            ValueError, answer, 2, 2, 2, what=f"the order {order}", mentions=[seen], order=order
        )


# 16.2 gradient_norm

exercise_16_2 = checks_for(
    "16.2",
    name="gradient_norm",
    difficulty=3,
    minutes=30,
    hint=(
        "Two sums of squares on each rank, of the parts and of the copies. All-reduce the first "
        "over tp, add the second, all-reduce over pp; the root comes last."
    ),
    forbidden=("shared.parallel3d.norm.", "torch.nn.utils.clip_grad"),
)


IN_16_BITS = "squares or their sums are kept in 16 bits"
MADE = "a gradient that was None is a tensor afterwards"
NO_GROUP = "it asks for a process group although neither tp nor pp is given"


def root(x: float) -> Tensor:
    return torch.tensor(x).sqrt()


def norms_of_mistakes(world, model, rank) -> dict[str, Tensor]:
    """What mistakes that people make come to on this rank."""
    of = {r: lab.squares_of(world, model, r) for r in range(world.ranks)}
    plane = [of[r] for r in world.plane(rank)]
    tensors, stages = ([of[r] for r in world.column(rank, axis)] for axis in ("tp", "pp"))
    own, one_of_each = of[rank], [of[world.column(r, "tp")[0]] for r in world.column(rank, "pp")]
    parts, copies = sum(s.parts for s in plane), sum(s.copies for s in one_of_each)
    tied = sum(s.tied for s in plane)
    everything = [of[r] for r in range(world.ranks)]
    of_stages = [
        root(sum(of[i].parts for i in world.column(r, "tp")) + of[r].copies)
        for r in world.column(rank, "pp")
    ]
    return {
        "the second copy of a tied weight counts as well": root(parts + copies + tied),
        "what every rank has a copy of counts once for each of them": (
            root(parts + sum(s.copies for s in plane))
        ),
        "what is not cut does not count": root(parts),
        "the parts are not summed over tp": (root(sum(s.parts + s.copies for s in stages))),
        "the other stages' gradients do not count": (
            root(sum(s.parts for s in tensors) + own.copies)
        ),
        "this rank's own gradients alone count": root(own.parts + own.copies),
        "the ranks' norms are added: squares are summed first, and the root comes last": (
            sum((root(s.parts + s.copies) for s in plane), torch.zeros(()))
        ),
        "the stages' norms are added: squares are summed first, and the root comes last": (
            torch.stack(of_stages).sum()
        ),
        "the largest of the stages' norms is taken: their squares are summed": max(of_stages),
        "cut_dim 0 is taken for no cut: whoever has the attribute is cut": (
            root(parts - sum(s.by_rows for s in plane) + copies + sum(s.by_rows for s in stages))
        ),
        "cut_dim 0 is taken for no cut: whoever has the attribute counts on every rank of tp": root(
            parts + copies - sum(s.by_rows for s in plane) + sum(s.by_rows for s in one_of_each)
        ),
        "tied_copy = False is taken for a second copy": root(parts + copies - tied),
        "the copies of the first stage alone count": root(parts + stages[0].copies),
        "None is given to torch.distributed as a group: there it is all ranks, here nothing is "
        "sent": root(lab.none_is_all_ranks(world, of, rank)),
        "the copies are this stage's alone: those of the other stages count as well": (
            root(sum(s.parts for s in everything) + own.copies)
        ),
        "the root is missing": torch.tensor(parts + copies),
        "the sum runs over all ranks of the world, copies of the model included": (
            root(sum(s.parts for s in everything) + world.dp * copies)
        ),
        "the mean of the parts is taken, not their sum": root(parts / world.tp + copies),
    }


def expect_messages(world, seen) -> None:
    """A number over tp and one over pp, at the most."""
    axes = sum(size > 1 for size in (world.tp, world.pp))
    at_most = 2 if world.single else axes
    sent = ", ".join(f"{c.op} of {c.num_bytes} bytes" for c in seen.calls[:4]) or "nothing"
    sent += f" and {len(seen.calls) - 4} more" if len(seen.calls) > 4 else ""
    recognise(
        {
            "something is sent although neither tp nor pp is given: None is no group here": (
                at_most == 0 and bool(seen.calls)
            ),
            "whole gradients travel: a sum of squares is one number": any(
                c.num_bytes > 8 for c in seen.calls
            ),
            "a message for each parameter: the sum of all squares is one number": (
                len(seen.calls) > 2
            ),
            "several numbers travel in one message: copies need not be sent, all have them": any(
                count > 1 for count in seen.numbers
            ),
        },
        expected=f"at most {at_most} messages of one number ({world.name})",
        seen=sent,
    )


def expect_number(value, what) -> None:
    """A float32 number."""
    recognise(
        {
            "nothing comes back": value is None,
            "a Python number comes back, not a tensor": isinstance(value, (int, float)),
            "what comes back is no tensor": not isinstance(value, Tensor),
            "a number is a tensor of shape (): this one has a dimension": (
                isinstance(value, Tensor) and value.shape == (1,)
            ),
            "more than one number comes back": isinstance(value, Tensor) and value.shape != (),
            "the norm comes back in float64": (
                isinstance(value, Tensor) and value.dtype == torch.float64
            ),
        },
        expected=f"{what} as a float32 tensor of shape ()",
        seen=f"{value.dtype}, {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else type(value).__name__,
    )


def explained(world, every) -> Callable[[int], dict[str, Tensor]]:
    """By rank what a mistake comes to, of those that explain every rank's norm."""

    @functools.cache
    def rows() -> list[dict[str, Tensor]]:
        found = [norms_of_mistakes(world, seen.model, rank) for rank, seen in enumerate(every)]
        pairs = [(seen.result.item(), row) for seen, row in zip(every, found, strict=True)]
        off = {
            words: max(abs(got - row[words].item()) / max(abs(got), 1e-30) for got, row in pairs)
            for words in found[0]
        }
        # The nearer first: in one draw of some hundred, two mistakes are this near by chance.
        fit = sorted((w for w in off if off[w] <= 1e-4), key=lambda words: off[words] > 1e-5)
        return [{words: row[words] for words in fit} for row in found]

    return lambda rank: rows()[rank]


def expect_norm(world, seen, rank, mistakes=lambda rank: {}) -> None:
    """The norm on one rank, which torch has of whole gradients."""
    what = f"the norm on rank {rank} of {world.name}"
    want = torch.nn.utils.get_total_norm(lab.whole_gradients(seen.model))
    expect_number(seen.result, what)
    got = seen.result.float()
    off = (got - want).abs().item()
    recognise(
        {
            IN_16_BITS: (
                world.dtype == lab.BF16
                and off < 0.05 * want.item()
                and (seen.result.dtype != torch.float32 or off > 1e-4 * want.item())
            )
        },
        expected=f"{what} = {want.item():.7g} in float32",
        seen=f"{seen.result.item():.7g} in {seen.result.dtype}",
    )
    right = math.isclose(got.item(), want.item(), rel_tol=1e-6)
    expect_close(seen.result, want, what=what, looks_like={} if right else mistakes(rank))
    changed = [n for n, x in seen.before.items() if not same(x, seen.after[n])]
    recognise(
        {
            MADE: bool(seen.made),
            "gradients are changed": bool(changed or seen.replaced),
        },
        expected="every gradient as it was",
        seen=f"{(seen.made + changed + seen.replaced)[:1]} is another",
    )


def same(x, y) -> bool:
    return y is not None and x.dtype == y.dtype and torch.equal(x, y)


@exercise_16_2.check("the norm of the whole model on every rank")
def norms(answer) -> None:
    for world in lab.NORMS:
        every = lab.on_meshes(answer, False)(world)
        for rank, seen in enumerate(every):
            expect_number(seen.result, f"the norm on rank {rank} of {world.name}")
        for rank, seen in enumerate(every):
            expect_norm(world, seen, rank, explained(world, every))
            expect_messages(world, seen)


@exercise_16_2.check("one process without a group")
def norm_alone(answer) -> None:
    seen = without_group(
        lab.observe,
        answer,
        False,
        fresh_seed(),
        lab.ALONE,
        None,
        mistake=NO_GROUP,
        expected="the norm, without any message",
        hint="None is no axis",
    )
    expect_norm(lab.ALONE, seen, 0)
    p = torch.nn.Parameter(torch.ones(300, dtype=lab.BF16))
    p.grad = torch.full((300,), 1.0625, dtype=lab.BF16)  # no 16-bit number is near its square
    got, want = answer([p]), math.sqrt(300) * 1.0625
    expect_number(got, "the norm of one gradient of 16 bits")
    recognise(
        {IN_16_BITS: got.dtype != torch.float32 or abs(got.item() - want) > 1e-4 * want},
        expected=f"the norm of one gradient of 16 bits = {want:.7g} in float32",
        seen=f"{got.item():.7g} in {got.dtype}",
    )


# 16.2b clip_gradients

exercise_16_2b = checks_for(
    "16.2b",
    name="clip_gradients",
    difficulty=2,
    minutes=15,
    hint=(
        "parameters = list(parameters): they are gone through twice. The factor is "
        "torch.clamp(max_norm / (norm + 1e-6), max=1.0); mul_ every gradient with it."
    ),
    in_place=True,
    forbidden=(
        "shared.parallel3d.norm.clip",
        "shared.parallel3d.norm.scale",
        "torch.nn.utils.clip_grad",
    ),
)


def clipped_otherwise(world, seen, rank, name, limit) -> dict[str, Tensor | Callable[[], Tensor]]:
    """What mistakes that people make leave of one gradient."""
    x = seen.before[name].float()
    norm = torch.nn.utils.get_total_norm(lab.whole_gradients(seen.model))
    own = torch.nn.utils.get_total_norm([each.float() for each in seen.before.values()])
    factor = min(1.0, limit / (norm.item() + 1e-6))

    def among(axis: str) -> float:
        # The factor by the norm of this rank's group along one axis.
        of = [lab.squares_of(world, seen.model, r) for r in world.column(rank, axis)]
        copies = of if axis == "pp" else of[:1]
        known = sum(s.parts for s in of) + sum(s.copies for s in copies)
        return min(1.0, limit / (math.sqrt(known) + 1e-6))

    nothing = "no gradient is scaled"
    if world.once:
        nothing = "the parameters come as a generator: the norm has gone through them, and none "
        nothing += "are left to be scaled"
    everything = all(same(y, seen.after[n]) for n, y in seen.before.items())
    left = {nothing: x} if everything else {}
    if seen.model[name].tied:
        left |= {"the second copy of a tied weight is not scaled: from now on the two differ": x}
    if seen.model[name].dim is None:
        left |= {"what is not cut is not scaled": x}
    return left | {
        "each rank clips by the norm of its own gradients": x * min(1.0, limit / own.item()),
        "gradients are scaled up to max_norm: smaller ones stay as they are": (
            x * limit / norm if limit > norm else x
        ),
        "the 1e-6 beside the norm is missing": x * min(1.0, limit / norm.item()),
        "each parameter is clipped by its own norm": (
            x * min(1.0, limit / (x.norm().item() + 1e-6))
        ),
        "each number is clipped, not the norm": x.clamp(-limit, limit),
        "each number is cut off at the factor: gradients are multiplied by it": (
            x.clamp(-factor, factor)
        ),
        "max_norm is divided by the square of the norm": (
            x * min(1.0, limit / (norm.item() ** 2 + 1e-6))
        ),
        "they are scaled twice": x * factor**2,
        "they are divided by the norm, and max_norm is not used": x / norm,
        "the norm lacks the parts of the other ranks of tp": lambda: x * among("pp"),
        "the norm lacks the other stages: pp is not passed on": lambda: x * among("tp"),
    }


def expect_clipped(world, seen, rank) -> None:
    """The gradients on one rank are parts of those that torch has clipped."""
    where = f"on rank {rank} of {world.name}"
    whole = lab.whole_gradients(seen.model)
    limit = lab.max_norm_of(world, seen.model)
    holders = [torch.nn.Parameter(torch.zeros_like(x)) for x in whole]
    for holder, x in zip(holders, whole, strict=True):
        holder.grad = x.clone()
    norm = torch.nn.utils.clip_grad_norm_(holders, limit)
    names = (n for n, e in seen.model.items() if e.gradient is not None and not e.tied)
    clipped = dict(zip(names, holders, strict=True))
    recognise(
        {
            "the weights are scaled: it is their gradients that are clipped": bool(seen.weights),
            MADE: bool(seen.made),
            "the gradients lie in new tensors: they are to be scaled in place": bool(seen.replaced),
            "a gradient has another dtype": any(
                y is not None and y.dtype != seen.before[n].dtype for n, y in seen.after.items()
            ),
        },
        expected=f"the same tensors in .grad {where}, scaled",
        seen=f"{(seen.weights + seen.made + seen.replaced)[:1]}",
    )
    for name in seen.before:
        each = seen.model[name]
        want = clipped["embedding" if each.tied else name].grad
        want = want if each.dim is None else want.chunk(world.tp, each.dim)[world.place(rank)["tp"]]
        expect_close(
            seen.after[name],
            want.to(world.dtype),
            what=f"the gradient of {name} {where}",
            looks_like=clipped_otherwise(world, seen, rank, name, limit),
            atol=1e-4 * want.abs().max().item(),
            rtol=2e-2 if world.dtype == lab.BF16 else 1e-4,
        )
    expect_number(seen.result, f"the norm {where}")
    after = {"what comes back is the norm of the clipped gradients": torch.tensor(limit)}
    what = f"the norm before clipping {where}"
    expect_close(seen.result, norm, what=what, looks_like=after, atol=0)


@exercise_16_2b.check("the gradients that torch clips in one process")
def clips(answer) -> None:
    for world in lab.CLIPS:
        for rank, seen in enumerate(lab.on_meshes(answer, True)(world)):
            expect_clipped(world, seen, rank)


@exercise_16_2b.check("one process without a group, and max_norm's edges")
def clip_alone(answer) -> None:
    for limit in (0.5, 0.996, 0.0):
        world = lab.World(limit=limit)
        work = functools.partial(lab.observe, answer, True, fresh_seed(), world, None)
        seen = accepted(
            lambda work=work: without_group(
                work,
                mistake=NO_GROUP,
                expected="clipped gradients, without any message",
                hint="None is no axis",
            ),
            what=f"a max_norm of {limit:g} times the norm",
        )
        expect_clipped(world, seen, 0)
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    expect_raises(ValueError, answer, [p], -1.5, what="max_norm -1.5", mentions=[-1.5])


# 16.3 train_step_3d

exercise_16_3 = checks_for(
    "16.3",
    name="train_step_3d",
    difficulty=4,
    minutes=45,
    hint=(
        "Let each part of the loss be a part of one mean: a sum of losses over the number of all "
        "targets of the whole batch. What is left to do is then to add, and to divide by nothing."
    ),
    in_place=True,
    forbidden=("shared.parallel3d.engine.", "shared.parallel3d.replicas."),
)
Whole = dict[str, Tensor]  # gradients of the model by name


def clipped(twin, whole: Whole) -> Whole:
    factor = min(1.0, twin.limit / (steps_lab.norm_of(whole) + 1e-6))
    return {name: factor * x for name, x in whole.items()}


def expect_gradients(world, twin, seen, step) -> None:
    """At the optimizer's step each rank has its parts of one process's gradients."""
    right = clipped(twin, steps_lab.joined(twin.right, world.tied))
    least = 2e-5 * max(x.abs().max().item() for x in right.values())
    places = [world.place(rank) for rank in range(len(seen))]

    def off(each, place, gradient: overlooked.Part) -> Iterator[str]:
        """The names of what a rank has otherwise."""
        for name, got in each.steps[0].items():
            want = gradient(name, each.dims[name], place)
            if got.shape != want.shape or not torch.allclose(got, want, 1e-4, least):
                yield name

    def good(name: str, dim: int | None, place: dict[str, int]) -> Tensor:
        return overlooked.part_of(world, right[name], dim, place)

    for rank, (each, place) in enumerate(zip(seen, places, strict=True)):
        name = next(off(each, place, good), None)
        if name is None:
            continue
        named = (
            (words, part)
            for words, part in overlooked.gradients(world, twin)
            if all(not [*off(e, p, part)] for e, p in zip(seen, places, strict=True))
        )
        words, part = next(named, ("", good))
        dim = each.dims[name]
        expect_close(
            each.steps[0][name],
            good(name, dim, place),
            what=f"the gradient of {name} at step {step} on rank {rank} of {world.name}",
            looks_like={words: part(name, dim, place)} if words else {},
            rtol=1e-4,
            atol=least,
        )


def expect_numbers(world, twin, seen, step) -> None:
    """Loss and norm, the same on every rank."""
    norm = steps_lab.norm_of(steps_lab.joined(twin.right, world.tied))
    places = [world.place(rank) for rank in range(len(seen))]
    pairs = list(zip(seen, places, strict=True))
    for what, want, mistakes in (
        ("norm", norm, [overlooked.norms(world, twin, each, place) for each, place in pairs]),
        ("loss", twin.loss, [overlooked.losses(world, twin, place) for place in places]),
    ):
        got = [getattr(each, what) for each in seen]
        far = [rank for rank, x in enumerate(got) if not math.isclose(x, want, rel_tol=1e-4)]
        named = (
            rows[0][0]
            for rows in zip(*mistakes, strict=True)  # one mistake on all ranks
            if all(
                math.isclose(x, value, rel_tol=1e-4, abs_tol=1e-12)
                for x, (_, value) in zip(got, rows, strict=True)
            )
        )
        expect(
            not far,
            mistake=next(named, "") if far else "",
            expected=f"the {what} of step {step} on every rank of {world.name} = {want:.6g}",
            seen=f"{got[far[0]]:.6g} on rank {far[0]}" if far else "",
        )


def expect_once(world, seen, step) -> None:
    """One run of the pipeline, one step of the optimizer."""
    most = min(world.pp, world.num_micro_batches)
    for rank, each in enumerate(seen):
        recognise(
            {
                "the optimizer makes no step": not each.steps,
                "the optimizer makes more than one step": len(each.steps) > 1,
                "the pipeline does not run": each.runs == 0,
                "the pipeline runs once for each micro-batch, while its other stages wait: it "
                "takes all of them together": 1 < each.runs == world.num_micro_batches,
                "the pipeline runs more than once: it takes all micro-batches together": (
                    each.runs > 1
                ),
                "more micro-batches are in flight than 1F1B has": each.in_flight > most,
            },
            expected=f"one run of the pipeline and one step, {most} micro-batches in flight at the "
            f"most (step {step} of {world.name})",
            seen=f"{each.runs} runs, {len(each.steps)} steps and {each.in_flight} micro-batches on "
            f"rank {rank}",
        )


def expect_travel(world, seen, step) -> None:
    """Over dp each gradient travels once."""
    dp = steps_lab.groups_of(world.sizes, world.order)["dp"]
    for rank, each in enumerate(seen if world.dp > 1 else ()):
        group = next(tuple(members) for members in dp if rank in members)
        sent = sum(c.num_bytes for c in each.calls if c.ranks == group and c.num_bytes > 8)
        size = sum(x.nbytes for x in each.steps[0].values())
        recognise(
            {
                "gradients travel over dp more than once in a step: they do when all micro-batches "
                "are through": sent >= 1.9 * size,
                "weights or something else travel over dp as well as gradients": sent > 1.4 * size,
            },
            expected=f"{size:,} bytes of gradients over dp on rank {rank} of {world.name}",
            seen=f"{sent:,} bytes at step {step}",
        )


def whole_steps(answer, worlds) -> None:
    for world in worlds:
        alone, by_rank = steps_lab.on_meshes(answer)(world)
        for step, twin in enumerate(alone):
            seen = [steps[step] for steps in by_rank]
            expect_once(world, seen, step + 1)
            expect_gradients(world, twin, seen, step + 1)
            expect_numbers(world, twin, seen, step + 1)
            expect_travel(world, seen, step + 1)


@exercise_16_3.check("the gradients of one process, on dp 2 x tp 2 x pp 2")
def composed(answer) -> None:
    whole_steps(answer, steps_lab.WORLDS[:2])


@exercise_16_3.check("four stages without replicas, four replicas without stages")
def other_meshes(answer) -> None:
    whole_steps(answer, steps_lab.WORLDS[2:])


# 16.4 seconds


def not_default(spec) -> str:
    """A description by what is special about it."""
    given = [f for f in fields(spec) if f.default is MISSING or getattr(spec, f.name) != f.default]
    return f"{type(spec).__name__}({', '.join(f'{f.name}={getattr(spec, f.name)}' for f in given)})"


def nearly(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)


def expect_seconds(answer, lab, cases) -> None:
    """An answer has the right numbers of all cases; a mistake that explains them is named."""
    found = []
    for case in cases:
        got = answer(**case)
        several = isinstance(lab.right(**case), tuple)
        pair = isinstance(got, tuple) and len(got) == 2 and all(map(is_number, got))
        expect(
            pair if several else is_number(got),
            expected="two numbers" if several else f"a number of seconds for {case}",
            seen=f"{got!r:.80}",
        )
        found.append(got if several else (got,))

    def wanted(function) -> list[tuple[float, ...]]:
        numbers = [function(**case) for case in cases]
        return [each if isinstance(each, tuple) else (each,) for each in numbers]

    right = wanted(lab.right)
    off = [i for i, got in enumerate(found) if not all(map(nearly, got, right[i]))]
    others = {words: wanted(other) for words, other in lab.mistakes.items()}

    def explaining(places) -> list[str]:
        def same(got, numbers) -> bool:
            return all(all(map(nearly, got[i], numbers[i])) for i in places)

        return [words for words, seen in alike(found, others, same).items() if seen]

    # Asked of a right answer, too: so a test hears that no two mistakes have the same numbers.
    named = explaining(range(len(found)))
    if not off:
        return
    if not named and len(in_part := explaining(off)) == 1:  # a mistake made in one branch alone
        named = in_part
    mistake = next(iter(named), "")
    for case, got, want in zip(cases, found, right, strict=True):
        for name, a, b in zip(lab.names, got, want, strict=True):
            said = ", ".join(f"{key} {value}" for key, value in case.items())
            expect(
                nearly(a, b),
                mistake=mistake,
                expected=f"{name} = {b:.6g} for {said}",
                seen=f"{a:.6g}",
            )


def is_number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


exercise_16_4a = checks_for(
    "16.4a",
    name="compute_and_bubble",
    difficulty=2,
    minutes=15,
    hint=(
        "Begin with the rows of one rank and m 1: how many forwards do a layer and the head take? "
        "Then those of two ranks that differ. Divide the bubble by the compute."
    ),
)


@exercise_16_4a.check("compute and bubble, as in the table")
def stages_and_waiting(answer) -> None:
    expect_seconds(answer, seconds_lab.PIPELINE, seconds_lab.pipeline_cases())


exercise_16_4b = checks_for(
    "16.4b",
    name="tensor_parallel_seconds",
    difficulty=2,
    minutes=10,
    hint=(
        "The rows of one layer and one micro-batch, without latency: divide by 4, then look at how "
        "the quotient grows with tp. Where a node is too small, compute the rate from the seconds."
    ),
    forbidden=("shared.planner.seconds.",),
)


@exercise_16_4b.check("the messages within layers, as in the table")
def tensor_messages(answer) -> None:
    expect_seconds(answer, seconds_lab.TENSOR, seconds_lab.tensor_cases())


exercise_16_4c = checks_for(
    "16.4c",
    name="data_parallel_seconds",
    difficulty=2,
    minutes=15,
    hint=(
        "First the rows without overlap: how many messages of (dp - 1) / dp of the bytes does each "
        "stage send? Then subtract from these the rows with overlap."
    ),
    forbidden=("shared.planner.seconds.",),
)


@exercise_16_4c.check("what compute does not hide, as in the table")
def data_messages(answer) -> None:
    expect_seconds(answer, seconds_lab.DATA, seconds_lab.data_cases())


# 16.5 best_plans

exercise_16_5 = checks_for(
    "16.5",
    name="best_plans",
    difficulty=3,
    minutes=30,
    hint=(
        "Three loops: tp over the divisors of cluster.gpus, pp over those of what is left, and "
        "variants. One list of Choices, one sort with a key of two numbers."
    ),
    forbidden=("shared.planner.search.",),
)


def searched(answer, question, **more) -> list[Choice]:
    """What an answer finds where there are plans that fit."""
    try:
        found = answer(question.model, question.cluster, question.batch, **more)
    except ValueError as error:
        count = more.get("count", 5)
        few = count > len(search_lab.fitting(question)) and finds_one(answer, question)
        cannot_be = "a layout that cannot be ends the search: it is left out, and others are tried"
        none = "nothing is found where some plans fit"
        wrong(
            "fewer plans fit than were asked for, and that is an error: they come back"
            if few
            else (cannot_be if search_lab.some_cannot_be(question) else none),
            expected=f"plans for {question}",
            seen=f"{type(error).__name__}: {error}",
        )
    fine = type(found) is list and all(type(each) is Choice for each in found)
    kind = type(found).__name__ if type(found) is not list else f"{found!r:.80}"
    expect(fine, expected=f"a list of Choice for {question}", seen=kind)
    return found


def finds_one(answer, question) -> bool:
    """Whether the search ends well where one plan is asked for."""
    try:
        return len(answer(question.model, question.cluster, question.batch, count=1)) == 1
    except ValueError:
        return False


def expect_possible(question, choice) -> None:
    """A plan can be, and fits; its bytes and seconds are its own."""
    plan, cluster, where = choice.plan, question.cluster, f"for {question}"
    recognise(
        {
            "a plan does not take all GPUs": plan.num_gpus < cluster.gpus,
            "a plan takes more GPUs than there are": plan.num_gpus > cluster.gpus,
            "tensor parallelism reaches over nodes": plan.tp > cluster.gpus_per_node,
            "a plan's step has another number of sequences": plan.batch != question.batch,
        },
        expected=f"dp x tp x pp = {cluster.gpus}, tp of {cluster.gpus_per_node} at most, "
        f"{question.batch} sequences {where}",
        seen=f"{not_default(plan)}: {plan.num_gpus} GPUs, {plan.batch} sequences",
    )
    limit = USABLE * cluster.memory
    memory = memory_per_rank(question.model, plan)
    whole = gathered_bytes(question.model, plan)
    needed = memory.total + whole
    recognise(
        {
            "the units that ZeRO-3 has whole for a moment are left out": (
                memory.total <= limit < needed
            ),
            "a plan fills more of the memory than can be used": limit < needed <= cluster.memory,
            "a plan does not fit: it is as fast as it likes, no GPU has that memory": (
                needed > limit
            ),
        },
        expected=f"at most {USABLE:.0%} of {cluster.memory:,.0f} bytes {where}",
        seen=f"{needed:,}, of which gathered {whole:,}, with {not_default(plan)}",
    )
    recognise(
        {
            "the bytes of units that are whole for a moment are in a Choice's memory: it is that "
            "of memory_per_rank": choice.memory.total == needed != memory.total
        },
        expected=f"{memory.total:,} bytes with {not_default(plan)} {where}",
        seen=f"{choice.memory.total:,}, of which gathered {whole:,}",
    )
    seconds = step_time(question.model, plan, cluster).total
    own = {"bytes": (choice.memory.total, memory.total), "seconds": (choice.time.total, seconds)}
    for what, (got, want) in own.items():
        expect(
            nearly(got, want),
            mistake="a Choice has the numbers of another plan",
            expected=f"{want:,.7g} {what} with {not_default(plan)} {where}",
            seen=f"{got:,.7g}",
        )


def exposed_of(question, found) -> list[float]:
    """Seconds of the plans with nothing hidden behind compute."""
    return [search_lab.exposed(question.model, each.plan, question.cluster) for each in found]


def expect_order(question, found) -> None:
    """The fastest first, of equally fast ones the one with less memory."""
    times, sizes = exposed_of(question, found), [each.memory.total for each in found]
    hidden = [each.time.total for each in found]
    fastest = sorted(each.hidden for each in search_lab.fitting(question))[: len(hidden)]
    sorted_up, sorted_down = in_order(times), in_order(times[::-1])
    larger_first = any(
        size > after
        and search_lab.equally_fast(question.model, (one.plan, other.plan), question.cluster)
        for (one, other), (size, after) in zip(
            itertools.pairwise(found), itertools.pairwise(sizes), strict=True
        )
    )
    recognise(
        {
            "plans are ranked by seconds that hide messages behind compute: without overlap they "
            "are ranked": not sorted_up and in_order(hidden) and all(map(nearly, hidden, fastest)),
            "the slowest comes first": sorted_down and not sorted_up,
            "they are in the order of their memory": not sorted_up and sizes == sorted(sizes),
            "they are not in the order of their seconds": not sorted_up,
            "of equally fast plans the one with more memory comes first": larger_first,
        },
        expected=f"the fastest first for {question}",
        seen=", ".join(f"{each:.4g} s" for each in times[:4]),
    )


def in_order(times: Sequence[float]) -> bool:
    """Whether no time is above the next one by more than rounding."""
    return all(a <= b or nearly(a, b) for a, b in itertools.pairwise(times))


@exercise_16_5.check("the fastest plans that fit, of all that there are")
def best(answer) -> None:
    questions = [search_lab.TIGHT, search_lab.ROOMY, search_lab.SIXES, search_lab.LONE]
    questions += [search_lab.LARGE, search_lab.drawn()]
    answers = [searched(answer, question) for question in questions]
    once = all(len({(c.plan.dp, c.plan.tp) for c in found}) == len(found) for found in answers)
    for question, found in zip(questions, answers, strict=True):
        for choice in found:
            expect_possible(question, choice)
        expect_order(question, found)
        wanted = search_lab.fitting(question)[:5]
        times = exposed_of(question, found)
        pairs = list(itertools.zip_longest(times, (each.seconds for each in wanted)))
        at = next((i for i, (a, b) in enumerate(pairs) if not (a and b and nearly(a, b))), None)
        if at is None:
            continue
        recognise(
            {
                "more plans come back than were asked for": len(found) > len(wanted),
                "each layout comes once: all its variants are plans of their own": once,
                "a plan that fits and is faster is left out": True,
            },
            expected=f"{wanted[min(at, len(wanted) - 1)].seconds:.7g} s as plan {at + 1} of "
            f"{len(wanted)}, with {not_default(wanted[min(at, len(wanted) - 1)].plan)}, for "
            f"{question}",
            seen=f"{times[at]:.7g} s" if at < len(times) else f"{len(times)} plans",
        )


@exercise_16_5.check("as many as are asked for, or as there are")
def how_many(answer) -> None:
    question = search_lab.SIXES
    for count in (1, 3, 10_000):
        want = min(count, len(search_lab.fitting(question)))
        got = searched(answer, question, count=count)
        for choice in got:
            expect_possible(question, choice)
        expect_equal(len(got), want, what=f"the number of plans for count={count}")
    edge = search_lab.to_the_last_byte()
    found = searched(answer, edge, count=10_000)
    expect_equal(
        len(found),
        len(search_lab.fitting(edge)),
        what=f"the number of plans that fit for {edge}",
        mistake="a plan that needs exactly what can be used is left out",
    )


@exercise_16_5.check("what is said where no plan fits")
def nothing_fits(answer) -> None:
    questions = search_lab.FULL, search_lab.LONG, search_lab.LONGER, search_lab.GATHERED
    expect_kinds({question: complaint(answer, question) for question in questions})
    for question, words in (
        (search_lab.NO_WAY, "a search on 7 GPUs for 6 heads, 6 layers and 5 sequences"),
        (replace(search_lab.FULL, batch=0), "a batch of 0"),
        (replace(search_lab.FULL, batch=-4), "a batch of -4"),
    ):
        args, mentions = (question.model, question.cluster, question.batch), []
        mentions = [question.batch] if question.batch < 1 else mentions
        expect_raises(ValueError, answer, *args, what=words, mentions=mentions)


def complaint(answer, question) -> str:
    """What an answer says where no plan fits."""
    what = f"a search without a plan that fits ({question})"
    args = question.model, question.cluster, question.batch
    expect_raises(ValueError, answer, *args, what=what)
    try:
        answer(*args)
    except ValueError as error:
        return str(error)
    return ""


OTHER_PLANS: dict[str, Callable[[list], object]] = {
    "the kind is that of a plan that misses by far more: the one that misses the least counts": (
        lambda plans: max(plans, key=lambda each: each.needed)
    ),
    "the plan that misses the least is found without gathered_bytes: both together must fit": (
        lambda plans: min(plans, key=lambda each: each.memory.total)
    ),
}


def expect_kinds(said: Mapping[search_lab.Question, str]) -> None:
    """Each message names the kind that is the most of the plan that misses the least."""
    plans = {question: search_lab.every_plan(question) for question in said}
    near = {q: min(plans[q], key=lambda each: each.needed) for q in said}
    kinds = {q: search_lab.most(each) for q, each in near.items()}
    named = {
        q: sorted((k for k in search_lab.KINDS if k in text), key=text.index)
        for q, text in said.items()
    }
    alike = len({(*each, *map(said[q].count, each)) for q, each in named.items()}) == 1
    explained = {
        words: all(named[q] == [search_lab.most(other(plans[q]))] for q in said)
        for words, other in OTHER_PLANS.items()
    }
    explained = explained if sum(explained.values()) == 1 else {}
    for question, text in said.items():
        recognise(
            {
                "no kind of bytes is named": not named[question],
                "several kinds are named, the same for every model: say which is the most": (
                    alike and len(named[question]) > 1
                ),
                "one kind is named for every model, whatever is the most": (
                    alike and kinds[question] not in named[question]
                ),
                **{
                    words: fits and kinds[question] not in named[question]
                    for words, fits in explained.items()
                },
                "a kind is named that is not the most of the plan that misses the least": (
                    kinds[question] not in named[question]
                ),
            },
            expected=f"a message that names {kinds[question]}, the most of "
            f"{not_default(near[question].plan)}, for {question}",
            seen=f"{text!r}",
        )
