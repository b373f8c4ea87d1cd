"""Lesson 09: what tells a right answer from a wrong one.

The oracles are torch's own GradScaler and AdamW, and one process on the whole batch.
"""

import math
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
    without_group,
)
from shared.exercises.on_ranks import on_ranks
from shared.exercises.seeds import fresh_seed
from shared.laboratories import lesson09 as lab
from shared.laboratories import lesson09_accumulating as accumulating

INF, NAN = math.inf, math.nan
# No two settings are each other's inverse, so that none can stand in for another.
SETTINGS = {"init_scale": 2.0**10, "growth_factor": 3.0, "backoff_factor": 0.25}
TORCH = partial(torch.amp.GradScaler, "cpu")
FLOOR = "the scale stops falling: it has no lower limit here, a scale below 1 is allowed"

exercise_09_1 = checks_for(
    "09.1",
    name="DynamicLossScaler",
    difficulty=3,
    minutes=30,
    hints=[
        "Keep the scale, the number of steps in a row without overflow, and for each optimizer "
        "what unscale_ found; update() reads the last, and clears it.",
        "grad.mul_(1 / scale) for every gradient in optimizer.param_groups, then "
        "grad.isfinite().all(). On several ranks: one dist.all_reduce of one number.",
    ],
)


@exercise_09_1.check("the scaled loss")
def scaled_loss(make) -> None:
    scaler, loss = make(init_scale=96.0), lab.new_weights(fresh_seed()).loss()
    value = loss.item()
    got = scaler.scale(loss)
    recognise(
        {
            "the caller's loss is changed in place": loss.item() != value,
            "the scaled loss has no graph: backward() cannot start from it": got.grad_fn is None,
            "the loss is not scaled": got.item() == value,
        },
        expected=f"{value:.6g} times 96, with its graph",
        seen=f"{got.item():.6g}, grad_fn {got.grad_fn}",
    )
    expect_close(got, loss * 96, what="the scaled loss")
    expect_equal(make().get_scale(), 65536.0, what="the scale at the start, by default")
    small, what = torch.tensor(2.0, dtype=torch.float16), "scale() of a loss of 2 in fp16"
    narrow = "an fp16 loss is multiplied in fp16, whose largest number is 65504"
    expect_equal(make().scale(small).item(), 131072.0, what=what, mistake=narrow)
    double = make().scale(torch.ones(2, dtype=torch.float64).sum())
    expect_equal(double.dtype, torch.float64, what="the dtype of a scaled float64 loss")


@exercise_09_1.check("a step without overflow, and clipping before it")
def clean_step(make) -> None:
    seed = fresh_seed()
    scaler, weights = make(init_scale=64.0), lab.new_weights(seed, torch.bfloat16)
    scaler.scale(weights.loss()).backward()
    scaler.step(weights.optimizer)
    what = "the number of steps with bf16 gradients"
    expect_equal(len(weights.optimizer.seen), 1, what=what)
    for clip in (False, True):
        scaler, weights, twin = make(init_scale=64.0), lab.new_weights(seed), lab.new_weights(seed)
        twin.loss().backward()
        scaler.scale(weights.loss()).backward()
        storage = weights.second.grad.data_ptr()
        if clip:
            scaler.unscale_(weights.optimizer)
            for each in (weights, twin):
                nn.utils.clip_grad_norm_([each.first, each.second], 0.5)
        scaler.step(weights.optimizer)
        expect_equal(len(weights.optimizer.seen), 1, what="the number of steps of the optimizer")
        first, second, _ = weights.optimizer.seen[0]
        all_scaled = "the optimizer sees gradients that are still scaled"
        one_scaled = "only the first parameter group is unscaled: go through all of them"
        for name, seen, true, scaled in (
            ("first", first, twin.first.grad, all_scaled),
            ("second", second, twin.second.grad, one_scaled),
        ):
            expect_close(
                seen,
                true,
                what=f"the gradient that the optimizer sees in its {name} group",
                looks_like={
                    scaled: 64 * true,
                    "step() divides again what unscale_() has divided": true / 64,
                },
                hint="unscale_ divides once; step() calls it only where nobody has",
            )
        moved = weights.second.grad.data_ptr() != storage
        recognise(
            {"the gradients are replaced by new tensors": moved},
            expected="gradients divided in place: a bucket or an optimizer may hold them",
            seen="another tensor in .grad",
        )


