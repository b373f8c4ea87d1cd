"""The script: engines and ranks that share the curve; bytes; bad input."""

import json

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson17_long_context" / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))


@pytest.fixture(scope="module")
def ring(launch_on):
    """Folder and metrics on 1 and 3 ranks."""
    return launch_on(SCRIPT, (1, 3), *TINY, "--steps", "3")


def test_ranks_share_the_sequence_and_not_the_curve(ring):
    for ranks, (out, metrics) in ring.items():
        (row,) = metrics["table"]
        assert (row["ranks"], row["positions a rank"]) == (ranks, 120 // ranks)
        assert metrics["losses"] == pytest.approx(ring[1][1]["losses"], abs=1e-4)
        part = 4 * (120 // ranks) * 48 * 4  # rows, positions, width, bytes
        sent = 2 * (6 * ranks - 4) * part if ranks > 1 else 0
        assert metrics["bytes_a_rank"] == {"predicted": sent, "measured": sent}
        assert {path.name for path in out.iterdir()} == {"metrics.json", "long_context.png"}


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (2, ("--engine", "all_to_all")),
        pytest.param(5, (), marks=pytest.mark.full),
        pytest.param(2, ("--precision", "bf16"), marks=pytest.mark.full),
    ],
)
def test_every_engine_has_the_same_curve(ranks, args, ring, launch_on):
    metrics = launch_on(SCRIPT, (ranks,), *TINY, "--steps", "3", *args)[ranks][1]
    bound = 0.05 if "bf16" in args else 1e-4
    assert metrics["losses"] == pytest.approx(ring[1][1]["losses"], abs=bound)
    counted = metrics["bytes_a_rank"]
    assert counted["predicted"] == counted["measured"] > 0


def test_one_process_is_an_engine(ring, tmp_path, run_script):
    args = ("--engine", "single", "--steps", 3, "--out", tmp_path)
    status, _, err = run_script(SCRIPT, *TINY, *args)
    assert status == 0, err
    losses = json.loads((tmp_path / "metrics.json").read_text())["losses"]
    assert losses == pytest.approx(ring[1][1]["losses"], abs=1e-5)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--length", "121"), "121 positions cannot be cut into 2 equal chunks"),
        (("--length", "0"), "whole number from 1 up"),
        (("--engine", "ulysses"), "invalid choice"),
        (("--dataset", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, tmp_path, run_script):
    status, _, err = run_script(SCRIPT, *TINY, "--out", tmp_path, *args)
    assert status == 2
    assert words in err.strip().splitlines()[-1]
