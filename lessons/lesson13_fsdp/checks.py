"""Lesson 13: what tells a right answer from a wrong one.

The oracle is one process that has everything, with torch's own optimizers, on the mean of all
ranks' gradients. Bytes are counted over live storages, messages below Python.
"""

from functools import partial

import torch
from torch import nn

from lessons.lesson13_fsdp.laboratory import chains, nets, orders, units
from lessons.lesson13_fsdp.laboratory import sharded_modules as lab
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, recognise
from shared.ranks.failures import Failure
from shared.sharding.counting import bytes_at_rest, part, peak_bytes

HANG = "not every rank takes part in each collective: the others wait for it"
SIZES = {
    Failure.DIED: (
        "the ranks' messages differ in size: a gradient that is None counts as zeros, in its place",
        "",
    )
}
UNUSED_HANG = (
    "a unit of which a rank has not used everything leaves out of turn, or not at all: the ranks' "
    "messages no longer match"
)
NAMED_HANG = (
    "a unit whose inputs are given by name is not reduced in its turn: at_backward() wants "
    "those, too"
)
ENGINE = (
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "shared.sharding.stage3.ZeroStage3",
)
BUILT = ("flat_unit", "fully_shard", "prefetch", "hybrid", "checkpoint")  # here, by hand

exercise_13_1 = checks_for(
    "13.1",
    name="FlatUnit",
    difficulty=3,
    minutes=35,
    hint=(
        "flat, parts = partition(parameters, n); the shard is a copy of parts[rank], in float32 "
        "where the parameters have 16 bits. Broadcast flat first, with group_src=0."
    ),
    forbidden=(*ENGINE, *(f"shared.sharding.{name}." for name in BUILT)),
)


def each_unit(answer):
    """Every case with what every rank saw of it."""
    for case in units.UNIT_CASES:
        for rank, seen in enumerate(units.observed_unit(answer).seen(case, HANG, known=SIZES)):
            yield case, case.place(rank), seen


def flat_of(tensors, n):
    """The padded flat tensor of some parameters."""
    numbers = torch.cat([x.reshape(-1) for x in tensors])
    return torch.cat([numbers, numbers.new_zeros(-len(numbers) % n)])


@exercise_13_1.check("the shard")
def unit_shard(answer) -> None:
    for case, rank, seen in each_unit(answer):
        n, kinds = case.num_ranks, seen.kinds
        half = case.dtype.itemsize == 2
        want = flat_of(seen.first, n).chunk(n)[rank]
        want = want.float() if half else want
        (got,) = seen.tensors["shard"]
        size = sum(x.numel() for x in seen.first)
        recognise(
            {
                "the shard is a tensor: an optimizer wants an nn.Parameter": not kinds["parameter"],
                "the shard has 16 bits: the optimizer's numbers stay in float32": half
                and kinds["dtype"] == case.dtype,
                "the shard has the dtype that computes: the numbers kept are rounded": (
                    kinds["dtype"] == case.computes != case.dtype
                ),
                "the shard of frozen parameters is trained": case.frozen and kinds["trained"],
                "the shard is frozen": not case.frozen and not kinds["trained"],
                "every rank has the whole tensor, not a shard": n > 1 and got.numel() >= size,
            },
            expected=f"{want.numel()} numbers in {want.dtype}, requires_grad={not case.frozen}",
            seen=f"{got.numel()} numbers in {got.dtype}, requires_grad={kinds['trained']}",
        )
        others = [
            i for i, x in enumerate(flat_of(seen.first, n).chunk(n)) if torch.equal(got, x.to(got))
        ]
        recognise(
            {
                "the part is chosen by the rank in the world, not by the place in the group": (
                    case.pairs and others not in ([], [rank])
                )
            },
            expected=f"part {rank} of {n}, the place in a group of every second rank",
            seen=f"part {others}",
            hint="dist.get_rank(group)",
        )
        hint = "rank 0 of the group decides the numbers, and the last shard ends with the padding"
        turns = flat_of(seen.first, n)[rank::n].to(want.dtype)
        looks_like = {"the shards are interleaved, element by element": turns}
        expect_close(got, want, what="the shard", atol=0, rtol=0, looks_like=looks_like, hint=hint)


@exercise_13_1.check("memory: a shard between uses, the whole in between")
def unit_bytes(answer) -> None:
    for case, _, seen in each_unit(answer):
        n, kinds = case.num_ranks, seen.kinds
        size = part(sum(x.numel() for x in seen.first), n)
        shard = size * seen.tensors["shard"][0].element_size()
        kept = shard + sum(x.nbytes for x in seen.first)  # the laboratory's own copies
        whole = n * size * case.computes.itemsize
        at = {name: number - kept for name, number in seen.bytes.items()}
        copies = sum(x.nbytes for x in seen.tensors["whole"])
        recognise(
            {
                "the whole tensor stays alive between uses, of parameters or for gradients": at[
                    "start"
                ]
                > shard + 64,
                "is_whole says True before gather()": kinds["whole at the start"],
                "is_whole says False after gather()": not kinds["whole"],
                "is_whole says False while gather()'s message is under way: the memory is there": (
                    not kinds["whole on its way"]
                ),
                "is_whole says True after free()": kinds["whole after free"],
                "parameters keep elements between uses: using one by mistake would pass unseen": (
                    kinds["left"] > 0 or kinds["left after free"] > 0
                ),
                "the parameters are whole in another dtype than compute_dtype": (
                    kinds["computes"] != case.computes
                ),
                "two whole tensors are alive after gather()": at["whole"] >= shard + 2 * whole,
                "the memory is not given back by free(): what autograd saved are views of it": (
                    at["free"] - copies > shard + 64
                ),
            },
            expected=f"{shard} bytes between uses, {shard + whole} while whole",
            seen=f"{at['start']} at the start, {at['whole']} whole, {at['free'] - copies} freed",
            hint="empty the storage with resize_(0): dropping a tensor frees nothing that "
            "another view of it keeps",
        )


