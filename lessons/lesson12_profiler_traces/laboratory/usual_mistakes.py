"""What the usual mistakes say of a made trace, each with the words for it."""

from collections.abc import Mapping
from typing import Any

from lessons.lesson12_profiler_traces.laboratory.made_traces import (
    MAIN,
    Trace,
    Wanted,
    both,
    is_compute,
    is_kernel,
    is_message,
    is_nccl,
    is_step,
    is_waiting,
    moments,
    share,
    spans_in,
    stall_by_moments,
)


def cut_short(trace: Trace, wanted: Wanted) -> list[int]:
    """The union in which a span's end replaces that of the one in which it lies."""
    united: list[tuple[int, int]] = []
    for start, end in sorted((e["ts"], e["ts"] + e["dur"]) for e in spans_in(trace, wanted)):
        meets = bool(united) and start <= united[-1][1]
        begin = united.pop()[0] if meets else start
        united.append((begin, end))
    size = len(moments(trace, wanted))
    return [int(any(start <= moment < end for start, end in united)) for moment in range(size)]


def is_label(event: Mapping[str, Any]) -> bool:
    """Whether it is a span by record_function on the CPU."""
    return event["cat"] == "user_annotation"


def by_message(trace: Trace, steps: list[int], busy: list[int]) -> tuple[list[float], list[int]]:
    """Each message's own share in the steps; the time of those that meet compute, and of all."""
    pieces = [
        [m for m in range(e["ts"], e["ts"] + e["dur"]) if steps[m]]
        for e in spans_in(trace, is_message)
    ]
    shares = [sum(busy[m] > 0 for m in piece) / len(piece) for piece in pieces if piece]
    whole = [0, 0]
    for each in spans_in(trace, is_message):
        whole[0] += each["dur"] * any(busy[each["ts"] : each["ts"] + each["dur"]])
        whole[1] += each["dur"]
    return shares, whole


def overlap_mistakes(trace: Trace) -> dict[str, float]:
    """What the usual mistakes say of a CPU trace."""
    steps, sent, busy = (moments(trace, each) for each in (is_step, is_message, is_compute))
    inside = [a * bool(b) for a, b in zip(sent, steps, strict=True)]
    once, hidden = both(inside), both(inside, busy)
    twice = [a * bool(b) for a, b in zip(busy, once, strict=True)]
    labelled = both(once, moments(trace, lambda e: not is_message(e) and not is_step(e)))
    operators = moments(trace, lambda e: e["cat"] == "cpu_op")
    one_thread = moments(trace, lambda e: is_compute(e) and e["tid"] == MAIN)
    reduced = both(moments(trace, lambda e: e["name"] == "gloo:all_reduce"), steps)
    short = both(cut_short(trace, is_message), steps), cut_short(trace, is_compute)
    begun = moments(trace, lambda e: is_message(e) and steps[e["ts"]] > 0)
    shares, whole = by_message(trace, steps, busy)
    return {
        "nested operators count twice: unite compute before measuring it": share(twice, once),
        "a span that lies in another ends the union: its end is the larger of the two": share(
            both(*short), short[0]
        ),
        "two messages at a time count twice: unite the messages first": share(
            [a * bool(b) for a, b in zip(inside, busy, strict=True)], inside
        ),
        "what lies outside the steps counts: clip at both ends": share(
            both(sent, busy), both(sent)
        ),
        "a message that begins in a step counts to its end: clip it there": share(
            both(begun, busy), both(begun)
        ),
        "a message counts as hidden whole when a part of it is": whole[0] / whole[1],
        "labels count as compute: 'backward' covers every wait inside it": share(labelled, once),
        "operators that are not aten:: count as compute": share(both(once, operators), once),
        "only gloo:all_reduce counts: every name that begins with gloo: is a message": share(
            both(reduced, busy), reduced
        ),
        "only one thread's operators count": share(both(once, one_thread), once),
        "operators of any category count as compute: only cpu_op's do": share(
            both(once, moments(trace, lambda e: e["name"].startswith("aten::"))), once
        ),
        "that is the mean of the messages' own shares: moments count": sum(shares) / len(shares),
        "that is a share of the compute time": share(hidden, both(busy, steps)),
        "that is a share of the steps' time": share(hidden, both(steps)),
        "that is the share that is not hidden": 1 - share(hidden, once),
    }


