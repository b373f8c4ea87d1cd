"""What tells a right answer of lesson 06 from a wrong one.

The oracle is the single-process twin: one process, rank 0's weights, the whole batch, plain
autograd; for the buckets also torch's own assignment. What travels is counted below the Python
functions, and overlap is judged by the order of events, never by a clock.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
    wrong,
)
from shared.exercises.on_ranks import on_one_rank
from shared.exercises.wrong import Wrong
from shared.laboratories.lesson06 import (
    CAPS_MB,
    SMALL,
    Broadcasts,
    Engines,
    Seen,
    Step,
    averaging,
    broadcasts,
    bucket_messages,
    engines,
)
from shared.laboratories.lesson06_accumulating import (
    NUM_PARTS,
    Accumulated,
    PlainDDP,
    accumulating,
    twin_parts,
)
from shared.laboratories.lesson06_nets import (
    BUFFERS,
    FROZEN,
    Case,
    Grads,
    Mixed,
    flat,
    flat_grads,
    grads_of,
    mean_of,
    torch_buckets,
    twin_steps,
)

exercise_06_1 = checks_for(
    "06.1",
    name="broadcast_parameters",
    difficulty=2,
    minutes=15,
    hints=[
        "dist.broadcast(tensor, src) fills the tensor on the other ranks. named_parameters() and "
        "named_buffers() each give a tied tensor once.",
        "Compare first: dist.all_gather_object(layouts, layout) gives every rank the names, "
        "shapes, dtypes and requires_grad of all. Then all ranks raise, or none does.",
    ],
)
exercise_06_2 = checks_for(
    "06.2",
    name="average_gradients",
    difficulty=2,
    minutes=15,
    hints=[
        "For each parameter: dist.all_reduce(parameter.grad), then divide by the world size.",
        "A rank that leaves an all-reduce out lets the others wait. When may .grad be None?",
    ],
)
exercise_06_3 = checks_for(
    "06.3",
    name="OverlappedDDP",
    difficulty=4,
    minutes=30,
    hints=[
        "parameter.register_post_accumulate_grad_hook(f) calls f(parameter) once its gradient is "
        "complete; f starts dist.all_reduce(parameter.grad, async_op=True) and keeps the handle.",
        "Keep a list of the trainable parameters, last first, and a set of those that are "
        "complete. The hook sends as many from the head of the list as are complete.",
        "finish_gradient_sync: send what is left (zeros where .grad is None), wait for every "
        "handle, and empty list and set for the next step.",
    ],
)
exercise_06_4 = checks_for(
    "06.4",
    name="BucketedDDP",
    difficulty=5,
    minutes=45,
    hints=[
        "A bucket: its parameters, one flat tensor, a view into it for each parameter, the number "
        "of gradients that are still missing.",
        "The hook copies the gradient into its view and lets parameter.grad be that view: after "
        "the all-reduce nothing has to be copied back.",
        "Send buckets strictly in order: bucket 2 may be complete before bucket 1.",
    ],
)
exercise_06_5 = checks_for(
    "06.5",
    name="accumulate_gradients",
    difficulty=2,
    minutes=15,
    hints=[
        "All micro-batches but the last under `with ddp.no_sync():`, forward and backward; the "
        "last outside of it; then finish_gradient_sync().",
    ],
)

WAITED = (
    "the tensor of an all-reduce that was started with async_op=True is neither read nor divided "
    "before wait(); and .grad is complete in register_post_accumulate_grad_hook, not before"
)
LEFT_OVER = (
    "step 1 was right: what a step leaves behind (handles, sets, counts) has to be cleared for the "
    "next in finish_gradient_sync()"
)
HANG = "the ranks wait for each other and never return: do all of them call the same collectives?"


# Claims about gradients and messages, of 06.2 to 06.4


def expect_gradients(case: Case, seen: Sequence[Seen]) -> None:
    """On every rank and in every step the mean over the ranks, as the single process has it."""
    expect(
        not any(one.weights_moved for one in seen),
        mistake="the weights are averaged, not the gradients: the hook is handed the parameter, "
        "its gradient is parameter.grad",
        expected="weights that only the optimizer changes",
        seen="they move before optimizer.step()",
    )
    for step, local in enumerate(twin_steps(case, seen[0].seed, seen[0].started)):
        want = {name: grad for name, grad in mean_of(local).items() if grad is not None}
        for rank, one in enumerate(seen):
            expect_means(want, one.steps[step].grads, local, rank, step)


def expect_means(
    want: Mapping[str, Tensor], got: Grads, local: Sequence[Grads], rank: int, step: int
) -> None:
    """All gradients of one rank at once, so that a mistake is seen as a whole."""
    n = len(local)
    absent = [name for name in want if got.get(name) is None]
    if absent:
        wrong(
            f"{absent[0]} has no gradient on rank {rank}",
            expected="the mean over all ranks, zeros counted where a rank did not use it",
            seen="None",
        )
    there = {name: grad for name in want if (grad := got[name]) is not None}
    stale = sum((there[name] - want[name]).abs().max() > 1e-9 for name in want)
    kept = sum(torch.equal(flat(there[name]), flat(local[rank][name])) for name in want)
    recognise(
        {
            f"{stale} of {len(want)} gradients are still rank {rank}'s own, the others are means": (
                0 < stale < len(want) and kept == stale
            )
        },
        expected=f"means everywhere (step {step + 1})",
        seen="a message was left out, or not written back",
    )
    unused = {name: grad * 0 for name, grad in want.items() if local[rank][name] is None}
    own = flat_grads({**{name: local[rank][name] for name in want}, **unused})
    mean = flat_grads(dict(want))
    try:
        expect_close(
            flat_grads(dict(there)),
            mean,
            what=f"rank {rank}'s gradients in step {step + 1}",
            looks_like={
                "the gradients are the sum over the ranks, not the mean: divide by the world "
                "size": mean * n,
                "every rank keeps its own gradients: nothing that was reduced comes back": own,
                "the gradients are divided by the world size twice": mean / n,
                "each rank's own gradient, divided by the world size": own / n,
                "the sum is divided by 2, which is not the number of ranks": mean * n / 2,
            },
        )
    except Wrong as fault:
        if not fault.mistake:
            fault.hint = LEFT_OVER if step else WAITED
        raise


def expect_all_reduce(step: Step) -> None:
    """No other operation in a step."""
    other = [op for op, _ in step.messages if op != "all_reduce"]
    if other:
        wrong(
            f"gradients travel by {other[0]}, not by all_reduce",
            expected="all_reduce: each rank sends 2(n-1)/n of the gradients",
            seen=f"{len(other)} messages of other kinds",
            hint="all_gather brings every rank's gradients to every rank: n times the memory"
            if "gather" in other[0]
            else "reduce gives the sum to one rank; all ranks need it",
        )


def expect_messages(case: Case, step: Step, *, exact: bool) -> None:
    """Each gradient travels once; with `exact` as a message of its own."""
    expect_all_reduce(step)
    sizes, want, net = step.sent(), case.trainable_bytes(), case.net()
    extra = sum(sizes) - sum(want)
    frozen = sum(p.nbytes for p in net.parameters() if not p.requires_grad)
    recognise(
        {
            "nothing is sent at all": not sizes,
            "the tied weight is reduced twice: it is one parameter in two places, which "
            "parameters() yields once and a loop over modules twice": (
                case.tied and extra == net.middle.weight.nbytes
            ),
            "frozen parameters are sent as well: they have no gradient": (
                case.frozen and extra >= frozen
            ),
            "gradients travel in half of their precision: they are converted to float32": (
                2 * sum(sizes) == sum(want)
            ),
            "gradients are left behind: what no hook has sent by the end of backward, "
            "finish_gradient_sync has to send": extra < 0,
        },
        expected=f"{sum(want)} bytes in {len(want)} gradients",
        seen=f"{sum(sizes)} bytes in {len(sizes)} messages",
    )
    expect_equal(sum(sizes), sum(want), what="bytes of all-reduce in a step")
    if exact:
        expect_equal(
            len(sizes),
            len(want),
            what="all-reduce calls in a step, one a parameter",
            mistake="several gradients travel as one message: that is the subject of 06.4"
            if len(sizes) < len(want)
            else "",
        )


def expect_one_order(seen: Seen) -> None:
    """With a layer left out (step 3) and without (step 4): the same messages, in one order."""
    without, with_it = seen.steps[2].messages, seen.steps[3].messages
    expect_equal(
        sorted(without),
        sorted(with_it),
        what="the messages of a step that does not use a layer",
        mistake="what a step does not use is left out: another rank may use it, and would wait "
        "for a message that never comes",
        hint="zeros take part where .grad is None",
    )
    expect_equal(
        without,
        with_it,
        what="the order of the messages of a step that does not use a layer",
        mistake="where a parameter is unused on one rank, the ranks send in different orders, and "
        "gradients of different parameters meet",
        hint="send in one fixed order on every rank, whatever the order of the hooks",
    )


ALONE = Case(1, skipped=frozenset({(0, 2)}), steps=4)
ALONE_HANGS = "a single rank waits and never returns"


# 06.1


@exercise_06_1.check("parameters and buffers of rank src")
def broadcast_values(broadcast_parameters: Any) -> None:
    for src, n in Broadcasts.SOURCES:
        apart = f"with src={src} of {n} ranks, not all of them take part in each broadcast"
        runs = broadcasts(broadcast_parameters).outcome(n, src, apart=apart)
        states = [before for before, _, _ in runs]
        for rank, (before, after, same) in enumerate(runs):
            for name in sorted(after, key=lambda name: name in BUFFERS):
                left = f"{name} is left as it was"
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
                    },
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


@exercise_06_1.check("ranks that have built different models")
def broadcast_mismatch(broadcast_parameters: Any) -> None:
    differing = ("middle.weight", "extra.weight", "middle.weight")
    for kind, name in zip(Broadcasts.DIFFERENCES, differing, strict=True):
        apart = f"ranks that differ in a {kind} hang: compare the layouts before the first "
        apart += "broadcast, on every rank"
        heard = broadcasts(broadcast_parameters).outcome(2, kind, apart=apart)
        for rank, (error, words) in enumerate(heard):
            what = f"a {kind} that differs between the ranks ({name})"
            recognise(
                {
                    f"{what} is accepted": not error,
                    f"{what} ends in another error than ValueError": error != "ValueError",
                    f"the error does not say which tensor differs in its {kind}": name not in words,
                },
                expected=f"a ValueError on every rank, before the first broadcast, with {name} in "
                "its message",
                seen=f"rank {rank}: {error}{': ' * bool(error)}{words[:120]}",
            )


# 06.2

AVERAGED = Case(3, tied=True, frozen=True)
KEPT = Case(2, tied=True, frozen=True, keep=True)
UNUSED = Case(3, skipped=frozenset({(1, 0), (0, 1), (2, 1)}))


def averaged(average_gradients: Any) -> Engines:
    """The answer to 06.2 on all of its cases."""
    return averaging(average_gradients, (AVERAGED, KEPT, ALONE, UNUSED))


@exercise_06_2.check("the mean over ranks, tied and frozen parameters, twice")
def average_values(average_gradients: Any) -> None:
    for case in (AVERAGED, KEPT):
        seen = averaged(average_gradients).trained(case, apart=HANG)
        expect_all_reduce(seen[0].steps[0])
        expect_gradients(case, seen)
        for name in FROZEN:
            expect(
                seen[0].steps[0].grads[name] is None,
                mistake="a frozen parameter is given a gradient",
                expected=f"{name}.grad stays None: an optimizer with weight decay would move it",
                seen="a tensor",
            )
        for step in seen[0].steps:
            expect_messages(case, step, exact=True)


@exercise_06_2.check("a parameter that one rank did not use")
def average_unused(average_gradients: Any) -> None:
    laboratory = averaged(average_gradients)
    expect_one_order(laboratory.trained(ALONE, apart=ALONE_HANGS)[0])
    expect_gradients(UNUSED, laboratory.trained(UNUSED, apart=HANG))


# 06.3 and 06.4

START = Case(2, tied=True, frozen=True, steps=0)
PLAIN = Case(2, steps=1)
VALUES = (
    Case(2, tied=True, frozen=True),
    Case(3, tied=True),
    Case(2, frozen=True, keep=True, steps=3),
)
LEFT_OUT = Case(2, skipped=frozenset({(0, 0), (1, 1), (0, 2), (1, 2)}), steps=4)
ACCUMULATING = Case(2, tied=True, quiet=2)
CASES = (START, PLAIN, *VALUES, ALONE, LEFT_OUT, ACCUMULATING)


def overlapped(OverlappedDDP: Any) -> Engines:
    """The answer to 06.3 on all of its cases."""
    return engines(OverlappedDDP, CASES)


def bucketed(BucketedDDP: Any) -> Engines:
    """The answer to 06.4 on all of its cases, with buckets of 524 bytes."""
    return engines(BucketedDDP, CASES, SMALL)


def check_start(laboratory: Engines) -> None:
    """All begin with rank 0's weights; the wrapper's state has the model's names."""
    apart = "the ranks wait for each other while the model is wrapped: not all call the same"
    seen = laboratory.trained(START, apart=apart)
    for rank, one in enumerate(seen):
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


