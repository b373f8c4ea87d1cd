"""What tells a right answer of lesson 06 from a wrong one.

The oracle is the single-process twin: one process, rank 0's weights, the whole batch, plain
autograd; for the buckets also torch's own assignment. What travels is counted below the Python
functions, and overlap is judged by the order of events, never by a clock.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lessons.lesson06_ddp.laboratory import accumulating
from lessons.lesson06_ddp.laboratory import engines as lab
from lessons.lesson06_ddp.laboratory.engines import Engines, Seen, Step
from lessons.lesson06_ddp.laboratory.messages import (
    CUTS,
    Broadcasts,
    broadcasts,
    bucket_messages,
    sent_in_bfloat16,
)
from shared.exercises import nets
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    alike,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
)
from shared.exercises.nets import BUFFERS, FROZEN, Case, Grads, flat_grads
from shared.exercises.on_ranks import on_one_rank
from shared.exercises.wrong import Wrong

exercise_06_1 = checks_for(
    "06.1",
    name="broadcast_parameters",
    difficulty=2,
    minutes=15,
    hint=(
        "dist.broadcast(tensor, src) fills the tensor on the other ranks. named_parameters() and "
        "named_buffers() each give a tied tensor once."
    ),
)
exercise_06_2 = checks_for(
    "06.2",
    name="average_gradients",
    difficulty=2,
    minutes=15,
    hint="For each parameter: dist.all_reduce(parameter.grad), then divide by the world size.",
)
exercise_06_2b = checks_for(
    "06.2b",
    name="average_gradients_flat",
    difficulty=2,
    minutes=15,
    hint=(
        "torch.cat([grad.flatten() for grad in grads]) makes the flat tensor, flat.split(sizes) "
        "cuts it again. One list of gradients for each dtype."
    ),
)
exercise_06_3 = checks_for(
    "06.3",
    name="OverlappedDDP",
    difficulty=4,
    minutes=30,
    hint=(
        "parameter.register_post_accumulate_grad_hook(f) calls f(parameter) once its gradient is "
        "complete; f starts dist.all_reduce(parameter.grad, async_op=True) and keeps the handle."
    ),
    forbidden=("torch.nn.parallel.DistributedDataParallel",),
)
exercise_06_4 = checks_for(
    "06.4",
    name="BucketedDDP",
    difficulty=5,
    minutes=45,
    hint=(
        "A bucket: its parameters, one flat tensor, a view into it for each parameter, the number "
        "of gradients that are still missing."
    ),
    forbidden=("torch.nn.parallel.DistributedDataParallel",),
)
exercise_06_5 = checks_for(
    "06.5",
    name="accumulate_gradients",
    difficulty=2,
    minutes=15,
    hint=(
        "All micro-batches but the last under `with ddp.no_sync():`, forward and backward; the "
        "last outside of it; then finish_gradient_sync()."
    ),
)

WAITED = (
    "the tensor of an all-reduce that was started with async_op=True is neither read nor divided "
    "before wait(); and .grad is complete in register_post_accumulate_grad_hook, not before"
)
LEFT_OVER = (
    "step 1 was right: what a step leaves behind (handles, sets, counts) has to be cleared for the "
    "next in finish_gradient_sync()"
)
AFTER = "after backward: dist.all_reduce(parameter.grad), then divide by the world size"
LEFT_BY_HOOKS = (
    "gradients are left behind: what no hook has sent by the end of backward, "
    "finish_gradient_sync has to send"
)
LEFT_OUT = "gradients are left out: each parameter that requires one takes part, biases as well"
ALONE = "every gradient is a message of its own: there are no buckets"
EXACT = {"rtol": 1e-11, "atol": 1e-12}  # below one rounding of a float64 to float32
HANG = "the ranks wait for each other and never return: do all of them call the same collectives?"


# Claims about gradients and messages, of 06.2 to 06.4


def expect_frozen(seen: Sequence[Seen]) -> None:
    """What is frozen has no gradient afterwards."""
    for name in FROZEN:
        expect(
            seen[0].steps[0].grads[name] is None,
            mistake="a frozen parameter is given a gradient",
            expected=f"{name}.grad stays None: an optimizer with weight decay would move it",
            seen="a tensor",
        )


def expect_weights_kept(seen: Sequence[Seen]) -> None:
    """Nobody but the optimizer changes a weight, and nobody but the model a buffer."""
    moved = sorted({name for one in seen for name in one.moved})
    recognise(
        {
            "the buffers are averaged as well: gradients alone are": (
                bool(moved) and set(moved) <= set(BUFFERS)
            ),
            "the weights are averaged, and it is the gradients that have to be: what travels "
            "is parameter.grad, not the parameter": bool(moved),
        },
        expected="weights that only the optimizer changes",
        seen=f"before optimizer.step() these move: {', '.join(moved)}",
    )


def expect_gradients(case: Case, seen: Sequence[Seen], *, hooks: bool = True) -> None:
    """On every rank and in every step the mean over the ranks, as the single process has it.

    Without `hooks` the hint is that of an average after backward.
    """
    expect_weights_kept(seen)
    last: dict[str, Tensor] = {}
    for step, local in enumerate(nets.twin_steps(case, seen[0].seed, seen[0].started)):
        want = {name: grad for name, grad in nets.mean_of(local).items() if grad is not None}
        for rank, one in enumerate(seen):
            hint = (LEFT_OVER if step else WAITED) if hooks else AFTER
            expect_means(want, one.steps[step].grads, local, rank, step, last, hint)
        last |= want


def present(want: Mapping[str, Tensor], got: Grads, rank: int) -> dict[str, Tensor]:
    """The gradients of one rank, none of which may be missing."""
    there = {name: grad for name in want if (grad := got.get(name)) is not None}
    missing = [name for name in want if name not in there]
    recognise(
        {"a parameter has no gradient": bool(missing)},
        expected="the mean over all ranks, zeros counted where a rank did not use it",
        seen=f"None for {', '.join(missing)} on rank {rank}",
    )
    return there


def expect_means(
    want: Mapping[str, Tensor],
    got: Grads,
    local: Sequence[Grads],
    rank: int,
    step: int,
    last: Mapping[str, Tensor],
    hint: str,
) -> None:
    """All gradients of one rank at once, so that a mistake is seen as a whole.

    `last` has the means of the steps before.
    """
    n, there = len(local), present(want, got, rank)
    own = {
        name: grad * 0 if (mine := local[rank][name]) is None else mine
        for name, grad in want.items()
    }
    stale = [name for name in want if (there[name] - want[name]).abs().max() > 1e-9]
    kept = all(torch.equal(there[name], own[name]) for name in stale)
    by_columns = [not there[name].is_contiguous() for name in stale]
    recognise(
        {
            "a gradient that does not lie in memory row by row is still this rank's own: a "
            "contiguous copy of it was averaged, and not written back": kept
            and by_columns == [True],
            "some gradients are still this rank's own, the others are means": (
                0 < len(stale) < len(want) and kept
            ),
        },
        expected=f"means everywhere (step {step + 1})",
        seen=f"{len(stale)} of {len(want)} are rank {rank}'s own: a message was left out, or not "
        "written back",
    )
    mine, mean, alone = flat_grads(there), flat_grads(want), flat_grads(own)
    try:
        expect_close(
            mine,
            mean,
            what=f"rank {rank}'s gradients in step {step + 1}",
            looks_like={
                "the gradients are the sum over the ranks, not the mean: divide by the world "
                "size": mean * n,
                "every rank keeps its own gradients: nothing that was reduced comes back": alone,
                "the gradients are divided by the world size twice": mean / n,
                "each rank's own gradient, divided by the world size: nothing is summed, or the "
                "sum is not waited for": alone / n,
                "the mean is added to this rank's own gradient: it has to take its place": (
                    mean + alone
                ),
                "where a rank has no gradient for a parameter, its pieces lie in another order "
                "than those of the other ranks": lambda: misplaced(local, own, rank),
                "the sum is divided by 2, which is not the number of ranks": mean * n / 2,
                "for a parameter that a rank did not use, the mean of the step before is sent once "
                "more: its place in the bucket still holds it": sent_again(local, own, last),
            },
            **EXACT,
        )
    except Wrong as fault:
        if not fault.mistake and torch.allclose(mine, mean, rtol=1e-2, atol=1e-4):
            fault.mistake = "digits are lost: gradients are converted to a smaller dtype"
        elif not fault.mistake and torch.allclose(mine.sort().values, mean.sort().values):
            fault.mistake = "all the means are there, in wrong places: slices are cut in another "
            fault.mistake += "order than they were laid"
        elif not fault.mistake and torch.allclose(mine, mean * (mine.norm() / mean.norm())):
            fault.mistake = "every gradient is the mean times one common factor: it is clipped, or "
            fault.mistake += "divided by a number that is not asked for"
        elif not fault.mistake:
            fault.hint = hint
        raise


def sent_again(
    local: Sequence[Grads], own: Mapping[str, Tensor], last: Mapping[str, Tensor]
) -> Tensor:
    """The means where a rank sends the mean of the step before in place of what it lacks."""
    again = [
        {
            name: last.get(name, zero) if each[name] is None else each[name]
            for name, zero in own.items()
        }
        for each in local
    ]
    return flat_grads(nets.mean_of(again))


def misplaced(local: Sequence[Grads], own: Mapping[str, Tensor], rank: int) -> Tensor:
    """The means where every rank lays the gradients that it lacks behind those that it has."""
    orders = [sorted(own, key=lambda name: each[name] is None) for each in local]
    rows = []
    for each, order in zip(local, orders, strict=True):
        pieces = [own[name] * 0 if (mine := each[name]) is None else mine for name in order]
        rows.append(torch.cat([piece.flatten().double() for piece in pieces]))
    cut = torch.stack(rows).mean(0).split([own[name].numel() for name in orders[rank]])
    there = dict(zip(orders[rank], cut, strict=True))
    return torch.cat([there[name] for name in own])


def expect_messages(case: Case, step: Step, *, one_each: bool, left: str = LEFT_OUT) -> None:
    """Each gradient travels once, by all_reduce; with `one_each` as a message of its own.

    `left` are the words for gradients that have not travelled.
    """
    others = [op for op, _ in step.messages if op != "all_reduce"]
    sizes, want, net = step.sent(), case.trainable_bytes(), case.net()
    asked = "more than gradients is sent: nobody has to ask who has one, since a rank without one "
    asked += "counts as zeros"
    recognise(
        {asked: bool(others) and sum(sizes) == sum(want)}
        | {f"gradients travel by {op}, not by all_reduce": True for op in others},
        expected="all_reduce: each rank sends 2(n-1)/n of the gradients",
        seen=f"{len(others)} messages of other kinds",
        hint="all_gather brings every rank's gradients to every rank: n times the memory"
        if any("gather" in op for op in others)
        else "reduce gives the sum to one rank; all ranks need it",
    )
    extra = sum(sizes) - sum(want)
    frozen = [p.nbytes for p in net.parameters() if not p.requires_grad]
    recognise(
        {
            "nothing is sent at all": not sizes,
            "the tied weight is reduced twice: it is one parameter in two places, which "
            "parameters() yields once and a loop over modules twice": (
                case.tied and extra == net.middle.weight.nbytes
            ),
            "frozen parameters are sent as well: they take no part, whatever .grad they have": (
                any(extra == more > 0 for more in (sum(frozen), *frozen))
            ),
            "digits are lost: gradients are converted to a smaller dtype before they travel": (
                any(sum(sizes) * times == sum(want) for times in (2, 4))
            ),
            left: extra < 0,
            asked: one_each and extra > 0 and len(sizes) > len(want),
            "more bytes travel than the gradients have: a message is padded, or a gradient is sent "
            "twice": extra > 0,
            "several gradients travel as one message: that is the subject of 06.4": (
                one_each and len(sizes) < len(want)
            ),
            "": one_each and len(sizes) > len(want),
        },
        expected=f"{sum(want)} bytes in {len(want)} gradients"
        + ", each a message of its own" * one_each,
        seen=f"{sum(sizes)} bytes in {len(sizes)} messages",
    )
    expect(
        step.unwaited == 0,
        mistake="an all-reduce is started and nobody waits for it: on a fast network its sum is "
        "there in time, on a slow one it is not",
        expected="wait() on each handle that async_op=True returns",
        seen=f"{step.unwaited} of {len(sizes)} handles are never waited for",
    )


def expect_one_order(engine: Engines, case: Case = lab.ALONE) -> None:
    """One rank by itself, with a layer left out and without: the same messages, in one order."""
    seen = engine.trained(case, apart="a single rank waits and never returns")[0]
    without, with_it = seen.steps[2].messages, seen.steps[3].messages
    recognise(
        {
            "what a step does not use is left out: another rank may use it, and would wait for a "
            "message that never comes": sorted(without) != sorted(with_it),
            "where a parameter is unused on one rank, the ranks send in different orders, and "
            "gradients of different parameters meet": without != with_it,
        },
        expected=f"the messages of a step that does not use a layer = {with_it}",
        seen=f"{without}",
        hint="zeros take part where .grad is None, and all is sent in one fixed order on every "
        "rank, whatever the order of the hooks",
    )


# 06.1


@exercise_06_1.check("parameters and buffers of rank src")
def broadcast_values(broadcast_parameters: Any) -> None:
    for src, n in Broadcasts.SOURCES:
        apart = f"with src={src} of {n} ranks, not all of them take part in each broadcast"
        runs = broadcasts(broadcast_parameters).outcome(src, apart=apart)
        states = [before for before, _, _, _ in runs]
        for rank, (before, after, same, in_place) in enumerate(runs):
            for name in sorted(after, key=lambda name: (name == "cache", name in BUFFERS)):
                left = f"{name} is left as it was"
                if name == "cache":
                    left += ": a buffer with persistent=False is in named_buffers(), and not in "
                    left += "state_dict()"
                if name == "last.weight":  # the only one of its kind, and the last to be looked at
                    left += ": it does not lie in memory row by row, and what its contiguous copy "
                    left += "received is not written back"
                if name in BUFFERS:
                    left = "the buffers are left as they were"
                elif name in FROZEN:
                    left = "a frozen parameter is left as it was: it is used in forward too"
                every = torch.stack([state[name].double() for state in states])
                expect_close(
                    after[name],
                    states[src][name],
                    what=f"{name} on rank {rank} of {n}, src={src}",
                    looks_like={
                        "src is not used: the weights are rank 0's": states[0][name],
                        "the weights are averaged, which is no one's start": every.mean(0),
                        left: before[name],
                        "digits are lost: what is broadcast travels in a smaller dtype": (
                            states[src][name].float().to(states[src][name].dtype)
                        ),
                    },
                    **EXACT,
                    hint="dist.broadcast(tensor, src) for all of them; what is started with "
                    "async_op=True must be waited for before it is read",
                )
            expect(
                same,
                mistake="the parameters are replaced by new ones: an optimizer that was made "
                "before would go on training the old",
                expected="the same Parameter objects with new numbers in them",
                seen="other objects",
            )
            expect(
                in_place,
                mistake="a tensor is given new memory (parameter.data = ...): what views the old, "
                "such as a flat buffer of all parameters, keeps the old numbers",
                expected="the numbers received where the tensor lies",
                seen="the tensor lies in other memory than before",
                hint="tensor.copy_(received) under torch.no_grad()",
            )


@exercise_06_1.check("ranks that have built different models")
def broadcast_mismatch(broadcast_parameters: Any) -> None:
    for kind, names in Broadcasts.DIFFERENCES.items():
        apart = f"ranks that differ in a {kind} hang: compare the layouts before the first "
        apart += "broadcast, and raise on every rank, src as well"
        heard = broadcasts(broadcast_parameters).outcome(kind, apart=apart)
        for rank, (error, words) in enumerate(heard):
            what = f"a {kind} that differs between the ranks ({names[0]})"
            recognise(
                {
                    f"{what} is accepted": not error,
                    f"{what} ends in another error than ValueError": error != "ValueError",
                    f"the error does not say which tensor differs in its {kind}": (
                        not any(name in words for name in names)
                    ),
                },
                expected="a ValueError on every rank, before the first broadcast, with "
                f"{' or '.join(names)} in its message",
                seen=f"rank {rank}: {error}{': ' * bool(error)}{words[:120]}",
            )


# 06.2


@exercise_06_2.check("the mean over ranks, tied and frozen parameters, twice")
def average_values(average_gradients: Any) -> None:
    for case in lab.AVERAGED:
        seen = lab.averaged(average_gradients).trained(case, apart=HANG)
        if case.frozen:
            expect_frozen(seen)
        expect_weights_kept(seen)
        for step in seen[0].steps:
            expect_messages(case, step, one_each=True)
        what, words = "bytes of the all-reduces", "they do not go in the order of parameters()"
        expect_equal(step.sent(), case.trainable_bytes()[::-1], what=what, mistake=words)
        expect_gradients(case, seen, hooks=False)


@exercise_06_2.check("a parameter that one rank did not use")
def average_unused(average_gradients: Any) -> None:
    engine = lab.averaged(average_gradients)
    expect_one_order(engine)
    expect_gradients(lab.UNUSED, engine.trained(lab.UNUSED, apart=HANG), hooks=False)
    seen = engine.trained(lab.OLD, apart=HANG)
    expect_messages(lab.OLD, seen[0].steps[0], one_each=True)


# 06.2b


@exercise_06_2b.check("one message a dtype, tied, frozen and transposed parameters, twice")
def flat_values(average_gradients_flat: Any) -> None:
    for case in lab.FLAT:
        seen = lab.averaged_flat(average_gradients_flat).trained(case, apart=HANG)
        want = case.dtype_bytes()
        if case.frozen:
            expect_frozen(seen)
        expect_weights_kept(seen)
        for step in seen[0].steps:
            sizes = sorted(step.sent())
            recognise(
                {
                    "the gradients of one dtype are sent, those of the other are not": (
                        len(want) > 1 and sum(sizes) in want
                    ),
                    "gradients of two dtypes share a flat tensor, and the smaller are converted: "
                    "torch.cat does so without a word": len(want) > 1 and sum(sizes) > sum(want),
                },
                expected=f"{sum(want)} bytes",
                seen=f"{sum(sizes)}",
                hint="a flat tensor for each dtype",
            )
            expect_messages(case, step, one_each=False)
            each = "every gradient is a message of its own, as in 06.2"
            looks_like = {each: sorted(case.trainable_bytes())}
            more = "gradients of one dtype travel in several messages: those of another dtype lie "
            more += "between them"
            if len(sizes) > len(want) > 1 and sum(sizes) == sum(want):
                looks_like[more] = sizes
            what = "bytes of the all-reduces, one a dtype"
            expect_equal(sizes, want, what=what, looks_like=looks_like)
        expect_gradients(case, seen, hooks=False)


@exercise_06_2b.check("a parameter that one rank did not use")
def flat_unused(average_gradients_flat: Any) -> None:
    engine = lab.averaged_flat(average_gradients_flat)
    expect_one_order(engine, lab.ALONE_MIXED)
    expect_gradients(lab.UNUSED, engine.trained(lab.UNUSED, apart=HANG), hooks=False)
    seen = engine.trained(lab.OLD, apart=HANG)
    expect_messages(lab.OLD, seen[0].steps[0], one_each=False)
    sizes = on_one_rank(functools.partial(sent_in_bfloat16, average_gradients_flat))
    wider = {"gradients of 2 bytes a number travel as float32: twice the bytes": [48]}
    expect_equal(sizes, [24], what="bytes of 12 gradients in bfloat16", looks_like=wider)


# 06.3 and 06.4, what is asked of both engines


def expect_start(engine: Engines) -> None:
    """Rank 0's weights and buffers everywhere, under the names of the bare model."""
    apart = "the ranks wait for each other while the model is wrapped: not all call the same"
    seen = engine.trained(lab.START, apart=apart)
    for rank, one in enumerate(seen):
        expect(
            not one.torch_ddp,
            mistake="torch's own DDP does the work, and it is what you are to build",
            expected="a wrapper with hooks of its own",
            seen="a DistributedDataParallel inside",
        )
        for name in sorted(one.started, key=lambda name: name in BUFFERS):
            left = "buffers" if name in BUFFERS else "weights"
            every = torch.stack([each.initial[name].double() for each in seen])
            expect_close(
                one.started[name],
                seen[0].initial[name],
                what=f"{name} on rank {rank} after wrapping",
                looks_like={
                    f"the ranks start from different {left}: rank 0's are not broadcast": (
                        one.initial[name]
                    ),
                    "the ranks start from the mean of their weights": every.mean(0),
                },
                hint="broadcast_parameters(module) of 06.1",
            )
        expect_equal(
            one.keys,
            list(one.initial),
            what="the names in state_dict()",
            mistake="state_dict() does not have the names of the bare model",
            hint="inherit from Wrapped and leave state_dict alone",
        )


