"""Made traces with known answers: integers for times, so that every microsecond can be asked."""

import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Event = dict[str, Any]
Trace = dict[str, Any]
Wanted = Callable[[Mapping[str, Any]], bool]
MAIN, OTHER, GLOO, STREAM = 11, 12, 21, 7  # threads, and a stream of a GPU


def span(name: str, category: str, start: int, end: int, thread: int = MAIN) -> Event:
    """A complete event."""
    return {
        "ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start,
        "pid": 1000, "tid": thread,
    }  # fmt: skip


def label(name: str, start: int, end: int) -> Event:
    """A span by record_function."""
    return span(name, "user_annotation", start, end)


def op(name: str, start: int, end: int, thread: int = MAIN) -> Event:
    """An operator."""
    return span(name, "cpu_op", start, end, thread)


def message(start: int, end: int, thread: int = GLOO, name: str = "all_reduce") -> Event:
    """A collective of gloo's."""
    return span(f"gloo:{name}", "user_annotation", start, end, thread)


def kernel(name: str, start: int, end: int, stream: int = STREAM) -> Event:
    """A kernel on a GPU."""
    return {**span(name, "kernel", start, end, stream), "pid": 0}


def trace_of(events: list[Event], seed: int = 0) -> Trace:
    """A trace in which nothing is sorted, with the events without length that real ones have."""
    place = {"pid": 1000, "tid": MAIN}
    without = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}, **place},
        {"ph": "M", "name": "thread_name", "ts": 5, "args": {"name": "thread"}, **place},
        {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "ts": 120, "s": "t", **place},
        {"ph": "s", "name": "fwdbwd", "cat": "fwdbwd", "id": 3, "ts": 130, **place},
        {"ph": "f", "name": "fwdbwd", "cat": "fwdbwd", "id": 3, "ts": 190, "bp": "e", **place},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 150, **place},  # cut off: no end
    ]
    mixed = [*events, *without]
    random.Random(seed).shuffle(mixed)
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": mixed}


def is_step(event: Mapping[str, Any]) -> bool:
    """Whether it is a step's span."""
    return event["name"].startswith("ProfilerStep#")


def is_kernel(event: Mapping[str, Any]) -> bool:
    """Whether it runs on the GPU."""
    return event["cat"] == "kernel"


def is_nccl(event: Mapping[str, Any]) -> bool:
    """Whether it is one of NCCL's kernels."""
    return is_kernel(event) and "nccl" in event["name"].lower()


def is_message(event: Mapping[str, Any]) -> bool:
    """Whether it is a collective, gloo's or NCCL's."""
    return event["name"].startswith("gloo:") or is_nccl(event)


def is_compute(event: Mapping[str, Any]) -> bool:
    """Whether it is an operator."""
    return event["cat"] == "cpu_op" and event["name"].startswith("aten::")


def is_waiting(event: Mapping[str, Any]) -> bool:
    """Whether it waits for data."""
    ours = event["name"] == "data" or event["name"].startswith("enumerate(DataLoader)")
    return ours and event["cat"] == "user_annotation"


def spans_in(trace: Trace, wanted: Wanted) -> list[Event]:
    """The complete events that are wanted."""
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X" and "dur" in e]
    return [event for event in complete if wanted(event)]


def moments(trace: Trace, wanted: Wanted) -> list[int]:
    """How many of the spans run in each microsecond from 0 on."""
    every = spans_in(trace, lambda event: True)
    running = [0] * max(event["ts"] + event["dur"] for event in every)
    for event in spans_in(trace, wanted):
        for moment in range(event["ts"], event["ts"] + event["dur"]):
            running[moment] += 1
    return running


def share(part: list[int], whole: list[int]) -> float:
    """The sum of one over that of the other; 1 where there is nothing."""
    return float(Fraction(sum(part), sum(whole))) if sum(whole) else 1.0


