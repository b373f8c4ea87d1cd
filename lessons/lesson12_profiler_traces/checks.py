"""Lesson 12: what tells a right answer from a wrong one.

Made traces have whole microseconds, so that the oracle can ask every one of them who is at work.
FLOPs are torch's own count. No clock decides anything.
"""

import functools
import math
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lessons.lesson12_profiler_traces.laboratory import made_traces as made
from lessons.lesson12_profiler_traces.laboratory import marked_training as lab
from lessons.lesson12_profiler_traces.laboratory import suspects
from lessons.lesson12_profiler_traces.laboratory import usual_mistakes as usual
from shared.exercises.checks import checks_for
from shared.exercises.expecting import (
    alike,
    expect,
    expect_close,
    expect_equal,
    expect_raises,
    recognise,
)
from shared.exercises.on_ranks import on_ranks
from shared.exercises.seeds import fresh_seed
from shared.model.config import TransformerConfig

exercise_12_1 = checks_for(
    "12.1",
    name="profile_training",
    difficulty=3,
    minutes=30,
    hint=(
        "with profile(schedule=schedule(wait=..., warmup=..., active=..., repeat=1), "
        "on_trace_ready=...) as profiler: and profiler.step() as the last line of each step."
    ),
    in_place=True,
)


@exercise_12_1.check("the steps in the trace")
def traced_steps(answer) -> None:
    seen = lab.profiled(answer, 9, 2, 1, 2)
    steps = seen.steps
    recognise(
        {
            "no file is written: profiler.step() ends no step, or nothing exports the trace": (
                not seen.files
            ),
            "there are no steps in the trace: profiler.step() is not called": not steps,
            "the first steps are in the trace, and they are slower: wait and warmup are not used": 0
            in steps,
            "more steps than `active` are in the trace": steps[:3] == [3, 4, 5],
            "the schedule begins again after its first cycle: repeat=1 is missing": (
                (steps[:2] == [3, 4] and len(steps) > 2)
                or steps[:1] == [3 + 5]  # the second cycle's file replaced the first one's
            ),
            "the trace begins too late: `wait` + `warmup` steps are left out, and no more": min(
                steps, default=0
            )
            > 3,
            "`wait` is not used: the trace begins right after the warm-up": steps == [1, 2],
            "the warm-up steps are in the trace": 2 in steps,
        },
        expected="the steps 3 and 4, with wait=2, warmup=1, active=2 and 9 batches",
        seen=f"the steps {steps} in files {seen.files}",
    )
    expect_equal(steps, [3, 4], what="the steps in the trace")
    early = "profiler.step() is called before a step, not after it: the trace begins a batch early"
    what = "the batches, from 1, whose forward is in the trace of wait=2, warmup=1, active=2"
    expect_equal(seen.batches, [4, 5], what=what, mistake=early)


@exercise_12_1.check("labels that hold what they say")
def labels_hold(answer) -> None:
    seen = lab.profiled(answer, 9, 2, 1, 2)
    steps = seen.spans("ProfilerStep#")
    order = list[tuple[float, str]]()
    for name, mark in lab.MARKS.items():
        spans = seen.spans(name)
        within = [sum(a <= s and e <= b for s, e in spans) for a, b in steps]
        recognise(
            {
                f'there is no label "{name}"': not spans,
                f'the label "{name}" is not inside a step': not any(within),
                "the batch is drawn outside of its label: a loader's wait would lie between two "
                "steps": name == "data" and not seen.marked.ahead and not seen.inside(name, mark),
                f'what belongs into "{name}" runs outside of it': name != "data"
                and not seen.inside(name, mark),
                f'"{name}" appears more than once in a step': max(within) > 1,
            },
            expected=f'one span "{name}" in each step, around what it is called after',
            seen=f"{len(spans)} of them in {len(steps)} steps; {within} within the steps",
        )
        order += [(start, name) for start, _ in spans if start >= steps[0][0]]
    names = [name for _, name in sorted(order)][: 4 * len(steps)]
    nested = [(a, b) for a in lab.LABELS for b in lab.LABELS if a != b and seen.inside(a, b)]
    recognise(
        {
            "the labels lie in one another: each microsecond belongs to one of them": bool(nested),
            "all batches are drawn before the first step: a slow loader would not be seen": (
                seen.marked.ahead == 8
            ),
            "a batch is drawn in the step before its own: the first one's wait is in no step": (
                seen.marked.ahead > 0
            ),
            "the order in a step is another: data comes first, and profiler.step() last": (
                names != [*lab.LABELS] * len(steps)
            ),
        },
        expected="in each step data, forward, backward, optimizer, side by side",
        seen=f"{names}, one inside another: {nested}, batches drawn too early: {seen.marked.ahead}",
    )