def expect_overlap(engine: Engines) -> None:
    """By the order of events: no hook waits, and all messages leave while backward goes on."""
    expect(
        all(engine.rendezvous(apart=HANG)),
        mistake="a hook waits for its all-reduce: backward stands still while the message "
        "travels, and nothing overlaps",
        expected="rank 0's backward ends although rank 1 has not begun its own",
        seen="it only ends once rank 1 has joined",
        hint="async_op=True in the hook, handle.wait() in finish_gradient_sync alone",
    )
    step = engine.trained(lab.PLAIN, apart=HANG)[0].steps[0]
    sizes = step.sent()
    expect(
        len(sizes) != 1 or sizes[0] < sum(lab.PLAIN.trainable_bytes()),
        mistake="all gradients travel as one message: it leaves when the last of them is complete",
        expected=f"several messages, {sum(sizes)} bytes in all"
        f" (where there are buckets: of {lab.SMALL * 2**20:.0f} bytes)",
        seen="1 message",
        hint="bucket_cap_mb counts MiB: 2^20 bytes, each number has nbytes / numel of them; "
        f"{lab.SMALL} is less than 1, so it holds for the first bucket, too, and it is not rounded",
    )
    expect(
        step.at_first_layer > 0,
        mistake="nothing has been sent when backward comes to the first layer: the messages "
        "leave when there is nothing left to hide them behind",
        expected="the last layers' gradients on their way by then",
        seen=f"0 of {len(step.messages)} messages",
        hint="start a message in the hook of the gradient that completes it, and begin with the "
        "last parameters: their gradients are complete first",
    )
    expect_left_in_backward(step.in_backward, len(sizes))


