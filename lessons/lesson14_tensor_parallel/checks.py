"""Lesson 14: what tells a right answer from a wrong one.

The oracle is the whole layer, or torch's own loss, in one process. Messages are counted below
Python. Ranks start with different weights, and the groups are not always all ranks.
"""

from functools import partial

import torch
import torch.nn.functional as F

from lessons.lesson14_tensor_parallel.laboratory import blocks as block_lab
from lessons.lesson14_tensor_parallel.laboratory import layers as lab
from lessons.lesson14_tensor_parallel.laboratory import messages as message_lab
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_close, expect_equal, recognise

OWN = "a torch.autograd.Function has a forward and a backward of its own"


def say(calls) -> str:
    """Operations as a reader wants them."""
    return ", ".join(f"{call.op} of {call.num_bytes} bytes" for call in calls) or "no message"


def sums_of(world, seen, what) -> list:
    """For each rank the sum of what the ranks of its group have."""
    return [
        torch.stack([what(seen[r]) for r in world.members(rank)]).sum(0)
        for rank in range(len(seen))
    ]


def expect_sent(calls, one, group_size, where, more) -> None:
    """One all-reduce of as many bytes as x; nothing in a group of one."""
    if group_size == 1:
        recognise(
            {"a group of one rank sends to itself": bool(calls)},
            expected=f"no message in {where} in a group of one",
            seen=say(calls),
        )
        return
    nbytes = one.x.nbytes
    recognise(
        more
        | {
            "the message is larger than x: it travels in another dtype": any(
                call.op == "all_reduce" and call.num_bytes > nbytes for call in calls
            ),
        },
        expected=f"one all_reduce of {nbytes} bytes in {where}",
        seen=say(calls),
    )
    expect(
        [(call.op, call.num_bytes) for call in calls] == [("all_reduce", nbytes)],
        expected=f"one all_reduce of {nbytes} bytes in {where}",
        seen=say(calls),
    )


def rounded(got) -> bool:
    """Whether float64 numbers are such that float32 has them, too."""
    return got.dtype == torch.float64 and torch.equal(got, got.float().double())


def expect_same_bits(world, seen, what) -> None:
    """All ranks of a group have the same sum: where they go on from it, they must not part."""
    for rank, one in enumerate(seen):
        first = what(seen[world.members(rank)[0]])
        recognise(
            {
                "the ranks' sums differ in their last bits: one computes with it what others do "
                "not": not torch.equal(what(one), first)
            },
            expected="the same bits on all ranks of the group",
            seen=f"rank {rank}: {int((what(one) != first).sum())} of {first.numel()} differ",
        )


NARROW = "float64 numbers travel as float32 and come back rounded"
SUMMED = "x is summed in forward already: the ranks have the same x"
IN_MEMORY_ORDER = (
    "the numbers are sent in the order of their memory, which differs from rank to rank: "
    "contiguous() first"
)
HALVES = "several messages, each of a part: one all_reduce takes all at once"


def as_they_lie(world, rank, seen, what):
    """The sum of a group's tensors by their places in memory, where these differ."""
    return message_lab.by_memory([what(seen[r]) for r in world.members(rank)], what(seen[rank]))


def is_cut(calls, one) -> bool:
    """Whether several all-reduces have the bytes of one."""
    sizes = [call.num_bytes for call in calls if call.op == "all_reduce"]
    return len(sizes) > 1 and sum(sizes) == one.x.nbytes


exercise_14_1a = checks_for(
    "14.1a",
    name="copy_to_ranks",
    difficulty=2,
    minutes=15,
    hint=(
        "A torch.autograd.Function whose forward returns x.view_as(x) and keeps the group in ctx; "
        "its backward clones the gradient, all-reduces the clone and returns it and None."
    ),
    forbidden=("torch.distributed.nn.", "torch.distributed._functional_collectives."),
)