@exercise_09_1.check("GradScaler's own course through planted infinities")
def step_for_step(make) -> None:
    planted = [0, 0, INF, 0, 0, 0, 0, NAN, 0, 0, -INF, 0, 0, 0, 0, 0, 0, 0, INF, NAN, 0, 0, 0, 0]
    seed, kept = fresh_seed(), {**SETTINGS, "growth_interval": 3}
    got = lab.scaled_steps(make(**kept), planted, seed)
    want = lab.scaled_steps(TORCH(**kept), planted, seed)
    rule, scales = partial(lab.scales_by_rule, planted), got.scales
    recognise(
        {
            "the optimizer steps in spite of an infinity": all(got.stepped),
            "after one overflow no step is ever made again": not any(got.stepped[3:]),
            "NaN is not recognised, infinity is": got.stepped
            == [abs(value) != INF for value in planted],
            "backoff_factor is not used": scales == rule({**kept, "backoff_factor": 1 / 3}),
            "growth_factor is not used": scales == rule({**kept, "growth_factor": 4.0}),
            "the scale grows one step too late": scales == rule(kept, late=1),
            "the scale grows one step too early": scales == rule(kept, late=-1),
            "an overflow does not begin the count of clean steps anew": scales
            == rule(kept, keeps_count=True),
            "a skipped step counts as a clean one": scales == rule(kept, counts_skips=True),
            "after it has grown the scale grows in every step": scales == rule(kept, every=True),
            "the scale never changes": len(set(scales)) == 1,
        },
        expected=f"the scales {want.scales[:8]} ...",
        seen=f"{scales[:8]} ..., the optimizer stepped {sum(got.stepped)} times",
    )
    expect_equal(scales, want.scales, what="the scale after each step")
    expect_equal(got.stepped, want.stepped, what="whether the optimizer stepped")
    expect_close(torch.tensor(got.values), torch.tensor(want.values), what="the weights")
    expect_equal(got.said, got.stepped, what="what step() returned")


@exercise_09_1.check("large numbers that are finite")
def finite_extremes(make) -> None:
    scaler, weights = make(init_scale=1.0, growth_interval=1), lab.new_weights(fresh_seed())
    weights.loss().backward()
    weights.first.grad.fill_(3e38)
    skipped = scaler.step(weights.optimizer) is False
    recognise(
        {"large but finite gradients count as an overflow": skipped},
        expected="a step: every gradient is 3e38, below the 3.4e38 of float32",
        seen="the step is skipped",
        hint="a sum of finite numbers may be infinite: isfinite() of each",
    )
    low, falling = {"init_scale": 2.0, "growth_interval": 9}, [INF, INF, NAN]
    want = lab.scaled_steps(TORCH(**low), falling, 0).scales
    got = lab.scaled_steps(make(**low), falling, 0).scales
    expect_equal(got, want, what="the scale after three overflows from 2", mistake=FLOOR)
    near = {"init_scale": 2.0**126, "growth_interval": 1}
    want = lab.growing(TORCH(**near), 4)
    expect_equal(lab.growing(make(**near), 4), want, what="the scale near float32's largest number")


@exercise_09_1.check("two optimizers, each by its own gradients")
def two_optimizers(make) -> None:
    scaler, one, two = make(init_scale=16.0), *(lab.new_weights(fresh_seed()) for _ in range(2))
    for culprit in (one, two, None):
        for weights in (one, two):
            weights.optimizer.zero_grad()
            scaler.scale(weights.loss()).backward()
        if culprit is not None:
            culprit.first.grad[0] = INF
        for weights in (one, two):
            scaler.step(weights.optimizer)
        scaler.update()
    steps, scale = [len(each.optimizer.seen) for each in (one, two)], scaler.get_scale()
    recognise(
        {
            "one optimizer's overflow makes the other skip": sum(steps) < 4,
            "update() backs off once for each optimizer": scale < 4,
            "update() looks at one of the optimizers only": scale == 8,
        },
        expected="2 steps of each, the scale backed off from 16 to 8, then to 4",
        seen=f"{steps[0]} and {steps[1]} steps, the scale {scale}",
    )
    expect_equal((steps, scale), ([2, 2], 4.0), what="the steps and the scale")


