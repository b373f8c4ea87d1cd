"""Lesson 20: what tells a right answer from a wrong one.

Hooks run under torch's DDP on gradients that are known beforehand. The oracle is the same method in
one process that has all ranks' gradients, in float64, or torch's own optimizer and collectives.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lessons.lesson20_less_communication import laboratory as lab
from lessons.lesson20_less_communication.laboratory import SHAPES, Outer, Seen, World
from shared.errors import InputError
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_close, expect_equal, expect_raises, recognise
from shared.exercises.on_ranks import on_one_rank
from shared.less_communication.states import ErrorFeedback, LowRank, TopK

WORLDS = (World(2), World(3), World(4, groups=2), World(1))
NUMEL = [torch.Size(shape).numel() for shape in SHAPES]


def say(sent: Sequence[tuple[str, int]]) -> str:
    """Messages as a reader wants them."""
    return ", ".join(f"{op} of {size} bytes" for op, size in sent) or "no message"


def got_of(seen: Seen) -> Tensor:
    """All that DDP made of the calls' values, in the order of the calls."""
    parts = [seen.results[call.step][n].flatten() for call in seen.calls for n in call.names]
    return torch.cat(parts)


def given_of(all_seen: list[Seen], ranks: list[int], number: int) -> list[Tensor]:
    """What each of these ranks gave into a call."""
    return [all_seen[r].calls[number].given for r in ranks]


def mean_of(world: World, all_seen: list[Seen], ranks: list[int]) -> Tensor:
    """The plain mean of every call."""
    calls = range(len(all_seen[0].calls))
    return torch.cat([torch.stack(given_of(all_seen, ranks, n)).mean(0) for n in calls])


def expect_same_bits(world: World, all_seen: list[Seen]) -> None:
    """All ranks of a group end up with the same numbers."""
    for rank, one in enumerate(all_seen):
        first = got_of(all_seen[world.members(rank)[0]])
        recognise(
            {
                "the ranks end up with different means: their models part": (
                    not torch.equal(got_of(one), first)
                )
            },
            expected="the same bits on all ranks of the group",
            seen=f"on rank {rank} {int((got_of(one) != first).sum())} numbers differ",
        )


exercise_20_1 = checks_for(
    "20.1",
    name="fp16_hook",
    difficulty=2,
    minutes=15,
    hint=(
        "bucket.buffer().to(torch.float16), divided by the number of ranks of the group; "
        "dist.all_reduce(..., async_op=True).get_future(), and .then() a function that copies "
        "done.value()[0] into the buffer and returns the buffer."
    ),
    forbidden=("torch.distributed.algorithms.",),
)


@exercise_20_1.check("the mean, in 16 bits, of the group's ranks")
def halves(fp16_hook) -> None:
    observe = lab.hooks(fp16_hook)
    worlds = [World(w.ranks, w.groups, torch.float32, steps=3) for w in WORLDS]
    for world in worlds:
        _, all_seen = observe(world, _group)
        for rank, seen in enumerate(all_seen):
            members = world.members(rank)
            for call in seen.calls:
                numbers = call.given.numel()
                sizes = [size for op, size in call.sent if op == "all_reduce"]
                recognise(
                    {
                        "the message still has 32 bits a number": 4 * numbers in sizes,
                        "everybody's gradients are gathered: all_reduce sums on the way": any(
                            "gather" in op for op, _ in call.sent
                        ),
                    },
                    expected=f"one all_reduce of {2 * numbers} bytes for {numbers} numbers",
                    seen=say(call.sent),
                )
                expect_equal(sizes, [2 * numbers], what="bytes of the bucket's all_reduces")
                recognise(
                    {"the future's value is still in 16 bits": call.dtype == torch.float16},
                    expected="a value in the buffer's dtype, torch.float32",
                    seen=f"{call.dtype}",
                    hint="copy it into the buffer, and return the buffer",
                )
            want = mean_of(world, all_seen, members)
            looks_like = {
                "the sum over the ranks, not the mean": len(members) * want,
                "the mean of all ranks, not of the group's": mean_of(
                    world, all_seen, [*range(world.ranks)]
                ),
                "the group's sum is divided by the number of all ranks": (
                    len(members) * want / world.ranks
                ),
                "a rank keeps its own gradients": mean_of(world, all_seen, [rank]),
            }
            what = f"rank {rank}'s gradients ({len(members)} ranks)"
            # 11 bits of mantissa: each addend and each sum is rounded, and small ones more
            expect_close(got_of(seen), want, what=what, looks_like=looks_like, rtol=4e-3, atol=4e-3)