@exercise_14_1a.check("values, gradients and messages on 1, 2, 3 and 2 x 2 ranks")
def copies(copy_to_ranks) -> None:
    for world in message_lab.MESSAGES:
        seen = message_lab.messages(copy_to_ranks)(world)
        wanted = sums_of(world, seen, lambda one: one.upstream)
        everywhere = torch.stack([one.upstream for one in seen]).sum(0)
        for rank, (one, want) in enumerate(zip(seen, wanted, strict=True)):
            n = len(world.members(rank))
            totals = {SUMMED: sums_of(world, seen, lambda one: one.x)[rank]}
            expect_close(one.y, one.x, what="the copy", looks_like=totals)
            summed = one.other_use is not None and not bool((one.other_use == 1).all())
            recognise(
                {
                    "x is written to: it is the caller's": one.changed,
                    "the gradient of another use of x is summed as well: only this one's is": (
                        summed
                    ),
                    "no gradient reaches x": one.gradient is None,
                    "forward sends: every rank has x already": bool(one.forward),
                },
                expected="x as it was, a gradient for it, and nothing sent in forward",
                seen=f"a gradient: {one.gradient is not None}; in forward {say(one.forward)}",
                hint=OWN,
            )
            changed = int((one.beside != one.upstream).sum())
            recognise(
                {
                    "the gradient is summed in place: another branch was handed the same tensor": (
                        changed > 0
                    ),
                },
                expected="the other branch of an addition gets the gradient as it came",
                seen=f"{changed} of {one.upstream.numel()} of its numbers are changed",
                hint="clone() the gradient, and all-reduce the clone",
            )
            looks_like = {
                "each rank keeps its own part of the gradient: the sum over the ranks is missing": (
                    one.upstream
                ),
                IN_MEMORY_ORDER: as_they_lie(world, rank, seen, lambda one: one.upstream),
                "the gradient is the mean of the parts, not their sum": want / n,
                "the sum runs over all ranks, not over those of the group": everywhere,
            }
            what = f"rank {rank}'s gradient of x ({n} ranks in the group)"
            recognise({NARROW: n > 1 and rounded(one.gradient)}, expected=what, seen="float32's")
            expect_close(one.gradient, want, what=what, looks_like=looks_like)
            gathered = {
                "the parts are gathered and added up: n - 1 times the bytes, not at most 2": (
                    any("gather" in call.op for call in one.backward)
                ),
                "a reduce brings the sum to one rank alone": (
                    any(call.op == "reduce" for call in one.backward)
                ),
                HALVES: is_cut(one.backward, one),
            }
            expect_sent(one.backward, one, n, "backward", gathered)
        expect_same_bits(world, seen, lambda one: one.gradient)


exercise_14_1b = checks_for(
    "14.1b",
    name="sum_over_ranks",
    difficulty=2,
    minutes=10,
    hint=(
        "The same Function the other way round: forward clones, all-reduces and returns the clone; "
        "backward returns the gradient as it is."
    ),
    forbidden=("torch.distributed.nn.", "torch.distributed._functional_collectives."),
)


@exercise_14_1b.check("values, gradients and messages on 1, 2, 3 and 2 x 2 ranks")
def sums(sum_over_ranks) -> None:
    for world in message_lab.MESSAGES:
        seen = message_lab.messages(sum_over_ranks)(world)
        wanted = sums_of(world, seen, lambda one: one.x)
        everywhere = torch.stack([one.x for one in seen]).sum(0)
        twice = sums_of(world, seen, lambda one: one.upstream)
        for rank, (one, want) in enumerate(zip(seen, wanted, strict=True)):
            n = len(world.members(rank))
            looks_like = {
                "the sum arrives on one rank alone": one.x,
                "the result is the mean, not the sum": want / n,
                "the sum runs over all ranks, not over those of the group": everywhere,
            }
            looks_like[IN_MEMORY_ORDER] = as_they_lie(world, rank, seen, lambda one: one.x)
            what = f"rank {rank}'s sum ({n} ranks)"
            late = "the message is not waited for: the result changes after it has been returned"
            recognise({late: one.moved}, expected=what, seen="another one later")
            alone = n > 1 and all(torch.equal(other.y, other.x) for other in seen)
            nothing = "nothing is summed: a group that is None means all ranks"
            recognise({nothing: alone}, expected=what, seen="each rank's own x on every rank")
            from_wide = one.x.dtype == torch.float64 and one.y.dtype == torch.float32
            narrow = n > 1 and (rounded(one.y) or from_wide)
            recognise({NARROW: narrow}, expected=f"{what} in {one.x.dtype}", seen="float32's")
            expect_equal(one.y.dtype, one.x.dtype, what=f"the dtype of {what}")
            expect_close(one.y, want, what=what, looks_like=looks_like)
            recognise(
                {"no gradient comes back through the sum": one.gradient is None},
                expected="a gradient for x",
                seen="None",
                hint=OWN,
            )
            looks_like = {
                "the gradients are summed as well: each rank has the whole gradient of the sum": (
                    twice[rank]
                ),
                "the gradients are summed as well, in the order in which they lie in memory": (
                    as_they_lie(world, rank, seen, lambda one: one.upstream)
                ),
                "the gradient is divided by the number of ranks": one.upstream / n,
                "the gradient is multiplied by the number of ranks": one.upstream * n,
            }
            what = f"rank {rank}'s gradient of x ({n} ranks in the group)"
            expect_close(one.gradient, one.upstream, what=what, looks_like=looks_like)
            gathered = {
                "everybody's x is gathered and added up: n - 1 times its bytes": any(
                    "gather" in call.op for call in one.forward
                ),
                HALVES: is_cut(one.forward, one),
            }
            expect_sent(one.forward, one, n, "forward", gathered)
            expect_equal([call.op for call in one.backward], [], what="messages in backward")
        expect_same_bits(world, seen, lambda one: one.y)


# 14.2 and 14.3