def expect_left_in_backward(left: int, num_messages: int) -> None:
    """A step in which every parameter is used leaves nothing to send to the end."""
    expect(
        left == num_messages,
        mistake="not all all-reduces have started when backward is over, although every gradient "
        "is complete: the others have nothing left to hide behind",
        expected=f"{num_messages} started, each by the hook that completes its last gradient",
        seen=f"{num_messages - left} started in finish_gradient_sync()",
        hint="finish_gradient_sync() sends only what a step did not use, which no hook completes",
    )


def expect_values(engine: Engines) -> None:
    """Gradients and messages with tied and frozen parameters, over several steps."""
    apart = "the ranks wait and never return: a frozen parameter never gets a gradient, so what "
    apart += "counts on it is never complete"
    for case in lab.VALUES:
        seen = engine.trained(case, apart=apart)
        steps = seen[0].steps
        for number, step in enumerate(steps, 1):
            expect_equal(
                sum(step.sent()),
                sum(steps[0].sent()),
                what=f"the bytes sent in step {number}",
                mistake="a later step sends other messages than the first: what is left over "
                "from the step before?",
            )
        # The first step may end with an exchange about the order to send in from then on.
        expect_messages(case, steps[1], one_each=engine.one_each, left=LEFT_BY_HOOKS)
        expect_gradients(case, seen)