@exercise_09_1.check("a checkpoint, and another scaler beside it")
def scaler_state(make) -> None:
    kept, planted, rest = {**SETTINGS, "growth_interval": 3}, [0, INF, 0, 0], [0, 0, INF, 0, 0, 0]
    seed, ours, theirs, other = fresh_seed(), make(**kept), TORCH(**kept), make(init_scale=1.0)
    for scaler in (ours, theirs):
        lab.scaled_steps(scaler, planted, seed)
    expect_equal(other.get_scale(), 1.0, what="the scale of a second scaler, which was not used")
    calm, weights, stranger = make(init_scale=8.0), lab.new_weights(seed), lab.new_weights(seed)
    calm.scale(weights.loss()).backward()
    stranger.first.grad = torch.full((5,), INF)
    other.unscale_(stranger.optimizer)
    calm.step(weights.optimizer)
    calm.update()
    shared = "an overflow that another scaler met is counted: the flags are shared by all"
    what = "the scale after an overflow that a second scaler met"
    expect_equal(calm.get_scale(), 8.0, what=what, mistake=shared)
    expect_equal(ours.state_dict(), theirs.state_dict(), what="state_dict()")
    anew = lab.scales_by_rule(rest, {**kept, "init_scale": theirs.get_scale()})
    want = lab.scaled_steps(theirs, rest, seed).scales
    fresh = make(init_scale=5.0)
    fresh.load_state_dict(lab.through_a_file(ours.state_dict()))
    got = lab.scaled_steps(fresh, rest, seed).scales
    recognise(
        {
            "the count of clean steps is not restored": got == anew,
            "growth_factor, backoff_factor or growth_interval is not restored": got != want,
        },
        expected=f"the scales {want}, as without the interruption",
        seen=f"{got}",
    )


@exercise_09_1.check("what is refused")
def refused(make) -> None:
    scaler, weights = make(), lab.new_weights(fresh_seed())
    scaler.scale(weights.loss()).backward()
    scaler.unscale_(weights.optimizer)
    again = "a second unscale_() before update()"
    expect_raises(RuntimeError, scaler.unscale_, weights.optimizer, what=again)
    half = lab.new_weights(fresh_seed(), torch.float16)
    half.loss().backward()
    expect_raises(
        ValueError, make(init_scale=2.0).unscale_, half.optimizer, what="an fp16 gradient"
    )
    limits = {
        "init_scale": (0.0, -1.0),
        "growth_factor": (1.0, 0.75),
        "backoff_factor": (1.0, 0.0),
        "growth_interval": (0, -2),
    }
    for name, value in ((name, value) for name, values in limits.items() for value in values):
        expect_raises(ValueError, make, **{name: value}, what=f"{name} {value}", mentions=[value])
    theirs = lab.holds_a(torch.amp.GradScaler, scaler)
    recognise(
        {"torch's GradScaler does the work: this one is to be built by hand": theirs},
        expected="a scaler of your own",
        seen="an instance of torch.amp.GradScaler",
    )


@exercise_09_1.check("several ranks: one overflow, all skip")
def ranks_agree(make) -> None:
    culprits = [1, 9, 1, -1, 0]  # 9: no rank; -1: rank 0 has no gradients
    apart = "not every rank takes part in the exchange: the others wait for it"
    seen = on_ranks(lab.overflow_on, 2, make, culprits, apart=apart, quiet=3.0)
    want = [False, True, False, True, False]
    mine, peers = [rank["stepped"] for rank in seen]
    sizes = [sizes for rank in seen for sizes in rank["sizes"]]
    recognise(
        {
            "only the rank that met the infinity skips: its weights are now others than its "
            "peers'": mine != peers,
            "an infinity on one rank lets all step": all(mine),
            "more than one message a step": max(map(len, sizes)) > 1,
            "whole gradients travel, where one number is enough": max(map(sum, sizes)) > 8,
        },
        expected=f"on both ranks steps {want}, one message of at most 8 bytes each",
        seen=f"rank 0 {mine}, rank 1 {peers}; messages of {sizes[0]} bytes in the first step",
        hint="dist.all_reduce of one number, on every rank, after the gradients were looked at",
    )
    expect_equal([mine, peers], [want, want], what="whether the optimizer stepped, rank by rank")
    expect_equal(seen[0]["scales"], seen[1]["scales"], what="the scales of rank 0 and rank 1")


