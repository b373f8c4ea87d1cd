"""Lesson 16: what tells a right answer from a wrong one.

Meshes are held against views of torch, norms and clipping against torch.nn.utils on gradients that
one process has.
"""

import functools
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace

import torch
from torch import Tensor

from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    accepted,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
    without_group,
    wrong,
)
from shared.exercises.seeds import fresh_seed
from shared.laboratories import lesson16 as lab
from shared.laboratories import lesson16_bytes as bytes_lab
from shared.laboratories import lesson16_counted as counting
from shared.laboratories import lesson16_overlooked as overlooked
from shared.laboratories import lesson16_search as search_lab
from shared.laboratories import lesson16_seconds as seconds_lab
from shared.laboratories import lesson16_tried as tried
from shared.planner.outcomes import FITTED, Choice, Fitted, Memory, StepTime
from shared.planner.specs import Cluster, ModelSpec, Plan
from shared.planner.variants import USABLE

# 16.1 build_mesh

exercise_16_1 = checks_for(
    "16.1",
    name="build_mesh",
    difficulty=2,
    minutes=20,
    hints=[
        "Write down the ranks of dp 2 x tp 2 x pp 2 as a box. A rank's coordinates are the digits "
        "of its number, the last axis of order is the last digit; the groups of an axis are the "
        "ranks that agree in the two other digits.",
    ],
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
    for words, other in WRONG_MESHES.items():
        pairs = [(got, other(*case)) for case, got in zip(cases, found, strict=True)]
        if all(in_any_order(got) == in_any_order(its) for got, its in pairs):
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
    hints=[
        "Two sums of squares on each rank, of the parts and of the copies. All-reduce the first "
        "over tp, add the second, all-reduce over pp; the root comes last.",
    ],
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
    hints=[
        "parameters = list(parameters): they are gone through twice. The factor is "
        "torch.clamp(max_norm / (norm + 1e-6), max=1.0); mul_ every gradient with it.",
    ],
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


# 16.3 memory_per_rank

Numbers = dict[str, float]  # by what they are


def not_default(spec) -> str:
    """A description by what is special about it."""
    given = [f for f in fields(spec) if f.default is MISSING or getattr(spec, f.name) != f.default]
    return f"{type(spec).__name__}({', '.join(f'{f.name}={getattr(spec, f.name)}' for f in given)})"


def expect_as_right(
    found: Sequence[Numbers],
    cases: Sequence[tuple],
    right: Callable[..., Numbers],
    mistakes: Mapping[str, Callable[..., Numbers]],
    equal: Callable[[float, float], bool] = lambda a, b: a == b,
) -> None:
    """What an answer says of every case is right; a mistake that explains all cases is named."""

    def as_found(wanted: Sequence[Numbers]) -> bool:
        pairs = zip(found, wanted, strict=True)
        return all(equal(got[name], want[name]) for got, want in pairs for name in want)

    wanted = [right(*case) for case in cases]
    if as_found(wanted):
        return
    named = (words for words, other in mistakes.items() if as_found([other(*c) for c in cases]))
    mistake = next(named, "")
    for case, got, want in zip(cases, found, wanted, strict=True):
        for name in want:
            expect(
                equal(got[name], want[name]),
                mistake=mistake,
                expected=f"{name} = {want[name]:,} for {' and '.join(map(not_default, case))}",
                seen=f"{got[name]:,}",
            )


exercise_16_3 = checks_for(
    "16.3",
    name="memory_per_rank",
    difficulty=4,
    minutes=50,
    hints=[
        "Write the parameters of one pipeline rank first: model.layer.on(plan.tp) for each of "
        "sum(plan.layers(model)[rank]) layers, the embeddings on the first, the head on the last.",
        "1F1B: rank s keeps min(pp - s, num_micro_batches) micro-batches at once; in_flight says "
        "so for interleaving as well, of each of a rank's stages, and for every moment.",
    ],
    forbidden=("shared.planner.memory.",),
)
STATES = bytes_lab.KINDS
KINDS = (*STATES, "activations")


def expect_memory(case, got) -> None:
    """One Memory for each pipeline rank, in whole numbers, within that of the fullest."""
    _, plan = case
    fine = type(got) is Memory and type(got.stages) is tuple and len(got.stages) == plan.pp
    fine = fine and all(type(each) is Memory for each in got.stages)
    where = f"for {' and '.join(map(not_default, case))}"
    recognise(
        {"there is not one Memory for each pipeline rank in stages": not fine},
        expected=f"a Memory whose stages are a tuple of {plan.pp} {where}",
        seen=f"{type(got).__name__} with stages {getattr(got, 'stages', None)!r:.80}",
    )
    ranks = [each.rank for each in got.stages]
    expect_equal(
        ranks,
        [*range(plan.pp)],
        what=f"the rank of each of stages {where}",
        mistake="a Memory in stages does not say which pipeline rank it is",
    )
    sizes = [getattr(each, kind) for each in (got, *got.stages) for kind in KINDS]
    recognise(
        {"bytes are no whole numbers: parts are rounded up": any(n != int(n) for n in sizes)},
        expected=f"whole numbers {where}",
        seen=f"{next((n for n in sizes if n != int(n)), 0):,}",
    )


def kinds_of(each: Memory) -> dict[str, int]:
    return {kind: getattr(each, kind) for kind in KINDS}


CHOSEN: dict[str, Callable[[tuple[Memory, ...]], Memory]] = {
    "what comes back is the first rank, which is not always the fullest": lambda of: of[0],
    "what comes back is the last rank, which is not always the fullest": lambda of: of[-1],
    "what comes back is the emptiest rank": lambda of: min(of, key=lambda each: each.total),
} | {
    f"what comes back is the rank with the most {kind}: its total is not always the largest": (
        functools.partial(max, key=lambda each, kind=kind: getattr(each, kind))
    )
    for kind in KINDS
}


def chosen_otherwise(found: Sequence[Memory]) -> str:
    """By what a rank was chosen in every case, if not by its total."""
    for words, pick in CHOSEN.items():
        if all(kinds_of(got) == kinds_of(pick(got.stages)) for got in found):
            return words
    return "what comes back is not the fullest rank"


def expect_fullest(case, got, chosen: str) -> None:
    """The outer Memory is that of the rank with the most."""
    totals = [each.total for each in got.stages]
    largest = got.stages[totals.index(max(totals))]
    outer = kinds_of(got)
    several = len(set(totals)) > 1
    most_of_each = {kind: max(getattr(each, kind) for each in got.stages) for kind in KINDS}
    recognise(
        {
            "all ranks are added up: each has a memory of its own": (
                several and got.total == sum(totals)
            ),
            "the largest of each kind comes back: they are not on one rank": (
                outer == most_of_each and got.total > max(totals)
            ),
            chosen: got.total != max(totals),
        },
        expected=f"{max(totals):,} bytes, those of rank {largest.rank} of {totals}, for "
        f"{' and '.join(map(not_default, case))}",
        seen=f"{got.total:,}",
    )
    expect_equal(
        totals[got.rank],
        max(totals),
        what="the total of the rank that comes back",
        mistake="the outer Memory does not say which pipeline rank it is",
    )


def by_rank(kinds, got) -> Numbers:
    """The numbers of all pipeline ranks by name."""
    return {
        f"{kind} on pipeline rank {rank}": getattr(each, kind)
        for rank, each in enumerate(got.stages)
        for kind in kinds
    }


def states_of(count) -> Callable[..., Numbers]:
    def numbers(model, plan) -> Numbers:
        return {
            f"{kind} on pipeline rank {rank}": number
            for rank in range(plan.pp)
            for kind, number in zip(STATES, count.states(model, plan, rank), strict=True)
        }

    return numbers


def activations_of(count) -> Callable[..., Numbers]:
    return lambda model, plan: {
        f"activations on pipeline rank {rank}": count.activations(model, plan, rank)
        for rank in range(plan.pp)
    }


@exercise_16_3.check("parameters, gradients and optimizer, item by item")
def states(answer) -> None:
    cases = [*tried.byte_cases(), *tried.in_float32()]
    found = [answer(*case) for case in cases]
    for case, got in zip(cases, found, strict=True):
        expect_memory(case, got)
    numbers = [by_rank(STATES, got) for got in found]
    mistakes = {words: states_of(count) for words, count in overlooked.WRONG_STATES.items()}
    expect_as_right(numbers, cases, states_of(bytes_lab.RIGHT), mistakes)
    chosen = chosen_otherwise(found)
    for case, got in zip(cases, found, strict=True):
        expect_fullest(case, got, chosen)


@exercise_16_3.check("activations, as Korthikanti et al. count them")
def activations(answer) -> None:
    cases = [*tried.byte_cases(), *tried.empty_stages()]
    found = [by_rank(("activations",), answer(*case)) for case in cases]
    mistakes = {w: activations_of(count) for w, count in overlooked.WRONG_ACTIVATIONS.items()}
    expect_as_right(found, cases, activations_of(bytes_lab.RIGHT), mistakes)


@exercise_16_3.check("a model of the course in float32, counted")
def counted_model(answer) -> None:
    for one in counting.counted():
        got = answer(one.model, one.plan)
        where = f"of {' and '.join(map(not_default, (one.model, one.plan)))}"
        for rank, want in enumerate(one.parameters):
            what = f"bytes of parameters on pipeline rank {rank} {where}"
            expect_equal(got.stages[rank].parameters, want, what=what)
        for rank, want in one.activations.items():
            what = f"bytes that autograd keeps on pipeline rank {rank} {where}"
            expect_equal(got.stages[rank].activations, want, what=what)


@exercise_16_3.check("parts that are not even, and models that cannot be cut")
def uneven(answer) -> None:
    model = ModelSpec(1, 5, 1, 3, 7, 4, tied=False)
    number = bytes_lab.whole_parameters(model)
    for dp in (2, 3, 5, 7):
        plan = Plan(dp=dp, num_micro_batches=2, zero=1)
        memory = answer(model, plan)
        expect_memory((model, plan), memory)
        got = memory.optimizer
        looks_like = {
            "the optimizer's parts are rounded down: some numbers are on no rank": (
                12 * (number // dp)
            ),
            "bytes are rounded up: a part has a whole number of parameters": -(-12 * number // dp),
        }
        what = f"the optimizer of {number} parameters in {dp} parts"
        expect_equal(got, 12 * -(-number // dp), what=what, looks_like=looks_like)
    for plan, seen in ((Plan(tp=4), 6), (Plan(pp=6), 6)):
        what = f"{not_default(plan)} for 6 heads and 5 layers"
        expect_raises(ValueError, answer, tried.PLAIN, plan, what=what, mentions=[seen])


# 16.4 step_time

exercise_16_4 = checks_for(
    "16.4",
    name="step_time",
    difficulty=4,
    minutes=50,
    hints=[
        "Seconds of one micro-batch on the slowest rank first, then times num_micro_batches.",
        "compute: 3 x n x layer_flops / (peak x achievable x matmul x tp) a layer, and traffic x "
        "(bytes kept, in forward and in backward) / memory_bandwidth; the last rank has the output "
        "matrix as well.",
        "Each of 4 all-reduces a layer: 2 (t - 1) / t of n d_model numbers over "
        "cluster.link(tp, 1) x fitted.link, and the latency.",
    ],
    forbidden=("shared.planner.seconds.",),
)


def nearly(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)


def expect_seconds(answer, *kinds) -> None:
    """Some kinds of seconds in all cases."""
    cases = [*tried.timed_cases()]
    found = []
    for case in cases:
        of = f"{case[1].num_gpus} GPUs of {case[2].gpus}"
        found.append(accepted(answer, *case, what=f"a plan for {of}"))
    for case, got in zip(cases, found, strict=True):
        expect(
            type(got) is StepTime,
            expected=f"a StepTime for {' and '.join(map(not_default, case))}",
            seen=f"{type(got).__name__}",
        )
    for kind in kinds:
        numbers = [{kind: getattr(got, kind)} for got in found]
        known = overlooked.WRONG_SECONDS[kind] | overlooked.WRONG_ANYWHERE
        mistakes = {words: each.of(kind) for words, each in known.items()}
        expect_as_right(numbers, cases, seconds_lab.RIGHT_SECONDS.of(kind), mistakes, nearly)


@exercise_16_4.check("compute on the slowest pipeline rank")
def compute(answer) -> None:
    expect_seconds(answer, "compute")


@exercise_16_4.check("the FLOPs of a model of the course, counted by torch")
def counted_flops(answer) -> None:
    model, flops = counting.counted_flops()
    cluster = Cluster(1, 1e9, 1e6, 1, 1e6, 1e6, 1e6)
    got = answer(model, Plan(micro_batch=2), cluster, Fitted(1.0, 1.0, 0.0))
    expect(
        nearly(got.compute * cluster.peak_flops, flops),
        expected=f"{flops:,} FLOPs in a step of {not_default(model)}, as torch counts them",
        seen=f"{got.compute * cluster.peak_flops:,.0f}",
    )


@exercise_16_4.check("messages of tensor parallelism and of the pipeline")
def messages(answer) -> None:
    expect_seconds(answer, "tensor_parallel", "pipeline")


@exercise_16_4.check("the bubble, and gradients that nothing hides")
def bubble(answer) -> None:
    expect_seconds(answer, "bubble", "data_parallel")


@exercise_16_4.check("FLOP/s, and what there is no time for")
def achieved(answer) -> None:
    expect_seconds(answer, "model_flops")
    cases = [*tried.timed_cases()]
    for case in cases[:3]:
        got, peak = answer(*case), case[2].peak_flops
        expect_equal(got.peak_flops, peak, what="peak_flops")
        plain = answer(*case[:3])
        right = seconds_lab.RIGHT_SECONDS.numbers(*case[:3], FITTED)["compute"]
        what = "compute where fitted is not given"
        expect(nearly(plain.compute, right), expected=f"{what} = {right}", seen=f"{plain.compute}")
    accepted(answer, tried.PLAIN, Plan(dp=64), tried.NEAR, tried.FIT, what="64 GPUs of 64")
    refused = (
        (tried.PLAIN, Plan(tp=4), "tp 4 for 6 heads", 6),
        (tried.PLAIN, Plan(dp=65), "65 GPUs of 64", 65),
    )
    for model, plan, what, seen in refused:
        expect_raises(
            ValueError, answer, model, plan, tried.NEAR, tried.FIT, what=what, mentions=[seen]
        )


# 16.5 best_plans

exercise_16_5 = checks_for(
    "16.5",
    name="best_plans",
    difficulty=3,
    minutes=30,
    hints=[
        "Three loops: tp over the divisors of cluster.gpus, pp over those of what is left, and "
        "variants. One list of Choices, one sort with a key of two numbers.",
    ],
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
    states = search_lab.bytes_of(question.model, plan)
    whole = search_lab.gathered(question.model, plan)
    needed = sum(states) + whole
    recognise(
        {
            "the units that ZeRO-3 has whole for a moment are left out": (
                sum(states) <= limit < needed
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
            "of memory_per_rank": whole > 0
            and math.isclose(choice.memory.total, needed, rel_tol=1e-3)
        },
        expected=f"{sum(states):,} bytes with {not_default(plan)} {where}",
        seen=f"{choice.memory.total:,}, of which gathered {whole:,}",
    )
    own = {
        "bytes": (choice.memory.total, sum(states)),
        "seconds": (
            choice.time.total,
            seconds_lab.total(question.model, plan, cluster, FITTED),
        ),
    }
    for what, (got, want) in own.items():
        expect(
            math.isclose(got, want, rel_tol=1e-3 if what == "bytes" else 1e-9),
            mistake="a Choice has the numbers of another plan",
            expected=f"{want:,.7g} {what} with {not_default(plan)} {where}",
            seen=f"{got:,.7g}",
        )


def expect_order(question, found) -> None:
    """The fastest first, of equally fast ones the one with less memory."""
    times = [each.time.total for each in found]
    sizes = [each.memory.total for each in found]
    pairs = list(zip(times, sizes, strict=True))
    recognise(
        {
            "the slowest comes first": times == sorted(times, reverse=True) != sorted(times),
            "they are in the order of their memory": (
                times != sorted(times) and sizes == sorted(sizes)
            ),
            "they are not in the order of their seconds": times != sorted(times),
            "of equally fast plans the one with more memory comes first": pairs != sorted(pairs),
        },
        expected=f"the fastest first for {question}",
        seen=", ".join(f"{each:.4g} s" for each in times[:4]),
    )


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
        times = [each.time.total for each in found]
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
    questions = search_lab.FULL, search_lab.LONG, search_lab.LONGER
    expect_kinds({question: complaint(answer, question) for question in questions})
    for asked, words in (
        (search_lab.NO_WAY, "a search on 7 GPUs for 6 heads, 6 layers and 5 sequences"),
        (replace(search_lab.FULL, batch=0), "a batch of 0"),
        (replace(search_lab.FULL, batch=-4), "a batch of -4"),
    ):
        args, mentions = (asked.model, asked.cluster, asked.batch), []
        mentions = [asked.batch] if asked.batch < 1 else mentions
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
}


def expect_kinds(said: Mapping[search_lab.Question, str]) -> None:
    """Each message names the kind that is the most of the plan that misses the least."""
    plans = {question: search_lab.every_plan(question) for question in said}
    near = {q: min(plans[q], key=lambda each: each.needed) for q in said}
    kinds = {q: search_lab.most(each) for q, each in near.items()}
    named = {q: sorted((k for k in KINDS if k in text), key=text.index) for q, text in said.items()}
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