def expect_unused(engine: Engines) -> None:
    """A parameter that is not used in a step, on one rank or on all."""
    expect_one_order(engine)
    apart = "a parameter that one rank did not use makes the ranks wait and never return"
    expect_gradients(lab.LEFT_OUT, engine.trained(lab.LEFT_OUT, apart=apart))


def expect_kept(seen: Sequence[Seen]) -> None:
    """What no_sync added up is sent also for a parameter that the last micro-batch leaves out."""
    left = seen[0].steps[0].grads["spare.weight"]
    recognise(
        {
            "what no_sync() had added up is lost where the last micro-batch does not use a "
            "parameter: it has a gradient, and zeros are sent": left is None or not left.any()
        },
        expected="zeros only where .grad is None",
        seen="spare.weight.grad is 0, or None",
    )
    expect_gradients(lab.NOT_IN_THE_LAST, seen)


def expect_own(case: Case, seen: Sequence[Seen]) -> None:
    """Inside no_sync() and right after it a rank holds the sum of its own gradients."""
    for rank, one in enumerate(seen):
        want = nets.own_of_parts(case, one.seed, one.started, rank, range(case.quiet))
        for own in one.steps[0].own:
            expect_close(
                flat_grads(own),
                want,
                what=f"rank {rank}'s gradients inside no_sync(), before anything is sent",
                looks_like={
                    "under no_sync() the gradients are divided by the world size already: who "
                    "reads them there, a norm for instance, reads too little": (
                        want / case.world_size
                    ),
                },
                **EXACT,
            )


