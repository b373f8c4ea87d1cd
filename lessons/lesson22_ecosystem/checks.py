"""Lesson 22: what tells a right answer from a wrong one.

The first exercise is judged by trainings that are made up, whose explanation is known. The other
two are run: DeepSpeed, FSDP2 and the Trainer on two ranks, whose losses are compared, and of the
first two the bytes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lessons.lesson22_ecosystem import laboratory as lab
from lessons.lesson22_ecosystem.laboratory import Order, Runs
from shared.ecosystem.defaults import DEFAULTS
from shared.errors import InputError
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_equal, expect_raises, recognise
from shared.exercises.on_ranks import on_one_rank
from shared.measuring.largest import largest

Settings = dict[str, Any]
TOLERANCE = 1e-3
STEPS = 8


def ramp(size: float, last: float | None = None) -> list[float]:
    """A difference that grows over the steps; `last` replaces that of the last one."""
    found = [size * (i + 1) / STEPS for i in range(STEPS)]
    return found if last is None else [*found[:-1], last]


def training(*effects: tuple[Callable[[Mapping[str, Any]], bool], list[float]]) -> Runs:
    """A made-up training: a falling curve, and what is added to it where a condition holds."""

    def curve(settings: Mapping[str, Any]) -> list[float]:
        losses = [4.0 - 0.3 * i for i in range(STEPS)]
        for holds, added in effects:
            if holds(settings):
                losses = [a + b for a, b in zip(losses, added, strict=True)]
        return losses

    return Runs(curve)


OURS: Settings = {"decay": 0.01, "seed": 0, "shuffle": False, "max_norm": 0.0, "loss": "sum"}
THEIRS: Settings = {"loss": "mean", "max_norm": 1.0, "shuffle": True, "seed": 42, "decay": 0.01}

exercise_22_1 = checks_for(
    "22.1",
    name="explain_difference",
    difficulty=2,
    minutes=15,
    hint=(
        "Begin with no settings at all (the curves may be the same), then each alone, then each "
        "pair: itertools.combinations(names, size) keeps the order."
    ),
)


def explained(explain_difference, run: Runs, tolerance: float = TOLERANCE) -> tuple[str, ...]:
    """An answer's, to copies: one that changes what it is given spoils nothing for the next."""
    return explain_difference(run, dict(OURS), dict(THEIRS), tolerance)


@exercise_22_1.check("one setting, and several")
def one_and_several(explain_difference) -> None:
    one = training((lambda s: s["max_norm"] > 0, ramp(0.2)))
    two = training((lambda s: s["max_norm"] > 0, ramp(0.2)), (lambda s: s["shuffle"], ramp(-0.5)))
    three = training(*[(lambda s, n=n: s[n] == THEIRS[n], ramp(by)) for n, by in
                       (("loss", 0.1), ("max_norm", 0.2), ("shuffle", -0.5))])  # fmt: skip
    names = ("loss", "max_norm", "shuffle")
    for run, want in ((one, names[1:2]), (two, names[1:]), (three, names)):
        got = explained(explain_difference, run)
        differ = ("loss", "max_norm", "shuffle", "seed")
        recognise(
            {
                "settings are named that are the same in both": "decay" in got,
                "every setting that differs is named, and not those that matter": (
                    tuple(got) == differ
                ),
                "more settings than needed: some of them give the curve without the others": (
                    set(want) < set(got)
                ),
                "only one setting is named, and two are needed": len(got) == 1 and len(want) == 2,
                "they are in the order of ours: theirs is asked for": (
                    tuple(got) == want[::-1] != want
                ),
            },
            expected=str(want),
            seen=str(got),
        )
        expect_equal(tuple(got), want, what="the settings")