exercise_09_2 = checks_for(
    "09.2",
    name="MasterWeightAdamW",
    difficulty=4,
    minutes=35,
    hints=[
        "In step(): for each group, for each parameter with a gradient: the state (made at the "
        "first step), AdamW's five lines in float32 on state['master'], then "
        "parameter.copy_(master) under torch.no_grad().",
        "Optimizer.load_state_dict casts every state to its parameter's dtype. Call it, then put "
        "the saved tensors back: state_dict['state'][number], numbered in the order of the groups.",
    ],
)
GROUPS = [
    {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3},
    {"lr": 1e-2, "betas": (0.6, 0.9), "eps": 1e-2, "weight_decay": 0.0},
]
STATES = ("master", "exp_avg", "exp_avg_sq")


def grouped(make, parameters):
    """An optimizer with two groups of different settings, the second added afterwards."""
    optimizer = make([{"params": parameters[:1], **GROUPS[0]}])
    optimizer.add_param_group({"params": parameters[1:], **GROUPS[1]})
    return optimizer


def dtypes_of(state) -> dict[str, torch.dtype | None]:
    """The dtype of each state, None where there is none."""
    return {name: getattr(state.get(name), "dtype", None) for name in STATES}


@exercise_09_2.check("small steps that arrive")
def small_steps(make) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = make([weight], lr=1e-3, weight_decay=0.0)
    kind = type(optimizer).__name__
    is_one = isinstance(optimizer, torch.optim.Optimizer)
    expect(is_one, expected="a torch.optim.Optimizer", seen=kind)
    for _ in range(8):
        weight.grad = torch.full_like(weight, 0.5)
        optimizer.step()
    still = weight[0].item() == 1.0
    recognise(
        {
            "the parameter is no bf16 any more": weight.dtype != torch.bfloat16,
            "the weights stop moving: each step is lost in the rounding to bf16": still,
        },
        expected="after 8 steps of -0.001 the bf16 weight is 0.992",
        seen=f"{weight[0].item()} in {weight.dtype}",
        hint="the float32 master is made once, and is never read from the parameter again",
    )


@exercise_09_2.check("what is kept, and in which dtype")
def kept_states(make) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        parameters = lab.half_parameters(fresh_seed(), dtype)
        storages = [p.data_ptr() for p in parameters]
        optimizer = grouped(make, parameters)
        grads = lab.gradients(parameters, 1, fresh_seed())
        engine = lab.torch_adam_runs(partial(lab.descend, optimizer, parameters, grads, [1e-2]))
        names = STATES[1:] if dtype == torch.float32 else STATES
        found, theirs = dtypes_of(optimizer.state[parameters[1]]), torch.optim.AdamW
        kept = [torch.equal(p.grad, g) for p, g in zip(parameters, grads[0], strict=True)]
        moments = {found["exp_avg"], found["exp_avg_sq"]}
        twice = dtype == torch.float32 and found["master"] is not None
        recognise(
            {
                "torch's AdamW does the work: this one is to be built by hand": engine
                or lab.holds_a(theirs, optimizer),
                "the master copy is kept in 16 bits": found["master"] in lab.HALVES,
                "m and v are kept in 16 bits": bool(moments & set(lab.HALVES)),
                "a float32 parameter has a master copy: it is its own": twice,
                "the gradients are changed by the step": not all(kept),
                "the parameters get new storage, where they should be written in place": storages
                != [p.data_ptr() for p in parameters],
            },
            expected=f"float32 states {', '.join(names)} in optimizer.state[p] for a {dtype} p",
            seen=", ".join(f"{name}: {kind}" for name, kind in found.items()),
        )
        for p in parameters:
            tensors = {k: v for k, v in optimizer.state[p].items() if k != "step"}
            kept = {name: (v.dtype, v.shape) for name, v in tensors.items()}
            want = dict.fromkeys(names, (torch.float32, p.shape))
            expect_equal(kept, want, what="the states beside 'step'")
            expect_equal(p.dtype, dtype, what="the parameter's dtype")


@exercise_09_2.check("torch's AdamW in float32, group by group")
def same_as_adamw(make) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        follows_adamw(make, dtype)
    defaults = make([nn.Parameter(torch.ones(1))]).defaults
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    kept = {name: defaults.get(name) for name in settings}
    expect_equal(kept, settings, what="the settings where none is given")


