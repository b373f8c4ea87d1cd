"""Lesson 05's script: right values by every maker, the two bandwidths, its flags."""

import json
import runpy
import subprocess
import sys

import matplotlib.pyplot as plt
import pytest
import torch

from shared.exercises.lessons import ROOT
from shared.ranks.group import Rank
from shared.ranks.launching import launch

SCRIPT = ROOT / "lessons" / "lesson05_collectives" / "train.py"


@pytest.fixture(scope="module")
def by_ranks() -> dict[int, dict]:
    return {n: launch(SCRIPT, nproc=n, args=["--preset", "tiny"]) for n in (2, 4)}


def test_every_operation_of_every_maker_is_right_at_every_size(by_ranks):
    for metrics in by_ranks.values():
        rows = metrics["table"]
        assert {row["wrong"] for row in rows} == {0}
        assert len(rows) == 9 * 3
        assert {row["by"] for row in rows if row["operation"] == "all_reduce"} == {
            "torch",
            "ring by hand",
            "central by hand",
        }


@pytest.mark.parametrize(("n", "factor"), [(2, 1.0), (4, 1.5)])
def test_the_bus_carries_what_the_formula_says(by_ranks, n, factor):
    factors = {"all_reduce": factor, "broadcast": 1.0}
    for row in by_ranks[n]["table"]:
        wanted = factors.get(row["operation"], (n - 1) / n)
        assert row["bus GB/s"] == pytest.approx(wanted * row["algorithm GB/s"])
        seconds = row["us"] / 1e6
        assert row["algorithm GB/s"] == pytest.approx(1024 * row["KiB"] / seconds / 1e9)


def test_every_rank_tells_its_place(by_ranks):
    places = by_ranks[4]["places"]
    assert [place["RANK"] for place in places] == list("0123")
    assert {place["LOCAL_WORLD_SIZE"] for place in places} == {"4"}


def test_one_process_runs_it_too(tmp_path):
    command = [sys.executable, SCRIPT, "--preset", "tiny", "--steps", "1", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert {row["wrong"] for row in metrics["table"]} == {0}
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
