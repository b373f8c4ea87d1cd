"""Lesson 12, the instructor's side: where a step's time goes, read from its trace.

The lesson's one idea: a stopwatch says how long a step takes, and only a trace says why. The
figures are shares of the same step time (waiting for data, communication that nothing hides,
arithmetic beside the peak), so they add up to a diagnosis, and they predict what a fix can gain.

Points are the difficulty at the exercise (13 in all). What to ask behind a right answer: why spans
are united before they are added; what one would see if the first step were in the trace; why
waiting for data on a GPU need not cost anything; why recomputed activations do not count in MFU.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.profiler import profile, record_function, schedule

from shared.errors import InputError
from shared.measuring.trace import file_alone
from shared.model.config import TransformerConfig
from shared.ranks.group import current_rank

Event = Mapping[str, Any]
Interval = tuple[float, float]
_END = object()


def profile_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Float[Tensor, ""]],
    folder: Path,
    *,
    wait: int = 1,
    warmup: int = 1,
    active: int = 3,
) -> Path:
    """Train on all batches; write a trace of some steps, one file per rank, and return its Path.

    The first `wait` + `warmup` steps are not in the trace, the next `active` steps are, once, each
    as torch's span "ProfilerStep#n". A step holds four spans by record_function, in this order:
    "data" (waiting for the step's own batch), "forward" (`loss_of(model, batch)`, once),
    "backward" and "optimizer" (step, and gradients cleared). No number is read from the device, and
    a step's loss and its graph are not kept for longer than the next step. No profiler is running
    afterwards, even when `loss_of` raises an error, which is passed on. The file is
    folder/rank_R.json, in Chrome's format. Raises ValueError, with both numbers, when there are
    fewer batches than steps to trace. `folder` exists.
    """
    path = folder / f"rank_{current_rank()}.json"
    plan = schedule(wait=wait, warmup=warmup, active=active, repeat=1)

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))

    waiting, steps = iter(batches), 0
    with profile(schedule=plan, on_trace_ready=write, **file_alone()) as profiler:
        while True:
            with record_function("data"):
                batch = next(waiting, _END)
            if batch is _END:
                break
            with record_function("forward"):
                loss = loss_of(model, batch)
            with record_function("backward"):
                loss.backward()
            with record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            profiler.step()
    if steps < wait + warmup + active:
        path.unlink(missing_ok=True)  # what the profiler wrote of a part
        raise InputError(
            f"a trace of steps {wait + warmup} to {wait + warmup + active - 1} needs "
            f"{wait + warmup + active} batches, got {steps}"
        )
    return path


def overlap_fraction(trace: Mapping[str, Any]) -> float:
    """Return the share of the communication time during which this rank also computes, 0 to 1.

    `trace` is one rank's file in Chrome's format. Events with "ph": "X" and a "dur" are spans, in
    any order; only their parts within the steps count ("ProfilerStep#...", of any category: a
    GPU's track has a second span for each step, which ends with its last kernel). On a GPU (there
    are events of category "kernel") the kernels with "nccl" in their name, in any case, communicate
    and the others compute. Without kernels spans called "gloo:..." communicate, and operators
    (category "cpu_op") called "aten::..." compute. A moment at which two messages travel counts
    once. 1.0 where nothing communicates. Raises ValueError without a step, and where there are
    NCCL's labels ("nccl:...") and no kernel: a profile of the CPU alone, which does not say when
    they traveled.
    """
    steps = _steps(trace)
    kernels = _spans(trace, lambda event: event.get("cat") == "kernel")
    if kernels:
        sent = _spans(trace, lambda e: e.get("cat") == "kernel" and "nccl" in e["name"].lower())
        busy = _spans(trace, lambda e: e.get("cat") == "kernel" and "nccl" not in e["name"].lower())
    elif _spans(trace, lambda e: e["name"].startswith("nccl:")):
        raise InputError("NCCL's labels, and no kernels: profile with ProfilerActivity.CUDA")
    else:
        sent = _spans(trace, lambda e: e["name"].startswith("gloo:"))
        busy = _spans(trace, lambda e: e.get("cat") == "cpu_op" and e["name"].startswith("aten::"))
    sent = _common(sent, steps)
    return _length(_common(sent, busy)) / _length(sent) if _length(sent) > 0 else 1.0


def data_stall_fraction(trace: Mapping[str, Any]) -> float:
    """Return the share of the steps' time in which training waits for data, 0 to 1.

    Waiting are the spans of category "user_annotation" that are called "data", and those that
    torch's DataLoader records itself, whose names begin with "enumerate(DataLoader)"; one may lie
    in the other. What counts is their part within the steps. On a GPU a kernel may be running
    meanwhile, and then nothing waits: those moments do not count. Raises ValueError without a step.
    """
    steps = _steps(trace)

    def waits(event: Event) -> bool:
        ours = event["name"] == "data" or event["name"].startswith("enumerate(DataLoader)")
        return ours and event.get("cat") == "user_annotation"

    waiting = _common(_spans(trace, waits), steps)
    kernels = _spans(trace, lambda event: event.get("cat") == "kernel")
    return (_length(waiting) - _length(_common(waiting, kernels))) / _length(steps)


def model_flops_utilization(
    config: TransformerConfig, tokens: tuple[int, int], seconds: float, peak: float
) -> float:
    """Return the share of `peak` that the language model's own arithmetic took of a step.

    `tokens` is the (rows, length) of the batch on this rank, `seconds` the time of a training step,
    `peak` in FLOP/s. Counted are the matrix products that the model needs, two FLOPs for each
    multiplication with its addition: the projections of attention, both attention products over
    the whole length (a causal mask saves nothing here), both layers of the feed-forward network
    and the output matrix; a backward costs two forwards. Looking up embeddings is free. What is
    computed a second time (gradient checkpointing) does not count. Raises ValueError unless
    seconds and peak are positive.

    Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N + 12 L H Q T a token.
    """
    for name, value in (("seconds", seconds), ("peak", peak)):
        if not value > 0:
            raise InputError(f"{name} must be above 0, got {value}")
    rows, length = tokens
    layer = 4 * config.d_model**2 + 2 * config.d_model * config.d_ff
    weights = config.num_layers * layer + config.vocab_size * config.d_model
    attention = config.num_layers * 2 * length * config.d_model  # q times k, weights times v
    return 6 * rows * length * (weights + attention) / (seconds * peak)


def diagnose(trace: Mapping[str, Any], healthy: Mapping[str, Any]) -> str:
    """Return why a run is slow: "item", "buckets", "kernels", "loader", or "none".

    Both traces are one rank's, of the same model on the same batch; they may hold different
    numbers of steps, told by their names. Counted are spans that begin within a step (its span on
    a GPU's track among it, as in 12.2), per step, not rounded: numbers read from the device
    ("aten::item"), messages ("gloo:...", or kernels with "nccl" in their name) and operators
    ("aten::..."); reads and operators are of category "cpu_op", as in 12.2. A count has grown when
    it is at least twice that of `healthy` and at least 10 higher. Asked in this order, the first
    that holds is returned: "item": the reads have grown; "buckets": the messages have; "kernels":
    the operators have; "loader": the data stall fraction is at least 0.2 higher. Reads and messages
    bring operators of their own, so those come last of the counts. Raises ValueError for a trace
    without a step.
    """
    counts, usual = _counts(trace), _counts(healthy)
    for name, seen in counts.items():
        if seen >= 2 * usual[name] and seen - usual[name] >= 10:
            return name
    more = data_stall_fraction(trace) - data_stall_fraction(healthy)
    return "loader" if more >= 0.2 else "none"


def _counts(trace: Mapping[str, Any]) -> dict[str, float]:
    """What happens in a step, on average, the most telling first."""
    steps = _steps(trace)
    names: list[tuple[str, str]] = [
        (event["name"], event.get("cat", ""))
        for event in trace["traceEvents"]
        if _is_span(event) and any(start <= event["ts"] < end for start, end in steps)
    ]
    numbers = {
        event["name"]
        for event in trace["traceEvents"]
        if _is_span(event) and event["name"].startswith("ProfilerStep#")
    }
    found = {
        "item": sum(name == "aten::item" and category == "cpu_op" for name, category in names),
        "buckets": sum(_is_message(name, category) for name, category in names),
        "kernels": sum(n.startswith("aten::") and category == "cpu_op" for n, category in names),
    }
    return {name: count / len(numbers) for name, count in found.items()}


def _is_message(name: str, category: str) -> bool:
    return name.startswith("gloo:") or (category == "kernel" and "nccl" in name.lower())


def _is_span(event: Event) -> bool:
    return event.get("ph") == "X" and "dur" in event


def _spans(trace: Mapping[str, Any], wanted: Callable[[Event], bool]) -> list[Interval]:
    """The union of the spans that are wanted: sorted, none touches the next."""
    united: list[Interval] = []
    for start, end in sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if _is_span(event) and wanted(event)
    ):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def _steps(trace: Mapping[str, Any]) -> list[Interval]:
    """The time of the steps; on a GPU until its last kernel, which ends after the CPU's step."""
    steps = _spans(trace, lambda event: event["name"].startswith("ProfilerStep#"))
    if not steps:
        raise InputError("the trace holds no ProfilerStep#...: nobody called profiler.step()")
    if not _length(steps):
        raise InputError("the trace's ProfilerStep#... take 0 microseconds: profile it again")
    return steps


def _common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """What lies in both unions, in one pass over each."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(union: list[Interval]) -> float:
    return sum(end - start for start, end in union)


NOTES = {
    "12.1": """
profile_training: 3 points, 30 minutes. The schedule 1, labels that hold what they say 1, training
unchanged and a file a rank 1.
Look for: next() inside the label "data" (a for loop around the labels hides the wait between two
steps); profiler.step() as the last act of a step; repeat=1; no loss.item().
Common mistakes: step 0 in the trace; one file name for all ranks; record_function around the
whole loop; stop() without a with block or finally, which an error passes by; losses kept in a list
without detach().
""",
    "12.2": """
overlap_fraction: 3 points, 30 minutes. Look for: both sides united before anything is added;
clipping to the steps; GPU and CPU told apart by what the trace holds, not by what the machine has;
a profile of the CPU alone of a run with NCCL refused, in place of "all hidden".
Common mistakes: durations of nested operators added up (more than 100 %); a span that counts
whole when it overlaps a little; the label "backward" taken for compute, which hides everything.
""",
    "12.3": """
data_stall_fraction: 2 points, 15 minutes. Look for: nested loader spans counted once; the copy of
the label on the GPU's own track left out; kernels that run meanwhile. Ask what num_workers changes
in the trace, and what it cannot change.
""",
    "12.4": """
model_flops_utilization: 2 points, 15 minutes. Look for: the output matrix (a fifth of a small
model), the attention term, the factor of three. Ask why embeddings are free, why the mask saves
nothing, and what HFU would count in addition.
""",
    "12.5": """
diagnose: 3 points, 25 minutes. Look for: counts per step, not per trace; the order of the
questions, since reading 1,000 numbers brings 5,000 operators along; what happens when the healthy
run reads none. Ask which of the four a stopwatch could tell apart (none), what a fix can gain, and
what "none" does not exclude (a rank that is late: its own trace has the usual counts).
""",
}