def share(whole, dim, world, rank):
    """A rank's part of a tensor."""
    members = world.members(rank)
    return whole.chunk(len(members), dim)[members.index(rank)]


def expect_parts(world, rank, everywhere, whole, dim) -> None:
    """Weight and bias of rank 0's layer, this rank's part, in memory of their own."""
    one = everywhere[rank]
    expect_cut(world, rank, one, whole, dim)
    expect_part(world, rank, everywhere, whole, dim)
    nbytes = one.parts["weight"].nbytes
    recognise(
        {
            "a frozen weight is trained": world.frozen and one.trained["weight"],
            "the parameters are frozen": not world.frozen and not one.trained["weight"],
            "the bias is frozen or trained as the weight is: each as it was": (
                world.bias and one.trained["bias"] == world.frozen_bias
            ),
            "the part is a view: the whole matrix stays in memory behind it": one.nbytes > nbytes,
        },
        expected=f"{nbytes} bytes behind the weight; trained what was trained in the layer",
        seen=f"{one.nbytes} bytes, trained: {one.trained}",
        hint="clone() of a part has memory of its own",
    )


def expect_marks(one, dim) -> None:
    """Each part says along which dim it is cut, and what is whole says nothing."""
    want = {name: dim if name == "weight" or dim == 0 else None for name in one.names}
    recognise(
        {
            "a part does not say along which dim it is cut: mark_cut(parameter, dim)": any(
                want[name] is not None and mark is None for name, mark in one.marks.items()
            ),
            "a parameter that is whole is marked as cut": any(
                want[name] is None and mark is not None for name, mark in one.marks.items()
            ),
            "a part says another dim than the one it is cut along": one.marks != want,
        },
        expected=f"cut_dim(parameter): {want}",
        seen=f"{one.marks}",
        hint="whole_state_dict() puts a model together again by these marks",
    )


def expect_cut(world, rank, one, whole, dim) -> None:
    """The parameters' names, dtype and shapes."""
    n = len(world.members(rank))
    names = ["weight", "bias"] if world.bias else ["weight"]
    recognise(
        {"a bias is made for a layer without one": not world.bias and "bias" in one.names},
        expected="no bias where the layer has none",
        seen=", ".join(one.names),
    )
    expect_equal(sorted(one.names), sorted(names), what="the names of the parameters")
    want = share(whole["weight"], dim, world, rank)
    got = one.parts["weight"]
    other = share(whole["weight"], 1 - dim, world, rank)
    too_many = world.groups > 1 and got.shape[dim] * world.ranks == whole["weight"].shape[dim]
    recognise(
        {"the parameters have another dtype than the layer's": got.dtype != want.dtype},
        expected=f"parameters in {want.dtype}",
        seen=f"{got.dtype}",
    )
    recognise(
        {
            "the layer that was given is changed": one.touched,
            "the matrix is whole on every rank: nothing is cut": (
                n > 1 and got.shape == whole["weight"].shape
            ),
            "the matrix is cut along its other dim": n > 1 and got.shape == other.shape,
            "the matrix is cut into a part for each of all ranks: those of the group share it": (
                too_many
            ),
        },
        expected=f"a weight of shape {tuple(want.shape)} (torch's weight is d_out x d_in)",
        seen=f"{tuple(got.shape)}",
    )


def expect_part(world, rank, everywhere, whole, dim) -> None:
    """The numbers of this rank's part of the weight."""
    one, members = everywhere[rank], world.members(rank)
    n, place = len(members), members.index(rank)
    first, got = everywhere[0].whole["weight"], one.parts["weight"]
    every_nth = whole["weight"].movedim(dim, 0)[place::n].movedim(0, dim)
    looks_like = {
        "each rank cuts a matrix of its own: rank 0's is for all": share(
            one.whole["weight"], dim, world, rank
        ),
        "the parts take turns, one feature each: a part has neighbours": every_nth,
        "every rank has the same part": whole["weight"].chunk(n, dim)[0],
        "rank 0 of all ranks decides the numbers, not rank 0 of the group": share(
            first, dim, world, rank
        ),
    }
    for other_rank, another in enumerate(whole["weight"].chunk(n, dim)):
        if other_rank not in (0, place):  # rank 0's is a row above
            looks_like[
                f"it is the part of rank {other_rank} of the group: its own place counts"
            ] = another
    what = f"rank {rank}'s part of the weight"
    want = share(whole["weight"], dim, world, rank)
    expect_close(got, want, what=what, atol=0, rtol=0, looks_like=looks_like)


def expect_message(world, one, shape) -> None:
    """The message that was given is used, once a forward, with the group."""
    recognise(
        {
            "it sends by itself, whatever it was given": bool(one.ops),
            "what was given is not used": not one.entered,
            "it gets another group than the layer's": not all(right for _, right in one.entered),
        },
        expected=f"one call a forward with a tensor of shape {shape} and the group",
        seen=f"{len(one.entered)} calls in 2 forwards, messages: {', '.join(one.ops) or 'none'}",
    )
    expect_equal(
        [each for each, _ in one.entered],
        [shape] * 2,
        what="the shapes that were given",
        mistake="something else comes through the message than what should",
    )