def both(*rows: list[int]) -> list[int]:
    """1 in each microsecond in which all of the rows have something."""
    return [int(all(each)) for each in zip(*rows, strict=True)]


def overlap_by_moments(trace: Trace) -> float:
    """The share of the communication time that compute covers, microsecond by microsecond."""
    on_gpu = bool(spans_in(trace, is_kernel))
    steps = moments(trace, is_step)
    sent = both(moments(trace, is_nccl if on_gpu else is_message), steps)
    busy = moments(trace, (lambda e: is_kernel(e) and not is_message(e)) if on_gpu else is_compute)
    return share(both(sent, busy), sent)


def stall_by_moments(trace: Trace) -> float:
    """The share of the steps in which data is waited for and no kernel runs."""
    steps = moments(trace, is_step)
    idle = [int(not count) for count in moments(trace, is_kernel)]
    return share(both(moments(trace, is_waiting), steps, idle), both(steps))


def planted_overlap() -> Trace:
    """Two steps in which each usual mistake gives a number of its own."""
    return trace_of(
        [
            label("ProfilerStep#3", 100, 200),
            label("ProfilerStep#4", 200, 300),
            label("backward", 130, 195),
            message(80, 110),  # begins before the first step
            message(140, 160),
            message(150, 170, GLOO + 1),  # two at a time
            message(230, 260),  # nothing computes but another thread
            message(290, 347, name="broadcast"),  # ends after the last step
            op("aten::linear", 135, 155),
            op("aten::addmm", 138, 150),  # inside linear
            op("AddmmBackward0", 156, 166),  # would also cover a wait in a hook
            op("c10d::allreduce_", 168, 170),
            op("aten::mul", 240, 247, OTHER),
            op("aten::add_", 104, 107),
            label("aten::zeros", 248, 251),  # a label of that name is no operator
            op("aten::add_", 292, 340),
            op("aten::mm", 205, 223),
        ]
    )


def planted_gpu() -> Trace:
    """A GPU's trace: its CPU operators hide nothing, and its kernels run after the CPU's step."""
    return trace_of(
        [
            label("ProfilerStep#5", 100, 160),
            {**label("ProfilerStep#5", 110, 200), "cat": "gpu_user_annotation", "pid": 0},
            label("data", 100, 120),
            {**label("data", 165, 185), "cat": "gpu_user_annotation", "pid": 0},
            label("data", 178, 184),  # while NCCL's kernel runs, and after it
            op("aten::mm", 120, 154),
            op("c10d::allreduce_", 150, 153),
            kernel("ampere_sgemm_64x64", 114, 150),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 140, 180, STREAM + 2),
            kernel("NCCLDevKernel_Broadcast", 186, 190, STREAM + 2),
            kernel("void pg_nccl_copy", 193, 196, STREAM + 2),
            kernel("ncclDevKernel_AllGather", 101, 102, STREAM + 2),  # before the GPU's own step
            span("Memcpy HtoD", "gpu_memcpy", 105, 109, STREAM),  # while data is waited for
            message(118, 128),  # between the CPUs
            label("nccl:all_reduce", 126, 137),  # what launches the kernel
            span("Memcpy HtoD", "gpu_memcpy", 172, 175, STREAM),
            kernel("vectorized_elementwise", 160, 170),
        ]
    )


def planted_stall() -> Trace:
    """Steps of two cycles, with a pause between them, and waits that lie in one another."""
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    return trace_of(
        [
            label("ProfilerStep#2", 100, 150),
            label("ProfilerStep#3", 150, 210),
            label("ProfilerStep#9", 260, 300),
            label("data", 85, 106),  # begins before the first step
            label("data", 150, 163),
            label(loader, 153, 162),  # inside the label
            label(loader, 195, 205),  # outside of any
            label("data", 292, 311),
            {**label("data", 215, 240)},  # between the cycles
            op("data", 110, 117),  # an operator of that name
            label("database", 170, 175),
            label("enumerate(files)", 185, 193),
            label("forward", 163, 180),
            op("aten::stack", 151, 159),
            op("aten::mm", 300, 333),
        ]
    )