@exercise_20_1.check("numbers whose sum is beyond 65,504")
def large(fp16_hook) -> None:
    world = World(2, dtype=torch.float32, steps=1, fill=40_000.0)
    _, all_seen = lab.hooks(fp16_hook)(world, _group)
    got = got_of(all_seen[0])
    recognise(
        {"divided after the sum, which is beyond what 16 bits hold": bool(got.isinf().any())},
        expected="40,000, the mean of 40,000 on both ranks",
        seen=f"{got[0].item()}",
        hint="divide before the all_reduce",
    )
    expect_close(got, torch.full_like(got, 40_000), what="the mean of 40,000s", rtol=1e-3)


@exercise_20_1.check("the hook comes back while its message travels")
def early(fp16_hook) -> None:
    recognise(
        {
            "the hook waits for its message: backward cannot go on meanwhile": (
                not lab.returns_early(fp16_hook)
            )
        },
        expected="rank 0's hook back before rank 1's has begun",
        seen="it comes back only then",
        hint="async_op=True, get_future() and .then()",
    )


def _group(group):
    """fp16_hook's state is the group itself."""
    return group


# What hooks with error feedback have in common: a compressor, and the same in one process.


def feedback_twin(
    all_seen: list[Seen],
    ranks: list[int],
    compress: Callable[[Tensor, list[int]], Tensor],
    *,
    feedback: bool = True,
    residual: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda whole, sent, given: whole - sent,
    divisor: int = 0,
    of_mean: bool = False,
    chosen_by_given: bool = False,
    join: Callable[[Tensor], Tensor] = lambda sent: sent.sum(0),
) -> Tensor:
    """The values of every call: each rank's gradients and residuals, compressed, and their mean."""
    kept: list[dict[int, Tensor]] = [{} for _ in ranks]
    values = []
    for number, call in enumerate(all_seen[ranks[0]].calls):
        sizes = [NUMEL[n] for n in call.names]
        all_given, wholes = list(given_of(all_seen, ranks, number)), []
        for own, given in zip(kept, all_given, strict=True):
            old = torch.cat([own.get(n, torch.zeros(NUMEL[n]).to(given)) for n in call.names])
            wholes.append(given + old if feedback else given)
        sent = [compress(whole, sizes) for whole in wholes]
        if chosen_by_given:
            chosen = [compress(given, sizes) != 0 for given in all_given]
            sent = [whole.where(c, 0) for whole, c in zip(wholes, chosen, strict=True)]
        values.append(join(torch.stack(sent)) / (divisor or len(ranks)))
        said = [values[-1]] * len(sent) if of_mean else sent
        for own, *each in zip(kept, wholes, said, all_given, strict=True):
            own.update(dict(zip(call.names, residual(*each).split(sizes), strict=True)))
    return torch.cat(values)


FORGOTTEN = "what is not sent is forgotten: the residual is not added to the next gradients"
DOUBLE = "what was sent stays in the residual: it is sent again"
SHORT = "the residual is of the gradients alone, and forgets what was kept before"
SUM = "the sum over the ranks, not their mean"
OF_ALL = "the mean over all ranks, not over those of the group"
OF_MEAN = "the residual is what the mean lacks, not what this rank did not send"
BY_GIVEN = "the places are of the largest gradients, without what was kept"
OF_ZERO = "the residual takes the sign of 0 for 0, where + was sent"
OVER = "a place that two ranks chose is written over, not added to"


def last_of(sent: Tensor) -> Tensor:
    """What stands at each place if ranks write theirs one after the other."""
    found = sent[0]
    for each in sent[1:]:
        found = torch.where(each != 0, each, found)
    return found


def expect_fed_back(world: World, all_seen: list[Seen], compress, more=None) -> None:
    """The values of all calls are the twin's; known mistakes by name."""
    for rank, seen in enumerate(all_seen):
        members = world.members(rank)
        twin = partial(feedback_twin, all_seen, members, compress)
        looks_like = {
            FORGOTTEN: partial(twin, feedback=False),
            DOUBLE: partial(twin, residual=lambda whole, sent, given: whole),
            SHORT: partial(twin, residual=lambda whole, sent, given: given - sent),
            "what is kept is of this step alone: what was kept before is lost": partial(
                twin, residual=lambda whole, sent, given: torch.where(sent == 0, given, 0)
            ),
            "divided by the ranks that sent a number: where a rank sent nothing it counts as 0": (
                partial(twin, divisor=1, join=lambda x: x.sum(0) / (x != 0).sum(0).clamp(min=1))
            ),
            SUM: partial(twin, divisor=1),
            OF_ZERO: partial(
                twin,
                residual=lambda whole, sent, given: torch.where(whole == 0, whole, whole - sent),
            ),
            OF_MEAN: partial(twin, of_mean=True),
            OF_ALL: partial(feedback_twin, all_seen, [*range(world.ranks)], compress),
        }
        if compress is largest:
            looks_like[OVER] = partial(twin, join=last_of)
            looks_like[BY_GIVEN] = partial(twin, chosen_by_given=True)
        for words, other in (more or {}).items():
            looks_like[words] = partial(feedback_twin, all_seen, members, other)
        what, got = f"rank {rank}'s gradients after each step ({len(members)} ranks)", got_of(seen)
        elsewhere = not seen.state["residuals"] and not torch.allclose(got, twin(feedback=False))
        recognise(
            {
                "residuals are not kept by state.keep: after the first step "
                "a bucket's index stands for other parameters": elsewhere
                and not torch.allclose(got, twin())
            },
            expected="the residual of each parameter, whatever bucket it is in",
            seen="nothing in the state",
        )
        expect_close(got, twin(), what=what, looks_like=looks_like)
        recognise(
            {"the residual is a view: the next backward writes over it": not seen.state["own"]},
            expected="residuals in memory of their own",
            seen="residuals that share memory",
            hint="state.keep(bucket, residual) clones",
        )
    expect_same_bits(world, all_seen)