@exercise_12_1.check("training as without the profiler")
def same_training(answer) -> None:
    seen = lab.profiled(answer, 9, 2, 1, 2)
    recognise(
        {
            "training ends with the trace: the batches after it are not used": torch.equal(
                seen.weights, seen.first_only
            ),
            "loss_of is called more than once for a batch: each call costs a forward": (
                seen.marked.used > 9
            ),
            "each step's loss is kept with its graph: memory grows with every step": (
                seen.marked.kept > 2
            ),
            "each step's loss is kept, without its graph: nobody asked for the losses": (
                seen.marked.kept_losses > 2
            ),
            "a number is read from the device: on a GPU each such call waits for all that was "
            "launched": bool(seen.reads),
            "the model is left in eval mode": not seen.training,
            "the profiler is not stopped: use it in a with block": seen.running > 0,
        },
        expected="the weights of a plain loop over 9 batches with 9 calls of loss_of, no number "
        "read, nothing left running",
        seen=f"{seen.marked.used} calls, graphs of earlier steps at the last: {seen.marked.kept}; "
        f"read by {seen.reads}, model.training is {seen.training}, "
        f"{seen.running} profilers still run",
    )
    expect_close(
        seen.weights,
        seen.twin,
        what="the weights after 9 batches",
        hint="gradients are cleared in every step, and every batch is used once",
    )


@exercise_12_1.check("the path, and a file for each rank")
def files(answer) -> None:
    seen = lab.profiled(answer, 4, 1, 1, 2)
    expect_equal(seen.steps, [2, 3], what="the steps where the batches end with the trace")
    expect(
        isinstance(seen.path, Path),
        mistake="what is returned is no Path: whoever reads the trace calls its read_text()",
        expected="a pathlib.Path",
        seen=f"{type(seen.path).__name__}: {seen.path!r:.80}",
    )
    expect_equal(seen.path.name, "rank_0.json", what="the name of the returned path")
    expect_equal(seen.files, ["rank_0.json"], what="the files in the folder")
    at_once = lab.profiled(answer, 4, 0, 0, 2)
    expect_equal(at_once.steps, [0, 1], what="the steps in the trace with wait=0, warmup=0")
    with TemporaryDirectory(prefix="ranks_") as folder:
        words = "not every rank trains to the end"
        on_two = on_ranks(lab.profile_on_rank, 2, answer, folder, apart=words, timeout=120)
    names = [name for name, _ in on_two]
    recognise(
        {
            "all ranks write to one file: the last one wins": len(set(names)) == 1,
            "only one rank writes a file: each rank has a trace of its own": -2
            in [number for _, number in on_two],
        },
        expected="rank_0.json and rank_1.json, each by its own rank",
        seen=f"files and the rank in them (-2: there is none): {on_two}",
    )
    expect_equal(on_two, [("rank_0.json", 0), ("rank_1.json", 1)], what="each rank's file")


