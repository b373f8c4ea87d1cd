"""Trace files: read with clear words, merged, refused."""

import gzip
import json
import math
import random
from unittest import mock

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank

from lessons.lesson12_profiler_traces.experiments.drawing import median_step, whole_steps
from lessons.lesson12_profiler_traces.experiments.report import lacks_kernels, trace_files
from lessons.lesson12_profiler_traces.experiments.stragglers import lateness
from lessons.lesson12_profiler_traces.laboratory import made_traces as made
from lessons.lesson12_profiler_traces.laboratory import suspects
from lessons.lesson12_profiler_traces.laboratory.suspects import FAULTS, letters
from shared.errors import InputError
from shared.measuring import peak
from shared.measuring.chrome import (
    memory_timeline,
    merge_ranks,
    rank_of,
    read_chrome,
    step_seconds,
    step_spans,
)
from shared.measuring.peak import product_flops
from shared.measuring.trace import overlap_fraction as overlap_of_messages
from shared.measuring.trace import read_trace
from shared.ranks.forked import run_ranks
from shared.ranks.group import Rank
from solutions.lesson12_profiler_traces import overlap_fraction


def of_rank(rank, pid, base=1_000_000_000):
    """A small trace of one rank, with a thread, a GPU's stream and an arrow."""
    events = [
        made.label("ProfilerStep#2", 100, 200),
        made.op("aten::mm", 110, 150),
        made.kernel("sgemm", 120, 160),
        made.message(130, 180),
    ]
    content = made.trace_of(events)
    moved = [{**event, "pid": event["pid"] and pid} for event in content["traceEvents"]]
    here = {"baseTimeNanoseconds": base, "distributedInfo": {"rank": rank}}
    return {**content, **here, "traceEvents": moved}