DENSITY = 0.1


def largest(whole: Tensor, sizes: list[int], key: Callable[[Tensor], Tensor] = torch.abs) -> Tensor:
    """The whole with all but its largest numbers at zero."""
    places = key(whole).topk(max(1, round(DENSITY * whole.numel()))).indices
    return torch.zeros_like(whole).index_copy(0, places, whole[places])


exercise_20_2 = checks_for(
    "20.2",
    name="topk_with_error_feedback",
    difficulty=3,
    minutes=30,
    hint=(
        "whole = buffer + state.recall(bucket); places = whole.abs().topk(k).indices; the residual "
        "is whole with zeros at these places."
    ),
)


@exercise_20_2.check("bytes: k values and k places from each rank")
def sparse_bytes(topk_with_error_feedback) -> None:
    observe = lab.hooks(topk_with_error_feedback)
    for world in WORLDS[:2]:
        _, all_seen = observe(world, partial(TopK, DENSITY))
        for call in all_seen[0].calls:
            n = call.given.numel()
            k = max(1, round(DENSITY * n))
            sizes = [size for _, size in call.sent]
            recognise(
                {
                    "every number is sent, the small ones as zeros": max(sizes, default=0) >= 8 * n,
                    "values are added up although each rank's are of different places": any(
                        op == "all_reduce" and size == 8 * k for op, size in call.sent
                    ),
                    "the places take 8 bytes each: int32 will do": sizes == [8 * k, 8 * k],
                },
                expected=f"k = {k} of {n} numbers: {8 * k} bytes of values, {4 * k} of places",
                seen=say(call.sent),
            )
            expect_equal(sum(sizes), 12 * k, what=f"bytes handed in for {n} float64 numbers")
            expect_equal({op for op, _ in call.sent}, {"all_gather"}, what="the operations")


@exercise_20_2.check("values over steps, against one process with all ranks' gradients")
def sparse_values(topk_with_error_feedback) -> None:
    observe = lab.hooks(topk_with_error_feedback)
    more = {
        "the largest with their sign: a number far below zero is large as well": partial(
            largest, key=lambda x: x
        )
    }
    for world in WORLDS:
        _, all_seen = observe(world, partial(TopK, DENSITY))
        expect_fed_back(world, all_seen, largest, more)


def signs(
    whole: Tensor,
    sizes: list[int],
    scale: Callable[[Tensor], Tensor] = lambda x: x.abs().mean(),
    one_for_all: bool = False,
) -> Tensor:
    """Signs times each gradient's mean size; the sign of 0 is +."""
    plus = torch.where(whole >= 0, 1.0, -1.0).to(whole)
    if one_for_all:
        return plus * scale(whole)
    return torch.cat(
        [s * scale(x) for s, x in zip(plus.split(sizes), whole.split(sizes), strict=True)]
    )


exercise_20_3 = checks_for(
    "20.3",
    name="one_bit_with_error_feedback",
    difficulty=3,
    minutes=25,
    hint=(
        "sizes = [g.numel() for g in bucket.gradients()]; one scale each: "
        "part.abs().mean() for part in whole.split(sizes)."
    ),
)