exercise_14_2 = checks_for(
    "14.2",
    name="ColumnParallelLinear",
    difficulty=3,
    minutes=20,
    hint=(
        "Clone linear.weight, broadcast the clone in the group (group_src=0), take "
        ".chunk(ranks, 0)[rank].clone() as nn.Parameter; the same for the bias. forward: enter, "
        "then F.linear."
    ),
    forbidden=("torch.distributed.tensor.",),
)


@exercise_14_2.check("the parts: rank 0's matrix by its outputs, in memory of their own")
def column_parts(answer) -> None:
    for world in lab.LAYERS:
        seen = lab.layers(answer, True)(world)
        for rank, one in enumerate(seen):
            whole = seen[world.members(rank)[0]].whole
            expect_parts(world, rank, seen, whole, 0)
            if world.bias:
                want = share(whole["bias"], 0, world, rank)
                recognise(
                    {
                        "the bias is whole on every rank: each has that of its outputs": (
                            one.parts["bias"].shape != want.shape
                        )
                    },
                    expected=f"a bias of shape {tuple(want.shape)}",
                    seen=f"{tuple(one.parts['bias'].shape)}",
                )
                looks_like = {
                    "the bias begins with zeros: it is rank 0's": torch.zeros_like(want),
                    "each rank keeps its own bias: rank 0's is for all": share(
                        one.whole["bias"], 0, world, rank
                    ),
                }
                got, what = one.parts["bias"], f"rank {rank}'s part of the bias"
                expect_close(got, want, what=what, atol=0, rtol=0, looks_like=looks_like)


@exercise_14_2.check("two steps: outputs in parts, the message that is given, every gradient")
def column_steps(answer) -> None:
    for world in lab.LAYERS:
        seen = lab.layers(answer, True)(world)
        for rank, one in enumerate(seen):
            n = len(world.members(rank))
            for step in range(2):
                expect_ran(one, world)
                got, size = one.y[step], one.parts["weight"].shape[0]
                recognise(
                    {
                        "the outputs are gathered: they stay in parts": (
                            n > 1 and got.shape[-1] == n * size
                        )
                    },
                    expected=f"this rank's {size} outputs",
                    seen=f"{got.shape[-1]}",
                )
                want, grads = plain_step(one, step, lab.FACTOR if world.given else 1.0)
                early, _ = plain_step(one, step, 1.0)
                strange = not any(torch.allclose(got, each) for each in (want, early))
                recognise(
                    {
                        "the outputs are summed over the ranks: they are different features": (
                            n > 1 and "all_reduce" in one.ops and strange
                        ),
                    },
                    expected=f"this rank's {size} outputs, and nothing sent in forward",
                    seen=f"messages: {', '.join(one.ops) or 'none'}",
                )
                if world.given:
                    expect_message(world, one, (2, 3, 12))
                else:
                    recognise(
                        {"something is sent although None was given": bool(one.ops)},
                        expected="no message: the input has been copied to the ranks before",
                        seen=", ".join(one.ops),
                    )
                looks_like = {
                    "the bias is left out": want - one.now[step].get("bias", torch.zeros(())),
                }
                what = f"rank {rank}'s outputs in step {step + 1}"
                expect_close(got, want, what=what, looks_like=looks_like)
                expect_grads(one, step, grads)


def expect_ran(one, world, rows=False) -> None:
    """Forward and backward came to their end."""
    called = "NoneType" in one.error and "callable" in one.error
    recognise(
        {
            "enter is called although it is None": called and not world.given and not rows,
            "the input is cut once more: it comes in parts already": rows
            and "cannot be multiplied" in one.error,
        },
        expected="two steps without an error",
        seen=one.error,
    )
    expect(not one.error, expected="two steps without an error", seen=one.error)


def plain_step(one, step, factor, leave=1.0):
    """What F.linear makes of a rank's part, and its gradients."""
    own = {n: p.clone().requires_grad_(one.trained[n]) for n, p in one.now[step].items()}
    x = one.x[step].clone().requires_grad_()
    y = leave * F.linear(factor * x, own["weight"])
    y = y + own["bias"] if "bias" in own else y
    y.backward(one.upstream[step])
    return y.detach(), {n: p.grad for n, p in own.items()} | {"x": x.grad}


def expect_grads(one, step, wanted) -> None:
    for name, want in wanted.items():
        got = one.gradients[step].get(name)
        recognise(
            {f"no gradient reaches {name}": got is None and want is not None},
            expected=f"a gradient of {name}",
            seen="None",
        )
        if want is not None:
            expect_close(got, want, what=f"the gradient of {name} in step {step + 1}")


@exercise_14_2.check("what cannot be cut is refused")
def column_refuses(answer) -> None:
    expect_refused(lab.refusal(answer, True), "7 outputs on 2 ranks")