@exercise_12_1.check("too few batches, and a loss that raises")
def errors(answer) -> None:
    too_few = "4 batches for a trace that ends with the fifth step"
    raising = "a loss_of that raises for the fourth of 9 batches"
    late = "a loss_of that raises a RuntimeError (as out of memory) for the eighth of 9 batches"
    not_stopped = "the profiler is not stopped before the error: the next one cannot start"
    at_error = "a profiler is left running where loss_of raises: the next one cannot start"
    for error, what, count, raise_at, words in (
        (ValueError, too_few, 4, 0, not_stopped),
        (TimeoutError, raising, 9, 4, at_error),
        (RuntimeError, late, 9, 8, at_error),
    ):
        with TemporaryDirectory(prefix="error_") as folder, lab.running_profilers() as running:
            act = functools.partial(lab.steps_3_and_4, answer, count, raise_at, error, Path(folder))
            mentions = [4, 5] if error is ValueError else []
            expect_raises(error, act, what=what, mentions=mentions)
            expect_equal(len(running), 0, what="profilers that run after the error", mistake=words)


exercise_12_2 = checks_for(
    "12.2",
    name="overlap_fraction",
    difficulty=3,
    minutes=30,
    hint=(
        "Three unions of intervals: the steps, the messages, the compute. Sort by start; an "
        "interval that begins before the last one ends prolongs it."
    ),
)


def by_name(answer, trace, measure, usual_mistakes) -> None:
    """The answer's number for a made trace, or the mistake that gives it."""
    want, mistakes, got = measure(trace), usual_mistakes(trace), float(answer(trace))
    numbers = {round(each, 9) for each in (*mistakes.values(), want)}
    assert len(numbers) == 1 + len(mistakes), f"two mistakes, one number: {mistakes}, {want}"
    in_order = made.in_order(trace)
    recognise(
        {
            "that is in percent": abs(got - 100 * want) < 1e-7,
            **alike(got, mistakes, lambda got, value: abs(got - value) < 1e-9),
            "events are taken to come in the order of their starts: sort the spans first": (
                abs(got - want) > 1e-9 and abs(float(answer(in_order)) - want) < 1e-9
            ),
        },
        expected=f"{want:.6g}",
        seen=f"{got:.6g}",
    )
    expect_close(torch.tensor(got), torch.tensor(want), what="the share", atol=1e-6)


def at_random(answer, measure) -> None:
    """The answer's numbers for random traces, with whole microseconds and with parts of them."""
    for number in range(30):
        trace = made.random_trace(fresh_seed(), gpu=number % 2 == 1)
        want, got = measure(trace), float(answer(trace))
        expect_close(torch.tensor(got), torch.tensor(want), what="the share", atol=1e-6)
        later = float(answer(made.later_and_shorter(trace)))
        recognise(
            {
                "times are rounded: ts and dur have parts of a microsecond, and large values": (
                    abs(later - got) > 1e-5
                )
            },
            expected=f"{want:.6g} as before, with all times divided by 8, and 16 seconds later",
            seen=f"{later:.6g}",
        )


@exercise_12_2.check("a made trace of a CPU")
def overlap_on_cpu(answer) -> None:
    by_name(answer, made.planted_overlap(), made.overlap_by_moments, usual.overlap_mistakes)


@exercise_12_2.check("a made trace of a GPU")
def overlap_on_gpu(answer) -> None:
    by_name(answer, made.planted_gpu(), made.overlap_by_moments, usual.gpu_overlap_mistakes)


@exercise_12_2.check("nothing to hide, nothing to measure")
def overlap_edges(answer) -> None:
    step, compute = made.label("ProfilerStep#1", 0, 100), made.op("aten::mm", 0, 50)
    alone = made.trace_of([step, compute])
    expect_equal(answer(alone), 1.0, what="overlap_fraction where nothing communicates")
    outside = made.trace_of([step, compute, made.message(110, 130)])
    expect_equal(answer(outside), 1.0, what="overlap_fraction where all messages lie outside")
    apart = [step, compute, made.label("ProfilerStep#2", 150, 250), made.message(40, 60)]
    pause = {
        "the pause between two steps counts, and what is sent in it": 0.25,
        "that is the mean of the steps' shares: moments count, whatever step they lie in": 0.75,
    }
    got, what = answer(made.trace_of([*apart, made.message(110, 130)])), "with a pause in it"
    expect_equal(got, 0.5, what=f"overlap_fraction {what}", looks_like=pause)
    idle = made.trace_of([step, made.message(10, 20)])
    expect_equal(answer(idle), 0.0, what="overlap_fraction where nothing computes")
    no_steps = made.trace_of([compute, made.message(10, 20)])
    expect_raises(ValueError, answer, no_steps, what="a trace without a step")
    of_the_cpu = made.trace_of([step, compute, made.label("nccl:all_reduce", 60, 70)])
    hint = "without kernels nobody knows what hid NCCL's messages: a profile of the CPU alone"
    what = "NCCL's labels and no kernels"
    expect_raises(ValueError, answer, of_the_cpu, what=what, hint=hint)