@exercise_20_3.check("bytes: a bit a number and a scale a gradient")
def one_bit_bytes(one_bit_with_error_feedback) -> None:
    observe = lab.hooks(one_bit_with_error_feedback)
    for world in WORLDS[:2]:
        _, all_seen = observe(world, ErrorFeedback)
        for call in all_seen[0].calls:
            n, gradients = call.given.numel(), len(call.names)
            packed, sizes = -(-n // 8), sorted(size for _, size in call.sent)
            recognise(
                {
                    "signs are sent as whole numbers: nothing is smaller": (
                        max(sizes, default=0) >= 8 * n
                    ),
                    "a byte for each sign: pack_signs puts eight into one": (
                        sum(sizes) == n + 8 * gradients
                    ),
                },
                expected=f"{packed} bytes of signs and {8 * gradients} of scales for {n} numbers",
                seen=say(call.sent),
            )
            scales = sum(sizes) - packed
            one = gradients > 1 and scales == 8
            recognise(
                {"one scale for the whole bucket: each gradient has its own": one},
                expected=f"{gradients} scales",
                seen="one",
            )
            expect_equal(sum(sizes), packed + 8 * gradients, what=f"bytes for {n} numbers")
            expect_equal({op for op, _ in call.sent}, {"all_gather"}, what="the operations")


@exercise_20_3.check("values over steps, against one process with all ranks' gradients")
def one_bit_values(one_bit_with_error_feedback) -> None:
    observe = lab.hooks(one_bit_with_error_feedback)
    more = {
        "the scale is the root of the mean square, which is larger than the mean size": partial(
            signs, scale=lambda x: x.square().mean().sqrt()
        ),
        "the scale is the largest size: the residual grows": partial(
            signs, scale=lambda x: x.abs().max()
        ),
        "one scale for the whole bucket: each gradient has its own": partial(
            signs, one_for_all=True
        ),
        "signs without a scale": partial(signs, scale=lambda x: torch.ones_like(x[0])),
    }
    for world in (*WORLDS, World(2, holes=True)):
        _, all_seen = observe(world, ErrorFeedback)
        for rank, seen in enumerate(all_seen):
            own = own_scales(all_seen, world.members(rank), rank)
            recognise(
                {
                    "the other ranks' signs are multiplied by this rank's own scales": (
                        world.ranks > 1 and torch.allclose(got_of(seen), own)
                    )
                },
                expected="each rank's signs times that rank's scales",
                seen="one rank's scales for all",
            )
        expect_fed_back(world, all_seen, signs, more)


def own_scales(all_seen: list[Seen], ranks: list[int], rank: int) -> Tensor:
    """The values where one rank's scales stand for all."""
    own: dict[int, dict[int, Tensor]] = {r: {} for r in ranks}
    values = []
    for number, call in enumerate(all_seen[rank].calls):
        sizes, wholes = [NUMEL[n] for n in call.names], {}
        for r, given in zip(ranks, given_of(all_seen, ranks, number), strict=True):
            old = [own[r].get(n, torch.zeros(NUMEL[n]).to(given)) for n in call.names]
            wholes[r] = given + torch.cat(old)
            left = (wholes[r] - signs(wholes[r], sizes)).split(sizes)
            own[r].update(dict(zip(call.names, left, strict=True)))
        mine = [x.abs().mean().expand(x.numel()) for x in wholes[rank].split(sizes)]
        plus = [torch.where(w >= 0, 1.0, -1.0).to(w) for w in wholes.values()]
        values.append(torch.stack(plus).mean(0) * torch.cat(mine))
    return torch.cat(values)


# 20.4


def orthonormal(x: Tensor) -> Tensor:
    """Columns at right angles, by the other way than the course's: a singular value decomposition.

    It spans the same, and only what is spanned matters: P P^T is the same.
    """
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    return u @ v


def low_rank_twin(
    every: list[list[Tensor]], factors: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The approximation P P^T M of the mean M, and P: in one process, from all ranks' matrices."""
    means = [torch.stack(each).mean(0) for each in zip(*every, strict=True)]
    lefts = [orthonormal(m @ q) for m, q in zip(means, factors, strict=True)]
    return [p @ (p.T @ m) for p, m in zip(lefts, means, strict=True)], means


exercise_20_4a = checks_for(
    "20.4a",
    name="low_rank_mean",
    difficulty=2,
    minutes=15,
    hint=(
        "lefts = [m @ q ...]; sum_flat(lefts, group); lefts = [orthonormal(p) ...]; "
        "rights = [m.T @ p ...]; average_flat(rights, group); matrix.copy_(p @ q.T)."
    ),
    in_place=True,
    forbidden=("torch.distributed.algorithms.",),
)


@exercise_20_4a.check("the approximation of the mean, and two messages")
def approximates(low_rank_mean) -> None:
    for world in WORLDS:
        for wide in (1, 3):
            seed, seen = lab.low_rank(low_rank_mean, world, wide)
            for rank, (_, _, sent, kept) in enumerate(seen):
                members = world.members(rank)
                expect_low_rank_messages(sent, len(members), wide)
                expect_low_rank(world, seed, seen, rank, wide)
                recognise(
                    {"the factors that were given are overwritten": not kept},
                    expected="factors as they were",
                    seen="changed ones",
                )


def expect_low_rank_messages(sent, ranks: int, wide: int) -> None:
    """Two all-reduces for all matrices together, none in a group of one."""
    rows, columns = (8 * wide * sum(shape[i] for shape in lab.MATRICES) for i in (0, 1))
    want = [("all_reduce", rows), ("all_reduce", columns)] if ranks > 1 else []
    whole = 8 * sum(m * n for m, n in lab.MATRICES)
    recognise(
        {
            "the matrices themselves are sent": any(size == whole for _, size in sent),
            "the left factors are not summed: each rank has a P of its own": (
                ranks > 1 and [size for _, size in sent] == [columns]
            ),
            "a message for each matrix: one for all lefts, one for all rights": len(sent) > 2,
            "a group of one rank sends to itself": ranks == 1 and bool(sent),
        },
        expected=say(want),
        seen=say(sent),
    )
    expect_equal(sent, want, what="messages", hint="sum_flat and average_flat take many tensors")


def expect_low_rank(world: World, seed: int, seen, rank: int, wide: int) -> None:
    """Matrices and new factors of a rank."""
    members = world.members(rank)
    n, (matrices, new, _, _) = len(members), seen[rank]
    every = [lab.given_matrices(world, seed, r) for r in members]
    factors = lab.given_factors(world, seed, wide)
    want, means = low_rank_twin(every, factors)
    loose = [m @ q @ (m @ q).T @ m for m, q in zip(means, factors, strict=True)]
    upright = [orthonormal(q) for q in factors]
    own = [[torch.linalg.qr(m @ q).Q for m, q in zip(each, factors, strict=True)] for each in every]
    early = [torch.stack(each).mean(0) for each in zip(*own, strict=True)]
    half = [m @ q @ (m @ q).T @ m for m, q in zip(means, upright, strict=True)]
    flat = torch.cat([m.flatten() for m in matrices])
    looks_like = {
        "the product is n times the mean: the rights are summed, not averaged": n * _flat(want),
        "P's columns are not at right angles and of length 1": n * n * _flat(loose),
        "each rank's left is made orthonormal before they are summed: their sum is not": _flat(
            [p @ (p.T @ m) for p, m in zip(early, means, strict=True)]
        ),
        "P's columns are as M Q has them: the given factors' are right, P's are not": (
            n * n * _flat(half)
        ),
        "the matrices are left as they were": _flat(every[members.index(rank)]),
    }
    what = f"rank {rank}'s matrices ({n} ranks, rank {wide} factors)"
    if n == 1:
        looks_like.popitem()
    expect_close(flat, _flat(want), what=what, looks_like=looks_like)
    shapes = [tuple(q.shape) for q in new]
    wanted = [tuple(q.shape) for q in factors]
    expect_equal(shapes, wanted, what="shapes of the returned factors")
    old = all(torch.allclose(a, b) for a, b in zip(new, factors, strict=True))
    recognise(
        {"the factors that were given are returned, not the new ones": old},
        expected="M^T P for each matrix",
        seen="what was given",
    )
    # P is an orthonormal basis, whichever: what M^T P times its transpose is does not depend on it.
    squares = _flat([q @ q.T for q in new]), _flat([m.T @ m for m in want])
    expect_close(*squares, what="R R^T for the new factors R = M^T P")


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors])