@exercise_14_2.check("weight and bias say along which dim they are cut")
def column_marks(answer) -> None:
    for world in lab.LAYERS:
        for one in lab.layers(answer, True)(world):
            expect_marks(one, 0)


def expect_refused(said, what) -> None:
    for text in said:
        recognise(
            {
                f"{what}: accepted": not text,
                "another error than ValueError": bool(text) and not text.startswith(": "),
                "the error does not say how many there are": bool(text) and "7" not in text,
            },
            expected="a ValueError that names 7",
            seen=text.removeprefix(": ") or "no error",
        )


exercise_14_3 = checks_for(
    "14.3",
    name="RowParallelLinear",
    difficulty=3,
    minutes=20,
    hint=(
        "As the column-parallel layer, with the weight's dim 1; the bias is a clone of rank 0's, "
        "whole. forward: F.linear without a bias, then leave, then the bias."
    ),
    forbidden=("torch.distributed.tensor.",),
)


@exercise_14_3.check("the parts: rank 0's matrix by its inputs, the bias whole")
def row_parts(answer) -> None:
    for world in lab.LAYERS:
        seen = lab.layers(answer, False)(world)
        for rank, one in enumerate(seen):
            whole = seen[world.members(rank)[0]].whole
            if world.bias and len(world.members(rank)) > 1:
                recognise(
                    {
                        "the bias is no parameter: it is trained like the weight": not any(
                            "bias" in seen[r].names for r in world.members(rank)
                        ),
                        "only one rank has the bias: it is whole on every rank": "bias"
                        not in one.names,
                    },
                    expected="the parameters weight and bias on every rank",
                    seen=", ".join(one.names),
                )
            expect_parts(world, rank, seen, whole, 1)
            if world.bias:
                n, want = len(world.members(rank)), whole["bias"]
                recognise(
                    {
                        "the bias is cut: each output needs all of it": (
                            one.parts["bias"].shape != want.shape
                        )
                    },
                    expected=f"a bias of shape {tuple(want.shape)}",
                    seen=f"{tuple(one.parts['bias'].shape)}",
                )
                looks_like = {
                    "each rank has a fraction of the bias: every fraction would move by the whole "
                    "gradient": want / n,
                    "each rank keeps its own bias: rank 0's is for all": one.whole["bias"],
                    "other ranks than the first have a bias of zeros": torch.zeros_like(want),
                }
                what = f"rank {rank}'s bias"
                got = one.parts["bias"]
                expect_close(got, want, what=what, atol=0, rtol=0, looks_like=looks_like)


@exercise_14_3.check("two steps: the message that is given, the bias after it, every gradient")
def row_steps(answer) -> None:
    for world in lab.LAYERS:
        seen = lab.layers(answer, False)(world)
        for rank, one in enumerate(seen):
            expect_ran(one, world, rows=True)
            for step in range(2):
                want, grads = plain_step(one, step, 1.0, leave=lab.FACTOR)
                got = one.y[step]
                early = plain_step(one, step, lab.FACTOR, leave=1.0)[0]
                bias = one.now[step].get("bias", torch.zeros(24, dtype=got.dtype))
                n = len(world.members(rank))
                last = seen[world.members(rank)[-1]]
                lacks = plain_step(last, step, 1.0, leave=lab.FACTOR)[0]
                lacks = lacks - last.now[step].get("bias", torch.zeros(24, dtype=got.dtype))
                once = n > 1 and torch.allclose(last.y[step], lacks)
                before = {
                    "one rank alone adds the bias: on the others it gets no gradient, and the "
                    "copies part": early + (lab.FACTOR - 1) * bias if once else want,
                    "a fraction of the bias is added before the sum: the bias then learns at "
                    "another pace than it should": want + (lab.FACTOR / n - 1) * bias
                    if n > 1
                    else want,
                    "the bias is added before the sum: it then counts once for each rank": (
                        early + (lab.FACTOR - 1) * bias
                    ),
                    "the bias is left out": want - bias,
                    "the result is divided by the number of ranks": want / len(world.members(rank)),
                }
                expect_message(world, one, (2, 3, 24))
                what = f"rank {rank}'s outputs in step {step + 1}"
                expect_close(got, want, what=what, looks_like=before)
                expect_grads(one, step, grads)


@exercise_14_3.check("what cannot be cut is refused")
def row_refuses(answer) -> None:
    expect_refused(lab.refusal(answer, False), "7 inputs on 2 ranks")


@exercise_14_3.check("the weight says along which dim it is cut, the bias nothing")
def row_marks(answer) -> None:
    for world in lab.LAYERS:
        for one in lab.layers(answer, False)(world):
            expect_marks(one, 1)