def follows_adamw(make, dtype: torch.dtype) -> None:
    """Six steps beside torch's AdamW on float32 weights, from the same rounded ones."""
    seed, rates = fresh_seed(), [1e-2, 1e-2, 3e-2, 1e-3, 2e-2, 5e-3]
    halves, starts = lab.half_parameters(seed, dtype), lab.half_parameters(seed, dtype)
    twins = [nn.Parameter(p.detach().to(torch.float32, copy=True)) for p in halves]
    grads = lab.gradients(halves, len(rates), seed)
    ours, theirs = grouped(make, halves), grouped(torch.optim.AdamW, twins)
    lab.descend(ours, halves, grads, rates)
    lab.descend(theirs, twins, grads, rates)
    for place, (p, twin) in enumerate(zip(halves, twins, strict=True)):
        group, slow = GROUPS[place > 0], [GROUPS[0]["lr"]] * len(rates)
        own, first = rates if place else slow, [group["lr"]] * len(rates)
        by = partial(lab.adamw_by_formula, starts[place], [step[place] for step in grads])
        master = ours.state[p].get("master", p)
        expect_close(
            master,
            twin,
            what=f"the master of {dtype} parameter {place + 1} after {len(rates)} steps",
            looks_like={
                "every group is given the first group's settings": by(slow, GROUPS[0]),
                "the learning rate is that of the beginning: groups' lr is not read again": by(
                    first, group
                ),
                "the weight decay is left out": by(own, {**group, "weight_decay": 0.0}),
                "the decay is added to the gradient: that is Adam, not AdamW": by(
                    own, group, coupled=True
                ),
                "the bias correction is missing": by(own, group, corrected=False),
                "eps stands under the root": by(own, group, inner_eps=True),
                "the gradient is squared in 16 bits": by(own, group, half_square=True),
            },
            atol=3e-6,
            rtol=3e-6,
        )
        apart = int((p != master.to(dtype)).sum())
        recognise(
            {"the parameter is not its master, rounded": apart > 0},
            expected=f"parameter == master.to({dtype}), every bit",
            seen=f"{apart} of {p.numel()} differ",
        )


@exercise_09_2.check("parameters without a gradient, and a closure")
def edges(make) -> None:
    parameters = lab.half_parameters(fresh_seed())
    first, second = parameters[:2]
    before = second.detach().clone()
    optimizer = make(parameters, lr=0.1, weight_decay=0.5)
    first.grad = torch.ones_like(first)
    optimizer.step()
    state = optimizer.state.get(second)
    alone = torch.equal(second, before) and not state
    recognise(
        {"a parameter without a gradient is decayed, or given a state": not alone},
        expected="it is left alone altogether",
        seen=f"its state: {list(state or {})}",
    )

    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = first.float().square().sum()
        loss.backward()
        return loss

    want = first.detach().float().square().sum()
    got = optimizer.step(closure)
    what = "what step(closure) returns: the closure's loss"
    recognise({"the closure is not called": got is None}, expected=what, seen="None")
    expect_close(got, want, what=what)
    expect_equal(len(calls), 1, what="how often step(closure) calls the closure")


