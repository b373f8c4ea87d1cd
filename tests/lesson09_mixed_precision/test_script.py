"""The script: every precision, by hand and by torch, on several ranks; bad input."""

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson09_mixed_precision" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def on_ranks(launch_on):
    """Folder and metrics of bf16 with masters on 2 and 4 ranks."""
    return launch_on(SCRIPT, (2, 4), *TINY, "--precision", "bf16", "--steps", "3")


def test_ranks_change_neither_the_bytes_nor_the_curve(on_ranks):
    for ranks, (out, metrics) in on_ranks.items():
        (row,) = metrics["table"]
        assert metrics["world_size"] == ranks
        assert row["bytes a parameter"] == 16
        assert row["skipped"] == 0
        assert metrics["losses"] == pytest.approx(on_ranks[2][1]["losses"], abs=0.05)
        assert {path.name for path in out.iterdir()} == {"metrics.json", "precision.png"}


@pytest.mark.parametrize(
    ("precision", "engine", "size"),
    [
        ("fp32", "by_hand", 16),
        ("bf16", "torch", 18),
        ("fp16", "by_hand", 18),
        pytest.param("fp16", "torch", 18, marks=pytest.mark.full),
        ("autocast_bf16", "by_hand", 16),
        pytest.param("autocast_fp16", "torch", 16, marks=pytest.mark.full),
    ],
)
def test_each_precision_trains(precision, engine, size, tmp_path, run_script):
    args = (*TINY, "--steps", 2, "--out", tmp_path, "--precision", precision, "--engine", engine)
    status, out, err = run_script(SCRIPT, *args)
    assert status == 0, err
    assert f"{size} bytes a parameter" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--micro-batches", "0"), "whole number from 1 up"),
        (("--precision", "fp8"), "invalid choice"),
        (("--dataset", "nowhere"), "nowhere"),
        (("--mine",), "no exercise"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