@exercise_12_2.check("random traces, microsecond by microsecond")
def overlap_at_random(answer) -> None:
    at_random(answer, made.overlap_by_moments)


exercise_12_3 = checks_for(
    "12.3",
    name="data_stall_fraction",
    difficulty=2,
    minutes=15,
    hint="The unions of 12.2 serve again: the steps, the waits, the kernels.",
)


@exercise_12_3.check("a made trace of a CPU")
def stall_on_cpu(answer) -> None:
    by_name(answer, made.planted_stall(), made.stall_by_moments, usual.stall_mistakes)


@exercise_12_3.check("a made trace of a GPU")
def stall_on_gpu(answer) -> None:
    by_name(answer, made.planted_gpu(), made.stall_by_moments, usual.gpu_stall_mistakes)


@exercise_12_3.check("edges, and random traces microsecond by microsecond")
def stall_at_random(answer) -> None:
    step = made.label("ProfilerStep#1", 0, 100)
    expect_equal(answer(made.trace_of([step])), 0.0, what="data_stall_fraction without a wait")
    no_steps = made.trace_of([made.label("data", 0, 10)])
    expect_raises(ValueError, answer, no_steps, what="a trace without a step")
    at_random(answer, made.stall_by_moments)


exercise_12_4 = checks_for(
    "12.4",
    name="model_flops_utilization",
    difficulty=2,
    minutes=15,
    hint=(
        "Multiplications a token: 4 D^2 + 2 D d_ff in each layer, V D for the output, and in each "
        "layer 2 T D for the two products of attention."
    ),
)


