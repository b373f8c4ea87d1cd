"""Lesson 05's script: right values by every maker, the two bandwidths, its flags."""

import runpy

import matplotlib.pyplot as plt
import pytest
import torch

from shared.exercises.lessons import ROOT
from shared.ranks.group import Rank

SCRIPT = ROOT / "lessons" / "lesson05_collectives" / "train.py"


def test_four_ranks_are_right_and_count_by_the_formula(launch_on):
    metrics = launch_on(SCRIPT, (4,), "--preset", "tiny")[4][1]
    rows = metrics["table"]
    assert {row["wrong"] for row in rows} == {0}
    assert len(rows) == 9 * 3
    makers = {row["by"] for row in rows if row["operation"] == "all_reduce"}
    assert makers == {"torch", "ring by hand", "central by hand"}
    for row in rows:
        wanted = {"all_reduce": 1.5, "broadcast": 1.0}.get(row["operation"], 3 / 4)
        assert row["bus GB/s"] == pytest.approx(wanted * row["algorithm GB/s"])
        seconds = row["us"] / 1e6
        assert row["algorithm GB/s"] == pytest.approx(1024 * row["KiB"] / seconds / 1e9)
    assert [place["RANK"] for place in metrics["places"]] == list("0123")
    assert {place["LOCAL_WORLD_SIZE"] for place in metrics["places"]} == {"4"}


def test_one_process_runs_it_too(metrics_of, tmp_path):
    table = metrics_of(SCRIPT, "--preset", "tiny", "--steps", 1)["table"]
    assert {row["wrong"] for row in table} == {0}
    assert (tmp_path / "bandwidth.png").stat().st_size > 10_000


def test_times_that_do_not_grow_have_no_bandwidth():
    draw = runpy.run_path(str(SCRIPT))["draw"]
    makers = ("torch", "ring by hand", "central by hand")
    rows = [
        {"operation": "all_reduce", "by": by, "KiB": size, "us": us, "bus GB/s": 0.1}
        for by in makers
        for size, us in ((1.0, 90.0), (8.0, 60.0), (64.0, 30.0))
    ]
    figure, lines = draw(rows, Rank(0, 0, 2, torch.device("cpu"), "gloo"))
    assert lines == {by: {"latency us": None, "GB/s": None} for by in makers}
    plt.close(figure)