@exercise_09_2.check("a state_dict, through a file and back")
def optimizer_state(make) -> None:
    parameters = lab.half_parameters(fresh_seed())
    grads = lab.gradients(parameters, 7, fresh_seed())
    whole = grouped(make, parameters)
    lab.descend(whole, parameters, grads[:4], [1e-2] * 4)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    fresh = grouped(make, copies)
    fresh.param_groups[0].update(lr=0.5, weight_decay=0.9)
    fresh.load_state_dict(lab.through_a_file(whole.state_dict()))
    kept = [{name: group[name] for name in GROUPS[0]} for group in fresh.param_groups]
    want = [{name: group[name] for name in GROUPS[0]} for group in whole.param_groups]
    lost = "the groups' settings are not restored, only the states"
    expect_equal(kept, want, what="the settings of the groups after loading", mistake=lost)

    def masters_apart() -> bool:
        pairs = zip(parameters, copies, strict=True)
        return any((whole.state[p]["master"] != fresh.state[q]["master"]).any() for p, q in pairs)

    found = dtypes_of(fresh.state[copies[0]])
    halves = set(found.values()) & set(lab.HALVES)
    recognise(
        {
            "after loading there is no state": found["exp_avg"] is None,
            "after loading, masters, m and v are rounded to the parameters' bf16": bool(halves),
            "after loading the masters are float32 again, but were rounded on the way": (
                masters_apart
            ),
        },
        expected="every state as it was saved, in float32",
        seen=", ".join(f"{name}: {kind}" for name, kind in found.items()),
        hint="torch.optim.Optimizer.load_state_dict casts states to the parameter's dtype",
    )
    for optimizer, own in ((whole, parameters), (fresh, copies)):
        lab.descend(optimizer, own, grads[4:], [1e-2] * 3)
    what = "whether the masters are equal 3 steps later, with and without the file"
    expect_equal(not masters_apart(), True, what=what)
    partly = make(parameters)  # the first has no gradient, and so no state
    parameters[0].grad = None
    partly.step()
    again = make(copies)
    again.load_state_dict(lab.through_a_file(partly.state_dict()))
    found = [name for p in copies[:1] for name in again.state.get(p, {})]
    expect_equal(found, [], what="the state, after loading, of a parameter that had none")
    moved = torch.equal(again.state[copies[1]]["master"], partly.state[parameters[1]]["master"])
    expect_equal(moved, True, what="whether the next parameter has its own master after loading")


exercise_09_3 = checks_for(
    "09.3",
    name="accumulate",
    difficulty=2,
    minutes=20,
    hints=[
        "First the tokens of all micro-batches of all ranks: a sum, and one dist.all_reduce. Then "
        "each micro-batch's mean counts with num_tokens / tokens.",
        "All but the last micro-batch under `with model.no_sync():`, forward and backward. DDP "
        "divides by the number of ranks: multiply by it.",
    ],
)
COUNTS = (3, 11, 5)
near = partial(expect_close, rtol=1e-5, atol=1e-5)  # a weight may have been a float32


@exercise_09_3.check("one process, micro-batches of different sizes")
def weighed_by_tokens(accumulate) -> None:
    net, parts, watch = (
        accumulating.small_net(),
        accumulating.micro_batches(COUNTS),
        accumulating.Watch(),
    )
    needs = "it asks for a process group where there is none, and a plain module has no no_sync"
    words = {"mistake": needs, "expected": "a step on one process"}
    hint = "current_world_size() is 1 there"
    loss = without_group(accumulate, net, parts, watch.loss_of, **words, hint=hint)
    shares = [count / sum(COUNTS) for count in COUNTS]
    by = partial(accumulating.weighed, net, parts)
    near(
        accumulating.flat_gradient(net),
        by(shares),
        what="the gradient of the mean loss per token",
        looks_like={
            "each micro-batch counts the same, whatever its number of tokens": by([1 / 3] * 3),
            "the micro-batches' means are added up": by([1.0] * 3),
            "the sums over tokens are added up, and nothing divides them": by(COUNTS),
            "only the last micro-batch counts": by([0, 0, shares[2]]),
        },
        hint="a mean over n of N tokens counts n / N",
    )
    recognise(
        {
            "the loss that is returned still holds the graphs of the step": getattr(
                loss, "requires_grad", False
            )
        },
        expected="a loss without a graph: part.detach()",
        seen="requires_grad is True",
    )
    near(torch.as_tensor(loss).double(), accumulating.mean_loss(net, parts), what="the loss")


@exercise_09_3.check("memory: one micro-batch's activations at a time")
def one_at_a_time(accumulate) -> None:
    watch = accumulating.Watch()
    accumulate(accumulating.small_net(), accumulating.micro_batches(COUNTS), watch.loss_of)
    recognise(
        {
            "one backward for all: the activations of every micro-batch are alive together, as in "
            "the whole batch": watch.events[:2] == ["forward", "forward"],
            "a micro-batch goes through the model more than once": len(watch.events) > 6,
        },
        expected="forward, backward, forward, backward, ...",
        seen=", ".join(watch.events),
    )
    expect_equal(watch.events, ["forward", "backward"] * 3, what="the order of events")


