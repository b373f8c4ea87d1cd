"""Lesson 10: what tells a right answer from a wrong one.

The oracle is torch's own AdamW in one process, on the mean of all ranks' gradients. Bytes are
counted over everything that is alive, wherever an answer keeps it; messages below Python.
"""

from functools import partial

import torch
from torch import nn

from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
)
from shared.exercises.seeds import fresh_generator
from shared.laboratories import lesson10 as lab
from shared.laboratories import lesson10_deepspeed as ds_lab
from shared.laboratories import lesson10_twin as twins

HANG = "not every rank takes part in each collective: the others wait for it"
UNUSED_HANG = (
    "a parameter without a gradient is left out: a rank that used it waits for those that did not"
)

exercise_10_1 = checks_for(
    "10.1",
    name="partition",
    difficulty=1,
    minutes=10,
    hints=[
        "torch.cat of the tensors, each detached and flattened, and of -size % num_parts zeros; "
        "flat.view(num_parts, -1) has the parts as rows.",
    ],
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
            expect_close(flat, want, what="the flat tensor", atol=0, rtol=0)
            expect_equal(len(parts), n, what="the number of parts")
            for part, wanted in zip(parts, want.chunk(n), strict=True):
                expect_close(part, wanted, what="a part", atol=0, rtol=0)


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


def expect_weights(stage: int, answer, cases) -> None:
    """On every rank, after every step, the weights of unsharded AdamW; at the start rank 0's."""
    for case in cases:
        seen = lab.observed(stage, answer).seen(case, UNUSED_HANG if case.skipped else HANG)
        start = seen[0].started
        recognise(
            {
                "full_state_dict() is not the model's state_dict(): names are missing": any(
                    one.lacking for one in seen
                )
            },
            expected="every name of model.state_dict(), buffers and tied names too",
            seen=f"no {', '.join(seen[0].lacking)}",
        )
        shapes = {name: p.shape for name, p in case.net().named_parameters()}
        recognise(
            {
                "full_state_dict() has parameters without their numbers: they have to be "
                "gathered for it": any(start[n].shape != shapes[n] for n in shapes),
                "the ranks start with different weights: rank 0's are for all": any(
                    not torch.equal(one.started[name], start[name])
                    for one in seen
                    for name in start
                ),
            },
            expected="whole parameters, rank 0's on every rank, once the optimizer is made",
            seen="others",
            hint="dist.broadcast of every parameter at the start, frozen ones too",
        )
        for rank, one in enumerate(seen):
            moved = [n for n in ("fixed.weight", "spare.bias") if case.frozen]
            recognise(
                {
                    "a frozen parameter is moved: weight decay alone would do that": any(
                        not torch.equal(one.steps[-1][name], start[name]) for name in moved
                    ),
                },
                expected="parameters without requires_grad as they were",
                seen="other numbers",
            )
            expect_steps(case, one, start, rank)


def expect_steps(case, one, start, rank, grouped=False, closed=False) -> None:
    twin = partial(twins.twin_steps, case, one.seed, start, grouped=grouped, rank=rank)
    wrongs = {
        "the gradients are summed over the ranks, not averaged": "sum",
        "the settings of the start are used: lr is read from param_groups in every step": (
            "first rate"
        ),
        "the gradients of earlier steps are added: zero_grad() has to drop all of them": (
            "never zeroed"
        ),
        "only the last of two backward passes counts: gradients are added up": "last part",
        "the settings of the first group are used for all": "one group",
        "a parameter that no rank used is left alone: with zeros it still decays": "no zeros",
    }
    for step, (got, want) in enumerate(zip(one.steps, twin(), strict=not closed)):
        mixed = (
            {
                "each rank updates its part by its own gradients, not by their mean": partial(
                    nearest_own, case, one.seed, start, lab.flat(got)
                )
            }
            if step == 0 and not grouped
            else {}
        )
        expect_close(
            lab.flat(got),
            lab.flat(want),
            what=f"rank {rank}'s weights after step {step + 1} of unsharded AdamW",
            looks_like=mixed
            | {
                words: partial(lambda wrong, step: lab.flat(twin(wrong=wrong)[step]), wrong, step)
                for words, wrong in wrongs.items()
                if case.quiet or wrong != "last part"
            },
            hint="after step 1 all is right: what does the first step leave behind?" * (step > 0),
        )
    if closed:
        return
    expect_close(one.output, twins.twin_output(case, one.seed, one.steps[-1], start), what="a loss")


def nearest_own(case, seed, start, got):
    """Of the ranks' own first steps, for each number the one that is nearest to what was seen."""
    ranks = range(case.world_size)
    steps = [twins.twin_steps(case, seed, start, wrong="own", rank=rank)[0] for rank in ranks]
    own = torch.stack([lab.flat(weights) for weights in steps])
    return own.gather(0, (own - got).abs().argmin(0, keepdim=True))[0]


def expect_groups(answer, stage) -> None:
    seen = lab.observed(stage, answer).seen(lab.GROUPS, HANG)
    recognise(
        {
            "a group that joins keeps each rank's own numbers": any(
                not torch.equal(lab.row(one.joined), lab.row(seen[0].joined)) for one in seen
            )
        },
        expected="rank 0's numbers on all ranks, after add_param_group as well",
        seen="others",
    )
    for rank, one in enumerate(seen):
        expect_steps(lab.Case(2), one, seen[0].started, rank, grouped=True)


def expect_closure(answer, stage) -> None:
    seen = lab.observed(stage, answer).seen(lab.CLOSURE, HANG)
    for rank, one in enumerate(seen):
        for told in one.closed:
            recognise(
                {
                    "the closure is not called": not told["called"],
                    "the closure is called without gradients switched on": not told["recorded"],
                    "the closure's loss is not returned": not told["returned"],
                },
                expected="step(closure) calls it first, under enable_grad, and returns its loss",
                seen=f"{told}",
            )
        expect_steps(lab.Case(2), one, seen[0].started, rank, closed=True)


def expect_resumed(answer, stage) -> None:
    seen = lab.observed(stage, answer).seen(lab.RESUMED, HANG)
    for whole, resumed in seen:
        recognise(
            {
                "a run that is resumed from state_dict() ends elsewhere": any(
                    not torch.equal(whole[name], resumed[name]) for name in whole
                )
            },
            expected="the bits of the run that was not interrupted",
            seen="other bf16 weights after two more steps",
            hint="AdamW's states, the float32 masters and the groups' settings are part of it",
        )
    errors = lab.observed(stage, answer).seen(lab.EXCHANGED, HANG)
    recognise(
        {
            "another rank's state is loaded without a word": not all(errors),
            "another rank's state ends in another error than ValueError": any(
                error not in ("ValueError", "InputError") for error in errors
            ),
        },
        expected="a ValueError: a state belongs to one stage, rank and number of ranks",
        seen=f"{errors}",
    )


def expect_bytes(answer, stage) -> None:
    """The formula's bytes at rest and after backward, exactly."""
    for size in lab.SIZES:
        n, dtype = size
        weights, grads, states = (2, 2, 12) if dtype is lab.HALF else (4, 4, 8)
        for one in lab.observed(stage, answer).seen(size, HANG):
            psi, at = one.numel, one.moments
            rest = psi * weights // (n if stage == 3 else 1) + psi * states // n
            more = psi * grads // (n if stage > 1 else 1)
            got = at["after zero_grad"]
            each = f"bytes a parameter ({dtype}, {n} ranks)".replace("torch.", "")
            recognise(
                {
                    "gradients are kept after zero_grad()": got == rest + more,
                    "nothing is saved: every rank keeps the states of all parameters": (
                        n > 1 and got >= psi * states
                    ),
                    "the parameters are whole on every rank between steps": (
                        stage == 3 and n > 1 and got >= psi * weights + psi * states // n
                    ),
                    "16-bit parameters have no float32 masters": dtype is lab.HALF
                    and got <= rest - 2 * psi // n,
                },
                expected=f"{rest / psi:.3f} {each} at rest",
                seen=f"{got / psi:.3f}",
            )
            expect_equal(got, rest, what=f"bytes at rest, {rest / psi:.3f} {each}")
            after = at["after backward"]
            recognise(
                {
                    "the gradients are whole on every rank after backward": (
                        stage > 1 and n > 1 and after >= rest + psi * grads
                    ),
                },
                expected=f"{(rest + more) / psi:.3f} {each}",
                seen=f"{after / psi:.3f}",
            )
            expect_equal(
                after, rest + more, what=f"bytes after backward, {(rest + more) / psi:.3f} {each}"
            )
            expect_worst(stage, one, n, weights, grads)


def expect_worst(stage, one, n, weights, grads) -> None:
    """One bucket beside the formula in stage 2, one and two units in stage 3."""
    at, unit = one.moments, max(one.units)
    if stage == 2:
        room = lab.BUCKET * grads
        expect(
            at["most in backward"] <= at["after backward"] + room,
            mistake="whole gradients are alive beyond a bucket: each is freed once it is in its "
            "bucket, and the bucket when its part has come",
            expected=f"at most {room} bytes more than after backward, whenever something is sent",
            seen=f"{at['most in backward'] - at['after backward']} bytes more on {n} ranks",
        )
    if stage == 3:
        expect_equal(
            at["after forward"],
            at["after zero_grad"],
            what="bytes after forward",
            mistake="parameters stay whole after the forward of their unit",
        )
        for name in ("an evaluation", "full_state_dict"):
            expect_equal(
                at[f"after {name}"],
                at["after zero_grad"],
                what=f"bytes after {name}",
                mistake=f"parameters stay whole after {name}",
            )
        for name, room in (("forward", weights * unit), ("backward", (weights + grads) * unit)):
            rest = at["after zero_grad" if name == "forward" else "after backward"]
            expect(
                at[f"most in {name}"] <= rest + room,
                mistake=f"more than a unit is whole at once in {name}",
                expected=f"at most {room} bytes beside the parts, whenever something is sent",
                seen=f"{at[f'most in {name}'] - rest} bytes on {n} ranks",
                hint="gather before a unit computes, free after it; in backward once more",
            )


def expect_messages(answer, stage) -> None:
    """Bytes on a ring: (n-1)/n of the parameters, twice or three times."""
    for size in lab.SIZES[:2]:
        n, dtype = size
        for one in lab.observed(stage, answer).seen(size, HANG):
            once = round((n - 1) / n * dtype.itemsize * one.numel)
            want = {"reduce_scatter": once, "all_gather": once * (2 if stage == 3 else 1)}
            got = lab.messages(one.calls)
            recognise(
                {
                    "gradients are all-reduced: every rank gets all of them, twice what is "
                    "needed": "all_reduce" in got,
                    "parameters travel by broadcast: one rank after the other sends its part to "
                    "all": "broadcast" in got,
                    "whole gradients are sent to one rank": "reduce" in got,
                    "gradients or parameters travel in float32: twice the bytes": any(
                        got.get(op) == 2 * want[op] for op in want
                    ),
                    "the parameters are not gathered again for backward": stage == 3
                    and got.get("all_gather") == once,
                },
                expected=f"bytes a rank sends in a step, on a ring: {want}",
                seen=f"{got}",
                hint="reduce_scatter for the gradients, all_gather for the parameters",
            )
            expect_equal(got, want, what="bytes a rank sends in a step, on a ring")
            calls = sum(call.op == "reduce_scatter" for call in one.calls)
            expect(
                stage == 1 or calls < 8,
                mistake="every gradient travels alone",
                expected=f"small ones together, up to bucket_size={lab.BUCKET} elements"
                if stage == 2
                else "one message a unit",
                seen=f"{calls} reduce-scatters for 8 parameters",
            )


exercise_10_2 = checks_for(
    "10.2",
    name="ZeroStage1",
    difficulty=4,
    minutes=45,
    hints=[
        "In add_param_group: super().add_param_group(group), then flat, parts = partition(those "
        "with requires_grad, n), parameter.data = its piece of flat, and AdamW over parts[rank] "
        "(16-bit: over a float32 copy of it).",
        "optimizer_class([{'params': []}], **kwargs) checks the settings and has .defaults for "
        "super().__init__; AdamW skips a parameter whose .grad is None.",
        "step(): fill a flat tensor with gradients / n, zeros where there is none, reduce-scatter "
        "it into this rank's part, update, all-gather.",
    ],
)
exercise_10_3 = checks_for(
    "10.3",
    name="ZeroStage2",
    difficulty=4,
    minutes=40,
    hints=[
        "parameter.register_post_accumulate_grad_hook(f): copy the gradient, divided by n, to its "
        "place in the bucket, and set parameter.grad = None.",
        "Buckets leave in one order on every rank, the last parameters first. What backward has "
        "not completed leaves at its end: Variable._execution_engine.queue_callback(f), called in "
        "the first hook, runs f there.",
    ],
)
exercise_10_4 = checks_for(
    "10.4",
    name="ZeroStage3",
    difficulty=5,
    minutes=60,
    hints=[
        "Free with flat.untyped_storage().resize_(0), not by dropping flat: what autograd saved "
        "are views of that storage, and find their numbers again once it is gathered.",
        "Four moments: register_forward_pre_hook gathers, register_forward_hook frees; "
        "register_full_backward_pre_hook gathers; the unit's last gradient sends and frees.",
    ],
)


@exercise_10_2.check("unsharded AdamW's weights; tied, frozen, odd sizes, a changing rate")
def stage_1_weights(answer) -> None:
    expect_weights(1, answer, lab.VALUES)


@exercise_10_2.check("an optimizer like torch's: two backward passes, groups, a group that joins")
def stage_1_optimizer(answer) -> None:
    expect_weights(1, answer, (lab.TWICE,))
    expect_groups(answer, 1)
    expect_closure(answer, 1)


@exercise_10_2.check("a parameter that one rank did not use")
def stage_1_unused(answer) -> None:
    expect_weights(1, answer, (lab.UNUSED,))


@exercise_10_2.check("bytes: 4 + 12/D")
def stage_1_bytes(answer) -> None:
    expect_bytes(answer, 1)


@exercise_10_2.check("messages: twice the parameters")
def stage_1_messages(answer) -> None:
    expect_messages(answer, 1)


@exercise_10_2.check("saved and resumed")
def stage_1_resumed(answer) -> None:
    expect_resumed(answer, 1)


@exercise_10_3.check("unsharded AdamW's weights; tied, frozen, odd sizes, a changing rate")
def stage_2_weights(answer) -> None:
    expect_weights(2, answer, lab.VALUES)


@exercise_10_3.check("two backward passes, groups, a parameter that one rank did not use")
def stage_2_optimizer(answer) -> None:
    expect_weights(2, answer, (lab.TWICE,))
    expect_groups(answer, 2)
    expect_closure(answer, 2)
    expect_weights(2, answer, (lab.UNUSED,))


@exercise_10_3.check("bytes: 2 + 14/D, and one bucket")
def stage_2_bytes(answer) -> None:
    expect_bytes(answer, 2)


@exercise_10_3.check("messages: twice the parameters")
def stage_2_messages(answer) -> None:
    expect_messages(answer, 2)


@exercise_10_3.check("saved and resumed")
def stage_2_resumed(answer) -> None:
    expect_resumed(answer, 2)


@exercise_10_4.check("unsharded AdamW's weights; tied, frozen, odd sizes, two backward passes")
def stage_3_weights(answer) -> None:
    expect_weights(3, answer, (*lab.VALUES, lab.TWICE, lab.IDLE))
    expect_closure(answer, 3)


@exercise_10_4.check("bytes: 16/D, and two units")
def stage_3_bytes(answer) -> None:
    expect_bytes(answer, 3)


@exercise_10_4.check("messages: three times the parameters")
def stage_3_messages(answer) -> None:
    expect_messages(answer, 3)


@exercise_10_4.check("saved and resumed")
def stage_3_resumed(answer) -> None:
    expect_resumed(answer, 3)


exercise_10_5 = checks_for(
    "10.5",
    name="zero_config",
    difficulty=3,
    minutes=25,
    hints=[
        "The first stage of 0 to 3 whose bytes at the worst moment, times num_params, are at most "
        "0.9 x budget. The table above has them; stage 1's is the larger of two.",
        "The whole batch is micro-batch x accumulation x ranks. Four defaults of stage 3 hide its "
        "saving: reduce_bucket_size, stage3_param_persistence_threshold, "
        "stage3_max_reuse_distance and stage3_prefetch_bucket_size.",
    ],
)


@exercise_10_5.check("the stage, by arithmetic")
def lowest_stage(config_for) -> None:
    for order in (
        ds_lab.Order(1, 23.0, 0),
        ds_lab.Order(4, 7.5, 2),
        ds_lab.Order(1, 20.5, 1),  # 18: the 16-bit gradients make way for the float32 ones
        ds_lab.Order(2, 11.5, 1),
        ds_lab.Order(4, 9.0, 1),
        ds_lab.Order(4, 7.0, 2),
        ds_lab.Order(4, 5.9, 3),
        ds_lab.Order(8, 6.2, 1, num_params=7_000_000_000),
        ds_lab.Order(64, 0.5, 3, batch_size=256, num_params=7_000_000_000),
    ):
        config = config_for(*order.arguments)
        expect(isinstance(config, dict), expected="a dict", seen=type(config).__name__)
        stage = ds_lab.zero_of(config).get("stage", 0)
        need = {s: ds_lab.worst(s, order.num_ranks) for s in range(4)}
        by_formula = [16, 4 + 12 / order.num_ranks, 2 + 14 / order.num_ranks, 16 / order.num_ranks]
        fits = [s for s in range(4) if need[s] <= order.per_parameter]
        paper = [s for s in range(4) if by_formula[s] <= 0.9 * order.per_parameter]
        recognise(
            {
                "the float32 gradients of the step are left out": stage != order.stage
                and stage in paper[:1],
                "the stage leaves no room for buckets": stage != order.stage and stage in fits[:1],
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
    odd = "a batch of 10 in micro-batches of 2 on 4 ranks"
    expect_raises(ValueError, config_for, 1000, 4, 90_000, 10, 2, what=odd)


@exercise_10_5.check("what else stands in it")
def sections(config_for) -> None:
    order = ds_lab.Order(4, 5.9, 3, batch_size=48, micro_batch=3)
    config = config_for(*order.arguments)
    said, multiplied = ds_lab.batch_product(config, 4)
    micro = config.get("train_micro_batch_size_per_gpu", 3)
    recognise(
        {
            "a key stands outside its section: DeepSpeed ignores what it does not know there": any(
                key.startswith(("stage", "reduce_bucket", "allgather")) for key in config
            ),
            "the batch sizes do not multiply": said != multiplied,
            "the batch is another": said != 48 or micro != 3,
            "gradient_clipping is not set: DeepSpeed clips at 1.0 when nobody says": (
                "gradient_clipping" not in config
            ),
            "the weights stay in float32": config.get("bf16", {}).get("enabled") is not True,
            "the masters are not float32": any(
                config.get("bf16", {}).get(key)
                for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states")
            ),
            "states are offloaded: the budget is to be met without that": any(
                key.startswith("offload") for key in ds_lab.zero_of(config)
            ),
            "a bucket has more than num_params // 50 elements": any(
                isinstance(size, int | float) and size > order.num_params // 50
                for key, size in ds_lab.zero_of(config).items()
                if key in ("reduce_bucket_size", "stage3_prefetch_bucket_size")
            ),
            "an optimizer beside the caller's, which is the one that DeepSpeed uses": "optimizer"
            in config,
            "it cannot stand in a JSON file": not ds_lab.is_json(config),
        },
        expected="48 rows = 3 x 4 x 4 ranks; bf16, gradient_clipping, no optimizer",
        seen=f"{said} rows said, {multiplied} multiplied; sections {', '.join(config)}",
    )


@exercise_10_5.check("DeepSpeed, started with it and counted")
def counted(config_for) -> None:
    orders = [ds_lab.Order(4, 7.0, 2), ds_lab.Order(4, 5.9, 3)]
    configs = [config_for(*order.arguments) for order in orders]
    zero = ds_lab.zero_of(configs[1])
    found = ds_lab.count_bytes(configs, 4)
    for order, seen in zip(orders, found, strict=True):
        sizes = {moment: sum(kinds.values()) for moment, kinds in seen["moments"].items()}
        moment = max(sizes, key=lambda name: sizes[name])
        over = sizes[moment] > order.per_parameter
        threshold = zero.get("stage3_param_persistence_threshold", 100_000)
        held = seen["moments"]["at rest"]["weights"]
        recognise(
            {
                "a bucket is larger than the model": over and sizes[moment] > 100,
                "stage3_param_persistence_threshold keeps small parameters whole": over
                and order.stage == 3
                and threshold > 0
                and held > 1,
                "every parameter is whole after forward: kept for backward, or fetched for it": over
                and moment == "after forward",
            },
            expected=f"at most {order} at any moment",
            seen=f"{sizes[moment]:.4g} {moment}",
            hint="a bucket of more than num_params // 50 elements, or a default of stage 3",
        )
        expect(not over, expected=f"at most {order}", seen=f"{sizes[moment]:.4g} {moment}")
        expect_equal(seen["clipping"], 0.0, what="the engine's gradient_clipping")
        expect_equal(seen["train batch"], order.batch_size, what="the engine's batch")
