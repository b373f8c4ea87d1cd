"""The script: traces of 1, 2 and 4 ranks, faults that are recognised, bad input."""

import json
from argparse import Namespace
from unittest import mock

import pytest
import torch

from lessons.lesson12_profiler_traces.experiments import report
from lessons.lesson12_profiler_traces.laboratory import made_traces as made
from shared.exercises.lessons import ROOT
from shared.ranks.group import Rank
from solutions.lesson12_profiler_traces import overlap_fraction

SCRIPT = ROOT / "lessons" / "lesson12_profiler_traces" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def on_ranks(launch_on):
    """Folder and metrics of the run with a message for each parameter; the notebook has 2 ranks."""
    return launch_on(SCRIPT, (4,), *TINY, "--slow", "buckets")


def test_each_rank_writes_a_trace_and_all_are_merged(on_ranks):
    for ranks, (out, metrics) in on_ranks.items():
        healthy, slow = metrics["table"]
        assert (healthy["diagnosis"], slow["diagnosis"]) == ("none", "buckets")
        assert metrics["losses"]["none"] == pytest.approx(metrics["losses"]["buckets"], abs=1e-4)
        assert 0 < healthy["MFU, %"] < 100
        assert (out / "steps.png").is_file()
        for run in ("none", "buckets"):
            names = {path.name for path in (out / run).iterdir()}
            traces = {f"rank_{rank}.json" for rank in range(ranks)}
            assert names == traces | {"merged.json", "memory.png"}
            merged = json.loads((out / run / "merged.json").read_text())
            assert {event["pid"] for event in merged["traceEvents"]} == set(range(ranks))


def test_mfu_is_a_share_of_the_peak_of_the_runs_own_precision(monkeypatch):
    """Of float32's, a GPU's run in bf16 would have six times as much."""
    peak_of = mock.Mock()
    monkeypatch.setattr(report, "peak_of", peak_of)
    monkeypatch.setattr(report, "dist", mock.Mock())
    rank = Rank(1, 1, 2, torch.device("cpu"), "gloo")  # which writes nothing
    run = mock.Mock(seconds=1.0, memory=1, losses=torch.zeros(1))
    report.conclude(Namespace(precision="bf16"), rank, [run], mock.Mock(), mock.Mock())
    peak_of.assert_called_once_with(rank, "bf16")


@pytest.mark.full
@pytest.mark.parametrize(
    ("slow", "engine"), [("loader", "ddp"), ("item", "single"), ("kernels", "single")]
)
def test_a_fault_is_recognised_on_one_rank(slow, engine, metrics_of):
    metrics = metrics_of(SCRIPT, *TINY, "--engine", engine, "--slow", slow)
    rows = metrics["table"]
    assert [row["diagnosis"] for row in rows] == ["none", slow]
    assert [row["overlap, %"] for row in rows] == ["-", "-"], "one rank sends nothing"
    assert "MFU" in metrics["headline"]


@pytest.mark.full
def test_a_straggler_has_no_fault_of_its_own_and_is_found_beside_the_other_rank(launch_on):
    args = ("--slow", "straggler", "--pause", "0.2")
    ((_, metrics),) = launch_on(SCRIPT, (2,), *TINY, *args).values()
    assert [row["diagnosis"] for row in metrics["table"]] == ["none", "none"]
    assert metrics["table"][1]["latest rank"].startswith("1 (by ")


def test_traces_that_are_there_are_read(on_ranks, tmp_path, metrics_of):
    rows = metrics_of(SCRIPT, *TINY, "--read", on_ranks[4][0] / "none")["table"]
    assert [row["rank"] for row in rows] == [0, 1, 2, 3]
    assert (tmp_path / "merged.json").is_file()


def folder_with(path, suffix=".json", **contents):
    """A folder with these files."""
    path.mkdir()
    for name, content in contents.items():
        (path / f"{name}{suffix}").write_text(content)
    return path


STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 0, "dur": 9}


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ({}, "no trace there"),
        (
            {"a": json.dumps({"traceEvents": [STEP]}), "b": json.dumps({"traceEvents": [STEP]})},
            "got ranks [0, 0]: call the files rank_0.json",
        ),
        ({"rank_0": '{"traceEvents": [{"ph"'}, "cut off"),
        ({"rank_0": '{"traceEvents": []}'}, "another program"),
        ({"rank_0": json.dumps({"traceEvents": [STEP | {"dur": 0}]})}, "take 0 microseconds"),
    ],
)
def test_bad_traces_are_said_in_one_line(contents, words, tmp_path, refused):
    folder = folder_with(tmp_path / "traces", **contents)
    assert words in refused(SCRIPT, *TINY, "--read", folder)


def test_one_file_is_read_as_a_folder_is(tmp_path, run_script, refused):
    folder = folder_with(tmp_path / "traces", rank_3=json.dumps({"traceEvents": [STEP]}))
    asked = ["--read", folder / "rank_3.json", "--out", tmp_path / "out"]
    status, _, err = run_script(SCRIPT, *TINY, *asked)
    assert status == 0, err
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["table"][0]["rank"] == 3
    (tmp_path / "notes.txt").write_text("no trace")
    assert "notes.txt" in refused(SCRIPT, *TINY, "--read", tmp_path / "notes.txt")


def read(folder, run_script):
    """What --read prints of a folder, and its rows."""
    status, out, err = run_script(SCRIPT, *TINY, "--read", folder, "--out", folder / "out")
    assert status == 0, err
    return out, json.loads((folder / "out" / "metrics.json").read_text())["table"]


def test_the_trace_of_one_gpu_is_read_alone(tmp_path, run_script):
    folder = folder_with(tmp_path / "alone", trace=json.dumps(made.planted_gpu()))
    out, (row,) = read(folder, run_script)
    assert "1 rank, steps of 0.09 to 0.09 ms" in out
    overlap = round(100 * overlap_fraction(made.planted_gpu()), 1)
    assert (row["rank"], row["overlap, %"]) == (0, overlap)
    assert not (folder / "out" / "merged.json").exists()


@pytest.mark.parametrize(
    ("at", "words"),
    [(20, "; nobody is late to send,"), (60, "; the last to send is rank 1 (by 40 %")],
)
def test_who_is_late_is_named_where_somebody_is(at, words, tmp_path, run_script):
    starts = {"rank_0": 20, "rank_1": at}
    texts = {
        name: json.dumps(made.trace_of([made.label("ProfilerStep#1", 0, 100), made.message(a, 90)]))
        for name, a in starts.items()
    }
    out, _ = read(folder_with(tmp_path / "late", **texts), run_script)
    assert words in out


def test_a_profile_of_the_cpu_alone_of_a_run_with_nccl_has_no_overlap(tmp_path, run_script):
    content = made.trace_of([made.label("ProfilerStep#1", 0, 100), made.label("nccl:x", 20, 30)])
    texts = {f"rank{rank}_trace": json.dumps(content) for rank in (0, 1)}
    out, rows = read(folder_with(tmp_path / "annotations", **texts), run_script)
    assert [(row["rank"], row["overlap, %"]) for row in rows] == [(0, "-"), (1, "-")]
    assert "NCCL's labels without kernels" in out
    assert "the last to send" not in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--slow", "buckets"), "two ranks or more"),
        (("--slow", "straggler"), "two ranks or more"),
        (("--steps", "3"), "the schedule takes 6"),
        (("--slow", "loader", "--pause", "0"), "above 0 seconds"),
        (("--slow", "gremlins"), "invalid choice"),
        (("--dataset", "SHORT"), "is shorter than a sequence of 32"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, tmp_path, refused):
    short = folder_with(tmp_path / "short", train="one\ntwo\nthree\nfour\n", suffix=".txt")
    args = [short if each == "SHORT" else each for each in args]
    assert words in refused(SCRIPT, *TINY, *args)
