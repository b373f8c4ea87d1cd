"""Traces with known answers, and one that torch's profiler made."""

import json

import pytest
import torch
import torch.distributed as dist

from shared.measuring.trace import (
    Span,
    Trace,
    merge,
    overlap_fraction,
    read_trace,
    record_trace,
)
from shared.ranks.forked import run_ranks


def made(*spans: tuple[str, float, float]) -> Trace:
    """A trace of compute ("c") and communication ("m") spans."""
    kinds = {"c": "compute", "m": "communication"}
    return Trace(tuple(Span(kind, kinds[kind], start, end) for kind, start, end in spans))


@pytest.mark.parametrize(
    ("trace", "fraction"),
    [
        (made(("c", 0, 10), ("m", 2, 6)), 1.0),
        (made(("c", 0, 10), ("m", 10, 20)), 0.0),
        (made(("c", 0, 10), ("m", 5, 15)), 0.5),
        (made(("c", 0, 4), ("c", 6, 10), ("m", 2, 8)), 4 / 6),  # a pause in between
        (
            made(("c", 0, 4), ("c", 2, 6), ("m", 3, 5)),
            1.0,
        ),  # two threads compute at once
        (made(("c", 0, 10), ("m", 0, 10), ("m", 5, 15)), 15 / 20),  # two messages at a time
        (made(("m", 0, 10)), 0.0),
        (made(("c", 0, 10)), 1.0),
    ],
)
def test_overlap_of_made_traces(trace, fraction):
    assert overlap_fraction(trace) == pytest.approx(fraction)


def test_merge():
    assert merge([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert merge([]) == []


def event(name, category, ts, dur, tid=1):
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": dur, "tid": tid}


def test_reading_a_cpu_trace():
    content = {
        "distributedInfo": {"rank": 3},
        "traceEvents": [
            event("aten::linear", "cpu_op", 100, 50),
            event("aten::addmm", "cpu_op", 110, 30),  # inside linear
            event("AddmmBackward0", "cpu_op", 100, 900),  # would also cover a wait in a hook
            event("gloo:all_reduce", "user_annotation", 120, 60, tid=2),
            event("c10d::allreduce_", "cpu_op", 118, 3),
            event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", 160, 10),
            event("autograd::engine::evaluate_function: TBackward0", "cpu_op", 170, 4),
            {"ph": "M", "name": "process_name"},
        ],
    }
    trace = read_trace(content)
    assert trace.rank == 3
    assert trace.backward_end == 74  # counted from the first span, as the spans are
    assert [(s.name, s.start, s.end) for s in trace.spans] == [
        ("aten::linear", 0, 50),
        ("gloo:all_reduce", 20, 80),
    ]
    assert overlap_fraction(trace) == pytest.approx(0.5)


def test_reading_a_gpu_trace_looks_at_kernels_alone():
    content = {
        "traceEvents": [
            event("aten::mm", "cpu_op", 0, 5),
            event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 0, 5),
            event("ampere_sgemm", "kernel", 10, 20, tid=7),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 20, 20, tid=9),
        ]
    }
    trace = read_trace(content)
    assert [s.kind for s in trace.spans] == ["compute", "communication"]
    assert trace.backward_end is None
    assert overlap_fraction(trace) == pytest.approx(0.5)


def test_something_else_is_refused():
    with pytest.raises(ValueError, match="traceEvents"):
        read_trace({"events": []})


def sum_of_ones(rank):
    trace = record_trace(lambda: dist.all_reduce(torch.ones(1000) @ torch.ones(1000, 1000)))
    return [span.name for span in trace.of("communication")], len(trace.of("compute")), trace.rank


def test_a_recorded_trace_holds_the_collective_and_nothing_is_printed(capfd):
    for rank, (names, compute, seen) in enumerate(run_ranks(sum_of_ones, 2)):
        assert names == ["gloo:all_reduce"]
        assert compute > 0
        assert seen == rank
    printed = capfd.readouterr()
    assert printed.err == ""
    assert json.dumps(printed.out) == '""'