exercise_20_4b = checks_for(
    "20.4b",
    name="power_sgd",
    difficulty=3,
    minutes=30,
    hint=(
        "bucket.gradients() are views of bucket.buffer(): add the residual to the buffer in place, "
        "keep a clone, overwrite the views; the residual is the clone minus the buffer."
    ),
    forbidden=("torch.distributed.algorithms.",),
)


def power_twin(
    all_seen: list[Seen],
    ranks: list[int],
    rank: int,
    start: int,
    *,
    feedback: bool = True,
    warm: bool = True,
    own_vectors: int = -1,
    short: bool = False,
    first: bool = False,
) -> Tensor:
    """The values of every call, in one process."""
    state = LowRank(rank, start)
    right: dict[int, Tensor] = {}
    kept: list[dict[int, Tensor]] = [{} for _ in ranks]
    values = []
    for number, call in enumerate(all_seen[ranks[0]].calls):
        given = given_of(all_seen, ranks, number)
        sizes = [NUMEL[n] for n in call.names]
        if call.step < start:
            values.append(torch.stack(given).mean(0))
            continue
        zeros = [torch.zeros(size).to(given[0]) for size in sizes]
        wholes = []
        for own, x in zip(kept, given, strict=True):
            old = [own.get(n, zero) for n, zero in zip(call.names, zeros, strict=True)]
            wholes.append(x + torch.cat(old) if feedback else x)
        mean = list(torch.stack(wholes).mean(0).split(sizes))
        pays = [state.pays(torch.empty(SHAPES[n])) for n in call.names]
        thin = [i for i, good in enumerate(pays) if good]
        matrices = [mean[i].view(SHAPES[call.names[i]][0], -1) for i in thin]
        names = [call.names[i] for i in thin]
        known = warm and all(n in right for n in names)
        factors = [right[n] for n in names] if known else state.first_factors(matrices)
        approximated, _ = low_rank_twin([matrices], factors)
        for i, m, q, name in zip(thin, matrices, factors, names, strict=True):
            right[name] = q if first else m.T @ orthonormal(m @ q)
            mean[i] = approximated[thin.index(i)].flatten()
        for i, good in enumerate(pays):
            if not good and own_vectors >= 0:
                mean[i] = wholes[own_vectors].split(sizes)[i]
        values.append(torch.cat(mean))
        for own, whole, x in zip(kept, wholes, given, strict=True):
            left = ((x if short else whole) - values[-1]).split(sizes)
            own.update(dict(zip(call.names, left, strict=True)))
    return torch.cat(values)