def expect_no_sync(engine: Engines) -> None:
    """Silence inside, each rank's own gradients; afterwards the sum over all micro-batches."""
    apart = "after no_sync() the ranks wait and never return"
    case, seen = lab.ACCUMULATING, engine.trained(lab.ACCUMULATING, apart=apart)
    step, got = seen[0].steps[1], flat_grads(seen[0].steps[0].grads)

    def mean(*parts: int) -> Tensor:
        return nets.mean_of_parts(case, seen[0].seed, seen[0].started, parts)

    def is_it(want: Tensor) -> bool:
        return got.shape == want.shape and torch.allclose(got, want)

    recognise(
        {
            "no_sync() sends messages all the same": step.quiet > 0,
            "no_sync() also drops the gradient that was accumulated: only the last micro-batch's "
            "is left": lambda: is_it(mean(2)),
            "each backward inside no_sync() divides by the world size what has been added up": (
                lambda: is_it(mean(0) / 4 + mean(1) / 2 + mean(2))
            ),
            "the last micro-batch's gradient is missing: the messages left too early": (
                lambda: is_it(mean(0, 1))
            ),
            "all is sent before backward has come to the first layer: what backward completed "
            "inside no_sync() is not complete": step.at_first_layer == len(step.messages) > 0,
        },
        expected="no message inside it, then the sum over all three micro-batches, averaged",
        seen=f"{step.quiet} messages inside it" if step.quiet else "a part of the sum",
    )
    expect_gradients(case, seen)
    expect_own(case, seen)
    expect_kept(engine.trained(lab.NOT_IN_THE_LAST, apart=apart))
    expect(
        step.at_first_layer > 0,
        mistake="after no_sync() messages no longer leave during backward",
        expected="hooks that are back at work once the block is left",
        seen="0 messages at the first layer",
    )
    expect(
        all(engine.interrupted(apart=apart)),
        mistake="an exception inside no_sync() leaves it switched on, and nothing is sent from "
        "then on",
        expected="messages in the next backward",
        seen="none",
        hint="try: yield, finally: switch back",
    )
    recognise(
        {
            "a no_sync() inside another one ends both: what was on before has to come back": (
                not all(engine.quiet_when_nested(apart=apart))
            ),
            "two models in one program disturb each other: what a wrapper keeps is to be its own, "
            "self.x, not the class's": not all(engine.two_apart(apart=apart)),
        },
        expected="each wrapper and each block for itself",
        seen="messages inside no_sync(), or gradients of one model in the other",
    )