@exercise_09_3.check("gradients that were there before, a loss scale, no micro-batch")
def before_and_scaled(accumulate) -> None:
    net, parts, watch = (
        accumulating.small_net(),
        accumulating.micro_batches(COUNTS),
        accumulating.Watch(),
    )
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    plain = float(accumulate(net, parts, watch.loss_of))
    want = accumulating.weighed(net, parts, [count / sum(COUNTS) for count in COUNTS])
    near(
        accumulating.flat_gradient(net),
        want + 7,
        what="the gradient where every .grad was 7 before",
        looks_like={"what .grad held before is thrown away": want},
    )
    expect(
        net.training,
        expected="the model in training mode, as before",
        seen="model.training is False",
        mistake="the model is left in evaluation mode",
    )
    net.zero_grad()
    loss = float(accumulate(net, parts, watch.loss_of, TORCH(init_scale=1024.0)))
    near(
        accumulating.flat_gradient(net),
        want * 1024,
        what="the gradient with a scaler at 1024",
        looks_like={"the scaler is not used": want},
        hint="scaler.scale(part).backward()",
    )
    recognise(
        {"the loss that is returned is the scaled one": abs(loss / plain - 1024) < 1},
        expected=f"{plain:.6g}, as without a scaler",
        seen=f"{loss:.6g}",
    )
    near(torch.tensor(loss), torch.tensor(plain), what="the loss with a scaler")
    expect_raises(ValueError, accumulate, net, [], watch.loss_of, what="an empty list")


@exercise_09_3.check("two ranks under torch's DDP: the whole batch, sent once")
def across_ranks(accumulate) -> None:
    two_ranks(accumulate, COUNTS[:2], (2, 301))
    two_ranks(accumulate, COUNTS, (9,), before=7.0, scale=64.0)


def two_ranks(
    accumulate,
    ours: tuple[int, ...],
    theirs: tuple[int, ...],
    before: float = 0.0,
    scale: float | None = None,
) -> None:
    """One step of both ranks, with these numbers of tokens in their micro-batches."""
    shares = [accumulating.micro_batches(ours), accumulating.micro_batches(theirs)]
    net, parts = accumulating.small_net(), [part for share in shares for part in share]
    numbers = f"they have {len(ours)} and {len(theirs)} micro-batches here"
    apart, case = f"the ranks do not send the same messages: {numbers}", (shares, before, scale)
    seen = on_ranks(accumulating.accumulate_on, 2, accumulate, *case, quiet=3.0, apart=apart)
    first, second = (rank["gradient"] for rank in seen)
    recognise(
        {
            "the ranks end with different gradients: the last micro-batch is not sent, or sent "
            "too early": not torch.equal(first, second)
        },
        expected="the same gradient on both ranks",
        seen=f"they differ by up to {(first - second).abs().max():.3g}",
        hint="the last micro-batch runs outside of no_sync()",
    )
    counts = [part.num_tokens for part in parts]
    total, by = sum(counts), partial(accumulating.weighed, net, parts)
    own = [n / sum(share) for share in (ours, theirs) for n in share]
    factor = 1.0 if scale is None else scale
    near(
        first,
        before + factor * by([n / total for n in counts]),
        what="the gradient of the mean over all ranks' tokens",
        looks_like={
            "the scaler is not used": before + by([n / total for n in counts]),
            "what .grad held before is thrown away": factor * by([n / total for n in counts]),
            "DDP divides by the number of ranks, and nothing makes up for it": by(
                [n / total / 2 for n in counts]
            ),
            "each rank divides by its own tokens: the mean of the ranks' means": by(
                [share / 2 for share in own]
            ),
            "each rank divides by its own tokens, and the ranks' means are added up": by(own),
        },
    )
    size = first.nbytes
    large = [sum(n >= size for n in rank["sizes"]) for rank in seen]
    small = [[n for n in rank["sizes"] if n < size] for rank in seen]
    recognise(
        {
            "the gradients travel with every micro-batch": max(large) > 1,
            "numbers of tokens travel one by one, where one message is enough": max(map(len, small))
            > 1,
        },
        expected=f"one message of {size} bytes of gradients, and one of a number",
        seen=f"messages of {seen[0]['sizes']} and {seen[1]['sizes']} bytes",
        hint="no_sync() around forward and backward of all but the last",
    )
    expect(max(map(sum, small)) <= 16, expected="one number beside them", seen=f"{small[0]} bytes")
    whole = torch.tensor(sum(rank["loss"] for rank in seen)).double()
    near(whole, accumulating.mean_loss(net, parts), what="the sum of the ranks' losses")
