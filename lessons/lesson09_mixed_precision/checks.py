"""Lesson 09: what tells a right answer from a wrong one.

The oracles are torch's own GradScaler and AdamW, and one process on the whole batch.
"""

import math
import weakref
from functools import partial

import torch
from torch import nn

from lessons.lesson09_mixed_precision.laboratory import accumulating, eight_bits, masters
from lessons.lesson09_mixed_precision.laboratory import loss_scales as lab
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
from shared.measuring.live import count_live_bytes

INF, NAN = math.inf, math.nan
PATIENT = {"timeout": 60.0, "quiet": 3.0}  # hanging ranks use no processor, slow ones do
TORCH = partial(torch.amp.GradScaler, "cpu")
FLOOR = "the scale stops falling: it has no lower limit here, a scale below 1 is allowed"

exercise_09_1 = checks_for(
    "09.1",
    name="DynamicLossScaler",
    difficulty=3,
    minutes=30,
    hint=(
        "Keep the scale, the number of steps in a row without overflow, and for each optimizer "
        "what unscale_ found; update() reads the last, and clears it."
    ),
    forbidden=("torch.amp.GradScaler", "torch.cuda.amp.GradScaler"),
)


@exercise_09_1.check("the scaled loss")
def scaled_loss(make) -> None:
    scaler, weights = make(init_scale=96.0), lab.new_weights(fresh_seed())
    loss = weights.loss()
    value, got = loss.item(), scaler.scale(loss)
    another = weakref.ref(scaler.scale(weights.loss()))
    recognise(
        {
            "the caller's loss is changed in place": loss.item() != value,
            "the scaled loss has no graph to the weights": not lab.reaches(got, weights.first),
            "the scaler keeps the loss, and so a step's graph": another() is not None,
        },
        expected=f"{value:.6g} times 96, with its graph, which nobody else keeps",
        seen=f"{got.item():.6g}, grad_fn {got.grad_fn}",
    )
    expect_close(got, loss * 96, what="the scaled loss")
    small, what = torch.tensor(2.0, dtype=torch.float16), "scale() of a loss of 2 in fp16"
    narrow = "an fp16 loss is multiplied in fp16, whose largest number is 65504"
    expect_equal(make().scale(small).item(), 131072.0, what=what, mistake=narrow)
    double = make().scale(torch.ones(2, dtype=torch.float64).sum())
    expect_equal(double.dtype, torch.float64, what="the dtype of a scaled float64 loss")


@exercise_09_1.check("a step without overflow, and clipping before it")
def clean_step(make) -> None:
    all_scaled = "the optimizer sees gradients that are still scaled"
    one_scaled = "only the first parameter group is unscaled: go through all of them"
    seed = fresh_seed()
    for dtype, clip in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False)):
        weights, twin = lab.new_weights(seed, dtype), lab.new_weights(seed, dtype)
        scaler = make(init_scale=64.0)
        twin.loss().backward()
        scaler.scale(weights.loss()).backward()
        storage = weights.second.grad.data_ptr()
        if clip:
            scaler.unscale_(weights.optimizer)
            for each in (weights, twin):
                nn.utils.clip_grad_norm_([each.first, each.second], 0.5)
        scaler.step(weights.optimizer)
        what = f"the number of steps with {dtype} gradients"
        expect_equal(len(weights.optimizer.seen), 1, what=what)
        first, second, _ = weights.optimizer.seen[0]
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
        left = weights.second.grad
        gone = left is None or not torch.equal(left, second)
        recognise(
            {
                "step() does not leave the gradients as the optimizer saw them": gone,
                "the gradients are replaced by new tensors": gone or left.data_ptr() != storage,
            },
            expected="gradients divided in place: a bucket or an optimizer may hold them",
            seen="other values in .grad" if gone else "another tensor in .grad",
        )


