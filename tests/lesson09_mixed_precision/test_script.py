"""The script: every precision, by hand and by torch, on several ranks; bad input."""

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson09_mixed_precision" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


def test_ranks_change_neither_the_bytes_nor_the_curve(launch_on, metrics_of):
    args = (*TINY, "--precision", "bf16", "--steps", "3")
    out, metrics = launch_on(SCRIPT, (4,), *args)[4]
    alone = metrics_of(SCRIPT, *args)
    for ranks, each in ((1, alone), (4, metrics)):
        (row,) = each["table"]
        assert (each["world_size"], row["bytes a parameter"], row["skipped"]) == (ranks, 16, 0)
    assert metrics["losses"] == pytest.approx(alone["losses"], abs=0.05)
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
def test_each_precision_trains(precision, engine, size, metrics_of):
    args = (*TINY, "--steps", 2, "--precision", precision, "--engine", engine)
    assert f"{size} bytes a parameter" in metrics_of(SCRIPT, *args)["headline"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--micro-batches", "0"), "whole number from 1 up"),
        (("--precision", "fp8"), "invalid choice"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