# 06.3


@exercise_06_3.check("the start: rank 0's weights everywhere")
def overlapped_start(OverlappedDDP: Any) -> None:
    expect_start(lab.overlapped(OverlappedDDP))


@exercise_06_3.check("overlap, by the order of events")
def overlapped_overlap(OverlappedDDP: Any) -> None:
    expect_overlap(lab.overlapped(OverlappedDDP))


@exercise_06_3.check("gradients and messages, tied and frozen parameters, several steps")
def overlapped_values(OverlappedDDP: Any) -> None:
    expect_values(lab.overlapped(OverlappedDDP))


@exercise_06_3.check("a parameter that is not used in a step")
def overlapped_unused(OverlappedDDP: Any) -> None:
    expect_unused(lab.overlapped(OverlappedDDP))


@exercise_06_3.check("no_sync")
def overlapped_no_sync(OverlappedDDP: Any) -> None:
    expect_no_sync(lab.overlapped(OverlappedDDP))


# 06.4


@exercise_06_4.check("the start: rank 0's weights everywhere")
def bucketed_start(BucketedDDP: Any) -> None:
    expect_start(lab.bucketed(BucketedDDP))


@exercise_06_4.check("overlap, by the order of events")
def bucketed_overlap(BucketedDDP: Any) -> None:
    expect_overlap(lab.bucketed(BucketedDDP))