@exercise_13_1.check("gathered: the numbers, the messages, the waiting")
def unit_gathers(answer) -> None:
    for case, _, seen in each_unit(answer):
        n, calls = case.num_ranks, seen.calls["whole"]
        size = part(sum(x.numel() for x in seen.first), n)
        for got, want in zip(seen.tensors["whole"], seen.first, strict=True):
            expect_close(got, want.to(case.computes), what="a gathered parameter", atol=0, rtol=0)
        sent = lab.sizes_of(calls, "all_gather")
        recognise(
            {
                "gather() waits for the message: it only starts, wait() waits": seen.waits["gather"]
                > 0,
                "a unit that is whole is gathered again": len(sent) > 1
                and max(sent) >= size * case.computes.itemsize,
                "float32 travels where 16 bits compute": case.computes == lab.HALF
                and sent == [4 * size],
                "the message goes to all ranks, not to the group alone": any(
                    call.group_size > n for call in calls
                ),
                "the parameters are gathered one by one": len(calls) > 1,
            },
            expected=f"one all_gather of {size * case.computes.itemsize} bytes among {n} ranks",
            seen=", ".join(f"{c.op} of {c.num_bytes} bytes ({c.group_size})" for c in calls),
        )
        expect_equal(sent, [size * case.computes.itemsize], what="the bytes of each all_gather")