exercise_14_4 = checks_for(
    "14.4",
    name="parallel_block",
    difficulty=3,
    minutes=40,
    hint=(
        "Look at everything before you change anything. For each MultiHeadAttention in "
        "block.modules(): num_heads //= t; w_q, w_k, w_v become column-parallel with enter=None, "
        "w_o row-parallel with sum_over_ranks; split_region(attention, group, copy_to_ranks). The "
        "same for linear1 and linear2 of each PositionwiseFeedForward. Broadcast the norms."
    ),
    in_place=True,
    forbidden=("torch.distributed.tensor.parallel.",),
)


@exercise_14_4.check("what each rank holds: its heads, its features, the norms whole")
def block_parts(answer) -> None:
    for case in block_lab.VALUES:
        for one in block_lab.blocks(answer)(case):
            heads = block_lab.HEADS // case.ranks
            recognise(
                {
                    "the layer itself has to come back": not one.returned,
                    "parameters have other names than before": one.names != one.wanted_names,
                    "cross-attention is left whole: each attention is cut": (
                        case.kind == "decoder"
                        and one.heads == [heads, block_lab.HEADS]
                        and one.held > one.wanted
                    ),
                    "num_heads is still that of the whole layer: the heads become narrower": (
                        case.ranks > 1 and block_lab.HEADS in one.heads
                    ),
                    "the norms differ from rank to rank: rank 0's numbers are for all": (
                        not one.norms
                    ),
                    "a part of the layer is whole on every rank": one.held > one.wanted,
                    "the parts are those of all ranks: the mesh has fewer": (
                        case.beside and one.held < one.wanted
                    ),
                    "norms or biases are cut, which are to be whole": one.held < one.wanted,
                },
                expected=f"{heads} heads and {one.wanted} parameters on each rank, names as before",
                seen=f"heads {one.heads}, {one.held} parameters",
            )


def many(forward, backward) -> str:
    return f"{len(forward)} messages in forward, {len(backward)} in backward"


@exercise_14_4.check("two steps beside the whole layer: outputs, gradients, messages")
def block_steps(answer) -> None:
    for case in block_lab.VALUES:
        cross = case.kind == "decoder"
        alone = case.ranks == 1
        for rank, one in enumerate(block_lab.blocks(answer)(case)):
            fine = {
                name: got is not None and torch.allclose(got, want, rtol=1e-6, atol=1e-8)
                for name, (got, want) in one.pairs[0].items()
            }
            recognise(
                {
                    "what enters comes through no copy_to_ranks: the gradient of x is a part": (
                        fine["the output"] and not one.backward and not alone
                    ),
                    "one of the parts has an input that comes through no copy_to_ranks: its "
                    "gradient is a part": (
                        fine["the output"]
                        and not alone
                        and not cross
                        and not fine["the gradient of x"]
                        and len(one.backward) < 2
                    ),
                    "the memory comes through no copy_to_ranks: its gradient is a part": (
                        cross and fine["the gradient of x"] and not fine["the gradient of memory"]
                    ),
                },
                expected="gradients that are those of the whole layer",
                seen=f"{sum(fine.values())} of {len(fine)} are; {many(one.forward, one.backward)}",
            )
            for step, pairs in enumerate(one.pairs):
                for name, (got, want) in pairs.items():
                    what = f"{name} on rank {rank} in step {step + 1} ({case.kind})"
                    expect(
                        got is not None, expected=what, seen="None", mistake="a gradient is lost"
                    )
                    expect_close(got, want, what=what)
            want = ([], []) if alone else (2 + cross, 2 + 2 * cross)
            lengths = len(one.forward), len(one.backward)
            recognise(
                {
                    "queries, keys and values come through a copy each: one is enough": (
                        not alone and lengths[1] > want[1]
                    ),
                    "messages that nobody needs in forward": (not alone and lengths[0] > want[0]),
                },
                expected=f"{want[0]} all-reduces in forward, {want[1]} in backward",
                seen=many(one.forward, one.backward),
            )
            if not alone:
                expect_equal(lengths, want, what="messages in forward and in backward")


@exercise_14_4.check("dropout: common numbers outside, each rank's own inside")
def block_dropout(answer) -> None:
    first, second = block_lab.blocks(answer)(block_lab.DROPOUT)
    masks = [torch.equal(a, b) for a, b in zip(first.masks, second.masks, strict=True)]
    recognise(
        {
            "after the layer the ranks draw different random numbers: the common ones are lost": (
                not torch.equal(first.drawn, second.drawn)
            ),
            "the ranks drop different features of the residual stream: it has to stay the same": (
                any(
                    not torch.equal(a, b)
                    for a, b in zip(first.outputs, second.outputs, strict=True)
                )
            ),
            "inside, the ranks drop the same hidden features of their parts": all(masks),
            "inside, the ranks drop the same attention weights of their heads": torch.equal(
                first.weights, second.weights
            ),
            "inside, a rank drops the same features in every step": torch.equal(*first.masks),
            "nothing is dropped inside": not first.masks[0].any(),
            "in evaluation mode something is dropped": not first.evaluated,
        },
        expected="inner_dropout with random numbers of each rank's own, dropout with common ones",
        seen=f"masks equal on both ranks in {sum(masks)} of 2 steps",
        hint="split_region(module, group, enter) takes care of both",
    )
    expect_close(first.inner_outputs, second.inner_outputs, what="the other rank's output")