def check_overlap(laboratory: Engines) -> None:
    """Messages leave while backward goes on, and backward never waits for one."""
    expect(
        all(laboratory.rendezvous(apart=HANG)),
        mistake="a hook waits for its all-reduce: backward stands still while the message "
        "travels, and nothing overlaps",
        expected="rank 0's backward ends although rank 1 has not begun its own",
        seen="it only ends once rank 1 has joined",
        hint="async_op=True in the hook, handle.wait() in finish_gradient_sync alone",
    )
    step = laboratory.trained(PLAIN, apart=HANG)[0].steps[0]
    sizes = step.sent()
    recognise(
        {
            "all gradients travel as one message: it leaves when the last of them is complete": (
                len(sizes) == 1 and sizes[0] >= sum(PLAIN.trainable_bytes())
            )
        },
        expected=f"several messages, {sum(sizes)} bytes in all"
        f" (where there are buckets: of {SMALL * 2**20:.0f} bytes)",
        seen="1 message",
        hint="bucket_cap_mb counts MiB: 2^20 bytes, each number has nbytes / numel of them",
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


def check_values(laboratory: Engines, *, exact: bool) -> None:
    """The twin's gradients, with all that models come with, two steps on."""
    apart = "the ranks wait and never return: a frozen parameter never gets a gradient, so what "
    apart += "counts on it is never complete"
    for case in VALUES:
        seen = laboratory.trained(case, apart=apart)
        # The first step may end with an exchange about the order to send in from then on.
        first = sum(seen[0].steps[0].sent())
        for number, step in enumerate(seen[0].steps):
            expect_equal(
                sum(step.sent()),
                first,
                what=f"the bytes sent in step {number + 1}",
                mistake="a later step sends other messages than the first: what is left over "
                "from the step before?",
            )
        expect_messages(case, seen[0].steps[1], exact=exact)
        expect_gradients(case, seen)


def check_unused(laboratory: Engines) -> None:
    """A layer that a step leaves out, on one rank, then on another, then on all."""
    expect_one_order(laboratory.trained(ALONE, apart=ALONE_HANGS)[0])
    apart = "a parameter that one rank did not use makes the ranks wait and never return"
    expect_gradients(LEFT_OUT, laboratory.trained(LEFT_OUT, apart=apart))


def check_no_sync(laboratory: Engines) -> None:
    """Two quiet micro-batches and one that is sent: the sum of all three, averaged."""
    apart = "after no_sync() the ranks wait and never return"
    seen = laboratory.trained(ACCUMULATING, apart=apart)
    step = seen[0].steps[1]
    recognise(
        {
            "no_sync() sends messages all the same": step.quiet > 0,
            "no_sync() also drops the gradient that was accumulated: only the last micro-batch's "
            "is left": lambda: gradients_are_of(seen, [2]),
            "the last micro-batch's gradient is missing: the messages left too early": (
                lambda: gradients_are_of(seen, [0, 1])
            ),
        },
        expected="no message inside it, then the sum over all three micro-batches, averaged",
        seen=f"{step.quiet} messages inside it" if step.quiet else "a part of the sum",
    )
    expect_gradients(ACCUMULATING, seen)
    expect(
        step.at_first_layer > 0,
        mistake="after no_sync() messages no longer leave during backward",
        expected="hooks that are back at work once the block is left",
        seen="0 messages at the first layer",
    )
    expect(
        all(laboratory.interrupted(apart=apart)),
        mistake="an exception inside no_sync() leaves it switched on, and nothing is sent from "
        "then on",
        expected="messages in the next backward",
        seen="none",
        hint="try: yield, finally: switch back",
    )


def gradients_are_of(seen: Sequence[Seen], parts: Sequence[int]) -> bool:
    """Whether the first step's gradients are those of some of the micro-batches alone."""
    twin = ACCUMULATING.net()
    twin.load_state_dict(seen[0].started)
    for rank in range(2):
        for part in parts:
            ACCUMULATING.loss(twin, seen[0].seed, rank, 0, part).backward()
    got, want = flat_grads(seen[0].steps[0].grads), flat_grads(grads_of(twin)) / 2
    return got.shape == want.shape and torch.allclose(got, want)


@exercise_06_3.check("the start: rank 0's weights everywhere")
def overlapped_start(OverlappedDDP: Any) -> None:
    check_start(overlapped(OverlappedDDP))


@exercise_06_3.check("overlap, by the order of events")
def overlapped_order(OverlappedDDP: Any) -> None:
    check_overlap(overlapped(OverlappedDDP))


@exercise_06_3.check("gradients and messages, tied and frozen parameters, several steps")
def overlapped_values(OverlappedDDP: Any) -> None:
    check_values(overlapped(OverlappedDDP), exact=True)


@exercise_06_3.check("a parameter that is not used in a step")
def overlapped_unused(OverlappedDDP: Any) -> None:
    check_unused(overlapped(OverlappedDDP))


@exercise_06_3.check("no_sync")
def overlapped_no_sync(OverlappedDDP: Any) -> None:
    check_no_sync(overlapped(OverlappedDDP))


@exercise_06_4.check("the start: rank 0's weights everywhere")
def bucketed_start(BucketedDDP: Any) -> None:
    check_start(bucketed(BucketedDDP))


@exercise_06_4.check("overlap, by the order of events")
def bucketed_order(BucketedDDP: Any) -> None:
    check_overlap(bucketed(BucketedDDP))


@exercise_06_4.check("gradients, tied and frozen parameters, several steps")
def bucketed_values(BucketedDDP: Any) -> None:
    check_values(bucketed(BucketedDDP), exact=False)


@exercise_06_4.check("how the gradients are cut into buckets")
def bucketed_sizes(BucketedDDP: Any) -> None:
    num_parameters = len(list(Mixed().parameters()))
    for cap_mb in CAPS_MB:
        got, want = bucket_messages(BucketedDDP).seen(cap_mb, apart=HANG)[0], torch_buckets(cap_mb)
        in_megabytes = sorted(torch_buckets(cap_mb / 1.048576, first=10**6))
        recognise(
            {
                "gradients of two dtypes share a bucket: one of them is converted to the other": (
                    sum(got) > sum(want)
                ),
                "a bucket is closed at bucket_cap_mb times 10^6 bytes: a MiB is 2^20": (
                    sorted(got) == in_megabytes != sorted(want)
                ),
                "every gradient is a message of its own: there are no buckets": (
                    len(got) == num_parameters > len(want) > 1
                ),
                "the first bucket is as large as the others: the first message leaves late": (
                    cap_mb == 25 and len(got) == 2
                ),
            },
            expected=f"{len(want)} all-reduces of {sorted(want)} bytes, each of one dtype: "
            f"bucket_cap_mb={cap_mb:g} is {cap_mb * 2**20:.0f} bytes, and the first bucket of a "
            "dtype is closed at 1 MiB where that is less",
            seen=f"{len(got)} of {sorted(got)} bytes",
        )
        expect_equal(
            sorted(got),
            sorted(want),
            what=f"bytes of the buckets for bucket_cap_mb={cap_mb:g}",
            hint="last parameter first; one dtype a bucket; closed once it holds the cap or more",
        )
    for cap_mb in (0, -1):

        def wrap(cap_mb: float = cap_mb) -> None:
            BucketedDDP(nn.Linear(2, 2), cap_mb)

        expect_raises(ValueError, on_one_rank, wrap, what=f"bucket_cap_mb={cap_mb}")


@exercise_06_4.check("a parameter that is not used in a step")
def bucketed_unused(BucketedDDP: Any) -> None:
    check_unused(bucketed(BucketedDDP))


@exercise_06_4.check("no_sync")
def bucketed_no_sync(BucketedDDP: Any) -> None:
    check_no_sync(bucketed(BucketedDDP))


# 06.5


@exercise_06_5.check("the gradients of all micro-batches, sent once")
def accumulate_values(accumulate_gradients: Any) -> None:
    num = len(list(Case().net().parameters()))
    for parts in NUM_PARTS:
        seen = accumulating(accumulate_gradients).seen(parts, apart=HANG)
        sent, most = seen[0].sent, max(one.most for one in seen)
        recognise(
            {
                "nothing is sent: the last micro-batch is under no_sync() as well": sent == 0,
                "backward is under no_sync() and the forward before it is not: messages leave "
                "all the same, since torch's DDP decides in forward": seen[0].late,
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
            mistake="backward comes after all forwards: the activations of all micro-batches are "
            "in memory at once, which accumulation is to avoid",
            hint="forward and backward of one micro-batch, then those of the next",
        )


def expect_accumulated(seen: Sequence[Accumulated], parts: int) -> None:
    """Gradients against the twin, then the loss, then the end of the step."""
    local, losses = twin_parts(seen[0], parts)
    both = torch.stack(local).mean(0)  # (parts, numbers)
    for rank, one in enumerate(seen):
        expect_close(
            flat_grads(one.grads),
            both.sum(0),
            what=f"rank {rank}'s gradients after {parts} micro-batches",
            looks_like={
                "only the last micro-batch's gradient is left: it must be added to": both[-1],
                "the gradients are the mean over the micro-batches: parts are added": both.mean(0),
                "the first micro-batch is sent and the later ones are added to it on each rank: "
                "the last one has to be the one that sends": both[0] + local[rank][1:].sum(0),
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
    def step() -> None:
        ddp = PlainDDP(nn.Linear(2, 2))
        accumulate_gradients(ddp, [], lambda model, part: model(torch.ones(1, 2)).sum())

    expect_raises(ValueError, on_one_rank, step, what="a step without micro-batches")