def random_trace(seed: int, gpu: bool) -> Trace:
    """Steps with and without pauses, and spans of every kind, nested, overlapping and cut."""
    draw = random.Random(seed)
    events, at = [], draw.randrange(20, 60)
    for number in range(draw.randrange(1, 4)):
        end = at + draw.randrange(40, 90)
        events.append(label(f"ProfilerStep#{number + 7}", at, end))
        at = end + draw.choice((0, 0, 13))
    kinds: list[Callable[[int, int], Event]] = [
        lambda a, b: op(draw.choice(("aten::mm", "aten::item", "AddmmBackward0")), a, b),
        lambda a, b: op("aten::add_", a, b, OTHER),
        lambda a, b: label(draw.choice(("data", "forward", "enumerate(DataLoader)#_x")), a, b),
    ]
    if gpu:
        kinds += [
            lambda a, b: kernel(draw.choice(("sgemm", "ncclDevKernel_AllReduce")), a, b),
            lambda a, b: message(a, b),
            lambda a, b: {**label("data", a, b), "cat": "gpu_user_annotation"},
            lambda a, b: span("Memcpy HtoD", "gpu_memcpy", a, b, STREAM),
            lambda a, b: label("nccl:all_reduce", a, b),
        ]
    else:
        names = "all_reduce", "broadcast", "allgather"
        kinds += [lambda a, b: message(a, b, draw.choice((GLOO, GLOO + 1)), draw.choice(names))]
    for kind in kinds * 6:
        start = draw.randrange(0, at + 10)
        events.append(kind(start, start + draw.randrange(1, 40)))
    return trace_of(events, seed)


def later_and_shorter(trace: Trace) -> Trace:
    """The trace with all times divided by 8, and 2**24 microseconds later."""
    scaled = {"ts": lambda at: 2**24 + at / 8, "dur": lambda time: time / 8}
    events = [
        {key: scaled[key](value) if key in scaled else value for key, value in event.items()}
        for event in trace["traceEvents"]
    ]
    return {**trace, "traceEvents": events}


def in_order(trace: Trace) -> Trace:
    """The trace with its events in the order in which they start."""
    events = sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0))
    return {**trace, "traceEvents": events}


def without(trace: Trace, unwanted: Wanted, key: str = "") -> Trace:
    """The trace without some of its events, or only without that key of theirs."""
    events = [
        {k: v for k, v in event.items() if k != key} if unwanted(event) else event
        for event in trace["traceEvents"]
        if key or not unwanted(event)
    ]
    return {**trace, "traceEvents": events}


def counted_trace(
    steps: int, *, items: float = 0, messages: int = 4, operators: int = 200, waits: int = 50
) -> Trace:
    """A trace with so much in each step of 1,000 microseconds, and as much again before them.

    Where `items` is not whole, some steps hold one read more than others. As in a real trace, each
    aten::item calls a second operator.
    """
    events: list[Event] = []
    for number in range(-1, steps):
        zero = 2000 + 1000 * number
        if number >= 0:
            events.append(label(f"ProfilerStep#{number + 4}", zero, zero + 1000))
        events.append(label("data", zero + 1, zero + 1 + waits))
        reads = round(items * (number + 1)) - round(items * number)
        names = ["aten::item", "aten::_local_scalar_dense"] * reads + ["aten::mm"] * operators
        events += [op(name, zero + 2 + k % 990, zero + 3 + k % 990) for k, name in enumerate(names)]
        kinds = ("all_reduce", "broadcast")
        events += [
            message(zero + 4 + k % 900, zero + 9 + k % 900, name=kinds[k % 2])
            for k in range(messages)
        ]
    return trace_of(events, steps)