@exercise_22_1.check("settings that hide each other, or cancel; curves that are alike")
def together(explain_difference) -> None:
    hidden = training((lambda s: s["max_norm"] > 0 and s["loss"] == "mean", ramp(0.3)))
    got = explained(explain_difference, hidden)
    recognise(
        {"two settings that matter only together are not found": len(got) != 2},
        expected="('loss', 'max_norm'): neither changes anything alone",
        seen=str(got),
    )
    expect_equal(tuple(got), ("loss", "max_norm"), what="the settings")

    either = training((lambda s: s["max_norm"] > 0 or s["loss"] == "mean", ramp(0.3)))
    got = explained(explain_difference, either)
    recognise(
        {"more settings than needed: each of two is enough by itself": len(got) > 1},
        expected="('loss',): the first in the order of theirs that is enough",
        seen=str(got),
    )
    expect_equal(tuple(got), ("loss",), what="the settings")

    cancel = training(
        (lambda s: s["max_norm"] > 0, ramp(0.3)), (lambda s: s["shuffle"], ramp(-0.3))
    )
    got = explained(explain_difference, cancel)
    recognise(
        {"settings are named for curves that are the same": len(got) > 0},
        expected="(): the curves do not differ",
        seen=str(got),
    )
    meets = training((lambda s: s["max_norm"] > 0, ramp(0.3, last=0.0)))
    got = explained(explain_difference, meets)
    recognise(
        {"only the last loss is compared: the curves differ before it": tuple(got) == ()},
        expected="('max_norm',)",
        seen=str(got),
    )
    expect_equal(tuple(got), ("max_norm",), what="the settings")
    near = training((lambda s: s["seed"] == 42, ramp(0.9 * TOLERANCE)))
    got = explained(explain_difference, near)
    expect_equal(tuple(got), (), what="the settings, for a difference below the tolerance")
    once = training((lambda s: s["seed"] == 42, [0, 0, 0, 3 * TOLERANCE, 0, 0, 0, 0]))
    got = explained(explain_difference, once)
    expect_equal(tuple(got), ("seed",), what="the settings, where one step differs by 3 tolerances")
    exact = Runs(lambda s: [1.5 if s["seed"] == 42 else 1.0] * STEPS)
    got = explained(explain_difference, exact, tolerance=0.5)
    expect_equal(tuple(got), (), what="the settings, for a difference of exactly the tolerance")


@exercise_22_1.check("no run for nothing")
def runs_counted(explain_difference) -> None:
    ours, theirs = dict(OURS), dict(THEIRS)
    run = training((lambda s: s["shuffle"], ramp(0.3)))
    explain_difference(run, ours, theirs, TOLERANCE)
    recognise(
        {
            "the settings that were given are changed": (ours, theirs) != (OURS, THEIRS),
            "a training is run twice with the same settings": run.repeated > 0,
            "sets are tried after one that explains the difference was found": len(run.asked) > 5,
        },
        expected="theirs, ours, and three settings alone: 5 runs",
        seen=f"{len(run.asked)} runs, of which {run.repeated} repeat another",
    )
    every = training(*[(lambda s, n=n: s[n] == THEIRS[n], ramp(0.1 * 2**i)) for i, n in
                       enumerate(("loss", "max_norm", "shuffle", "seed"))])  # fmt: skip
    got = explained(explain_difference, every)
    expect_equal(tuple(got), ("loss", "max_norm", "shuffle", "seed"), what="the settings")
    expect_equal(every.repeated, 0, what="runs that repeat another, where all settings matter")
    run.asked.clear()
    got = explain_difference(run, dict(OURS), dict(OURS), TOLERANCE)
    expect_equal(tuple(got), (), what="the settings, where theirs are ours")
    expect_equal(run.repeated, 0, what="runs that repeat another, where theirs are ours")