def gpu_overlap_mistakes(trace: Trace) -> dict[str, float]:
    """What the usual mistakes say of a GPU's trace."""
    steps, sent = moments(trace, is_step), moments(trace, is_nccl)
    once, kernels = both(sent, steps), moments(trace, is_kernel)
    by_cpu = both(sent, moments(trace, lambda e: is_step(e) and e["cat"] == "user_annotation"))
    by_gpu = both(sent, moments(trace, lambda e: is_step(e) and e["cat"] != "user_annotation"))
    gloo = both(moments(trace, lambda e: e["name"].startswith("gloo:")), steps)
    begins = moments(trace, lambda e: is_nccl(e) and e["name"].lower().startswith("nccl"))
    begins = both(begins, steps)
    lower = both(moments(trace, lambda e: is_nccl(e) and "nccl" in e["name"]), steps)
    rest = moments(trace, lambda e: is_kernel(e) and "nccl" not in e["name"])
    busy = moments(trace, lambda e: is_kernel(e) and not is_nccl(e))
    other = moments(trace, lambda e: is_kernel(e) and not e["name"].lower().startswith("nccl"))
    all_sent = [int(bool(a or b)) for a, b in zip(once, gloo, strict=True)]
    named = both(moments(trace, lambda e: "nccl" in e["name"].lower()), steps)
    copying = moments(trace, lambda e: e["cat"].startswith("gpu_mem") or is_kernel(e))
    copying = [a - b for a, b in zip(copying, sent, strict=True)]
    beside = [a + b for a, b in zip(moments(trace, is_compute), busy, strict=True)]
    return {
        "the CPU's operators count as compute on a GPU": share(
            both(once, moments(trace, is_compute)), once
        ),
        "the CPU's operators count as compute beside the kernels": share(both(once, beside), once),
        "NCCL's kernels count as compute and hide themselves": share(both(once, kernels), once),
        "'nccl' is looked for in one case only": share(both(lower, rest), lower),
        "'nccl' is looked for at the beginning of the name only": share(
            both(begins, other), begins
        ),
        "a step's second span, on the GPU's track, is left out": share(both(by_cpu, busy), by_cpu),
        "a step's span on the CPU is left out: a step is both of its spans": share(
            both(by_gpu, busy), by_gpu
        ),
        "a GPU's trace is read as a CPU's: what the trace holds decides": share(
            both(gloo, moments(trace, is_compute)), gloo
        ),
        "gloo's spans count as messages on a GPU, too": share(both(all_sent, busy), all_sent),
        "labels with 'nccl' in their name count: only kernels are messages": share(
            both(named, busy), named
        ),
        "copies count as compute: only kernels do": share(both(once, copying), once),
    }


def stall_mistakes(trace: Trace) -> dict[str, float]:
    """What the usual mistakes say of a trace's waits."""
    steps, waits = moments(trace, is_step), moments(trace, is_waiting)
    idle = [int(not count) for count in moments(trace, is_kernel)]
    inside = [a * bool(b) * c for a, b, c in zip(waits, steps, idle, strict=True)]
    named = moments(trace, lambda e: e["name"] == "data" and e["cat"] == "user_annotation")
    everywhere = moments(trace, lambda e: e["name"] == "data" or is_waiting(e))
    begins = moments(trace, lambda e: e["name"].startswith("data") and e["cat"] != "cpu_op")
    counted = moments(trace, lambda e: e["name"].startswith("enumerate") or is_waiting(e))
    words = moments(trace, lambda e: ("data" in e["name"] and is_label(e)) or is_waiting(e))
    numbers = [m for m, count in enumerate(steps) if count]
    hull = [int(numbers[0] <= m <= numbers[-1]) for m in range(len(steps))]
    true, single = stall_by_moments(trace), both(waits, steps, idle)
    spans = [(e["ts"], e["dur"]) for e in spans_in(trace, is_step)]
    means = [sum(single[start : start + size]) / size for start, size in spans]
    everything = spans_in(trace, lambda e: True)
    whole = max(e["ts"] + e["dur"] for e in everything) - min(e["ts"] for e in everything)
    return {
        "that is the mean of the steps' shares, as if all were equally long": sum(means)
        / len(means),
        "waits that lie in one another count twice": share(inside, both(steps)),
        "what lies outside the steps counts: clip at both ends": share(
            both(waits, idle), both(steps)
        ),
        "the pause between the steps is part of the time": share(both(waits, hull, idle), hull),
        "the waits are divided by the time between the steps, too": share(both(inside), hull),
        "what torch's DataLoader records itself is left out": share(
            both(named, steps, idle), both(steps)
        ),
        "names count whatever their category: not every 'data' is a wait": share(
            both(everywhere, steps, idle), both(steps)
        ),
        "names that only begin with 'data' count": share(both(begins, steps, idle), both(steps)),
        "every label with 'data' in its name counts": share(both(words, steps, idle), both(steps)),
        "names that only begin with 'enumerate' count": share(
            both(counted, steps, idle), both(steps)
        ),
        "that is a share of the whole trace: the steps' time counts": sum(single) / whole,
        "that is the share in which nothing waits": 1 - true,
    }


def gpu_stall_mistakes(trace: Trace) -> dict[str, float]:
    """What the usual mistakes say of a GPU's trace."""
    steps, waits = moments(trace, is_step), moments(trace, is_waiting)
    idle = [int(not count) for count in moments(trace, is_kernel)]
    copied = moments(trace, lambda e: e["name"] == "data")
    by_cpu = moments(trace, lambda e: is_step(e) and is_label(e))
    silent = [int(not n) for n in moments(trace, lambda e: is_kernel(e) and not is_nccl(e))]
    within, running = both(waits, steps), both(steps, moments(trace, is_kernel))
    copies = moments(trace, lambda e: e["cat"].startswith("gpu_mem") or is_kernel(e))
    uncopied = [int(not n) for n in copies]
    return {
        "a copy counts as a kernel that runs: category gpu_memcpy is none": share(
            both(waits, steps, uncopied), both(steps)
        ),
        "that is a share of the moments without a kernel: divide by all of the steps": share(
            both(waits, steps, idle), both(steps, idle)
        ),
        "while an NCCL kernel runs, waiting counts: it is a kernel, too": share(
            both(waits, steps, silent), both(steps)
        ),
        "all of the kernels' time is taken off, not that in the waits": (
            (sum(within) - sum(running)) / sum(both(steps))
        ),
        "a wait counts although a kernel runs meanwhile": share(both(waits, steps), both(steps)),
        "a step and its second span, on the GPU's track, count as two steps' time": share(
            both(waits, steps, idle), steps
        ),
        "the label's copy on the GPU's own track counts as a wait": share(
            both(copied, steps, idle), both(steps)
        ),
        "a step's second span, on the GPU's track, is left out": share(
            both(waits, by_cpu, idle), both(by_cpu)
        ),
        "that is the share in which nothing waits": 1 - stall_by_moments(trace),
    }