POWER = ((World(2, steps=5), 1, 2), (World(3, steps=4), 2, 1), (World(4, 2, steps=4), 1, 0),
         (World(1, steps=4), 1, 2), (World(2, steps=2), 1, 2))  # fmt: skip


@exercise_20_4b.check("values and messages over steps, against one process")
def power_values(power_sgd) -> None:
    observe = lab.hooks(power_sgd)
    for world, rank_of_factors, start in POWER:
        make = partial(LowRank, rank_of_factors, start, 0)
        _, all_seen = observe(world, make, (rank_of_factors, start))
        for rank, seen in enumerate(all_seen):
            members = world.members(rank)
            steps = seen.state["steps"]
            recognise(
                {
                    "state.steps counts buckets, not steps": steps == len(seen.calls) > world.steps,
                    "state.steps is not counted": steps == 0,
                },
                expected=f"state.steps = {world.steps} after {world.steps} steps",
                seen=f"{steps}",
                hint="bucket.is_last()",
            )
            expect_equal(steps, world.steps, what="state.steps")
            early = steps <= start and (seen.state["residuals"] or seen.state["right"])
            recognise(
                {"something is kept or drawn before state.start": bool(early)},
                expected=f"no residual and no factor in the first {start} steps",
                seen=f"residuals of {len(seen.state['residuals'])} parameters",
            )
            twin = partial(power_twin, all_seen, members, rank_of_factors, start)
            looks_like = {
                FORGOTTEN: partial(twin, feedback=False),
                "a new random factor in every step: last time's is the better start": partial(
                    twin, warm=False
                ),
                "vectors stay each rank's own: they are averaged whole": partial(
                    twin, own_vectors=members.index(rank)
                ),
                "everything is compressed from the first step on, before state.start": partial(
                    power_twin, all_seen, members, rank_of_factors, 0
                ),
                "nothing is compressed": partial(mean_of, world, all_seen, members),
                "start + 1 steps are sent whole": partial(
                    power_twin, all_seen, members, rank_of_factors, start + 1
                ),
                "state.right keeps the first factors": partial(twin, first=True),
                SHORT: partial(twin, short=True),
            }
            if len(members) == 1:
                looks_like.pop("vectors stay each rank's own: they are averaged whole")
            what = f"rank {rank}'s gradients after each step ({len(members)} ranks)"
            expect_close(got_of(seen), twin(), what=what, looks_like=looks_like)
            if len(members) > 1:
                expect_power_messages(seen, rank_of_factors, start)
        expect_same_bits(world, all_seen)