exercise_22_2 = checks_for(
    "22.2",
    name="deepspeed_config",
    difficulty=3,
    minutes=20,
    hint="{**DEFAULTS, **arguments} is what the Trainer works with.",
)
KNOWN = dict(DEFAULTS)
ORDERS: tuple[Settings, ...] = (
    {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 3, "max_grad_norm": 0.25,
     "max_steps": 90, "learning_rate": 2e-3, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    {"max_steps": 70, "bf16": True, "warmup_steps": 5, "max_grad_norm": 0.0},
    {"max_steps": 30, "adam_beta1": 0.8, "per_device_train_batch_size": 5},
)  # fmt: skip


def strings(value: Any) -> set[str]:
    """All strings in a configuration."""
    if isinstance(value, Mapping):
        return set().union(*(strings(each) for each in value.values()))
    if isinstance(value, list | tuple):
        return set().union(*(strings(each) for each in value))
    return {value} if isinstance(value, str) else set()


def number(value: Any) -> float:
    """A number, or NaN for what is none."""
    return float(value) if isinstance(value, int | float) else float("nan")


def settings_of(config: dict, params: dict) -> dict:
    """What a configuration says, with DeepSpeed's defaults."""
    return {
        "micro-batch": config.get("train_micro_batch_size_per_gpu"),
        "accumulation": config.get("gradient_accumulation_steps", 1),
        "clipping": config.get("gradient_clipping", 1.0),
        "bf16": bool(config.get("bf16", {}).get("enabled", False)),
        "lr": params.get("lr"),
        "betas": list(params.get("betas", [0.9, 0.999])),
        "eps": params.get("eps", 1e-8),
    }


def wanted_of(a: dict) -> dict:
    """The same of the Trainer's arguments."""
    return {
        "micro-batch": a["per_device_train_batch_size"],
        "accumulation": a["gradient_accumulation_steps"],
        "clipping": a["max_grad_norm"],
        "bf16": a["bf16"],
        "lr": a["learning_rate"],
        "betas": [a["adam_beta1"], a["adam_beta2"]],
        "eps": a["adam_epsilon"],
    }


@exercise_22_2.check("what the arguments become")
def sections(deepspeed_config) -> None:
    for order in ORDERS:
        a = KNOWN | order
        config = deepspeed_config(dict(order), 24)
        written = {key: value for key, value in DEFAULTS.items() if KNOWN.get(key) != value}
        DEFAULTS.clear()
        DEFAULTS.update(KNOWN)
        recognise(
            {"DEFAULTS is written into: the next call finds these arguments there": bool(written)},
            expected="DEFAULTS as it was before the call",
            seen=str(written),
        )
        expect(isinstance(config, dict), expected="a dict", seen=type(config).__name__)
        zero, optimizer = config.get("zero_optimization", {}), config.get("optimizer", {})
        params = optimizer.get("params", {})
        got, want = settings_of(config, params), wanted_of(a)
        bucket = number(zero.get("reduce_bucket_size", 5e8))
        recognise(
            {
                "`auto` is left standing: DeepSpeed alone knows none": "auto" in strings(config),
                "a scheduler is in it: DeepSpeed's is a step behind the Trainer's": (
                    "scheduler" in config
                ),
                "gradient_clipping is not the Trainer's: DeepSpeed clips at 1.0 if nobody says": (
                    got["clipping"] != want["clipping"]
                ),
                "a default of torch's AdamW, where the Trainer has its own": (
                    "learning_rate" not in order and got["lr"] in (None, 1e-3)
                )
                or number(params.get("weight_decay", 0.01)) == 0.01,
                "DeepSpeed would compile an Adam of its own: torch_adam is not set": (
                    params.get("torch_adam") is not True
                ),
                "parameters stay whole on every rank: the stage is not 3": zero.get("stage") != 3,
                "small parameters stay whole: stage3_param_persistence_threshold": number(
                    zero.get("stage3_param_persistence_threshold", 1e5)
                )
                != 0,
                "the bucket is DeepSpeed's default of 5e8 numbers, 2 GB": bucket >= 5e8,
                "the micro-batch is multiplied by the accumulation": (
                    a["gradient_accumulation_steps"] > 1
                    and got["micro-batch"] == want["micro-batch"] * want["accumulation"]
                ),
            },
            expected=f"for {order}: {want}",
            seen=str(got),
        )
        for key, value in want.items():
            expect_equal(got[key], value, what=f"{key} for {order}")
        expect_equal(bucket, 576.0, what="reduce_bucket_size for a hidden size of 24")
        expect_equal(number(params.get("weight_decay", 0.01)), 0.0, what="weight_decay")
        expect_equal(str(optimizer.get("type")).lower(), "adamw", what="the optimizer's type")


@exercise_22_2.check("what a JSON cannot say")
def refused(deepspeed_config) -> None:
    order = {"max_steps": 9, "weight_decay": 0.125}
    what = "a weight_decay, which the Trainer applies to some parameters only"
    expect_raises(InputError, deepspeed_config, order, 24, what=what, mentions=[0.125])


@exercise_22_2.check("the Trainer, DeepSpeed and FSDP2, run on two ranks")
def three_runs(deepspeed_config) -> None:
    wanted, full, half = lab.three_ways(deepspeed_config)
    gap = largest(abs(a - b) for a, b in zip(full["losses"], wanted, strict=True))
    recognise(
        {"DeepSpeed trains on other batches than the Trainer": full["batch"] != 32},
        expected="a batch of 32 on two ranks",
        seen=str(full["batch"]),
    )
    expect(
        gap < 5e-5,
        expected="the Trainer's losses: " + " ".join(f"{x:.4f}" for x in wanted),
        seen=" ".join(f"{x:.4f}" for x in full["losses"]),
        mistake="DeepSpeed's curve is not the Trainer's",
    )
    order = Order(bf16=True)
    fsdp = lab.oracle(order)
    total = sum(half["kinds"].values())
    recognise(
        {"bf16 is not switched on": half["dtype"] != "torch.bfloat16"},
        expected="weights in bf16",
        seen=half["dtype"],
    )
    expect_equal(total, fsdp.states, what="bytes of a rank after backward in bf16, as FSDP2's")


exercise_22_3 = checks_for(
    "22.3",
    name="shard_as_trainer",
    difficulty=2,
    minutes=15,
    hint="Modules whose type(module).__name__ is named, inner ones first; the model itself last.",
)
HALF = torch.bfloat16
SOME = MixedPrecisionPolicy(HALF, torch.float32, HALF)
SHARDINGS = (
    Order(),
    Order(bf16=True, half_model=True),
    Order(names="DecoderLayer", reshard=False),
)
BLOCKS = ["", "first", "second"]
MADE = (
    (Order(names="GateBlock", half_model=True), BLOCKS),
    (Order(names=None, bf16=False), [""]),
    (
        Order(names=("GateBlock", "Gate"), bf16=True),
        sorted([*BLOCKS, "first.gate", "lone", "second.gate"]),
    ),
)


def sizes_of(calls: list[tuple[str, int]]) -> tuple[list[int], list[int]]:
    """Of the all_gathers and of the reduce_scatters."""
    gathers = [size for op, size in calls if op == "all_gather"]
    return gathers, [size for op, size in calls if op == "reduce_scatter"]


def say(calls: list[tuple[str, int]]) -> str:
    """Messages of a step, in short."""
    gathers, scatters = sizes_of(calls)
    return (
        f"{len(gathers)} all_gathers of {sum(gathers)} bytes, {len(scatters)} reduce_scatters of"
        f" {sum(scatters)}"
    )


@exercise_22_3.check("units, dtypes and messages, as torch's own call gives them")
def units(shard_as_trainer) -> None:
    for order in SHARDINGS:
        want = lab.oracle(order)
        for got in lab.sharded_by(shard_as_trainer, order):

            def looks(bf16: bool = order.bf16, got=got, want=want, order=order, **wrong) -> bool:
                """Whether what was sent is what this mistake sends."""
                if got.calls == want.calls:
                    return False
                return got.calls == lab.oracle(order._replace(bf16=bf16), **wrong).calls

            (gathers, scatters), (again, wanted) = sizes_of(got.calls), sizes_of(want.calls)
            recognise(
                {
                    "a copy is sharded: the model that was given is whole": (
                        not got.returned and got.numbers > 1.9 * want.numbers
                    ),
                    "nothing is sharded": got.numbers > 1.9 * want.numbers,
                    "parameters outside the named classes are whole: the model itself is no unit": (
                        len(got.whole) > 0
                    ),
                    "the weights are bf16: what the optimizer updates is to be float32": (
                        "torch.bfloat16" in got.dtypes
                    ),
                    "the model itself is told to reshard, which Accelerate leaves to torch": (
                        lambda: looks(root_too=True)
                    ),
                    "the model is one unit: its blocks are not": lambda: looks(roots=True),
                    "bf16 is not passed on: all is sent in float32": lambda: looks(bf16=False),
                    "gradients are reduced in float32: Accelerate reduces in bf16": lambda: looks(
                        policy=SOME
                    ),
                    "reshard_after_forward is not passed on": lambda: looks(reshard=True),
                    "a tied weight has become two": got.tensors != want.tensors,
                    "some modules of the named classes are no units: each of them is one": (
                        len(scatters) < len(wanted)
                    ),
                    "a block stays whole until backward: reshard_after_forward holds for each": (
                        len(scatters) == len(wanted) and len(gathers) < len(again)
                    ),
                },
                expected=say(want.calls),
                seen=say(got.calls),
                hint=str(order.arguments),
            )
            expect_equal(say(got.calls), say(want.calls), what=f"messages for {order.arguments}")
            expect_equal(got.dtypes, want.dtypes, what="the weights' dtypes")
            expect_equal(got.returned, True, what="whether the model is returned")


@exercise_22_3.check("losses of the reference run, and 16/D bytes a parameter")
def numbers(shard_as_trainer) -> None:
    for order in SHARDINGS[:2]:
        for got in lab.sharded_by(shard_as_trainer, order):
            want = lab.oracle(order)
            gap = largest(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True))
            expect(gap < 1e-6, expected=f"losses {want.losses}", seen=str(got.losses))
            expect_equal(got.states, want.states, what="bytes of a rank after backward")