@exercise_09_1.check("GradScaler's own steps through planted infinities")
def step_for_step(make) -> None:
    planted = [0, 0, INF, 0, 0, 0, 0, NAN, 0, 0, -INF, 0, 0, 0, 0, 0, 0, 0, INF, NAN, 0, 0, 0, 0]
    seed = fresh_seed()
    with lab.watching(lab.GRAD_SCALER) as engine:
        got = lab.scaled_steps(make(**lab.SETTINGS), planted, seed)
    want = lab.scaled_steps(TORCH(**lab.SETTINGS), planted, seed)
    rule, scales = partial(lab.scales_by_rule, planted), got.scales
    only_infinity = [abs(value) != INF for value in planted]
    recognise(
        {
            "torch's GradScaler does the work: this one is to be built by hand": bool(engine),
            "the optimizer steps in spite of an infinity, here in the second group": all(
                got.stepped
            ),
            "after one overflow no step is ever made again": not any(got.stepped[3:]),
            "NaN is not recognised, infinity is": got.stepped == only_infinity,
            "backoff_factor is not used": scales == rule({**lab.SETTINGS, "backoff_factor": 1 / 3}),
            "growth_factor is not used": scales == rule({**lab.SETTINGS, "growth_factor": 4.0}),
            "the scale grows one step too late": scales == rule(lab.SETTINGS, late=1),
            "the scale grows one step too early": scales == rule(lab.SETTINGS, late=-1),
            "an overflow does not begin the count of clean steps anew": scales
            == rule(lab.SETTINGS, keeps_count=True),
            "a skipped step counts as a clean one": scales == rule(lab.SETTINGS, counts_skips=True),
            "after it has grown the scale grows in every step": scales
            == rule(lab.SETTINGS, every=True),
            "the scale never changes": len(set(scales)) == 1,
        },
        expected=f"the scales {want.scales[:8]} ...",
        seen=f"{scales[:8]} ..., the optimizer stepped {sum(got.stepped)} times",
    )
    expect_equal(scales, want.scales, what="the scale after each step")
    expect_close(torch.tensor(got.values), torch.tensor(want.values), what="the weights")
    expect_equal(got.returned, got.stepped, what="what step() returned")


@exercise_09_1.check("large numbers that are finite, and small scales")
def finite_extremes(make) -> None:
    scaler, weights = make(init_scale=1.0, growth_interval=1), lab.new_weights(fresh_seed())
    weights.loss().backward()
    weights.first.grad.fill_(3e38)
    recognise(
        {
            "large but finite gradients count as an overflow": (
                lambda: scaler.step(weights.optimizer) is False
            )
        },
        expected="a step: every gradient is 3e38, below the 3.4e38 of float32",
        seen="the step is skipped",
        hint="a sum of finite numbers may be infinite: isfinite() of each",
    )
    low, falling = {"init_scale": 2.0**-20, "growth_interval": 9}, [INF, INF, NAN]
    near = {"init_scale": 2.0**126, "growth_interval": 1}
    scales = partial(lab.scaled_steps, planted=falling, seed=0)
    got, want = scales(make(**low)).scales, scales(TORCH(**low)).scales
    expect_equal(got, want, what="the scale after three overflows from 2**-20", mistake=FLOOR)
    got, want = lab.growing(make(**near), 4), lab.growing(TORCH(**near), 4)
    infinite = "the scale grows beyond float32's largest number, where it is infinite"
    words = infinite * (max(got) > torch.finfo(torch.float32).max)
    expect_equal(got, want, what="the scale near float32's largest number", mistake=words)


@exercise_09_1.check("two optimizers, and two scalers")
def two_optimizers(make) -> None:
    settings, culprits = {"init_scale": 16.0, "growth_interval": 2}, ((0,), (1,), (), (), (0, 1))
    got = lab.two_at_once(make(**settings), culprits)
    want = lab.two_at_once(TORCH(**settings), culprits)
    values, true = torch.tensor(got.values), torch.tensor(want.values)
    recognise(
        {
            "one optimizer's overflow makes the other skip": sum(got.stepped) < 6,
            "an infinity in the first of the groups is not noticed": all(got.stepped),
            "update() backs off once for each optimizer": got.scales[:2] == [4.0, 1.0]
            or got.scales == [*want.scales[:4], want.scales[4] / 2],
            "update() looks at one of the optimizers only": got.scales[1] == 8.0,
            "a clean step counts once for each optimizer": got.scales[1:3] == [4.0, 8.0],
            "one optimizer's gradients are divided by another scale than they were multiplied "
            "with: it changes in update() only": not torch.allclose(values, true, equal_nan=True),
        },
        expected=f"the scales {want.scales}; all but the optimizer with the overflow step",
        seen=f"{got.scales}; did they step: {got.stepped}",
    )
    expect_equal(got.scales, want.scales, what="the scale after each step of two optimizers")
    expect_equal(
        lab.beside_another(make),
        (8.0, 1.0),
        what="the scales of two scalers, the second before the update() after its overflow",
        looks_like={
            "an overflow that another scaler met is counted: the flags are shared": (4.0, 1.0),
            "the scale is shared by all scalers": (1.0, 1.0),
        },
    )