@exercise_14_4.check("what cannot be cut is refused, and left as it was")
def block_refuses(answer) -> None:
    for told in block_lab.blocks(answer)(block_lab.REFUSED):
        for request, (error, kept) in told.items():
            recognise(
                {
                    f"{request}: accepted": error == "nothing",
                    f"{request}: another error than ValueError": error != "ValueError",
                    f"{request}: the layer is left half cut": not kept,
                },
                expected="a ValueError before anything is changed",
                seen=f"{error}; the layer as it was: {kept}",
            )


exercise_14_5 = checks_for(
    "14.5",
    name="vocab_parallel_cross_entropy",
    difficulty=3,
    minutes=40,
    hint=(
        "The largest logit by all_reduce with MAX (no gradient needed); subtract it; then the sum "
        "of the exponentials and the target's logit, which is 0 on the ranks that do not have it, "
        "by all_reduce. The loss is log(sum) - target's logit. With sum_over_ranks for the two "
        "sums autograd does the rest."
    ),
    forbidden=("torch.distributed.tensor.",),
)


@exercise_14_5.check("the loss, its gradient, what is sent")
def loss_values(answer) -> None:
    for world in lab.LOSSES:
        for rank, one in enumerate(lab.losses(answer)(world)):
            expect_loss(world, rank, one)
            expect_little(world, rank, one)