@exercise_06_4.check("gradients, tied and frozen parameters, several steps")
def bucketed_values(BucketedDDP: Any) -> None:
    expect_values(lab.bucketed(BucketedDDP))


@exercise_06_4.check("how the gradients are cut into buckets")
def buckets(BucketedDDP: Any) -> None:
    messages = bucket_messages(BucketedDDP)
    for rule, cut in CUTS.items():
        (got, left), wanted = messages.seen(rule, apart=HANG)[0], cut.buckets()
        cap, kib = "left alone" if cut.cap_mb is None else f"= {cut.cap_mb:g}", cut.unit // 2**10
        recognise(
            {
                "gradients of two dtypes share a bucket: one of them is converted to the other": (
                    sum(got) != sum(wanted[0])
                ),
            }
            | alike(got, {ALONE: cut.alone(), **cut.looks_like})
            | {"": got not in wanted},
            expected=f"{rule}: {' or '.join(map(str, wanted))} for gradients of {cut.gradients} "
            f"(last parameter first, all times {kib} KiB; d: float64, x: frozen, +: one layer) "
            f"and bucket_cap_mb {cap}",
            seen=str(got),
            hint="last parameter first; one dtype a bucket; closed once it holds the cap or more",
        )
        expect_left_in_backward(left, len(got))
    for cap_mb in (0, -1):
        wrap = functools.partial(lab.wrap_alone, BucketedDDP, cap_mb)
        expect_raises(ValueError, on_one_rank, wrap, what=f"bucket_cap_mb={cap_mb}")


@exercise_06_4.check("a parameter that is not used in a step")
def bucketed_unused(BucketedDDP: Any) -> None:
    expect_unused(lab.bucketed(BucketedDDP))


@exercise_06_4.check("no_sync")
def bucketed_no_sync(BucketedDDP: Any) -> None:
    expect_no_sync(lab.bucketed(BucketedDDP))


# 06.5