@exercise_09_1.check("a checkpoint")
def scaler_state(make) -> None:
    planted, rest = [0, INF, 0, 0, 0, 0], [0, 0, INF, 0, 0, 0]
    seed, ours, theirs = fresh_seed(), make(**lab.SETTINGS), TORCH(**lab.SETTINGS)
    for scaler in (ours, theirs):
        lab.scaled_steps(scaler, planted, seed)
    saved, fresh = ours.state_dict(), make(init_scale=5.0)
    kept = theirs.state_dict()
    expect_equal(saved, kept, what="state_dict() after a few steps")
    plain = [type(value).__name__ for value in (ours.get_scale(), *saved.values())]
    expect("Tensor" not in plain, expected="plain numbers, as in torch's", seen=", ".join(plain))
    expect_equal(make().state_dict(), TORCH().state_dict(), what="state_dict() at the beginning")
    fresh.load_state_dict(saved)
    changed = "load_state_dict() changes the dict that it is given: it is the caller's own"
    expect_equal(saved, kept, what="the saved state after it was loaded", mistake=changed)
    want = lab.scaled_steps(theirs, rest, seed).scales
    got = lab.scaled_steps(fresh, rest, seed).scales
    anew = lab.scales_by_rule(rest, {**lab.SETTINGS, "init_scale": kept["scale"]})
    lab.scaled_steps(ours, rest, seed)
    ours.state_dict()  # a second one, which has nothing to do with the first
    recognise(
        {
            "the count of clean steps is not restored": got == anew,
            "growth_factor, backoff_factor or growth_interval is not restored": got != want,
            "what was saved changes with the scaler's next steps: it is no copy": saved != kept,
        },
        expected=f"the scales {want}, as without the interruption, and {kept} in the saved state",
        seen=f"{got} and {saved}",
    )


@exercise_09_1.check("what is refused")
def refused(make) -> None:
    scaler, weights = make(), lab.new_weights(fresh_seed())
    scaler.scale(weights.loss()).backward()
    for name in ("unscale_", "step"):
        getattr(scaler, name)(weights.optimizer)
        again = f"unscale_() after {name}(), before update(),"
        expect_raises(RuntimeError, scaler.unscale_, weights.optimizer, what=again)
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    half.grad = torch.ones_like(half)
    weights.optimizer.add_param_group({"params": [half]})
    fresh = make(init_scale=2.0)
    expect_raises(ValueError, fresh.unscale_, weights.optimizer, what="an fp16 gradient")
    for name, value in lab.REFUSED:
        expect_raises(ValueError, make, **{name: value}, what=f"{name} {value}", mentions=[value])