def wrong_losses(one, wide, ignore, members, place) -> dict:
    """What usual mistakes give, by the words for them."""
    size, counted, n = lab.PART, one.targets != ignore, len(members)
    whole = one.logits.to(wide)
    parts = whole.split(size, -1)
    part, everything, top = parts[place], whole.logsumexp(-1), whole.amax(-1)
    target = one.targets.clamp(0)
    owner, within = target // size, target % size

    def own(i):
        """Each position's target as a number of part i, brought inside."""
        return (one.targets - i * size).clamp(0, size - 1)[..., None]

    tops = [x.amax(-1) for x in parts]
    pairs = zip(parts, tops, strict=True)
    uneven = sum((x - t[..., None]).exp().sum(-1) for x, t in pairs)
    chosen = whole.gather(-1, target[..., None])[..., 0]
    owners_top = torch.stack(tops, -1).gather(-1, owner[..., None])[..., 0]
    alike = torch.stack([x.gather(-1, within[..., None])[..., 0] for x in parts], -1)
    later = (torch.arange(n) > owner[..., None]).to(wide)
    nxt = torch.where(  # the part before counts the first token of a part as its own last
        (within == 0) & (owner > 0),
        torch.stack([x[..., -1] for x in parts], -1).gather(-1, (owner - 1).clamp(0)[..., None])[
            ..., 0
        ]
        - top,
        torch.zeros((), dtype=wide),
    )
    low = ((one.targets >= 0) & (one.targets < size)).to(wide)
    first = sum(x.gather(-1, own(0))[..., 0] * low for x in parts)
    every = sum(x.gather(-1, own(i))[..., 0] for i, x in enumerate(parts))
    astray = sum(
        (x.gather(-1, own(r))[..., 0] - top) * (one.targets // size == r).to(wide)
        for r, x in zip(members, parts, strict=True)
    )
    wrong = {
        "each rank takes the softmax of its own part alone": part.logsumexp(-1)
        - part.gather(-1, own(place))[..., 0],
        "each rank subtracts its own largest logit: the sums are of different scales": uneven.log()
        - (chosen - tops[place]),
        "each rank subtracts its own largest logit, and the sums are of different scales": (
            uneven.log() - (chosen - owners_top)
        ),
        "the first token of a part counts on the rank before, too": everything - chosen - nxt,
        "the last token of a part is on no rank": torch.where(
            within == size - 1, everything - top, everything - chosen
        ),
        "a negative place counts from a part's end: later ranks add a logit of their own": (
            everything - chosen - ((alike - top[..., None]) * later).sum(-1)
        ),
        "a rank's number among all ranks counts, not that in its group": everything - top - astray,
        "the targets are read as numbers within this rank's part": everything
        + (n * low - 1) * top
        - first,
        "a target on another rank counts as the nearest of this rank's tokens": everything
        + (n - 1) * top
        - every,
    }
    return {words: torch.where(counted, x, torch.zeros(())) for words, x in wrong.items()}


def expect_loss(world, rank, one) -> None:
    wide = torch.promote_types(world.dtype, torch.float32)
    members = world.members(rank)
    n, place = len(members), members.index(rank)
    logits = one.logits.to(wide).requires_grad_()
    flat, ignore = one.targets.flatten(), world.ignore
    per_token = partial(F.cross_entropy, ignore_index=ignore, reduction="none")
    want = per_token(logits.flatten(0, 1), flat).view(3, 4)
    size = lab.PART
    mine = slice(place * size, (place + 1) * size)
    rows = one.logits.to(wide).flatten(0, 1)
    flat_loss = F.cross_entropy(rows, flat.clamp(0), reduction="none").view(3, 4)
    headless = (rows.logsumexp(-1) - rows.amax(-1)).view(3, 4)
    recognise(
        {
            "one number comes back: each position has a loss of its own": one.loss.dim() == 0,
            "float64 logits are rounded to float32": wide == torch.float64 != one.loss.dtype,
            "logits in 16 bits are summed in 16 bits": one.loss.dtype != wide,
            "the logits that were given are written to": one.changed,
        },
        expected=f"losses of shape (3, 4) in {wide}",
        seen=f"shape {tuple(one.loss.shape)}, {one.loss.dtype}",
    )
    looks_like = wrong_losses(one, wide, ignore, members, place) | {
        "ignored targets have a loss": flat_loss,
        "ignored targets have the loss of a logit of 0": torch.where(
            one.targets == ignore, headless, want
        ),
    }
    recognise(
        {
            "the largest logit of all ranks is subtracted, not that of the group: nothing is left "
            "where the group's are far below it": (
                world.groups > 1 and n > 1 and bool(torch.isneginf(one.loss).any())
            )
        },
        expected="the losses of this group, whatever other groups have",
        seen=f"{int(torch.isneginf(one.loss).sum())} losses of -inf",
        hint="group= in every all_reduce",
    )
    named = "the exponentials overflow: subtract the largest logit first"
    recognise(
        {named: bool(world.large and not torch.isfinite(one.loss).all())},
        expected="finite losses for logits around 900",
        seen=f"{int((~torch.isfinite(one.loss)).sum())} that are not",
    )
    what = f"rank {rank}'s losses ({n} ranks, {world.dtype})".replace("torch.", "")
    expect_close(one.loss, want, what=what, looks_like=looks_like)
    expect_loss_gradient(world, mine, n, one, what)


def expect_loss_gradient(world, mine, n, one, what) -> None:
    """This rank's part of the gradient that torch's cross-entropy has."""
    logits = one.logits.to(torch.promote_types(world.dtype, torch.float32)).requires_grad_()
    flat, counted = one.targets.flatten(), one.targets != world.ignore
    each = F.cross_entropy(logits.flatten(0, 1), flat, ignore_index=world.ignore, reduction="none")
    (whole,) = torch.autograd.grad(each.view(3, 4), logits, one.upstream, retain_graph=True)
    recognise(
        {"no gradient reaches the logits": one.gradient is None},
        expected="a gradient of this rank's logits",
        seen="None",
    )
    (alone,) = torch.autograd.grad(each.sum(), logits)
    looks_like = {
        "the gradient is that of a sum: the gradient that comes in is left out": alone[
            ..., mine
        ].to(world.dtype),
        "the gradient is too large by the number of ranks": (n * whole[..., mine]).to(world.dtype),
        "the gradient of the sum of exponentials is added up over the ranks once more": (
            (whole + (n - 1) * logits.softmax(-1) * (one.upstream * counted)[..., None])[..., mine]
        ).to(world.dtype),
        "a rank without the target has no gradient: its part of the softmax has one": (
            (whole * ((one.targets >= mine.start) & (one.targets < mine.stop))[..., None])[
                ..., mine
            ].to(world.dtype)
        ),
        "the gradient lacks the target: it is the softmax alone": (
            (logits.softmax(-1) * (one.upstream * counted)[..., None])[..., mine].to(world.dtype)
        ),
    }
    got = one.gradient
    want_part = whole[..., mine].to(world.dtype)
    expect_close(got, want_part, what=f"the gradient of {what}", looks_like=looks_like)


def expect_little(world, rank, one) -> None:
    n = len(world.members(rank))
    room = 3 * one.targets.numel() * one.loss.element_size() if n > 1 else 0
    sent = sum(call.num_bytes for call in one.forward)
    recognise(
        {
            "the logits are gathered: a whole row is on one rank": any(
                "gather" in call.op for call in one.forward
            ),
            "whole rows of exponentials are summed: a number a position is enough": sent > room > 0,
            "backward sends something: each rank has its part of the gradient already": bool(
                one.backward
            ),
            "one rank alone sends to itself": n == 1 and bool(one.forward),
        },
        expected=f"at most 3 numbers a position, {room} bytes, in forward, none in backward",
        seen=f"forward {say(one.forward)}; backward {say(one.backward)}",
    )


@exercise_14_5.check("targets outside of the vocabulary")
def loss_refuses(answer) -> None:
    for world in lab.LOSSES[:2]:
        for one in lab.losses(answer)(world):
            expect(
                not one.outside,
                mistake="a target outside of the whole vocabulary is no error",
                expected="a ValueError",
                seen=one.outside,
            )