def expect_power_messages(seen: Seen, rank: int, start: int) -> None:
    """A bucket's three messages at most: vectors, lefts, rights."""
    for call in seen.calls:
        shapes = [SHAPES[n] for n in call.names]
        state = LowRank(rank)
        thin = [s for s in shapes if state.pays(torch.empty(s))]
        sides = [(s[0], torch.Size(s).numel() // s[0]) for s in thin]
        rest = sum(torch.Size(s).numel() for s in shapes if s not in thin)
        want = [
            8 * n for n in (rest, *(rank * sum(side) for side in zip(*sides, strict=True))) if n
        ]
        if call.step < start:
            want = [8 * call.given.numel()]
        sizes = [size for _, size in call.sent]
        recognise(
            {
                "each vector is a message of its own": len(sizes) > len(want),
            },
            expected=f"all_reduces of {want} bytes",
            seen=say(call.sent),
        )
        expect_equal(sorted(sizes), sorted(want), what="bytes of a bucket's messages")


# 20.5


exercise_20_5 = checks_for(
    "20.5",
    name="LocalSGD",
    difficulty=3,
    minutes=30,
    hint=(
        "The outer gradient is agreed - parameter, averaged over the ranks: average_flat(moved, "
        "group) takes all at once."
    ),
    in_place=True,
    forbidden=("torch.optim.", "torch.distributed.algorithms."),
)


def outer_twin(
    world: World, seed: int, ranks: list[int], index: int, options: tuple, kind: str = "nesterov"
) -> Tensor:
    """A parameter after each step on the first of these ranks, by torch's SGD in one process."""
    every, lr, momentum = options
    start = world.gradient(seed + 1, ranks[0], 0, index)
    outer = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD(
        [outer], lr, 0 if kind == "none" else momentum,
        nesterov=kind not in ("plain", "none") and momentum > 0,
    )  # fmt: skip
    local, after = [start.clone() for _ in ranks], []
    for step in range(world.steps):
        for p, r in zip(local, ranks, strict=True):
            p -= lab.move(world, seed, r, step, index)
        if (step + 1) % every == 0:
            mean = torch.stack(local).mean(0)
            outer.grad = mean - start if kind == "sign" else start - mean
            outer.grad *= len(ranks) if kind == "sum" else 1
            if kind in ("here", "once"):
                outer.data.copy_(mean if kind == "here" else start)
            optimizer.step()
            if kind != "once":
                start = outer.detach().clone()
            local = [outer.detach().clone() for _ in ranks]
        after.append(local[0].clone())
    return torch.stack(after)


OUTER = ((2, 0.7, 0.9), (1, 1.0, 0.0), (2, 1.0, 0.0), (3, 0.5, 0.6))


@exercise_20_5.check("parameters after each step, and messages")
def outer_steps(LocalSGD) -> None:
    observe = lab.local(LocalSGD)
    for each in (World(2, steps=6), World(4, groups=2, steps=6), World(1, steps=6)):
        for options in OUTER:
            seed, all_seen = observe(each, *options)
            for rank, seen in enumerate(all_seen):
                expect_agreement(each, seed, all_seen, rank, options)
                expect_outer_messages(each, seen, len(each.members(rank)), options[0])


def expect_agreement(
    world: World, seed: int, all_seen: list[Outer], rank: int, options: tuple
) -> None:
    """A rank's parameters."""
    members, seen = world.members(rank), all_seen[rank]
    first = all_seen[members[0]].first
    trained = [i for i in range(len(SHAPES)) if i != 1]
    same = all(torch.equal(seen.start[i], first[i]) for i in trained)
    own = all(torch.equal(seen.start[i], seen.first[i]) for i in trained)
    recognise(
        {
            "the ranks start apart: rank 0's parameters are for all": not same and own,
            "a frozen parameter is changed": not torch.equal(seen.after[-1][1], seen.first[1]),
            "the parameters are recorded by autograd": seen.graph,
        },
        expected="the group's rank 0's parameters on all ranks; frozen ones as they were",
        seen=f"the same: {same}",
    )
    agrees = [(step + 1) % options[0] == 0 for step in range(world.steps)]
    expect_equal([bool(x) for x in seen.said], agrees, what=f"step() with every = {options[0]}")
    for index in trained:
        got = torch.stack([after[index] for after in seen.after])[options[0] - 1 :: options[0]]
        every = options[0]

        def of(kind: str, index: int = index, every: int = every) -> Tensor:
            after = outer_twin(world, seed, members, index, options, kind)
            return after[every - 1 :: every]

        looks_like = {
            "the outer gradient has the wrong sign: it leads back": partial(of, "sign"),
            "the outer step is taken from where the ranks are, not from where they agreed": partial(
                of, "here"
            ),
            "where the ranks agreed is not renewed": partial(of, "once"),
            "the sum of what the ranks moved by, not the mean": partial(of, "sum"),
        }
        if options[2]:
            looks_like |= {
                "plain momentum, not Nesterov's": partial(of, "plain"),
                "the outer momentum is not used": partial(of, "none"),
            }
        others = [torch.stack([after[index] for after in all_seen[m].after]) for m in members]
        recognise(
            {
                "the ranks are apart after the step in which they agree: each steps from its own "
                "parameters": all(
                    torch.equal(all_seen[m].start[index], first[index]) for m in members
                )
                and any(not torch.allclose(each[every - 1 :: every], got) for each in others)
            },
            expected=f"the same parameter {index} on all ranks of the group",
            seen=f"others on rank {rank} than on its peers",
            hint="the outer step begins where all last agreed",
        )
        what = (
            f"rank {rank}'s parameter {index} where the ranks agree, every, lr, momentum {options}"
        )
        expect_close(got, of("nesterov"), what=what, looks_like=looks_like)


def expect_outer_messages(world: World, seen: Outer, ranks: int, every: int) -> None:
    """One message where the ranks agree, none in between."""
    numbers = sum(n for i, n in enumerate(NUMEL) if i != 1)
    for step, sent in enumerate(seen.sent):
        agrees = (step + 1) % every == 0 and ranks > 1
        recognise(
            {
                "something is sent in a step in which the ranks do not agree": (
                    bool(sent) and not agrees
                ),
                "a message for each parameter: one for all": agrees and len(sent) > 1,
                "the frozen parameter is sent as well": agrees
                and [size for _, size in sent] == [8 * (numbers + NUMEL[1])],
            },
            expected=f"{'one' if agrees else 'no'} message in step {step + 1} of every {every}",
            seen=say(sent),
        )
        expect_equal(sent, [("all_reduce", 8 * numbers)] if agrees else [], what="messages")


@exercise_20_5.check("what cannot be")
def refused(LocalSGD) -> None:
    for every, momentum in ((0, 0.0), (2, 1.5), (2, 1.0), (2, -0.5)):

        def begin(every: int = every, momentum: float = momentum) -> None:
            LocalSGD([], every, 1.0, momentum)

        what, value = (f"a momentum of {momentum}", momentum) if every else ("every = 0", 0)
        expect_raises(InputError, on_one_rank, begin, what=what, mentions=[value])


# 20.6


exercise_20_6 = checks_for(
    "20.6",
    name="hierarchical_all_reduce",
    difficulty=2,
    minutes=25,
    hint=(
        "F.pad(x.flatten(), (0, -x.numel() % m)) for m ranks inside; reduce_scatter(part, whole, "
        "inside).wait(); dist.all_reduce(part, group=across); all_gather(whole, part, "
        "inside).wait(); x.copy_(...)."
    ),
    in_place=True,
)


@exercise_20_6.check("the sum, and what each link carries")
def sums(hierarchical_all_reduce) -> None:
    observe = lab.levels(hierarchical_all_reduce)
    for nodes, inside, shape in ((2, 2, (4, 6)), (2, 2, (3, 5)), (1, 2, (4,)), (2, 1, (5,)),
                                 (2, 3, (1,))):  # fmt: skip
        seen = observe(nodes, inside, shape)
        total = torch.stack([one.given for one in seen]).sum(0)
        for rank, one in enumerate(seen):
            node = rank // inside
            own = torch.stack([x.given for x in seen[node * inside : (node + 1) * inside]]).sum(0)
            place = torch.stack([x.given for x in seen[rank % inside :: inside]]).sum(0)
            looks_like = {
                "the mean, not the sum": total / len(seen),
                "x is left as it was: the sum belongs into it": one.given,
                "the sum of one node alone": own,
                "the sum of one place in every node alone": place,
            }
            if len(seen) == 2:  # then one of these is the sum itself
                looks_like = dict(list(looks_like.items())[:2])
            what = f"rank {rank}'s sum ({nodes} nodes of {inside})"
            expect_close(one.got, total, what=what, looks_like=looks_like)
            expect_links(one.sent, nodes, inside, one.given.numel(), rank)


def expect_links(sent, nodes: int, inside: int, numbers: int, rank: int) -> None:
    """By link: what a rank hands in."""
    part = 8 * -(-numbers // inside)
    own = set(range(rank // inside * inside, rank // inside * inside + inside))
    crossing = [(op, size) for op, size, ranks in sent if not set(ranks) <= own]
    within = [(op, size) for op, size, ranks in sent if set(ranks) <= own and len(ranks) > 1]
    alone = [1 for *_, ranks in sent if len(ranks) == 1]
    want = [("all_reduce", part)] if nodes > 1 else []
    whole = inside > 1 and any(size > part for _, size in crossing)
    recognise(
        {"a group of one rank sends to itself": bool(alone)},
        expected="no message in a group of one rank",
        seen=f"{len(alone)} of them",
    )
    recognise(
        {
            "one all_reduce over all ranks: it knows of no nodes": nodes > 1
            and inside > 1
            and any(len(ranks) == nodes * inside for *_, ranks in sent),
            "the slow link carries reduce_scatter and all_gather: the groups are exchanged": any(
                op in ("reduce_scatter", "all_gather") for op, _ in crossing
            ),
            "the whole tensor is sent across: each rank's part will do": whole,
        },
        expected=f"across the nodes {say(want)} ({nodes} nodes of {inside})",
        seen=say(crossing),
    )
    expect_equal(crossing, want, what="what a rank sends across the nodes")
    halves = [("reduce_scatter", part * inside), ("all_gather", part)] if inside > 1 else []
    expect_equal(within, halves, what="what a rank sends inside the node")