@exercise_22_3.check("a class that the model does not have")
def missing(shard_as_trainer) -> None:
    order = Order(names=("EncoderLayer", "LlamaDecoderLayer"))
    what = "a class that the model lacks (the wrap would silently be another)"

    def shard() -> None:
        shard_as_trainer(order.arguments, lab.model_for(order))

    expect_raises(InputError, on_one_rank, shard, what=what, mentions=["LlamaDecoderLayer"])


@exercise_22_3.check("units, dtypes and outputs of a small model, on one rank")
def small(shard_as_trainer) -> None:
    for order, wanted in MADE:
        got = lab.made_by(shard_as_trainer, order)
        half = "torch.bfloat16" if order.bf16 else "torch.float32"
        recognise(
            {
                "a part of a name counts as the name: one name is no list": (
                    isinstance(order.names, str) and "lone" in got.units
                ),
                "units are made where no class is named": (
                    order.names is None and len(got.units) > 1
                ),
                "the weights are bf16: what the optimizer updates is to be float32": (
                    "torch.bfloat16" in got.dtypes
                ),
                "a bf16 of False counts as True": not order.bf16 and got.output != half,
                "the output is not bf16: the policy has no output_dtype": (
                    bool(order.bf16) and got.output != half
                ),
            },
            expected=f"units {wanted}, output {half}",
            seen=f"units {got.units}, output {got.output}, weights {got.dtypes}",
            hint=str(order.arguments),
        )
        expect_equal(sorted(got.units), wanted, what=f"the units for {order.arguments}")
        expect_equal(got.dtypes, ["torch.float32"], what="the weights' dtypes")
        expect_equal(got.trained, 13, what="parameters that are trained, of 14")