@exercise_12_4.check("FLOPs as torch counts them")
def flops_counted(answer) -> None:
    config = TransformerConfig(
        vocab_size=37, d_model=24, num_heads=3, num_layers=5, d_ff=56, dropout=0.1, max_len=64
    )
    rows, length = 7, 11
    want = lab.counted_flops(config, rows, length) / (0.4 * 1e9)
    D, F, L, V = config.d_model, config.d_ff, config.num_layers, config.vocab_size
    body, output, attention = L * (4 * D * D + 2 * D * F), V * D, 2 * L * length * D
    others = L * (9 * D + F) + 2 * D  # biases and norms
    whole = body + output + attention
    products = {
        "the products of attention are left out": body + output,
        "the output matrix is left out": body + attention,
        "the embedding counts as a product, too: looking up is free": whole + output,
        "one matrix of the feed-forward network is counted: it has two": whole - L * D * F,
        "three projections of attention are counted: the output has one, too": whole - L * D * D,
        "the length is max_len: it is that of the batch": body
        + output
        + attention * config.max_len / length,
        "d_ff is taken for 4 d_model": 12 * L * D * D + output + attention,
        "attention is halved: it has two products, and the causal mask saves nothing": whole
        - attention / 2,
        "the causal mask is taken off, (T + 1) / 2 places a token: it saves nothing here": whole
        - attention * (length - 1) / (2 * length),
        "half of the length counts, as under a causal mask: it saves nothing here": whole
        - attention * (length - length // 2) / length,
        "attention counts one head, and there are num_heads": body
        + output
        + attention / config.num_heads,
        "attention counts all of d_model for each head": whole + attention * (config.num_heads - 1),
        "tokens are (rows, length), and are read as (length, rows)": body
        + output
        + attention * rows / length,
        "biases and norms count as products": whole + others,
        "rows are left out": whole / rows,
        "the backward is left out: it costs two forwards": whole / 3,
        "the backward is counted as one forward: it costs two": whole * 2 / 3,
        "a multiplication with its addition is two FLOPs": whole / 2,
        "recomputation counts: a model's FLOPs are 3 forwards, not 4": whole * 4 / 3,
        "that is in percent": whole * 100,
    }
    got = float(answer(config, (rows, length), 0.4, 1e9))
    recognise(
        alike(whole * got / want, products, functools.partial(math.isclose, rel_tol=1e-9)),
        expected=f"{want:.6g}, by torch's FlopCounterMode",
        seen=f"{got:.6g}",
    )
    expect_close(torch.tensor(got), torch.tensor(want), what="MFU", rtol=1e-5)


@exercise_12_4.check("other sizes, and what cannot be")
def flops_at_random(answer) -> None:
    for number in range(4):
        draw = torch.Generator().manual_seed(fresh_seed())
        heads, width, layers, ff, vocab, rows, length = torch.randint(
            1, 9, (7,), generator=draw
        ).tolist()
        config = TransformerConfig(
            vocab_size=10 + vocab, d_model=2 * heads * width, num_heads=heads, num_layers=layers,
            d_ff=3 * ff, tie_embeddings=number % 2 == 0, fused=number < 2, max_len=64,
        )  # fmt: skip
        want = lab.counted_flops(config, rows, 5 * length) / (0.25 * 3e10)
        looked_up = 6 * config.vocab_size * config.d_model * 5 * rows * length / (0.25 * 3e10)
        got = torch.tensor(float(answer(config, (rows, 5 * length), 0.25, 3e10)))
        looks_like = {
            "the embedding counts as a product where it is not tied: looking up is free": (
                torch.tensor(want + looked_up)
            ),
        }
        what = f"MFU of {layers} layers"
        expect_close(got, torch.tensor(want), what=what, rtol=1e-5, looks_like=looks_like)
    small = TransformerConfig(vocab_size=10, d_model=8, num_heads=2, num_layers=1, d_ff=8)
    want = lab.counted_flops(small, 2, 3) / (0.5 * 1e3)
    got = float(answer(small, (2, 3), 0.5, 1e3))
    recognise(
        {"a share above 1 is cut off: it is what says that the peak is wrong": got == 1.0},
        expected=f"{want:.6g}",
        seen=f"{got:.6g}",
    )
    for seconds, peak in ((0.0, 1e9), (-0.25, 1e9), (1.0, 0.0), (1.0, -2.5)):
        bad = min(seconds, peak)
        what = f"{'seconds' if bad == seconds else 'peak'} {bad}"
        expect_raises(ValueError, answer, small, (1, 2), seconds, peak, what=what)


exercise_12_5 = checks_for(
    "12.5",
    name="diagnose",
    difficulty=3,
    minutes=25,
    hint=(
        "Count, per step, what begins inside a step: aten::item, messages, aten:: in all. Divide "
        "by the number of steps in that trace."
    ),
)
HEALTHY = {"items": 3, "messages": 7, "operators": 200, "waits": 50}
# Each case: the reason, what differs from HEALTHY, the steps, the mistake that another answer is.
CASES = [
    ("none", {}, 2, "a healthy run is called slow"),
    ("none", {}, 6, "counts of the whole trace are compared, or by one number of steps for both"),
    ("none", {"operators": 280}, 2, "ten more, or twice as many, is enough: both are asked for"),
    ("none", {"operators": 280}, 1, "what lies before the first step is counted"),
    ("item", {"items": 90, "operators": 900}, 2, "operators are asked first"),
    ("item", {"items": 90, "messages": 60}, 2, "messages are asked before reads"),
    ("buckets", {"messages": 60}, 4, "the messages are not counted, or not per step"),
    ("buckets", {"messages": 18}, 4, "one kind of collective is counted: gloo: begins all names"),
    ("buckets", {"messages": 60, "operators": 450}, 4, "messages that bring operators along"),
    ("kernels", {"operators": 640}, 1, "a run of many operators is not recognised"),
    ("loader", {"waits": 700}, 2, "a run that waits for data is not recognised"),
    ("buckets", {"messages": 60, "waits": 700}, 2, "waiting is asked first"),
    ("none", {"items": 12}, 2, "nine reads more count as many: at least 10 more are asked for"),
    ("none", {"operators": 390}, 2, "less than twice as many operators count as grown"),
    (
        "none",
        {"waits": 150},
        2,
        "several times the healthy run's waiting counts: 0.2 more is asked",
    ),
    ("none", {"waits": 210}, 2, "waiting is compared with 0.2, not with the healthy run's"),
    ("none", {"waits": 249}, 2, "0.199 more of waiting counts: 0.2 are asked for"),
    ("loader", {"waits": 251}, 2, "0.201 more of waiting does not count: 0.2 are asked for"),
    ("item", {"items": 13}, 2, "ten reads more, and twice as many, do not count"),
    ("kernels", {"operators": 406}, 2, "exactly twice as many operators do not count"),
    ("item", {"items": 40, "operators": 4000}, 1, "the largest growth is taken, not the first"),
]


@exercise_12_5.check("made traces, each with one reason")
def made_reasons(answer) -> None:
    inner = made.without(
        made.counted_trace(3, **{**HEALTHY, "items": 7}), lambda e: "_local_scalar" in e["name"]
    )
    got = answer(made.counted_trace(3, **{**HEALTHY, "items": 12}), inner)
    words = "the operator inside a read is counted as one more: aten::item alone is a read"
    case = "the reason (12 reads, 7 in the healthy, where no inner operator is recorded)"
    recognise({words: got == "item"}, expected=f"{case} = 'none'", seen=f"{got!r}")
    healthy = made.counted_trace(3, **HEALTHY)
    for want, change, steps, words in CASES:
        got = answer(made.counted_trace(steps, **{**HEALTHY, **change}), healthy)
        case = f"the reason with {change} in place of the healthy run's {HEALTHY}"
        expect_equal(got, want, what=case, mistake=words)


@exercise_12_5.check("made traces, in which not all steps are the same")
def uneven_reasons(answer) -> None:
    def trace(steps: int = 3, **change):
        return made.counted_trace(steps, **{**HEALTHY, **change})

    def first_of_two(event) -> bool:
        return event["name"].startswith("gloo:") and event["ts"] < 3000

    def reads(event) -> bool:
        return event["name"] == "aten::item"

    nodes = [made.op("AddmmBackward0", 2000 + k, 2001 + k) for k in range(900)]
    labels = [made.label("aten::item", 2000 + k, 2001 + k) for k in range(900)]
    others = [made.op("aten::item_of", 2000 + k, 2001 + k) for k in range(90)]

    def second_of_three(event) -> bool:
        return event["name"] == "ProfilerStep#5"

    for want, slow, healthy, case, words in (
        ("buckets", made.without(trace(2, messages=60), first_of_two), trace(),
         "60 messages in one of 2", "one step is looked at, not the average of all"),
        ("item", trace(items=60), trace(items=0), "60 reads, none in the healthy",
         "where the healthy run reads nothing, reads cannot grow: do not divide by its count"),
        ("none", trace(5, items=13.6), trace(items=11 / 3), "13.6 reads, 3.67 in the healthy",
         "counts a step are rounded: 13.6 are not 10 more than 3.67"),
        ("none", made.without(trace(items=90), reads, "dur"), trace(), "90 reads without a dur",
         "spans that were cut off are counted: they have no dur"),
        ("none", made.without(trace(operators=280), second_of_three), trace(),
         "280 operators, as many between the two steps", "what lies between the steps is counted"),
        ("buckets", made.without(trace(messages=24), second_of_three), trace(),
         "24 messages in each of the steps 4 and 6",
         "steps are counted from the first number to the last, and some may be missing"),
        ("none", {**trace(), "traceEvents": [*trace()["traceEvents"], *labels]}, trace(),
         "900 labels called aten::item",
         "labels count as operators and reads: those are spans of category cpu_op"),
        ("none", {**trace(), "traceEvents": [*trace()["traceEvents"], *others]}, trace(),
         "90 operators aten::item_of", "a read is called aten::item, and nothing more"),
        ("none", {**trace(), "traceEvents": [*trace()["traceEvents"], *nodes]}, trace(),
         "900 autograd nodes", "autograd nodes count as operators, whose names begin with aten::"),
        ("loader", trace(waits=650), trace(waits=400), "650 waits, 400 in the healthy",
         "the waits' quotient is asked for, not their difference"),
    ):  # fmt: skip
        got = answer(slow, healthy)
        expect_equal(got, want, what=f"the reason ({case})", mistake=words)


def on_gpu(count: int, at: int = 10, labels: int = 2, name: str = "nccl", early: int = 0):
    """A step of a GPU with so many of NCCL's kernels from a microsecond on, and some before it."""
    names = ["sgemm", *[f"{name}DevKernel_AllReduce_Sum_f32"] * count]
    kernels = [made.kernel(name, at + k, at + k + 5) for k, name in enumerate(names)]
    kernels += [made.kernel("ncclDevKernel_Broadcast", -20 - k, 4) for k in range(early)]
    kernels += [made.label("nccl:all_reduce", 20 + k, 25 + k) for k in range(labels)]
    step = made.label("ProfilerStep#3", 0, 200)
    copy = {**made.label("ProfilerStep#3", 5, 400), "cat": "gpu_user_annotation", "pid": 0}
    return made.trace_of([step, copy, *kernels])


@exercise_12_5.check("kernels of a GPU, and traces without steps")
def gpu_reasons(answer) -> None:
    for count, at, words in (
        (60, 10, "NCCL's kernels are not counted as messages"),
        (14, 10, "the step's copy on the GPU's own track is counted as one more step"),
        (
            60,
            250,
            "a step's second span, on the GPU's track, is left out",
        ),
        (12, 387, "what begins in a step and ends after it is left out"),
    ):
        got = answer(on_gpu(count, at), on_gpu(2))
        what = f"the reason of {count} NCCL kernels from microsecond {at} on"
        expect_equal(got, "buckets", what=what, mistake=words)
    words = "labels with 'nccl' in their name are counted: only kernels are messages"
    got = answer(on_gpu(2, labels=60), on_gpu(2))
    expect_equal(got, "none", what="the reason of 60 labels 'nccl:all_reduce'", mistake=words)
    words = "'nccl' is looked for in one case only, and these kernels are called NCCL..."
    got = answer(on_gpu(60, name="NCCL"), on_gpu(2))
    expect_equal(got, "buckets", what="the reason of 60 kernels 'NCCLDevKernel'", mistake=words)
    words = "what begins before a step and ends in it is counted: it begins within no step"
    got = answer(on_gpu(2, early=60), on_gpu(2))
    expect_equal(got, "none", what="the reason of 60 kernels cut by the start", mistake=words)
    without = made.trace_of([made.op("aten::mm", 0, 5)])
    for pair in ((without, on_gpu(2)), (on_gpu(2), without)):
        expect_raises(ValueError, answer, *pair, what="a trace without a step")


@functools.cache
def real_runs():
    """Real traces of this machine and this process; they do not depend on the answer."""
    runs = suspects.record_runs()
    kept = ("ph", "name", "cat", "ts", "dur", "pid", "tid")
    return {
        name: {"traceEvents": [{k: e[k] for k in kept if k in e} for e in run.trace["traceEvents"]]}
        for name, run in runs.items()
    }


@exercise_12_5.check("fresh traces of this machine")
def real_reasons(answer) -> None:
    runs = real_runs()
    said = {name: answer(trace, runs["none"]) for name, trace in runs.items()}
    expect_equal(said, {name: name for name in runs}, what="the reasons of five real runs")