def test_merged_ranks_are_processes_whose_threads_and_arrows_stay_apart():
    one, two = of_rank(0, 77), of_rank(1, 77, base=1_000_002_000)
    merged = merge_ranks([two, one])
    events = merged["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert merged["ranks"] == [0, 1]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * len([e for e in one["traceEvents"] if e["ph"] == "X"])
    assert all({"name", "ph", "ts", "pid", "tid"} <= set(e) for e in spans)
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(set(arrows)) == 2
    lanes = {e["tid"] for e in spans if e["pid"] == 0 and e["name"] in ("aten::mm", "sgemm")}
    assert len(lanes) == 2
    starts = {e["pid"]: e["ts"] for e in spans if e["name"] == "sgemm"}
    assert starts == {0: 120, 1: 122}  # the second base is 2,000 ns later
    assert json.loads(json.dumps(merged)) == merged


@pytest.mark.parametrize("ranks", [[0], [], [1, 1]])
def test_traces_of_one_rank_are_not_merged(ranks):
    with pytest.raises(InputError, match="different ranks"):
        merge_ranks([of_rank(rank, 5) for rank in ranks])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"traceEvents": [{"ph": "X", "na', "cut off"),
        ("", "cut off"),
        ("[1, 2]", "no trace in Chrome's format"),
        ('{"events": []}', "no trace in Chrome's format"),
        (json.dumps(made.trace_of([made.op("aten::mm", 0, 5)])), "another program"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "is cut off"),
        (b"\xff\xfe", "is not text"),
        ('{"traceEvents": [{"dur": inf, "name": "a "quoted" one"}]}', "line 1, column.*with_stack"),
        ('{"traceEvents": [\n{"name": "pkg\\core\\_init.py"}]}', "line 2, column 14.*with_stack"),
        ('{"traceEvents": [\n{"name": "a "quoted" one"}]}', "line 2, column 14.*with_stack"),
    ],
)
def test_what_is_no_trace_of_steps_is_said_in_one_line(content, words, tmp_path):
    path = tmp_path / "rank_0.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=words) as refused:
        read_chrome(path)
    assert len(str(refused.value).splitlines()) == 1
    assert str(path) in str(refused.value)
    with pytest.raises(InputError, match="cannot be read"):
        read_chrome(tmp_path / "absent.json")


def test_steps_are_those_of_the_cpu_and_last_as_long_as_the_gpu_says():
    trace = made.planted_gpu()
    assert step_spans(trace) == [(100, 160)]
    assert whole_steps(trace) == [(100, 200)]
    assert step_seconds(trace) == pytest.approx(90e-6)
    assert rank_of(trace) == 0
    assert step_seconds(made.planted_stall()) == pytest.approx(50e-6)


@pytest.mark.parametrize(
    "name",
    [
        "rank_3.json",
        "rank-3.json.gz",
        "rank3_trace.json",
        "rank3_worker0.json",
        "worker3.1690000000.pt.trace.json",  # tensorboard_trace_handler("log", worker_name=...)
        "host_77.1690000000.pt.trace.json.gz",
    ],
)
def test_traces_are_read_under_the_names_that_tools_give_them(name, tmp_path):
    trace = made.planted_gpu()
    if "host" in name:
        trace["distributedInfo"] = {"backend": "nccl", "rank": 3, "world_size": 8}
    text = json.dumps(trace).replace("sgemm", "sge\tmm").encode()  # a character not escaped
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    for other in ("merged.json", "metrics.json", "settings.json", "rank_3.txt"):
        (tmp_path / other).write_text("{}")
    assert trace_files(tmp_path) == [tmp_path / name]
    assert rank_of(read_chrome(tmp_path / name)) == 3


def test_what_kineto_wrote_and_json_does_not_know_is_read(tmp_path):
    """kineto #105 (a bandwidth of inf, a copy of 0 us) and #80 (a name that is no UTF-8)."""
    trace = made.planted_gpu()
    trace["traceEvents"].append({"ph": "X", "name": "x: inf,", "ts": 1, "dur": 0, "args": {}})
    trace["traceEvents"][-1]["args"] = {"GB/s": math.inf, "a": -math.inf, "b": math.nan}
    text = json.dumps(trace).replace("Infinity", "inf").replace("NaN", "nan").encode()
    path = tmp_path / "rank_0.json"
    path.write_bytes(text.replace(b"sgemm", b"sg\xd0\xffmm"))
    read = read_chrome(path)
    assert read["traceEvents"][-1]["name"] == "x: inf,"
    assert step_seconds(read) == step_seconds(trace)


def test_overlap_of_moments_and_of_messages_agree_where_one_message_travels_at_a_time():
    step = made.label("ProfilerStep#1", 0, 100)
    trace = made.trace_of([step, made.op("aten::mm", 10, 40), made.message(20, 80)])
    assert overlap_fraction(trace) == pytest.approx(20 / 60)
    assert overlap_of_messages(read_trace(with_lengths(trace))) == pytest.approx(20 / 60)


def test_a_trace_without_memory_is_refused():
    with pytest.raises(InputError, match="profile_memory"):
        memory_timeline(made.planted_stall())


def test_the_letters_are_all_faults_in_an_order_of_the_seed():
    orders = [tuple(letters(seed).values()) for seed in range(20)]
    assert all(sorted(order) == sorted(FAULTS) for order in orders)
    assert len(set(orders)) > 5
    assert letters(3) == letters(3)


def mean_peak(rank, precision):
    def flops(device, dtype):
        return rank + dtype.itemsize

    with mock.patch.object(peak, "product_flops", flops):
        return peak.peak_of(Rank(rank, rank, 2, torch.device("cpu"), "gloo"), precision)


@pytest.mark.parametrize(("precision", "flops"), [("fp32", 4.5), ("bf16", 2.5)])
def test_the_peak_of_a_run_is_its_precisions_on_all_ranks(precision, flops):
    assert run_ranks(mean_peak, 2, precision) == [flops, flops]


def test_a_peak_is_a_number_of_flops():
    assert 1e8 < product_flops("cpu", size=64) < 1e14


def of_a_rank(rank, *starts, steps=((0, 100), (100, 200))):
    """A trace of a rank whose messages begin at these moments and all end together."""
    events = [made.label(f"ProfilerStep#{n}", a, b) for n, (a, b) in enumerate(steps)]
    events += [made.message(at, at - at % 100 + 95) for at in starts]
    return {**made.trace_of(events), "distributedInfo": {"rank": rank}}


def test_the_rank_that_enters_its_messages_last_is_late_by_a_share_of_the_step():
    traces = [of_a_rank(0, 20, 30, 120, 130), of_a_rank(1, 50, 65, 120, 135)]
    late = lateness(merge_ranks(traces))
    assert late == {0: 0.0, 1: pytest.approx((0.35 + 0.05) / 2)}
    turned = lateness(merge_ranks([of_a_rank(0, 50, 150), of_a_rank(1, 20, 120)]))
    assert turned == {0: pytest.approx(0.3), 1: 0.0}


def test_lateness_leaves_out_what_one_rank_has_more_of():
    more = [of_a_rank(0, 20, 120), of_a_rank(1, 30, 90, 120)]
    assert lateness(merge_ranks(more)) == {0: 0.0, 1: pytest.approx(0.05)}


def test_lateness_counts_no_message_between_the_steps_and_asks_for_one():
    pause = ((0, 100), (150, 250))
    between = [of_a_rank(rank, 20, 110 + 30 * rank, 160, steps=pause) for rank in (0, 1)]
    assert lateness(merge_ranks(between)) == {0: 0.0, 1: 0.0}
    with pytest.raises(InputError, match="no message"):
        lateness(merge_ranks([of_a_rank(rank) for rank in (0, 1)]))
    with pytest.raises(InputError, match=r"\{0: 2, 1: 1\}; record the same on all"):
        lateness(merge_ranks([of_a_rank(0, 20), of_a_rank(1, 20, steps=((0, 100),))]))
    at_once = [on_a_gpu(rank, ((0, 9), (9, 20)), ((20, 30), (20, 40)), (25,)) for rank in (0, 1)]
    with pytest.raises(InputError, match="take 0 microseconds"):  # by the GPU's clock
        lateness(merge_ranks(at_once))


KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def on_a_gpu(rank, cpu, gpu, sent, launched=()):
    """A trace whose CPU and GPU steps lie apart, with NCCL's kernels, launched at these moments."""
    events = [made.label(f"ProfilerStep#{n}", a, b) for n, (a, b) in enumerate(cpu)]
    for stream, cut in ((7, 5), (20, 0)):  # a stream has its own span of a step
        for n, (a, b) in enumerate(gpu):
            span = made.span(f"ProfilerStep#{n}", "gpu_user_annotation", a + cut, b - cut, stream)
            events.append({**span, "pid": 0})
    for number, at in enumerate(sent):
        args = {"args": {"correlation": number}} if launched else {}
        events.append({**made.kernel(KERNEL, at, at + 8, 20), **args})
    for number, at in enumerate(launched):
        call = made.span("cudaLaunchKernel", "cuda_runtime", at, at + 1)
        events.append({**call, "args": {"correlation": number}})
    return {**made.trace_of(events), "distributedInfo": {"rank": rank, "world_size": 2}}


def test_a_cpu_that_runs_ahead_makes_nobody_late_on_the_gpu():
    gpu, sent = ((20, 110), (110, 210)), (50, 90, 150, 190)
    ranks = [
        on_a_gpu(0, ((0, 100), (100, 200)), gpu, sent),
        on_a_gpu(1, ((0, 60), (60, 160)), gpu, sent),  # by its steps one kernel is another step's
    ]
    assert lateness(merge_ranks(ranks)) == {0: 0.0, 1: 0.0}
    assert [step_seconds(each) for each in ranks] == [pytest.approx(90e-6)] * 2
    late = on_a_gpu(1, ((0, 60), (60, 160)), gpu, (50, 99, 150, 199))
    assert lateness(merge_ranks([ranks[0], late])) == {0: 0.0, 1: pytest.approx(0.1)}


def test_a_kernel_is_of_the_step_that_launched_it():
    """Rank 1 sends a prefetched message of step 1 while step 0's kernels still run."""
    steps, gpu = ((0, 40), (40, 80)), ((20, 100), (90, 190))
    ranks = [on_a_gpu(r, steps, gpu, (30, at, 150), (5, 45, 60)) for r, at in ((0, 105), (1, 92))]
    assert lateness(merge_ranks(ranks)) == {0: pytest.approx(13 / 2 / 70), 1: 0.0}


def test_the_step_that_is_drawn_lasts_until_its_last_kernel():
    trace = on_a_gpu(0, ((0, 30), (30, 60), (60, 95)), ((20, 120), (120, 210), (210, 320)), ())
    assert median_step(trace) == (30, 210)


def drawn_kernels(seed):
    """Forty kernels of a step on a GPU, of which some are NCCL's."""
    draw, events = random.Random(seed), [made.label("ProfilerStep#1", 1000, 4000)]
    gpu = {**made.label("ProfilerStep#1", 1000, 10_000), "cat": "gpu_user_annotation"}
    for _ in range(40):
        name = draw.choice(["sgemm_128", "ncclKernel_AllReduce_RING_LL_Sum_float", "elementwise"])
        start = draw.randrange(1100, 8000)
        events.append(made.kernel(name, start, start + draw.randrange(5, 200)))
    return made.trace_of([*events, gpu])


@pytest.mark.parametrize(("seed", "percent"), [(0, 37.70), (1, 23.87), (2, 33.09), (3, 40.52)])
def test_overlap_is_the_number_that_holistic_trace_analysis_itself_gave(seed, percent):
    """HTA 0.5.0, get_comm_comp_overlap of these traces as files."""
    assert 100 * overlap_fraction(drawn_kernels(seed)) == pytest.approx(percent, abs=0.005)


def test_a_profile_of_the_cpu_alone_of_a_run_with_nccl_is_not_all_hidden():
    step, label = made.label("ProfilerStep#1", 0, 100), made.label("nccl:all_to_all", 20, 30)
    trace = made.trace_of([step, label, made.op("aten::mm", 10, 40)])
    assert lacks_kernels(trace)
    assert not lacks_kernels(made.planted_gpu())
    for read in (overlap_fraction, lambda trace: read_trace(with_lengths(trace))):
        with pytest.raises(ValueError, match="no kernels"):
            read(trace)


def with_lengths(trace):
    return {**trace, "traceEvents": [e for e in trace["traceEvents"] if "dur" in e]}


def test_the_fixes_of_the_slow_runs_count_and_read_the_same():
    logits, wanted = torch.randn(3, 50, 4), torch.randint(4, (3, 50))
    right = suspects.count_right(logits, wanted)
    assert 0 < right < 150
    assert suspects.count_at_once(logits, wanted) == right
    plain, ahead = suspects._batches(1, 0.0), suspects._read_ahead(1, 0.001)
    for _ in range(6):
        assert torch.equal(next(plain), next(ahead))
    ahead.close()