@exercise_09_1.check("several ranks: one overflow, all skip")
def ranks_agree(make) -> None:
    culprits = [1, 9, 1, -1, 0]  # 9: no rank; -1: rank 0 has no gradients
    apart = "not every rank takes part in the exchange, or not with as many messages"
    seen = on_ranks(lab.overflow_on, 2, make, culprits, apart=apart, **PATIENT)
    want = [False, True, False, True, False]
    mine, peers = [rank["stepped"] for rank in seen]
    sizes = [sizes for rank in seen for sizes in rank["sizes"]]
    recognise(
        {
            "only the rank that met the infinity skips: its weights are now others than its "
            "peers'": mine != peers,
            "an infinity on one rank lets all step": mine[0] and peers[0],
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
    hint=(
        "In step(): for each group, for each parameter with a gradient: the state (made at the "
        "first step), AdamW's five lines in float32 on state['master'], then "
        "parameter.copy_(master) under torch.no_grad()."
    ),
)


@exercise_09_2.check("small steps that arrive")
def small_steps(make) -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = make([weight], lr=1e-3, weight_decay=0.0)
    is_one, kind = isinstance(optimizer, torch.optim.Optimizer), type(optimizer).__name__
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
    for dtype in masters.DTYPES:
        parameters = masters.half_parameters(fresh_seed(), dtype)
        storages = [p.data_ptr() for p in parameters]
        (grads,) = masters.gradients(parameters, 1, fresh_seed())
        with lab.watching(masters.ADAMW) as engine, count_live_bytes(parameters) as live:
            optimizer = masters.grouped(make, parameters)
            masters.descend(optimizer, parameters, [grads], [1e-2])
            beside = live.now() - masters.kept_bytes(optimizer, parameters)
        states = [optimizer.state[p] for p in parameters]
        names = masters.STATES[dtype == torch.float32 :]  # all, or all but the master
        found, pairs = masters.dtypes_of(states[1]), zip(parameters, grads, strict=True)
        recognise(
            {
                "torch's AdamW does the work: this one is to be built by hand": bool(engine),
                "the master copy is kept in 16 bits": found["master"] in masters.HALVES,
                "m and v are kept in 16 bits": found["exp_avg"] in masters.HALVES,
                "a float32 parameter has a master copy: it is its own": "master" not in names
                and found["master"] is not None,
                "the states hold the graph of the step, which grows with every step": any(
                    getattr(value, "grad_fn", None) for value in states[1].values()
                ),
                "the gradients are changed by the step": any(
                    p.grad is None or not torch.equal(p.grad, g) for p, g in pairs
                ),
                "the parameters get new storage, where they should be written in place": storages
                != [p.data_ptr() for p in parameters],
                "more is kept than the states, such as float32 gradients": beside > 0,
            },
            expected=f"float32 states in optimizer.state[p] for a {dtype} p, which is written in "
            "place; gradients as they were",
            seen=", ".join(f"{name}: {kind}" for name, kind in found.items())
            + f"; {max(beside, 0)} bytes beside them",
        )
        for p, state in zip(parameters, states, strict=True):
            kept = {k: (v.dtype, v.shape) for k, v in state.items() if k != "step"}
            want = dict.fromkeys(names, (torch.float32, p.shape))
            expect_equal(kept, want, what="the states beside 'step'")
            expect_equal(p.dtype, dtype, what="the parameter's dtype")


@exercise_09_2.check("parameters without a gradient, and a closure")
def edges(make) -> None:
    parameters = masters.half_parameters(fresh_seed())
    first, second = parameters[:2]
    before = second.detach().clone()
    optimizer = make(parameters, lr=0.1, weight_decay=0.5)
    first.grad = torch.ones_like(first)
    optimizer.step()
    state = optimizer.state.get(second)
    recognise(
        {
            "a parameter without a gradient is decayed, or given a state": bool(state)
            or not torch.equal(second, before)
        },
        expected="it is left alone altogether",
        seen=f"its state: {list(state or {})}",
    )

    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = first.float().square().sum()
        loss.backward()
        return loss

    start, first.grad = first.detach().clone(), None
    got = optimizer.step(closure)
    what = "what step(closure) returns: the closure's loss"
    recognise(
        {
            "the closure is not called": not calls,
            "the closure is called with gradients switched off": not all(calls),
            "the step goes by gradients from before the closure": torch.equal(first, start),
        },
        expected="the closure first, then a step with its gradients",
        seen=f"{len(calls)} calls",
    )
    expect_close(got, start.float().square().sum(), what=what)
    expect_equal(len(calls), 1, what="how often step(closure) calls the closure")


@exercise_09_2.check("torch's AdamW in float32, group by group")
def same_as_adamw(make) -> None:
    for dtype in masters.DTYPES:
        follows_adamw(make, dtype)
    defaults = make([nn.Parameter(torch.ones(1))]).defaults
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    kept = {name: defaults.get(name) for name in settings}
    expect_equal(kept, settings, what="the settings where none is given")


def follows_adamw(make, dtype: torch.dtype) -> None:
    """Six steps beside torch's AdamW on float32 weights from the same rounded ones, one more."""
    rates, groups = [1e-2, 1e-2, 3e-2, 1e-3, 2e-2, 5e-3], masters.GROUPS
    pair = masters.beside_adamw(make, dtype, fresh_seed(), len(rates))
    pair.descend(pair.grads, rates)
    near = partial(expect_close, atol=3e-6, rtol=3e-6)
    for place, (p, twin) in enumerate(zip(pair.parameters, pair.twins, strict=True)):
        group, slow = groups[place > 0], [groups[0]["lr"]] * len(rates)
        own, first = rates if place else slow, [group["lr"]] * len(rates)
        grads = [step[place] for step in pair.grads]
        by = partial(masters.adamw_by_formula, pair.starts[place], grads)
        state, true = pair.ours.state[p], pair.theirs.state[twin]
        master = state.get("master", p)
        near(
            master,
            twin,
            what=f"the master of {dtype} parameter {place + 1} after {len(rates)} steps",
            looks_like={
                "every group is given the first group's settings": by(slow, groups[0]),
                "settings come from `defaults`: a group has its own": by(
                    [pair.ours.defaults["lr"]] * len(rates), pair.ours.defaults
                ),
                "a group's lr is not read again at each step": by(first, group),
                "the weight decay is left out": by(own, {**group, "weight_decay": 0.0}),
                "a decay added to the gradient: Adam, not AdamW": by(own, group, "coupled decay"),
                "the decay goes by the rounded parameter": by(own, group, "rounded decay"),
                "the decay comes last, on the updated weight": by(own, group, "late decay"),
                "the bias correction is missing": by(own, group, "m and v uncorrected"),
                "m is not corrected for its bias, v is": by(own, group, "m uncorrected"),
                "v is not corrected for its bias, m is": by(own, group, "v uncorrected"),
                "eps is added before v is corrected for its bias": by(own, group, "early eps"),
                "the decay is not multiplied by lr": by(own, group, "whole decay"),
                "one count of steps serves all parameters": by(own, group, "one count"),
                "eps stands under the root": by(own, group, "inner eps"),
                "the gradient is squared in 16 bits": by(own, group, "half square"),
            },
        )
        halved = [k for k in ("exp_avg", "exp_avg_sq") if masters.fits_16_bits(state[k])]
        apart = int((p != master.to(dtype)).sum())
        recognise(
            {
                "the parameter is not its master, rounded": apart > 0,
                "m or v is rounded to 16 bits in every step, and kept as float32": bool(halved),
            },
            expected=f"parameter == master.to({dtype}), every bit; m and v never rounded",
            seen=f"{apart} of {p.numel()} numbers differ; rounded: {halved}",
        )
        for name in ("exp_avg", "exp_avg_sq"):
            size, what = true[name].abs().max(), f"{name} over its largest number"
            squared = masters.squared_in_16_bits(grads, group["betas"][1]) / size
            alike = {"the gradient is squared in 16 bits": squared}
            near(state[name] / size, true[name] / size, what=what, looks_like=alike)
        what = "state[p]['step'], the number of its steps"
        expect_equal(float(state.get("step", 0)), float(true["step"]), what=what)
    for optimizer in (pair.ours, pair.theirs):
        optimizer.param_groups[0].update(groups[1])
    pair.descend(pair.grads[:1], [1e-2])
    p, what = pair.parameters[0], "the first master after its group was given other settings"
    near(pair.ours.state[p].get("master", p), pair.twins[0], what=what, hint="read them each time")


@exercise_09_2.check("a state_dict, through a file and back")
def optimizer_state(make) -> None:
    seen = masters.resumed(make, fresh_seed())
    recognise(
        {
            "load_state_dict() takes something out of the dict that it is given": seen.taken_out,
            "the groups' settings are not restored, only the states": seen.settings != seen.wanted,
        },
        expected="the dict as it was, and the settings that were saved",
        seen=f"{seen.settings}",
    )
    recognise(
        {
            "after loading there is no state": seen.found["exp_avg"] is None,
            "after loading, masters, m and v are in bf16": torch.bfloat16 in seen.found.values(),
            "after loading the masters are float32 again, but rounded": not seen.masters_equal,
            "after loading m, v or the number of steps is another": not seen.equal_later,
        },
        expected="states as they were saved, in float32, and the same steps after it",
        seen=f"{seen.found}",
        hint="torch.optim.Optimizer.load_state_dict casts states to the parameter's dtype",
    )
    parameters, copies = masters.half_parameters(1), masters.half_parameters(1)
    partly, fresh = make(parameters), make(copies)
    for p in (*parameters[1:], *copies):  # the first parameter has no gradient, and so no state
        p.grad = torch.ones_like(p)
    partly.step()
    fresh.step()  # it has a state for each: what is loaded comes in its place
    fresh.load_state_dict(masters.through_a_file(partly.state_dict()))
    found = list(fresh.state.get(copies[0], {}))
    expect_equal(found, [], what="the state, after loading, of a parameter that had none")
    moved = torch.equal(fresh.state[copies[1]]["master"], partly.state[parameters[1]]["master"])
    expect_equal(moved, True, what="whether the next parameter has its own master after loading")


exercise_09_3 = checks_for(
    "09.3",
    name="accumulate",
    difficulty=2,
    minutes=20,
    hint=(
        "First the tokens of all micro-batches of all ranks: a sum, and one dist.all_reduce. Then "
        "each micro-batch's mean counts with num_tokens / tokens."
    ),
)
COUNTS = (3, 11, 5)
near = partial(expect_close, rtol=1e-5, atol=1e-5)  # a weight may have been a float32


@exercise_09_3.check("one process, micro-batches of different sizes")
def weighted_by_tokens(accumulate) -> None:
    net, parts, watch = accumulating.one_process(COUNTS)
    needs = "it asks for a process group where there is none, and a plain module has no no_sync"
    words = {"mistake": needs, "expected": "a step on one process"}
    hint = "current_world_size() is 1 there"
    loss = without_group(accumulate, net, parts, watch.loss_of, **words, hint=hint)
    shares = [count / sum(COUNTS) for count in COUNTS]
    by = partial(accumulating.weighted, net, parts)
    near(
        accumulating.flat_gradient(net),
        by(shares),
        what="the gradient of the mean loss per token",
        looks_like={
            "each micro-batch counts the same, whatever its number of tokens": by([1 / 3] * 3),
            "the micro-batches' means are added up": by([1.0] * 3),
            "the sums over tokens are added up, and nothing divides them": by(COUNTS),
            "only the last micro-batch counts": by([0, 0, shares[2]]),
            "the share of the tokens is rounded to bf16": by(
                torch.tensor(shares).bfloat16().tolist()
            ),
        },
        hint="a mean over n of N tokens counts n / N",
    )
    held = getattr(loss, "requires_grad", False)
    recognise(
        {"the loss that is returned still holds the graphs of the step": held},
        expected="a loss without a graph: part.detach()",
        seen="requires_grad is True",
    )
    near(torch.as_tensor(loss).double(), accumulating.mean_loss(net, parts), what="the loss")


@exercise_09_3.check("memory: one micro-batch's activations at a time")
def one_at_a_time(accumulate) -> None:
    net, parts, watch = accumulating.one_process(COUNTS)
    accumulate(net, parts, watch.loss_of)
    events = list(watch.events)
    recognise(
        {
            "a micro-batch goes through the model more than once": events.count("forward") > 3,
            "one backward for all: the activations of every micro-batch are alive together, as in "
            "the whole batch": events[:2] == ["forward", "forward"],
            "backward keeps the graph: the activations are not freed": watch.keeps_a_graph,
        },
        expected="forward, backward, forward, backward, ..., each backward frees what it used",
        seen=", ".join(events),
    )
    expect_equal(events, ["forward", "backward"] * 3, what="the order of events")


@exercise_09_3.check("gradients that were there before, a loss scale, no micro-batch")
def before_and_scaled(accumulate) -> None:
    net, parts, watch = accumulating.one_process(COUNTS)
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    net[1].eval()  # as where a part of a model is frozen
    modes = [module.training for module in net.modules()]
    accumulate(net, parts, watch.loss_of)
    want = accumulating.weighted(net, parts, [count / sum(COUNTS) for count in COUNTS])
    near(
        accumulating.flat_gradient(net),
        want + 7,
        what="the gradient where every .grad was 7 before",
        looks_like={
            "what .grad held before is thrown away": want,
            "what .grad held before is divided, too: weight the loss": want + 7 / sum(COUNTS),
        },
    )
    switched = "training or evaluation mode is not left as it was"
    got = [module.training for module in net.modules()]
    expect_equal(got, modes, what="training of the model and its layers", mistake=switched)
    net.zero_grad()
    parts, tokens = parts[:2], sum(COUNTS[:2])  # another step of the same model
    want = 1024 * accumulating.weighted(net, parts, [count / tokens for count in COUNTS[:2]])
    loss = float(accumulate(net, parts, watch.loss_of, TORCH(init_scale=1024.0)))
    near(
        accumulating.flat_gradient(net),
        want,
        what="the gradient of another step, with a scaler at 1024",
        looks_like={
            "the scaler is not used, or its scale is taken out again": want / 1024,
            "only the last micro-batch's loss goes through the scaler": want / 1024
            + 1023 * accumulating.weighted(net, parts, [0.0, COUNTS[1] / tokens]),
            "the first step's number of tokens serves all": want * tokens / sum(COUNTS),
        },
        hint="scaler.scale(part).backward()",
    )
    plain = accumulating.mean_loss(net, parts)
    scaled = {"the loss that is returned is the scaled one": 1024 * plain}
    near(torch.tensor(loss).double(), plain, what="the loss with a scaler", looks_like=scaled)
    expect_raises(ValueError, accumulate, net, [], watch.loss_of, what="an empty list")
    half_losses(accumulate, net, parts, watch)


def half_losses(accumulate, net, parts, watch) -> None:
    """Losses in fp16, without a scaler and with one at its default of 65,536."""
    net.zero_grad()
    many = [accumulating.Many(part, n) for part, n in zip(parts, (40_000, 60_000), strict=True)]
    accumulate(net, many, lambda model, each: watch.loss_of(model, each.part).half())
    got, want = accumulating.flat_gradient(net), accumulating.weighted(net, parts, [0.4, 0.6])
    words = "the share of the tokens is worked out in the loss's fp16, which ends at 65,504"
    expect(
        bool((got - want).abs().max() < 0.02 * want.abs().max()),
        mistake=words,
        expected="fp16 losses of 40,000 and 60,000 tokens to count with 0.4 and 0.6",
        seen=f"a gradient of {got[0]:.3g}, not {want[0]:.3g}",
        hint="num_tokens / total of two python ints",
    )
    net.zero_grad()
    own = TORCH(init_scale=2.0**16)  # the default: fp16 holds it only after it met the share
    accumulate(net, many, lambda model, each: watch.loss_of(model, each.part).half(), own)
    got, want = accumulating.flat_gradient(net), 2.0**16 * want
    expect(
        bool((got - want).abs().max() < 0.02 * want.abs().max()),
        mistake="an fp16 loss is weighted in fp16: on its way back the scale of 65,536 is infinite",
        expected="a finite gradient: 65,536 times a share of 0.4 or 0.6 is below fp16's 65,504",
        seen=f"a gradient of {got[0]:.3g}, not {want[0]:.3g}",
        hint="loss.float() before it is multiplied by anything",
    )


@exercise_09_3.check("two ranks under torch's DDP: the whole batch, sent once")
def across_ranks(accumulate) -> None:
    two_ranks(accumulate, COUNTS[:2], (2, 4001))  # the sum is no number of fp16 or bf16
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
    seen = on_ranks(accumulating.accumulate_on, 2, accumulate, *case, **PATIENT, apart=apart)
    first, second = (rank["gradient"] for rank in seen)
    recognise(
        {
            "the model's DDP is left without exchange: the next backward sends nothing": not all(
                rank["syncs"] for rank in seen
            ),
            "the ranks end with different gradients: the last micro-batch is not sent, or sent "
            "too early": not torch.equal(first, second),
        },
        expected="the same gradient on both ranks",
        seen=f"they differ by up to {(first - second).abs().max():.3g}",
        hint="the last micro-batch runs outside of no_sync()",
    )
    counts = [part.num_tokens for part in parts]
    in_bf16 = torch.tensor([sum(ours), sum(theirs)], dtype=torch.bfloat16).sum().item()
    total, by = sum(counts), partial(accumulating.weighted, net, parts)
    means = by([n / sum(share) for share in (ours, theirs) for n in share])
    want, factor = by([n / total for n in counts]), 1.0 if scale is None else scale
    near(
        first,
        before + factor * want,
        what="the gradient of the mean over all ranks' tokens",
        looks_like={
            "what .grad held before is multiplied by the ranks": 2 * before + factor * want,
            "what .grad held before is scaled, too: scale the loss": factor * (before + want),
            "the tokens are added up in bf16, which rounds their number": before
            + factor * by([n / in_bf16 for n in counts]),
            "DDP divides by the number of ranks, and nothing makes up for it": want / 2,
            "each rank divides by its own tokens: the mean of the ranks' means": means / 2,
            "each rank divides by its own tokens, and the ranks' means are added up": means,
        },
    )
    whole = torch.tensor(sum(rank["loss"] for rank in seen)).double()
    mean, words = accumulating.mean_loss(net, parts), "what is returned is multiplied by the ranks"
    expect_sent_once(seen, first.nbytes, float(mean))
    near(whole, mean, what="the sum of the ranks' losses", looks_like={words: 2 * mean})


def expect_sent_once(seen, size: int, mean: float) -> None:
    """One message of `size` bytes of gradients, one of a number; a loss that was not sent."""
    large = [sum(n >= size for n in rank["sizes"]) for rank in seen]
    small = [[n for n in rank["sizes"] if n < size] for rank in seen]
    recognise(
        {
            "the loss is added up over the ranks: each returns its own part": all(
                math.isclose(rank["loss"], mean, rel_tol=1e-4) for rank in seen
            ),
            "numbers of tokens travel one by one": max(map(len, small)) > 1,
        },
        expected="one message of a number, the tokens of all this rank's micro-batches",
        seen=f"messages of {seen[0]['sizes']} and {seen[1]['sizes']} bytes",
    )
    recognise(
        {
            "the gradients travel with every micro-batch": max(large) > 1,
            "gradients are all-reduced by hand, and DDP has done it already": min(large) == 1
            and max(map(sum, small)) >= size,
            "gradients travel parameter by parameter: DDP's own message has all": max(large) == 0
            and max(map(sum, small)) >= size,
            "more than one number travels beside the gradients": max(map(sum, small)) > 16,
        },
        expected=f"one message of {size} bytes of gradients, and one of a number",
        seen=f"messages of {seen[0]['sizes']} and {seen[1]['sizes']} bytes",
        hint="no_sync() around forward and backward of all but the last",
    )


exercise_09_4 = checks_for(
    "09.4",
    name="float8_linear",
    difficulty=3,
    minutes=20,
    hint=(
        "Which numbers are added up, and so need one scale? keepdim=True lets it divide; weight's "
        "scales lie along the product's columns. And a row of zeros?"
    ),
    forbidden=("torch._scaled_mm", "torch.nn.functional.scaled_mm"),
)
ONE_SCALE = {
    "no scale: what is small beside the format's range becomes 0": "unscaled",
    "the product is that of the scaled factors: it has to be multiplied by both scales": (
        "left scaled"
    ),
    "the product is multiplied by the scale of x alone": "one back",
    "the scale goes by the largest number, not by the largest in size: abs() first": "signed",
    "the largest number becomes 1, where it should become the format's largest": "to one",
    "x is not rounded to 8 bits": "whole x",
    "weight is not rounded to 8 bits": "whole weight",
    "the product is rounded to 16 bits": "16 bits",
}
SHARED = {"both factors are divided by one scale: each has its own": "shared"}
BY_ROW = {
    "the scales go by columns: these numbers are added up, so they need one scale": "by column",
    **{
        f"a floor of {floor} under the scale is larger than small rows' scales": f"floor {floor}"
        for floor in ("1e-12", "1e-10", "1e-8")
    },
}


def same_as_scaled_mm(float8_linear, by_row: bool) -> None:
    """Both formats, odd sizes; all rows and columns of the product are brought to one size."""
    for dtype in (eight_bits.E4M3, eight_bits.E5M2):
        (x, rows), (weight, columns) = (
            eight_bits.factor(fresh_seed(), *shape) for shape in ((5, 24, 0), (7, 24, 6))
        )
        by = partial(eight_bits.by_formula, x, weight, dtype, by_row)
        other = {eight_bits.E4M3, eight_bits.E5M2} - {dtype}
        ways = ONE_SCALE | (BY_ROW if by_row else SHARED)
        looks_like = {words: by(way) for words, way in ways.items()}
        looks_like |= {
            f"the factors are rounded to another format than {dtype}": (
                eight_bits.by_torch(x, weight, other.pop(), by_row)
            ),
            "one scale a factor, where by_row asks for one a row"
            if by_row
            else "a scale for each row, where by_row is False": (
                eight_bits.by_torch(x, weight, dtype, not by_row)
            ),
        }
        sizes = rows * columns.T
        got = float8_linear(x, weight, dtype, by_row)
        expect_equal(getattr(got, "dtype", None), torch.float32, what="the dtype of the result")
        expect_close(
            got / sizes,
            eight_bits.by_torch(x, weight, dtype, by_row) / sizes,
            what=f"the product of {dtype} factors, over the rows' sizes",
            looks_like={words: value / sizes for words, value in looks_like.items()},
        )


@exercise_09_4.check("torch._scaled_mm with one scale a factor")
def one_scale(float8_linear) -> None:
    same_as_scaled_mm(float8_linear, by_row=False)


@exercise_09_4.check("torch._scaled_mm with a scale a row")
def scale_a_row(float8_linear) -> None:
    same_as_scaled_mm(float8_linear, by_row=True)


@exercise_09_4.check("16-bit factors, rows of zeros, e4m3 where nothing is said")
def edges_of_8_bits(float8_linear) -> None:
    (x, _), (weight, _) = (eight_bits.factor(fresh_seed(), *each) for each in ((3, 8), (4, 8)))
    half = x.bfloat16(), weight.bfloat16()
    plain = float8_linear(*half)
    want = eight_bits.by_torch(*half, eight_bits.E4M3, False)
    expect_equal(getattr(plain, "dtype", None), torch.float32, what="the dtype for bf16 factors")
    expect_close(plain, want, what="the product of bf16 factors, e4m3, one scale")
    x[1] = 0.0
    for by_row, given in ((True, x), (False, torch.zeros_like(x))):
        got = float8_linear(given, weight, eight_bits.E4M3, by_row)
        zeros = "a row of zeros" if by_row else "a factor of zeros"
        recognise(
            {f"{zeros} is divided by its largest number, which is 0": bool(got[1].isnan().any())},
            expected=f"zeros for {zeros}",
            seen="NaN",
            hint="torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)",
        )
        expect_close(got[1], torch.zeros(4), what=f"the row of the product that {zeros} gives")