@exercise_06_5.check("the gradients of all micro-batches, added to what is there and sent once")
def accumulate_values(accumulate_gradients: Any) -> None:
    num = len(list(Case().net().parameters()))
    for parts in accumulating.NUM_PARTS:
        seen = accumulating.accumulating(accumulate_gradients).seen(parts, apart=HANG)
        sent, most = seen[0].sent, max(one.most for one in seen)
        together = (
            "backward comes after all forwards: the activations of all micro-batches are "
            "in memory at once, which accumulation is to avoid"
        )
        recognise(
            {
                "nothing is sent: the last micro-batch is under no_sync() as well": sent == 0,
                together: seen[0].late and most > 1,
                "backward is under no_sync() and the forward before it is not: messages leave "
                "all the same, since torch's DDP decides in forward": seen[0].late,
                "more than the last micro-batch sends: it is told by its place, not by comparing "
                "micro-batches, of which two may be one object": num < sent < parts * num,
                "every micro-batch sends its gradients: accumulation alone saves no message": (
                    sent > num
                ),
            },
            expected=f"{num} messages, those of the last micro-batch",
            seen=f"{sent} for {parts} micro-batches",
            hint="forward and backward of the others under ddp.no_sync(), of the last outside",
        )
        expect_accumulated(seen, parts)
        expect_equal(
            most,
            1,
            what="graphs alive at once",
            mistake=together,
            hint="forward and backward of one micro-batch, then those of the next",
        )


def expect_accumulated(seen: Sequence[accumulating.Accumulated], parts: int) -> None:
    """Gradients against the twin, then the loss, then the end of the step."""
    local, losses = accumulating.twin_parts(seen[0], parts)
    both = torch.stack(local).mean(0)  # (parts, numbers)
    held = accumulating.HELD * 1.5  # the mean over the two ranks
    for rank, one in enumerate(seen):
        expect_close(
            flat_grads(one.grads),
            both.sum(0) + held,
            what=f"rank {rank}'s gradients after {parts} micro-batches",
            looks_like={
                "what .grad held before the first micro-batch is lost: gradients are added to it, "
                "and the training loop clears them": both.sum(0),
                "what .grad held before is kept out of the mean over the ranks": both.sum(0)
                + accumulating.HELD * (rank + 1),
                "only the last micro-batch's gradient is left: it must be added to": both[-1],
                "the gradients are the mean over the micro-batches: parts are added": both.mean(0)
                + held,
                "all that .grad holds is divided by the number of micro-batches: parts are added": (
                    both.sum(0) + held
                )
                / parts,
                "the first micro-batch is sent and the later ones are added to it on each rank: "
                "the last one has to be the one that sends": both[0]
                + held
                + local[rank][1:].sum(0),
            },
        )
        recognise(
            {
                "nothing is returned": one.loss is None,
                "the returned loss is no tensor: .item() waits for the device each time": (
                    not isinstance(one.loss, Tensor)
                ),
                "the returned loss still holds the graphs of all micro-batches: the memory that "
                "accumulation is to save": one.graph,
            },
            expected="the sum of the losses as a tensor without gradient",
            seen=type(one.loss).__name__ + ", requires_grad=True" * one.graph,
            hint="add up loss.detach() after loss.backward(), and return the sum",
        )
        expect_close(
            one.loss.reshape(()),
            losses[rank].sum(),
            what="the returned loss",
            looks_like={
                "the returned loss is the last micro-batch's": losses[rank][-1],
                "the returned loss is the mean of the parts": losses[rank].mean(),
                "the returned loss is the sum over the ranks: that is one more message in every "
                "step, and each rank is to return its own": torch.stack(losses).sum(),
            },
        )
        expect_equal(
            one.finished,
            1,
            what="calls of finish_gradient_sync",
            mistake="finish_gradient_sync() must be called once, after the last backward",
        )


@exercise_06_5.check("no micro-batch at all")
def accumulate_nothing(accumulate_gradients: Any) -> None:
    step = functools.partial(accumulating.accumulate_nothing, accumulate_gradients)
    expect_raises(ValueError, on_one_rank, step, what="a step without micro-batches")


@exercise_06_5.check("a loss_of that raises")
def accumulate_interrupted(accumulate_gradients: Any) -> None:
    expect(
        on_one_rank(functools.partial(accumulating.interrupted, accumulate_gradients)),
        mistake="an exception of loss_of leaves no_sync() on: nothing is sent from then on",
        expected="a block that is left in every case",
        seen="ddp is silent after the exception",
        hint="with ddp.no_sync(): calls its exit whatever happens inside",
    )
