"""Lesson 10: what tells a right answer from a wrong one.

The oracle is torch's own AdamW in one process, on the mean of all ranks' gradients. Bytes are
counted over everything that is alive, wherever an answer keeps it; messages below Python.
"""

from functools import partial

import torch
from torch import nn

from lessons.lesson10_zero.laboratory import deepspeed_configs as ds_lab
from lessons.lesson10_zero.laboratory import nets
from lessons.lesson10_zero.laboratory import stages as lab
from lessons.lesson10_zero.laboratory import twin as twins
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
)
from shared.exercises.seeds import fresh_generator

HANG = "not every rank takes part in each collective: the others wait for it"
UNUSED_HANG = (
    "a parameter without a gradient is left out, or its bucket leaves out of turn: what the ranks "
    "send no longer matches"
)

exercise_10_1 = checks_for(
    "10.1",
    name="partition",
    difficulty=1,
    minutes=10,
    hint=(
        "torch.cat of the tensors, each detached and flattened, and of -size % num_parts zeros; "
        "flat.view(num_parts, -1) has the parts as rows."
    ),
)


@exercise_10_1.check("the numbers, their order, the padding")
def partition_values(partition) -> None:
    draw = partial(torch.randn, generator=fresh_generator(), dtype=torch.float64)
    for shapes, n in (([(3, 5), (7,), (2, 2, 2)], 4), ([(4,), (), (2, 5)], 3), ([(2,)], 5)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            tensors = [draw(shape).to(dtype) for shape in shapes]
            numbers = torch.cat([x.reshape(-1) for x in tensors])
            want = torch.cat([numbers, numbers.new_zeros(-len(numbers) % n)])
            flat, parts = partition(tensors, n)
            size = flat.numel()
            recognise(
                {
                    "the flat tensor has another dtype": flat.dtype != dtype,
                    "the flat tensor is not flat": flat.dim() != 1,
                    "the flat tensor is not padded: its parts differ in size": size % n > 0,
                    "a whole part is added as padding": size >= len(want) + n,
                    "the padding comes first": size == len(want) > len(numbers)
                    and torch.equal(flat, torch.cat([want[len(numbers) :], numbers])),
                },
                expected=f"{len(numbers)} numbers and {len(want) - len(numbers)} zeros, {dtype}",
                seen=f"{size} numbers in the shape {tuple(flat.shape)}, {flat.dtype}",
            )
            gaps = [y for x in tensors for y in (x.reshape(-1), x.new_zeros(-x.numel() % n))]
            words = "every tensor is padded by itself: the zeros stand at the end, once"
            between = {words: torch.cat(gaps)}
            expect_close(flat, want, what="the flat tensor", atol=0, rtol=0, looks_like=between)
            expect_equal(len(parts), n, what="the number of parts")
            words = "the parts are interleaved, element by element: each is a piece without gaps"
            for i, (part, wanted) in enumerate(zip(parts, want.chunk(n), strict=True)):
                turns = {words: want[i::n]}
                expect_close(part, wanted, what="a part", atol=0, rtol=0, looks_like=turns)


@exercise_10_1.check("views of one tensor, a copy of the others")
def partition_views(partition) -> None:
    for shapes in ([(6,)], [(3, 4), (5,)]):
        tensors = [
            nn.Parameter(torch.randn(shape, generator=fresh_generator())) for shape in shapes
        ]
        before = [x.detach().clone() for x in tensors]
        flat, parts = partition(tensors, 3)
        frozen = not all(x.requires_grad for x in tensors)
        recognise(
            {
                "the flat tensor belongs to a graph: it could not be written to": (
                    flat.requires_grad
                ),
                "the parameters are frozen by the call: nothing trains them any more": frozen,
            },
            expected="numbers alone, detached from parameters that stay as they were",
            seen=f"flat.requires_grad={flat.requires_grad}, the parameters' {not frozen}",
        )
        parts[1].fill_(7.0)
        size = len(flat) // 3
        recognise(
            {
                "the parts are copies: what is written to one does not reach the flat tensor": bool(
                    (flat[size : 2 * size] != 7).any()
                ),
                "the flat tensor shares memory with what it was made of": any(
                    not torch.equal(x.detach(), y) for x, y in zip(tensors, before, strict=True)
                ),
            },
            expected="parts that are views of flat, and flat a copy",
            seen="a 7 that was written to the second part, and where it arrived",
        )
    transposed = torch.arange(6.0).view(2, 3).t()
    flat, _ = partition([transposed], 2)
    expect_close(flat, torch.tensor([0.0, 3, 1, 4, 2, 5]), what="a transposed tensor, flat")


@exercise_10_1.check("what is refused")
def partition_refuses(partition) -> None:
    x = torch.ones(3)
    expect_raises(ValueError, partition, [], 2, what="no tensor at all")
    expect_raises(ValueError, partition, [x], 0, what="num_parts 0")
    expect_raises(ValueError, partition, [x], -1, what="num_parts -1")
    expect_raises(ValueError, partition, [x, x.bfloat16()], 2, what="two dtypes in one flat tensor")
    last = [x, x, x.bfloat16()]
    expect_raises(ValueError, partition, last, 2, what="a last tensor of another dtype")


# What all stages are held against


def expect_weights(observed, *cases) -> None:
    """On every rank, after every step, the unsharded optimizer's weights; rank 0's at first."""
    stage = observed.stage
    for case in cases:
        seen = observed.seen(case, UNUSED_HANG if case.skipped else HANG)
        start, own = seen[0].started, seen[0].own
        missing = sorted({name for one in seen for name in one.missing})
        recognise(
            {
                "full_state_dict() gives rank 0 alone its tensors: every rank gets them": (
                    bool(missing) and not seen[0].missing
                ),
                "full_state_dict() is not the model's state_dict(): names are missing": bool(
                    missing
                ),
                "full_state_dict() has parameters without their numbers: gather them, and clone "
                "them before they are freed": any(
                    start[name].shape != own[name].shape for name in own
                ),
                "the ranks start with different weights: rank 0's are for all": any(
                    not torch.equal(one.started[name], own[name]) for one in seen for name in own
                ),
                "a group that joins keeps each rank's own numbers": any(
                    not torch.equal(one.joined[name], seen[0].joined[name])
                    for one in seen
                    for name in one.joined
                ),
            },
            expected="every name of model.state_dict(), buffers and tied names too, and whole "
            "parameters, rank 0's on every rank, frozen ones too",
            seen=f"no {', '.join(missing)}" if missing else "other tensors",
        )
        for rank, one in enumerate(seen):
            some = stage == 2 and case.grouped and 0 < len(one.kept) < len(one.own)
            expect(
                not some,
                mistake="the gradients of a group that is added stay whole until step(): its "
                "parameters have no hooks",
                expected="no whole gradient after backward",
                seen=f"those of {', '.join(one.kept)}",
            )
            for closure in one.closures:
                recognise(
                    {
                        "the closure is not called": not closure["called"],
                        "the closure is called without gradients switched on": (
                            not closure["recorded"]
                        ),
                        "the closure's loss is not returned": not closure["returned"],
                    },
                    expected="step(closure) calls it, under enable_grad, and returns its loss",
                    seen=f"{closure}",
                )
            frozen = [n for n in ("fixed.weight", "spare.bias") if case.frozen]
            expect(
                all(torch.equal(one.steps[-1][name], start[name]) for name in frozen),
                mistake="a frozen parameter is moved: weight decay alone would do that",
                expected="parameters without requires_grad as they were",
                seen="other numbers",
            )
            expect_steps(case, one, start, rank, sharded=stage > 1)


WRONG = {
    "the gradients are summed over the ranks, not averaged": "sum",
    "the settings of the start are used: they are read from param_groups in every step": (
        "first settings"
    ),
    "only the learning rate is read from param_groups in every step": "lr alone",
    "the settings of the first group alone are read in every step": "first group",
    "the settings of the first group are used for all": "one group",
    "the updates are AdamW's, whatever optimizer_class is": "AdamW",
    "the gradients of earlier steps are added: zero_grad() has to drop all of them": (
        "never zeroed"
    ),
    "what came before zero_grad() counts in all later steps": "nothing zeroed",
    "what came before zero_grad() counts in this step": "nothing dropped",
    "only the last of two backward passes counts: gradients are added up": "last part",
    "the mean over the backward passes is taken, not their sum": "mean of parts",
    "the gradients are divided by the number of ranks twice": "divided twice",
    "a parameter that no rank used is left alone: with zeros it still decays": "no zeros",
}


def expect_steps(case, one, start, rank, sharded: bool) -> None:
    """One rank's weights after each step, and what a wrong way would have made of them."""
    stays = "a gradient is left in .grad after backward: it is not freed, or it was never sent"
    stale = "some weights stay as they were: not gathered, or not in the inner optimizer"
    narrow = "gradients or updates are rounded to float32 on their way: these weights are float64"
    twin = partial(twins.twin_steps, case, one.seed, start, rank=rank)
    for step, (got, want) in enumerate(zip(one.steps, twin(), strict=True)):
        before = one.steps[step - 1] if step else {name: start[name] for name in got}
        moved = lab.flat(got) != lab.flat(before)
        looks_like = {stays: lab.flat(got)} if sharded and one.kept else {}
        looks_like |= {
            "each rank updates its part by its own gradients, not by their mean": partial(
                twins.nearest_own, case, one.seed, start, lab.flat(got)
            )
        } | {
            words: partial(lambda wrong, step: lab.flat(twin(wrong=wrong)[step]), wrong, step)
            for words, wrong in WRONG.items()
        }
        if moved.any():
            looks_like[stale] = torch.where(moved, lab.flat(want), lab.flat(got))
        if torch.allclose(lab.flat(got), lab.flat(want), rtol=1e-6, atol=1e-7):
            looks_like[narrow] = lab.flat(got)
        expect_close(
            lab.flat(got),
            lab.flat(want),
            what=f"rank {rank}'s weights after step {step + 1}, {case.kind.__name__} unsharded",
            looks_like=looks_like,
            hint="after step 1 all is right: what does the first step leave behind?" * (step > 0),
        )
    expect_close(one.output, twins.twin_output(case, one.seed, one.steps[-1], start), what="a loss")


def expect_values(observed) -> None:
    """Every model and number of ranks, two backward passes, a closure."""
    expect_weights(observed, *observed.values)


def expect_more(observed) -> None:
    """Groups, where there may be several, and layers that a rank leaves out."""
    expect_weights(observed, *observed.others)


def expect_resumed(observed) -> None:
    for lost in observed.seen(lab.RESUMED, HANG):
        recognise(
            {
                "what is float32 comes back rounded to the parameters' 16 bits": "bits" in lost,
                "the parameters are not those of the state that was loaded: their parts stay as "
                "they were": "weights" in lost,
                "a run that is resumed from state_dict() ends elsewhere": "apart" in lost,
            },
            expected="the bits of the run that was not interrupted",
            seen="other bf16 weights after two more steps",
            hint="AdamW's states, the float32 masters and the groups' settings are part of it",
        )
    errors = [error for error, _ in observed.seen(lab.EXCHANGED, HANG)]
    foreign = "" if not all(errors) else observed.foreign()
    recognise(
        {
            "another rank's state is loaded without a word": not all(errors),
            "another rank's state ends in another error than ValueError": any(
                error != "ValueError" for error in errors
            ),
            "the state of rank 0 of 2 is loaded without a word where there is one rank": (
                not foreign
            ),
            "a state of another number of ranks ends in another error than ValueError": (
                foreign != "ValueError"
            ),
        },
        expected="a ValueError: a state belongs to one rank and one number of ranks",
        seen=f"{[*errors, foreign]}",
    )


def expect_masters(observed) -> None:
    """In 16 bits the numbers of unsharded float32 masters, of which the weights are roundings."""
    for started, ended in observed.seen(lab.HALVES, HANG):
        want = twins.twin_of_halves(started, 2)
        moved = (lab.flat(ended).float() - lab.flat(started).float()).abs().mean().item()
        wanted = (lab.flat(want).float() - lab.flat(started).float()).abs().mean().item()
        words = "the masters are made again from the rounded parts in every step, or there are none"
        expect(
            moved > wanted / 2,
            mistake=words + ": updates smaller than a rounding step are lost",
            expected=f"bf16 weights that {twins.NUM_SMALL_STEPS} small steps move by {wanted:.3g}",
            seen=f"{moved:.3g}",
        )
        expect_close(
            lab.flat(ended).float(),
            lab.flat(want).float(),
            what="bf16 weights, against AdamW on unsharded float32 masters",
            atol=2**-7,  # one rounding step: the mean may be taken before or after the sum
            rtol=0,
        )


def expect_outputs(observed) -> None:
    """A unit that returns a tuple of tensors is gathered for its backward as any other."""
    for seen in observed.seen(lab.OUTPUTS, HANG):
        words = "a unit whose output is a tuple of tensors is not gathered for its backward"
        crashed = isinstance(seen, str)
        expect(not crashed, mistake=words, expected="three training steps", seen=str(seen)[:120])
        started, ended = seen
        want = lab.flat(twins.twin_of_outputs(started, 2))
        lost = lab.flat(twins.twin_of_outputs(started, 2, lost="middle"))
        left = "a unit of which a layer is not used loses all its gradients: what is left is sent "
        looks_like = {left + "at the end of backward": lost}
        what = "weights after three steps"
        expect_close(lab.flat(ended), want, what=what, hint=words, looks_like=looks_like)


def expect_bytes(observed) -> None:
    """The formula's bytes at rest and after backward, exactly."""
    stage = observed.stage
    for size in observed.sizes:
        n = size.world_size
        half = size.dtype.itemsize == 2
        weights, grads, states = (2, 2, 12) if half else (4, 4, 8)
        for one in observed.seen(size, HANG):
            psi, at, own = one.numel, one.moments, one.trained
            rest = psi * weights // (n if stage == 3 else 1) + own * states // n
            more = own * grads // (n if stage > 1 else 1)
            got = at["after zero_grad"]
            above, outside = got - rest, weights * one.outside
            kind = f"bytes a parameter ({size.dtype}, {n} ranks)".replace("torch.", "")
            recognise(
                {
                    "parameters outside of all units are whole between steps": (
                        above > 0 and above in (outside, outside * (n - 1) // n)
                    ),
                    "frozen parameters are whole between steps": (
                        0 < above <= weights * (psi - own)
                    ),
                    "nothing is saved: every rank keeps the states of all parameters": (
                        n > 1 and got >= psi * weights // (n if stage == 3 else 1) + psi * states
                    ),
                    "a second copy of the weights is kept, or masters of more than this rank's "
                    "part: there before any backward": stage < 3
                    and at["before a backward"] > psi * weights + own * 4 * half // n,
                    "gradients are kept after zero_grad()": got == rest + more,
                    "this rank's part of the gradients outlives step() and zero_grad(), as a "
                    "master's .grad perhaps": got == rest + own * 4 // n,
                    "the parameters are whole on every rank between steps": (
                        stage == 3 and n > 1 and got >= psi * weights + psi * states // n
                    ),
                    "this rank's part is kept in float32 alone: in 16 bits, too, beside the "
                    "masters": half and got == rest - 2 * own // n,
                    "16-bit parameters have no float32 masters": half
                    and got <= rest - 2 * psi // n,
                },
                expected=f"{rest / psi:.3f} {kind} at rest",
                seen=f"{got / psi:.3f}",
            )
            expect_equal(got, rest, what=f"bytes at rest, {rest / psi:.3f} {kind}")
            after = at["after backward"]
            expect(
                after == rest + more,
                mistake="the gradients are whole on every rank after backward"
                * (stage > 1 and n > 1 and after >= rest + own * grads),
                expected=f"{(rest + more) / psi:.3f} {kind} after backward",
                seen=f"{after / psi:.3f}",
            )
            expect(
                at["after a dropped backward"] == rest,
                mistake="zero_grad(set_to_none=False) leaves zeros behind: all memory is freed",
                expected=f"{rest / psi:.3f} {kind} after a backward and zero_grad()",
                seen=f"{at['after a dropped backward'] / psi:.3f}",
            )
            if "saved" in at:
                expect_saved(stage, one, n, weights, states, kind)
            expect_worst(stage, one, n, weights, grads)


def expect_saved(stage, one, n, weights, states, kind) -> None:
    """The bytes of this rank's file: its part, not in 16 bits, and nothing behind a view."""
    psi, at, own, half = one.numel, one.moments, one.trained, weights == 2
    # Who saves a float32 part as its own master as well writes it twice: that is no whole.
    room = psi * weights * (2 if stage == 3 and not half else 1) // n + own * states // n
    larger = "state_dict() has more than this rank's part: every rank saves its own"
    views = "state_dict() has views: torch.save writes all the memory behind a view"
    expect(
        at["saved"] <= room,
        mistake=larger if at["state_dict"] > room else views,
        expected=f"at most {room / psi:.3f} {kind} in a file",
        seen=f"{at['saved'] / psi:.3f}",
    )
    expect(
        not half or at["saved"] != own * (states - 2) // n,
        mistake="the float32 masters are saved in 16 bits, rounded",
        expected=f"{states} bytes for each of this rank's parameters in state_dict()",
        seen=f"{states - 2}",
    )


def expect_worst(stage, one, n, weights, grads) -> None:
    """One bucket beside the formula in stage 2, one and two units in stage 3."""
    at, rest = one.moments, one.moments["after zero_grad"]
    if stage == 2:
        room = lab.BUCKET * grads
        sent = [call.num_bytes for call in one.calls if call.op == "reduce_scatter"]
        expect(
            max(sent, default=0) <= room,
            mistake="a bucket has more than bucket_size elements: it is closed too late",
            expected=f"at most {room} bytes of gradients in a message",
            seen=f"{max(sent, default=0)} bytes",
        )
        expect(
            at["most in backward"] <= at["after backward"] + room,
            mistake="whole gradients are alive beyond a bucket: each is freed once it is in its "
            "bucket, and the bucket when its part has come",
            expected=f"at most {room} bytes more than after backward, whenever something is sent",
            seen=f"{at['most in backward'] - at['after backward']} bytes more on {n} ranks",
        )
    if stage == 3:
        recognise(
            {
                "the views that autograd saved keep a freed unit's memory: empty its storage": (
                    at["after forward"] > rest >= at["in parameters"] * 4
                ),
            }
            | {
                f"parameters stay whole after {name}": at[f"after {moment}"] != rest
                for name, moment in (
                    ("the forward of their unit", "forward"),
                    ("an evaluation", "an evaluation"),
                    ("full_state_dict", "full_state_dict"),
                )
            },
            expected=f"{rest} bytes after each of them, as at rest",
            seen=", ".join(f"{at[f'after {m}']} after {m}" for m in ("forward", "an evaluation")),
        )
        unit = one.unit + one.outside
        for name, base, room in (
            ("forward", rest, weights * unit),
            ("an evaluation", rest, weights * unit),
            ("backward", at["after backward"], (weights + grads) * unit),
        ):
            expect(
                at[f"most in {name}"] <= base + room,
                mistake="`units` says which modules are gathered together: more is whole at once"
                if one.outside > 0
                else f"more than a unit is whole at once in {name}",
                expected=f"at most {room} bytes beside the parts, whenever something is sent",
                seen=f"{at[f'most in {name}'] - base} bytes on {n} ranks",
                hint="gather before a unit computes, free after it; in backward once more",
            )


def expect_messages(observed) -> None:
    """Bytes on a ring: (n-1)/n of the parameters, twice or three times."""
    stage = observed.stage
    for size in observed.sizes[:2]:
        n, dtype = size.world_size, size.dtype
        for one in observed.seen(size, HANG):
            once = round((n - 1) / n * dtype.itemsize * one.numel)
            want = {"reduce_scatter": once, "all_gather": once * (2 if stage == 3 else 1)}
            got = nets.messages(one.calls)
            recognise(
                {
                    "gradients are all-reduced: every rank gets all of them, twice what is "
                    "needed": "all_reduce" in got,
                    "parameters travel by broadcast: one rank after the other sends its part to "
                    "all": "broadcast" in got,
                    "whole gradients are sent to one rank": "reduce" in got,
                    "gradients or parameters travel twice in a step": dtype.itemsize == 4
                    and any(got.get(op) == 2 * want[op] for op in want),
                    "gradients or parameters travel in float32: twice the bytes": any(
                        got.get(op) == 2 * want[op] for op in want
                    ),
                    "the parameters are gathered in step(), too: the next forward does it": (
                        stage == 3 and got.get("all_gather") == 3 * once
                    ),
                    "the parameters are not gathered again for backward": stage == 3
                    and got.get("all_gather") == once,
                },
                expected=f"bytes a rank sends in a step, on a ring: {want}",
                seen=f"{got}",
                hint="reduce_scatter for the gradients, all_gather for the parameters",
            )
            calls = sum(call.op == "reduce_scatter" for call in one.calls)
            if stage > 1:
                words = ": is bucket_size taken for bytes?" * (stage == 2)
                expect(
                    calls < 8,
                    mistake="every gradient travels alone" + words,
                    expected=f"small ones together, up to bucket_size={lab.BUCKET} elements"
                    if stage == 2
                    else "one message a unit",
                    seen=f"{calls} reduce-scatters for 8 parameters",
                )
            expect_equal(got, want, what="bytes a rank sends in a step, on a ring")


def hold(observe, stage, hold_to, answer) -> None:
    """Hold what a laboratory has seen of an answer to what is expected of its stage."""
    hold_to(observe(stage, answer))


NOT_TORCHS = ("torch.distributed.optim.", "torch.distributed.fsdp.")
exercise_10_2 = checks_for(
    "10.2",
    name="ShardedOptimizer",
    difficulty=3,
    minutes=25,
    hint=(
        "flat, parts = partition(params, n); broadcast flat; parameter.data = its piece of flat "
        "(views_of); optimizer_class([nn.Parameter(parts[rank])], **kwargs) does the updates, and "
        "has .defaults for super().__init__."
    ),
    forbidden=NOT_TORCHS,
)
exercise_10_2b = checks_for(
    "10.2b",
    name="ZeroStage1",
    difficulty=4,
    minutes=40,
    hint=(
        "In add_param_group: super().add_param_group(group), then flat, parts = partition(those "
        "with requires_grad, n), parameter.data = its piece of flat, and AdamW over parts[rank] "
        "(16-bit: over a float32 copy of it)."
    ),
    forbidden=NOT_TORCHS,
)
exercise_10_3 = checks_for(
    "10.3",
    name="ZeroStage2",
    difficulty=4,
    minutes=40,
    hint=(
        "parameter.register_post_accumulate_grad_hook(f): copy the gradient, divided by n, to its "
        "place in the bucket, and set parameter.grad = None."
    ),
    forbidden=NOT_TORCHS,
)
exercise_10_4 = checks_for(
    "10.4",
    name="ChainStage3",
    difficulty=4,
    minutes=45,
    hint=(
        "Free with flat.untyped_storage().resize_(0), not by dropping flat: what autograd saved "
        "are views of that storage, and find their numbers again once it is gathered."
    ),
    forbidden=NOT_TORCHS,
)
exercise_10_4b = checks_for(
    "10.4b",
    name="ZeroStage3",
    difficulty=5,
    minutes=45,
    hint=(
        "Parameters outside of all units are a unit of the model itself; a unit for each "
        "requires_grad, and 16-bit parts with float32 masters."
    ),
    forbidden=NOT_TORCHS,
)


ALONE = "unsharded weights; odd sizes, two backward passes"
for exercise, number, memory, sent in (
    (exercise_10_2, 1, "in float32 8 + 8/D", "twice"),
    (exercise_10_4, 3, "in float32 16/D, and two units", "three times"),
):
    for title, hold_to in (
        (ALONE, expect_values),
        (f"bytes: {memory}", expect_bytes),
        (f"messages: {sent} the parameters", expect_messages),
    ):
        exercise.check(title)(partial(hold, lab.observed_first, number, hold_to))

for exercise, number, memory, sent in (
    (exercise_10_2b, 1, "4 + 12/D", "twice"),
    (exercise_10_3, 2, "2 + 14/D, and one bucket", "twice"),
    (exercise_10_4b, 3, "16/D, and two units", "three times"),
):
    for title, hold_to in (
        ("unsharded weights; tied, frozen, odd sizes, two backward passes", expect_values),
        ("several groups, parameters that a rank did not use", expect_more),
        (f"bytes: {memory}", expect_bytes),
        (f"messages: {sent} the parameters", expect_messages),
        ("saved and resumed", expect_resumed),
        ("16 bits: small updates add up in the masters", expect_masters),
        *([("a unit that returns a tuple", expect_outputs)] if number == 3 else []),
    ):
        exercise.check(title)(partial(hold, lab.observed, number, hold_to))


exercise_10_5 = checks_for(
    "10.5",
    name="zero_config",
    difficulty=3,
    minutes=25,
    hint=(
        "The first stage of 0 to 3 whose bytes at the worst moment, times num_params, are at most "
        "0.9 x budget. The table above has them; stage 1's is the larger of two."
    ),
)


@exercise_10_5.check("the stage, by arithmetic")
def lowest_stage(config_for) -> None:
    for order in (
        ds_lab.Order(8, 4.2, 3),
        ds_lab.Order(8, 5.5, 3),  # 4.95: without room for buckets stage 2's 5 would fit
        ds_lab.Order(1, 23.0, 0),
        ds_lab.Order(8, 6.0, 2),  # 5.4: in AdamW stage 1 needs 5, in backward 5.75
        ds_lab.Order(2, 16.0, 1),
        ds_lab.Order(4, 9.0, 1),
        ds_lab.Order(4, 8.5, 3),  # 2 + 16/D, without what AdamW makes, would do for stage 1
        ds_lab.Order(8, 5.4, 3),  # 2 + 14/D, as in the paper, would do for stage 2
        ds_lab.Order(9, 6.0, 2, batch_size=36),  # 5.4: stage 1 needs 5.56, and 5 rounded down
        ds_lab.Order(5, 7.4, 3, batch_size=20),  # 6.66: stage 2 needs 6.8, and 6 rounded down
        ds_lab.Order(8, 50 / 9, 2, num_params=9000),  # nine tenths are 45,000 bytes, 5 x 9,000
        ds_lab.Order(8, 6.6, 1, num_params=7_000_000_000),
        ds_lab.Order(64, 0.5, 3, batch_size=256, num_params=7_000_000_000),
    ):
        config = config_for(*order.arguments)
        expect(isinstance(config, dict), expected="a dict", seen=type(config).__name__)
        stage = ds_lab.zero_of(config).get("stage", 0)
        need = {s: ds_lab.worst(s, order.num_ranks) for s in range(4)}
        by_formula = [16, 4 + 12 / order.num_ranks, 2 + 14 / order.num_ranks, 16 / order.num_ranks]
        fits = [s for s in range(4) if need[s] <= order.per_parameter]
        floors = [20, max(4 + 14 // order.num_ranks, 2 + 24 // order.num_ranks)]
        floors += [2 + 24 // order.num_ranks, 28 // order.num_ranks]
        most = 0.9 * order.budget
        rounded = [s for s in range(4) if floors[s] * order.num_params <= most]
        paper = [s for s in range(4) if by_formula[s] <= 0.9 * order.per_parameter]
        recognise(
            {
                "the bytes are rounded down before they are compared: 24 // D, not 24 / D": (
                    stage != order.stage and stage in rounded[:1]
                ),
                "a stage that takes exactly nine tenths of the budget is refused": (
                    stage != order.stage and need[order.stage] * order.num_params == most
                ),
                "stage 1 is counted by its optimizer's step alone: 4 + 14/D in backward is more": (
                    stage == 1 and need[1] > 0.9 * order.per_parameter >= need[2]
                ),
                "the stage leaves no room for buckets": stage != order.stage and stage in fits[:1],
                "the float32 gradients of the step, and what AdamW makes, are left out": stage
                != order.stage
                and stage in paper[:1],
                "always stage 3: the least bytes, and half as much again to send": stage == 3
                and order.stage != 3,
                "the stage is too low for the budget": stage < order.stage,
            },
            expected=f"stage {order.stage} for {order}",
            seen=f"stage {stage!r}, {need.get(stage, 0):.4g} bytes a parameter at its worst",
        )
        expect_equal(stage, order.stage, what=f"the stage for {order}")
    few = "a budget of 5 bytes a parameter on 4 ranks"
    expect_raises(ValueError, config_for, 1000, 4, 5000, 8, 1, what=few)
    none = "a budget of 22 bytes on 1 rank, 19.8 for states where the least (stage 0) is 20,"
    expect_raises(ValueError, config_for, 1000, 1, 22_000, 8, 1, what=none)
    odd = "a batch of 12 in micro-batches of 2 on 4 ranks"
    expect_raises(ValueError, config_for, 1000, 4, 90_000, 12, 2, what=odd)


@exercise_10_5.check("what else stands in it")
def sections(config_for) -> None:
    for order in (
        ds_lab.Order(2, 16.0, 1, batch_size=18, micro_batch=3, num_params=20_000),
        ds_lab.Order(8, 6.0, 2, batch_size=48, micro_batch=3, num_params=40_050),
        ds_lab.Order(4, 8.0, 3, batch_size=48, micro_batch=2),
    ):
        config = config_for(*order.arguments)
        zero = {"reduce_bucket_size": 5e8} | ds_lab.zero_of(config)
        if order.stage == 3:  # which gathers so many elements ahead where nobody says
            zero.setdefault("stage3_prefetch_bucket_size", 5e7)
        rows, multiplied = ds_lab.batch_product(config, order.num_ranks)
        micro = config.get("train_micro_batch_size_per_gpu", order.micro_batch)
        buckets = [
            zero.get(key, 0) for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size")
        ]
        bf16 = config.get("bf16", {})
        recognise(
            {
                "a key stands outside its section: DeepSpeed ignores what it does not know there": (
                    any(key.startswith(("stage", "reduce_bucket", "allgather")) for key in config)
                ),
                "'auto' stands in it: Hugging Face's Trainer replaces it, DeepSpeed does not": (
                    "'auto'" in repr(config)
                ),
                "the batch sizes do not multiply": rows != multiplied,
                "the batch is another": (rows, micro) != (order.batch_size, order.micro_batch),
                "gradient_clipping is not set: DeepSpeed clips at 1.0 when nobody says": (
                    "gradient_clipping" not in config
                ),
                "fp16 is switched on: the weights are to be bf16": bool(
                    config.get("fp16", {}).get("enabled")
                ),
                "the weights stay in float32": bf16.get("enabled") is not True,
                "the masters are not float32": any(
                    bf16.get(key)
                    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
                ),
                "states are offloaded: the budget is to be met without that": any(
                    key.startswith("offload") for key in zero
                ),
                "a bucket has more than num_params // 50 elements, as DeepSpeed's default of 5e8": (
                    any(
                        isinstance(size, int | float) and size > order.num_params // 50
                        for size in buckets
                    )
                ),
                "an odd allgather_bucket_size: DeepSpeed wants it even": (
                    order.stage < 3 and zero.get("allgather_bucket_size", 2) % 2 == 1
                ),
                "an optimizer beside the caller's, which is the one that DeepSpeed uses": (
                    "optimizer" in config
                ),
                "it cannot stand in a JSON file": not ds_lab.is_json(config),
            },
            expected=f"{order.batch_size} rows on {order.num_ranks} ranks, micro-batches of "
            f"{order.micro_batch}; bf16, gradient_clipping, no optimizer",
            seen=f"{rows} rows said, {multiplied} multiplied; sections {', '.join(config)}",
        )


@exercise_10_5.check("DeepSpeed, started with it and counted")
def counted(config_for) -> None:
    orders = [ds_lab.Order(8, 6.0, 2), ds_lab.Order(8, 4.2, 3)]
    configs = [config_for(*order.arguments) for order in orders]
    zero = ds_lab.zero_of(configs[1])
    found = ds_lab.count_bytes(configs, 8)
    for order, seen in zip(orders, found, strict=True):
        moment, most = max(seen["peaks"].items(), key=lambda peak: peak[1])
        after, rest = (sum(seen["moments"][at].values()) for at in ("after forward", "at rest"))
        over = most > order.per_parameter
        threshold = zero.get("stage3_param_persistence_threshold", 100_000)
        held = seen["moments"]["at rest"]["weights"]
        recognise(
            {
                "stage3_param_persistence_threshold keeps small parameters whole": over
                and order.stage == 3
                and threshold > 0
                and held > 1,
                "every parameter is whole after forward: kept for backward, or fetched for it": over
                and after - rest > 1,
            },
            expected=f"at most {order} at any moment",
            seen=f"{most:.4g} {moment}",
            hint="a bucket of more than num_params // 50 elements, or a default of stage 3",
        )
        expect(not over, expected=f"at most {order}", seen=f"{most:.4g} {moment}")
        expect_equal(seen["clipping"], 0.0, what="the engine's gradient_clipping")
        expect_equal(seen["train batch"], order.batch_size, what="the engine's batch")
