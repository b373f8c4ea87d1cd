"""Lesson 01: the script shares its models out to any number of ranks and refuses in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.exercises.lessons import ROOT
from shared.ranks.launching import LaunchFailed, launch

SCRIPT = ROOT / "lessons" / "lesson01_positional_encoding" / "train.py"
TINY = ["--preset", "tiny", "--device", "cpu"]


def results(metrics: dict) -> list[dict]:
    """The runs without the rank that made them and how fast, in an order of their own."""
    own = ("rank", "speed")
    runs = [{k: v for k, v in run.items() if k not in own} for run in metrics["runs"]]
    return sorted(runs, key=lambda run: (run["task"], run["variant"], run["seed"]))


@pytest.fixture(scope="module")
def by_ranks() -> dict[int, dict]:
    return {n: launch(SCRIPT, nproc=n, args=TINY) for n in (1, 3)}


def test_every_variant_is_trained_once_on_both_tasks(by_ranks) -> None:
    for metrics in by_ranks.values():
        assert len(metrics["table"]) == 8
        assert len({(run["task"], run["variant"]) for run in metrics["runs"]}) == 8


def test_ranks_share_the_variants_evenly(by_ranks) -> None:
    for world_size, metrics in by_ranks.items():
        assert metrics["world_size"] == world_size
        shares = [
            len({run["variant"] for run in metrics["runs"] if run["rank"] == rank})
            for rank in range(world_size)
        ]
        assert sum(shares) == 4
        assert max(shares) - min(shares) <= 1


def test_results_do_not_depend_on_who_computed_them(by_ranks) -> None:
    for metrics in by_ranks.values():
        assert results(metrics) == results(by_ranks[1])


def test_plain_python_is_a_world_of_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *TINY, "--seed", "3", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["world_size"] == 1
    assert {run["seed"] for run in metrics["runs"]} == {3}
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_a_width_that_cannot_be_paired_is_one_line_for_all_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *TINY, "--d-model", "33", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr == "error: --d-model 33 is no multiple of 4 (2 heads of pairs)\n"
    with pytest.raises(LaunchFailed, match="--d-model 33 is no multiple of 4"):
        launch(SCRIPT, nproc=2, args=[*TINY, "--d-model", "33"])