def slid(grads: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """A rank's gradients one after the other without those that are zeros, then zeros."""
    there = [x.double().flatten() for x in grads if x.any()]
    return torch.cat([*there, 0 * whole])[: len(whole)]


@exercise_13_1.check("gradients: the mean, this rank's part alone")
def unit_gradients(answer) -> None:
    for case, rank, seen in each_unit(answer):
        if case.frozen:
            continue
        n, calls = case.num_ranks, seen.calls["reduce"]
        flats = [flat_of([x.double() for x in grads], n) for grads in seen.grads]
        total = sum(flats)
        recognise(
            {
                "nothing arrives in shard.grad": not seen.tensors["grad"],
                "whole gradients are left behind": seen.kinds["gradients left"] > 0,
                "reduce() waits for the message: it only starts, finish() waits": seen.waits[
                    "reduce"
                ]
                > 0,
                "gradients are all-reduced: every rank gets all of them": any(
                    call.op == "all_reduce" for call in calls
                ),
                "the whole gradients stay alive after finish(): this rank's part is enough": (
                    seen.kinds["whole gradients kept"]
                ),
                "shard.grad has another dtype than the shard": seen.kinds["grad"]
                not in (False, seen.kinds["dtype"]),
            },
            expected="one reduce_scatter, its mean in shard.grad, no whole gradient",
            seen=", ".join(f"{c.op} of {c.num_bytes} bytes" for c in calls) or "nothing sent",
        )
        second = total if n == 1 else sum(flats[:-1])  # the last rank had nothing in the second
        want, more = ((x / n).chunk(n)[rank].to(seen.kinds["dtype"]) for x in (total, second))
        exact = case.computes.itemsize > 2
        loose = {"atol": 1e-5, "rtol": 1e-4} if exact else {"atol": 0.1, "rtol": 0.05}
        looks_like = {
            "the gradients are summed, not averaged": total.chunk(n)[rank],
            "the mean is taken over the whole world, not over the group": (
                total / case.world_size
            ).chunk(n)[rank],
            "this rank's own gradients, not the mean": flats[rank].chunk(n)[rank],
            "a gradient that is None takes no place, and those behind it slide forward: it counts "
            "as zeros, in its place": (sum(map(slid, seen.grads, flats)) / n).chunk(n)[rank],
        }
        looks_like = {words: x.to(want.dtype) for words, x in looks_like.items()}
        check = partial(expect_close, **loose)
        (first,), (both,) = seen.tensors["grad"], seen.tensors["twice"]
        check(first, want, what="shard.grad", looks_like=looks_like)
        looks_like = {
            "the second backward's gradient takes the place of the first: they are added up": more,
            "a finish() with nothing on its way adds the last gradient again": want + 2 * more,
        }
        check(both, want + more, what="shard.grad after a second", looks_like=looks_like)
        padded = n * part(sum(x.numel() for x in seen.first), n)
        wide = {"gradients travel in float32 where 16 bits compute": [4 * padded]}
        expect_equal(
            lab.sizes_of(calls, "reduce_scatter"),
            [padded * case.computes.itemsize],
            what="the bytes of each reduce_scatter",
            looks_like=wide,
        )


@exercise_13_1.check("after an update")
def unit_updated(answer) -> None:
    for case, _, seen in each_unit(answer):
        recognise(
            {
                "own_part() gives a copy: it is a view": not seen.kinds["own part written"],
                "pieces() gives copies: they are views": not seen.kinds["pieces written"],
            },
            expected="what is written into a part to be in the flat tensor",
            seen="a flat tensor as before",
        )
        new = seen.tensors["shard at the end"][0]
        size = sum(x.numel() for x in seen.first)
        exact = all(x.dtype == new.dtype for x in seen.tensors["full"])
        expect(
            exact,
            expected=f"full() in the shard's {new.dtype}, not rounded",
            seen=", ".join(str(x.dtype) for x in seen.tensors["full"]),
            mistake="full() returns what computes, rounded: it is asked for what the shards say",
        )
        moved = 1e-4
        for first, full, whole in zip(
            seen.first, seen.tensors["full"], seen.tensors["after an update"], strict=True
        ):
            want = first.to(new.dtype) + moved
            expect_equal(tuple(full.shape), tuple(first.shape), what="a shape in full()")
            rounded = first.to(case.computes).to(new.dtype) + moved
            in_place = {"the shard itself is rounded, not what travels of it": rounded}
            expect_close(full, want, what=f"full() of {size} updated numbers", looks_like=in_place)
            stale = {"the numbers of before the update are gathered": first.to(case.computes)}
            expect_close(whole, want.to(case.computes), what="gathered anew", looks_like=stale)


# What all shardings are held against

FREED = (
    "a module computes with parameters that are freed, or a gradient of theirs is still to come: a "
    "unit is freed after its last use"
)
EMPTY = ("size of tensor a (0)", "storage of size 0", "must be 2-D", "be a matrix")
USERS = (
    "count a unit's users: each module that has one of its parameters, a tied one as well; and, in "
    "13.2b, its uses that backward has not come to (pending): it is reduced after these"
)
KNOWN = dict.fromkeys(EMPTY, (FREED, USERS)) | {
    "must have the same dtype, but got Double and Float": (
        "compute_dtype is not used: what computes is in the shards' dtype",
        "cast what is gathered, and every floating-point input",
    ),
    "must have the same dtype": (
        "an input of a unit is not cast to compute_dtype: every floating-point one is, float64 too",
        "x.is_floating_point()",
    ),
    "cannot register a hook on a tensor that doesn't require gradient": (
        "frozen and trained parameters are in one unit, or a frozen one is waited for",
        "a unit for each requires_grad",
    ),
}


def expect_weights(observed, *cases, apart: str = HANG) -> None:
    """On every rank, after every step, the weights of one process."""
    for case in cases:
        found = observed.seen(case, apart, known=KNOWN)
        seed, first = found[0]
        for _, seen in found:
            missing = sorted({*first.own} - {*seen.started})
            recognise(
                {
                    "full_state_dict() is not the module's state_dict(): names are missing": bool(
                        missing
                    ),
                    "full_state_dict() has parameters without their numbers": any(
                        seen.started[n].shape != first.own[n].shape
                        for n in first.own
                        if n in seen.started
                    ),
                    "the ranks start with different numbers: rank 0's are for all": any(
                        not torch.equal(seen.started[n], first.own[n])
                        for n in first.own
                        if n in seen.started
                    ),
                    "parameters() are the whole parameters, not the shards": case.world_size > 1
                    and (case.mesh is None or case.mesh[1] > 1)
                    and seen.kept >= seen.numel,
                },
                expected="every name, rank 0's numbers, and a shard of them on each rank",
                seen=f"no {', '.join(missing)}" if missing else f"{seen.kept} of {seen.numel}",
            )
            recognise(
                {
                    "units stay whole after finish_gradient_sync()": seen.between > 0,
                    "units stay whole after an evaluation": seen.left > 0,
                },
                expected="no elements in the module's parameters between steps",
                seen=f"{seen.between} and {seen.left}",
            )
        for rank, (_, seen) in enumerate(found):
            expect_steps(case, seed, first.own, seen, rank)


WRONG = {
    "the gradients are summed over the ranks, not averaged": "sum",
    "only the last of two backward passes counts: gradients are added up": "last",
    "only the first of two backward passes counts: gradients are added up": "first",
}
WRONG_ON_A_MESH = {
    "the mean is taken inside a node alone: the replicas go apart": "node",
    "the gradients are summed over the replicas, not averaged": "replicas",
    "the mean of a node is divided by all ranks once more": "again",
}
MIXED = "different shards are averaged with each other: a shard's gradient is all-reduced over "
MIXED += "those ranks alone that have the same one"
NOT_WAITED = "the message between replicas is not waited for: some gradients lack the others'"


def expect_steps(case, seed, start, seen, rank) -> None:
    """One rank's weights after each step, and what a wrong way would have made of them."""
    twin = partial(nets.twin_steps, case, seed, start, rank=rank)
    for step, (got, want) in enumerate(zip(seen.steps, twin(), strict=True)):
        frozen = [n for n in want if n.startswith("layers.1.") and case.frozen]
        named = WRONG if case.mesh is None else WRONG | WRONG_ON_A_MESH
        looks_like = {
            words: partial(lambda wrong, step: nets.flat(twin(wrong=wrong)[step]), wrong, step)
            for words, wrong in named.items()
        }
        words = "each rank trains on its own gradients: nothing is averaged"
        looks_like[words] = partial(nets.nearest_own, case, seed, start, step, nets.flat(got))
        close = torch.allclose(nets.flat(got), nets.flat(want), rtol=1e-3, atol=1e-4)
        if case.mesh is not None:
            mixed = min(case.mesh) > 1 and seen.mixed
            recognise(
                {NOT_WAITED: seen.unwaited > 0 and not close, MIXED: mixed and not close},
                expected=f"all-reduces among {case.mesh[0]} ranks, a wait for each message",
                seen=f"{seen.unwaited} messages of a step without one, and other weights"
                if seen.unwaited > 0
                else f"one among {case.world_size}, and other weights",
            )
        start_flat = nets.flat({n: start[n] for n in want})
        looks_like["nothing is trained: the shards get no gradient"] = start_flat
        for name in frozen:
            expect(
                torch.equal(got[name], start[name]),
                mistake="a frozen parameter is moved",
                expected="parameters without requires_grad as they were",
                seen="other numbers",
            )
        expect_close(
            nets.flat(got),
            nets.flat(want),
            what=f"rank {rank}'s weights after step {step + 1}, {case.units} units",
            looks_like=looks_like,
        )
    if seen.steps:
        net = case.net()
        last = {**start, **seen.steps[-1]}
        net.load_state_dict({**last, "output.weight": last["embedding.weight"]})
        loss = case.loss(net, seed, 9, 0, 0).detach()
        expect_close(torch.tensor(seen.evaluated), loss, what="the loss of an evaluation")


def expect_calls(observed, ahead: int, choices=orders.CHOICES) -> None:
    """Two all-gathers and one reduce-scatter a unit, of its size."""
    again = "a unit is gathered more often than for forward and for backward"
    again += ": what is fetched ahead is not the next one" if ahead else ""
    for n in (2, 3):
        for choice in choices:
            matrix = 64 * 64
            sizes = {"root": [6 * matrix], "block": [2 * matrix] * 3, "linear": [matrix] * 6}
            parts = [4 * part(size, n) for size in sizes[choice]]
            for calls in observed.seen((n, "calls", choice), HANG):
                gathers = lab.sizes_of(calls, "all_gather")
                scatters = lab.sizes_of(calls, "reduce_scatter")
                way = "".join(
                    {"all_gather": "g", "reduce_scatter": "s"}.get(c.op, "") for c in calls
                )
                ops = {call.op for call in calls if call.num_bytes > 16}
                recognise(
                    {
                        "gradients are all-reduced: every rank gets all of them": "all_reduce"
                        in ops,
                        "parameters travel by broadcast": "broadcast" in ops,
                        "the gradients leave after backward: a unit's leave when they are there": (
                            choice != "root"
                            and not ahead  # gathers of later units may all have begun
                            and way == "g" * len(gathers) + "s" * len(parts)
                        ),
                        "the units are kept whole from forward to backward: one gather a unit": (
                            gathers == parts
                        ),
                        again: len(gathers) > 2 * len(parts) and sum(gathers) > 2 * sum(parts),
                        "`units` are not kept to: other tensors travel together": len(scatters)
                        != len(parts),
                    },
                    expected=f"{2 * len(parts)} all_gathers, {len(parts)} reduce_scatters "
                    f"for units by {choice}",
                    seen=f"{len(gathers)} and {len(scatters)}; {', '.join(sorted(ops))}",
                )
                expect_equal(sorted(gathers), sorted(2 * parts), what="bytes of the all_gathers")
                expect_equal(scatters, [n * x for x in parts], what="bytes of the reduce_scatters")


def expect_bytes(observed, ahead: int, choices=orders.CHOICES) -> None:
    """Shards, and two units; one more with prefetch."""
    matrix = 64 * 64
    sizes = {"root": [6 * matrix], "block": [2 * matrix] * 3, "linear": [matrix] * 6}
    for choice in reversed(choices):
        rest = bytes_at_rest(sizes[choice], 2)
        peak = peak_bytes(sizes[choice], 2, ahead=ahead)
        for before, most, gathered in observed.seen(("bytes", choice), HANG):
            unit = 4 * sizes[choice][0]
            recognise(
                {
                    "every unit is gathered before the first one computes: a unit is gathered "
                    "before its own module's forward": 1 + ahead < gathered == len(sizes[choice]),
                },
                expected=f"{1 + ahead} of {len(sizes[choice])} units while the first one computes",
                seen=f"{gathered}",
                hint="the hook belongs on each unit, not on the module that has them all",
            )
            recognise(
                {
                    "more than the shards and their moments is kept between steps": before > rest,
                    "every unit is whole at the worst moment, or every unit's gradients, which are "
                    "still under way": most >= rest + 4 * 6 * matrix + unit and choice != "root",
                    "more is alive than a unit's parameters and its gradients": most > peak,
                },
                expected=f"{rest} bytes between steps, {peak} at most (units by {choice})",
                seen=f"{before} and {most}",
                hint="free the parameters before the gradients are copied together, let no name in "
                "FlatUnit.reduce() keep the last of them, and wait for one unit's reduce_scatter "
                "before the next unit's backward",
            )


def expect_half(observed) -> None:
    """16 bits compute, float32 is kept, the twin casts in the same way."""
    found = observed.seen("half", HANG, known=KNOWN)
    seed, first = found[0]
    twin = nn.Sequential(*(nn.Linear(a, b) for a, b in ((5, 9), (9, 7), (7, 3))))
    twin.load_state_dict(first["start"])
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        grads = []
        for rank in range(2):
            cast = {name: p.bfloat16() for name, p in twin.named_parameters()}
            x = lab.half_rows(seed, step, rank).bfloat16()
            out = torch.func.functional_call(twin, cast, (x,))
            own = torch.autograd.grad(out.float().square().mean(), list(twin.parameters()))
            grads.append([g.bfloat16() / 2 for g in own])
        for p, *each in zip(twin.parameters(), *grads, strict=True):
            p.grad = sum(each).float()
        optimizer.step()
    for _, seen in found:
        state = seen["state"]
        rounded = all(torch.equal(x, x.bfloat16().to(x.dtype)) for x in state.values())
        recognise(
            {
                "the shards have 16 bits: the optimizer's small steps are lost": seen["masters"]
                != {torch.float32},
                "compute_dtype is not used: float32 computes": seen["output"] == torch.float32,
                "the inputs of the units are not cast": seen["inputs"] != {lab.HALF},
                "an input that is given by its name is not cast": seen["named"] != {lab.HALF},
                "full_state_dict() is rounded to what computes": rounded,
            },
            expected="bf16 in and out, float32 shards, full_state_dict() from the shards",
            seen=f"inputs {seen['inputs']}, output {seen['output']}, shards {seen['masters']}",
        )
        for name, want in twin.state_dict().items():
            expect_close(state[name], want, what=name, atol=2e-3, rtol=2e-2)


def expect_refusals(found) -> None:
    """Every attempt ends in a ValueError."""
    for errors in found:
        for what, error in errors.items():
            recognise(
                {
                    f"{what} is accepted": not error,
                    f"{what} raises the wrong kind of error": error != "ValueError",
                },
                expected="a ValueError",
                seen=error or "no error",
            )


def expect_order(observed) -> None:
    """While a unit computes the next one is on its way, and no third one is whole."""
    for seed, seen in observed.seen("orders", HANG):
        want = orders.twin_orders(seed, seen.start, 2)
        for name, value in want.items():
            stale = (
                "weights of before the optimizer's step: gathered ahead across the end of a step"
            )
            expect_close(seen.state[name], value, what=f"{name} after five steps", hint=stale)
        for number in (1, 2, 4):
            expect_ahead(seen.steps[number], number)
        expect_nothing_ahead(seen.steps[3])
        for number, moments in enumerate(seen.steps):
            most = max(len(each.whole) for each in moments)
            expect(
                most <= 2,
                mistake="more than two units are whole at a time",
                expected="the unit that computes, and one that is on its way",
                seen=f"{most} in step {number + 1}",
            )
        expect_equal(
            seen.gathers[:3], [2 * orders.NUM_LAYERS] * 3, what="gathers in the first three steps"
        )
    for gathers in observed.seen("ending", HANG):
        words = "at the end of a step the next one's first unit is fetched, and thrown away"
        expect_equal(gathers, 6, what="gathers of three units in a step", looks_like={words: 7})


def expect_ahead(moments, number: int) -> None:
    """One step's moments, forward and backward."""
    order, again = orders.ORDERS[number], orders.ORDERS[number - 1] != orders.STRAIGHT
    for each in moments:
        forward = each.way == "forward"
        place = order.index(each.layer) + (1 if forward else -1)
        if not 0 <= place < len(order):
            continue
        following = order[place]
        wrong = [i for i in each.whole if i not in (each.layer, following)]
        none = each.whole == [each.layer]
        recognise(
            {
                "more than two units are whole at a time": len(each.whole) > 2,
                "the order is that of a first step for ever: it is that of the step before": again
                and (none or bool(wrong)),
                "nothing is on its way after an evaluation, which must not touch the order": (
                    none and number == 2
                ),
                "nothing is on its way while a unit computes": none and forward,
                "nothing is on its way in backward: it has an order, too": none,
                "another unit than the next one is on its way: the order is that of use": bool(
                    wrong
                ),
                "the next unit is waited for before this one computes: nothing overlaps": forward
                and each.waits > place,
            },
            expected=f"unit {following} on its way in the {each.way} of unit {each.layer}",
            seen=f"whole: {each.whole}; {each.waits} waits in step {number + 1}",
        )


def expect_nothing_ahead(moments) -> None:
    """A forward in another order than the step before: in its third place 3 came after 2 there."""
    third = next(each for each in moments if each.way == "forward" and each.layer == 1)
    words = "the next unit is the one in the next place, whether or not the order still holds"
    expect(
        3 not in third.whole,
        mistake=words,
        expected=f"no unit 3 in the third place of a forward in the order {orders.OTHER}",
        seen=f"whole: {third.whole}",
    )


# 13.1b ChainShard

exercise_13_1b = checks_for(
    "13.1b",
    name="ChainShard",
    difficulty=3,
    minutes=30,
    hint=(
        "One FlatUnit for each unit; self.shards = nn.ParameterList of their shards; the module in "
        "a list, so that parameters() does not see its own."
    ),
    forbidden=(
        *ENGINE,
        *(f"shared.sharding.{name}." for name in ("fully_shard", "prefetch", "hybrid")),
        "shared.sharding.unit_hooks.UnitHooks",
    ),
)
IN_A_CHAIN = ("block", "linear")
EACH_STEP = "free after the forward, and after the last of the unit's gradients, counted anew"
IN_CHAINS = KNOWN | dict.fromkeys(EMPTY, (FREED, f"{EACH_STEP} in every step"))


@exercise_13_1b.check("one process's weights, a shard on each rank")
def chain_weights(answer) -> None:
    for n in (2, 3, 1):
        found = chains.observed_chain(answer).seen((n, "weights"), HANG, known=IN_CHAINS)
        seed, first = found[0]
        want = chains.twin_weights(seed, first.own, n)
        own = chains.twin_weights(seed, first.own, 1)
        for rank, (_, seen) in enumerate(found):
            recognise(
                {
                    "parameters() are the whole parameters, not the shards": n > 1
                    and seen.kept >= first.own.numel(),
                    "parameters() has the module's own parameters beside the shards: keep the "
                    "module where nn.Module does not find it": seen.listed > len(chains.SIZES),
                    "units stay whole after a forward": seen.after_forward > 0,
                    "units stay whole after finish_gradient_sync()": seen.between > 0,
                    "units stay whole after an evaluation": seen.evaluated > 0,
                },
                expected="a shard on each rank, and no unit whole but while it computes",
                seen=f"{seen.kept} numbers in parameters(), {seen.after_forward} elements whole "
                f"after forward, {seen.between} between steps, {seen.evaluated} after an "
                "evaluation",
            )
            looks_like = {
                "nothing is trained: the shards get no gradient": first.own,
                "each rank trains on its own gradients: nothing is averaged": own[-1],
                "the last step's gradients are missing: they are waited for after the step": (
                    want[-2]
                ),
            }
            what = f"rank {rank}'s weights after three steps on {n} rank(s)"
            expect_close(seen.state, want[-1], what=what, looks_like=looks_like)


@exercise_13_1b.check("messages: two gathers and one reduce-scatter a unit")
def chain_messages(answer) -> None:
    expect_calls(chains.observed_chain(answer), 0, choices=IN_A_CHAIN)


@exercise_13_1b.check("bytes: the shards and two units")
def chain_bytes(answer) -> None:
    expect_bytes(chains.observed_chain(answer), 0, choices=IN_A_CHAIN)


# 13.2 ModelShard, 13.2b FullyShard, 13.3 PrefetchingShard, 13.4 hybrid_shard

OWN_HOOKS = (
    *ENGINE,
    *(f"shared.sharding.{name}." for name in ("fully_shard", "prefetch", "hybrid")),
    "shared.sharding.unit_hooks.UnitHooks",
)
exercise_13_2 = checks_for(
    "13.2",
    name="ModelShard",
    difficulty=4,
    minutes=45,
    hint=(
        "A unit for each module, over its parameters that no earlier unit has, one for each dtype; "
        "then one for what is left, hooked to the module itself. self.shards = nn.ParameterList of "
        "the shards; the module in a list, so that parameters() does not see its own."
    ),
    forbidden=OWN_HOOKS,
)
exercise_13_2b = checks_for(
    "13.2b",
    name="FullyShard",
    difficulty=5,
    minutes=45,
    hint=(
        "Derived from your ModelShard: other units (compute_dtype, WholeUnit; one for each dtype, "
        "requires_grad and size), and another before_forward, after_forward and reduce."
    ),
    forbidden=OWN_HOOKS,
)
exercise_13_3 = checks_for(
    "13.3",
    name="PrefetchingShard",
    difficulty=4,
    minutes=30,
    hint=(
        "Note the units in acquire(); in finish_gradient_sync() the list becomes the order of the "
        "next step."
    ),
    forbidden=(*ENGINE, "shared.sharding.prefetch.", "shared.sharding.hybrid."),
)
exercise_13_4 = checks_for(
    "13.4",
    name="hybrid_shard",
    difficulty=4,
    minutes=30,
    hint=(
        "Ranks 0 to s-1 are a node: group of rank r is r - r % s to that plus s; its replicas are "
        "all ranks with the same r % s. dist.new_group is called for every group, on every rank."
    ),
    forbidden=(*ENGINE, "shared.sharding.hybrid."),
)


def expect_uses(observed) -> None:
    """The weights of one process where a unit is used twice, in part, or on one rank alone."""
    expect_weights(observed, orders.TWICE)
    expect_weights(observed, orders.SHORT, apart=UNUSED_HANG)
    expect_weights(observed, orders.SHORT_NAMED, apart=NAMED_HANG)


SPLIT = dict.fromkeys(
    EMPTY,
    (
        "a unit with several outputs computes its backward with parameters that are freed: it "
        "begins with whichever of their gradients is computed first",
        "register_multi_grad_hook(outputs, f, mode='any')",
    ),
)


def expect_outputs(observed) -> None:
    """The gradients of one process, of units with several outputs."""
    for got, want in observed.seen("outputs", HANG, known=SPLIT):
        for one, two in zip(got, want, strict=True):
            expect_close(one, two, what="a gradient of units with several outputs, some unused")


def expect_modes(observed) -> None:
    """train() and eval() reach the module that was sharded."""
    for evaluating, training, selves in observed.seen("modes", HANG):
        recognise(
            {
                "eval() does not reach the module: its dropout stays on": not evaluating,
                "train() does not reach the module: its dropout stays off": not training,
                "train() or eval() does not return the sharded module itself": not selves,
            },
            expected="the module in the mode that train() and eval() set, which return self",
            seen=f"after eval() {evaluating}, after train() {training}",
            hint="override train(mode): eval() calls it, too",
        )


def expect_group(observed) -> None:
    """A group of one rank on each of two sends nothing, and keeps its own numbers."""
    alone = observed.seen("alone", HANG)
    kept, numel = [seen.kept for seen in alone], alone[0].numel
    sizes = sorted({size for seen in alone for size in seen.group_sizes})
    recognise(
        {
            "units are sharded over all ranks, not over the group": min(kept) < numel,
            "numbers or buffers come from outside of the group": not all(
                seen.own for seen in alone
            ),
            "something is sent outside of the group": sizes != [1],
        },
        expected=f"{numel} numbers of its own on each of two ranks, a group each",
        seen=f"{kept}, messages among {sizes} ranks",
    )


@exercise_13_2.check("one process's weights: tied, odd sizes, two backward passes")
def model_weights(answer) -> None:
    expect_weights(orders.observed_model(answer), *orders.MODELS)


@exercise_13_2.check("units with several outputs")
def model_outputs(answer) -> None:
    expect_outputs(orders.observed_model(answer))


@exercise_13_2.check("messages: two gathers and one reduce-scatter a unit")
def model_messages(answer) -> None:
    expect_calls(orders.observed_model(answer), 0)


@exercise_13_2.check("bytes: the shards and two units")
def model_bytes(answer) -> None:
    expect_bytes(orders.observed_model(answer), 0)


@exercise_13_2.check("what is refused")
def model_refused(answer) -> None:
    expect_refusals(orders.observed_model(answer).seen("refused", HANG))


@exercise_13_2.check("train() and eval(); a group of its own")
def model_modes_and_group(answer) -> None:
    expect_modes(orders.observed_model(answer))
    expect_group(orders.observed_model(answer))


@exercise_13_2b.check("one process's weights: tied, frozen, odd sizes, two backward passes")
def sharded_weights(answer) -> None:
    expect_weights(orders.observed_sharding(answer), *orders.VALUES)


@exercise_13_2b.check("a unit called twice, and one that a rank does not use all of")
def sharded_uses(answer) -> None:
    expect_uses(orders.observed_sharding(answer))


@exercise_13_2b.check("units with several outputs")
def sharded_outputs(answer) -> None:
    expect_outputs(orders.observed_sharding(answer))


@exercise_13_2b.check("messages: two gathers and one reduce-scatter a unit")
def sharded_messages(answer) -> None:
    expect_calls(orders.observed_sharding(answer), 0)


@exercise_13_2b.check("bytes: the shards and two units")
def sharded_bytes(answer) -> None:
    expect_bytes(orders.observed_sharding(answer), 0)


@exercise_13_2b.check("16 bits compute, float32 is kept")
def sharded_half(answer) -> None:
    expect_half(orders.observed_sharding(answer))


@exercise_13_3.check("one process's weights: tied, frozen, odd sizes, two backward passes")
def prefetched_weights(answer) -> None:
    expect_weights(orders.observed_sharding(answer), *orders.VALUES)


# A wrong order of gathers hangs where ranks use different units: its own check comes first.
@exercise_13_3.check("messages: two gathers and one reduce-scatter a unit")
def prefetched_messages(answer) -> None:
    expect_calls(orders.observed_sharding(answer), 1)


@exercise_13_3.check("the next unit on its way, no third one whole")
def prefetched_order(answer) -> None:
    expect_order(orders.observed_sharding(answer))


@exercise_13_3.check("a unit called twice, and one that a rank does not use all of")
def prefetched_uses(answer) -> None:
    expect_uses(orders.observed_sharding(answer))


@exercise_13_3.check("bytes: the shards and two units, and the one on its way")
def prefetched_bytes(answer) -> None:
    expect_bytes(orders.observed_sharding(answer), 1)


@exercise_13_3.check("16 bits compute, float32 is kept")
def prefetched_half(answer) -> None:
    expect_half(orders.observed_sharding(answer))


@exercise_13_2b.check("frozen units, tokens, and train() and eval()")
def frozen_and_modes(answer) -> None:
    observed = orders.observed_sharding(answer)
    for left, behind, reductions in observed.seen("frozen", HANG):
        recognise(
            {
                "a frozen unit stays whole from forward to backward": left == 2 * 64 * 64,
                "units stay whole from forward to backward": left > 0,
                "a frozen unit stays whole after its backward: it has no last gradient, and is "
                "freed when backward has passed its module": behind > 0,
                "a frozen unit is reduced: it has no gradient to send": reductions == 3,
            },
            expected="no unit whole between forward and backward, 2 reduce_scatters for 3 units of "
            "which one is frozen",
            seen=f"{left} elements, {behind} of the frozen one after backward, {reductions} "
            "reduce_scatters",
        )
        expect_equal(reductions, 2, what="reduce_scatters of three units, one of them frozen")
    for words in observed.seen("tokens", HANG):
        recognise(
            {
                "integers are cast to compute_dtype: token numbers stay what they are": (
                    "indices" in words
                ),
                "only the module's inputs are cast: a unit's can be float32 again on the way": (
                    "same dtype" in words
                ),
            },
            expected=f"an output in {lab.HALF} of tokens, with float32 positions on the way",
            seen=words[:120],
        )
        expect_equal(words, str(lab.HALF), what="the dtype that comes out of a model of tokens")
    expect_modes(observed)


@exercise_13_2b.check("what is refused")
def units_refused(answer) -> None:
    expect_refusals(orders.observed_sharding(answer).seen("refused", HANG))


@exercise_13_2b.check("small parameters whole, units kept for backward")
def options(answer) -> None:
    observed, most = orders.observed_sharding(answer), orders.SMALL.keep_whole
    for _, seen in observed.seen(orders.SMALL, HANG):
        small = sum(x.numel() for n, x in seen.own.items() if x.numel() < most and n != "shift")
        recognise(
            {
                "keep_whole is not used, or counts bytes: small parameters are sharded": (
                    seen.small < small
                ),
                "a parameter of exactly keep_whole elements stays whole: smaller ones do": (
                    seen.between == most
                ),
            },
            expected=f"{small} elements whole between steps with keep_whole={most}",
            seen=f"{seen.small + seen.between}",
        )
    expect_weights(observed, orders.SMALL, orders.KEPT)
    for _, seen in observed.seen(orders.SMALL, HANG):
        expect_equal(seen.small, small, what=f"elements kept with keep_whole={most}")
    for calls in observed.seen("kept calls", HANG):
        gathers = len(lab.sizes_of(calls, "all_gather"))
        words = "reshard_after_forward=False is not used: a unit is gathered twice"
        expect_equal(gathers, 3, what="all_gathers of three units", looks_like={words: 6})


@exercise_13_2b.check("each use is told to acquire(); a group of its own")
def uses_and_group(answer) -> None:
    for told in orders.observed_sharding(answer).seen("acquired", HANG):
        recognise(
            {
                "acquire() is not called in forward: what overrides it learns of no use": (
                    told.forward < 3
                ),
                "acquire() is not called in backward: what overrides it learns of no use there": (
                    told.backward < 3
                ),
                "on_shard_gradient() is not called for each unit": told.means < 3,
                "on_shard_gradient() is called before shard.grad holds the mean: after finish()": (
                    told.early > 0
                ),
            },
            expected="a call for each of three units, forward and backward, and when its mean is "
            "there",
            seen=f"{told.forward} and {told.backward}; {told.means} means, {told.early} too early",
        )
    expect_group(orders.observed_sharding(answer))


@exercise_13_4.check("one process's weights on every mesh")
def mesh_values(answer) -> None:
    expect_weights(orders.observed_mesh(answer), *orders.MESHES)


@exercise_13_4.check("who talks to whom, and what crosses nodes")
def mesh_calls(answer) -> None:
    size = 64 * 64  # each matrix is a unit
    for mesh in ((2, 2), (4, 1)):
        replicas, n = mesh
        for calls in orders.observed_mesh(answer).seen(("calls", mesh), HANG):
            seen = {(c.op, c.group_size) for c in calls if c.num_bytes > 16}
            across = [c for c in calls if c.op == "all_reduce" and c.num_bytes > 16]
            shard = 4 * part(size, n)
            inside = {("all_gather", n), ("reduce_scatter", n)}
            recognise(
                {
                    "parameters are gathered across nodes": ("all_gather", 4) in seen
                    or (n != replicas and ("all_gather", replicas) in seen),
                    "`units` is not handed on: other tensors travel together": (
                        [c.num_bytes for c in across] == [2 * shard] * 3
                    ),
                    "whole gradients cross the nodes: a shard's is enough": (
                        sum(c.num_bytes for c in across) > 6 * shard
                    ),
                    "gradients are averaged over all ranks at once": ("all_reduce", 4) in seen
                    and replicas != 4,
                },
                expected=f"{sorted(inside)} and all_reduces of {shard} bytes on {replicas} ranks",
                seen=f"{sorted(seen)}, {[c.num_bytes for c in across]} bytes",
            )
            want = inside | {("all_reduce", replicas)}
            expect_equal(seen, want, what=f"operations and sizes of groups on a mesh {mesh}")
            expect_equal([c.num_bytes for c in across], [shard] * 6, what="bytes across nodes")


@exercise_13_4.check("neighbours are a node")
def mesh_groups(answer) -> None:
    found = orders.observed_mesh(answer).seen("neighbours", HANG)
    for rank, others in enumerate(found):
        want = [rank - rank % 2, rank - rank % 2 + 1]
        words = "rows and columns are exchanged: a unit is sharded across nodes"
        columns = {words: [rank % 2, rank % 2 + 2]}
        expect_equal(
            others, want, what=f"the ranks that share a unit with rank {rank}", looks_like=columns
        )


@exercise_13_4.check("compute_dtype")
def mesh_half(answer) -> None:
    for dtype in orders.observed_mesh(answer).seen("half", HANG):
        words = "compute_dtype is not handed on: float32 computes"
        expect_equal(dtype, lab.HALF, what="the output's dtype", looks_like={words: torch.float32})


@exercise_13_4.check("what is refused")
def meshes_refused(answer) -> None:
    words = (
        "a mesh that does not fit the number of ranks is accepted: its ranks wait for each other"
    )
    expect_refusals(orders.observed_mesh(answer).seen("refused", words))
