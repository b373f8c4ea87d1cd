"""The script: engines and ranks that share the curve; bytes; bad input."""

import pytest

from lessons.lesson17_long_context.experiments.results import exchange_bytes, ring_bytes
from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson17_long_context" / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (3, ()),
        pytest.param(2, ("--engine", "all_to_all"), marks=pytest.mark.full),
        pytest.param(5, (), marks=pytest.mark.full),
        pytest.param(2, ("--precision", "bf16"), marks=pytest.mark.full),
    ],
)
def test_ranks_share_the_sequence_and_not_the_curve(ranks, args, metrics_of, launch_on):
    alone = metrics_of(SCRIPT, *TINY, "--steps", "3", "--engine", "single")["losses"]
    out, metrics = launch_on(SCRIPT, (ranks,), *TINY, "--steps", "3", *args)[ranks]
    (row,) = metrics["table"]
    assert (row["ranks"], row["positions a rank"]) == (ranks, 120 // ranks)
    assert metrics["losses"] == pytest.approx(alone, abs=0.05 if "bf16" in args else 1e-4)
    counted = metrics["bytes_a_rank"]
    assert counted["predicted"] == counted["measured"] > 0
    if not args:
        part = 4 * (120 // ranks) * 48 * 4  # rows, positions, width, bytes
        assert counted["measured"] == 2 * (6 * ranks - 4) * part
    assert {path.name for path in out.iterdir()} == {"metrics.json", "long_context.png"}


def test_of_one_rank_nothing_is_predicted_to_be_sent():
    assert ring_bytes(4, 1) == exchange_bytes(4, 1) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--length", "121"), "121 positions cannot be cut into 2 equal chunks"),
        (("--length", "0"), "whole number from 1 up"),
        (("--engine", "ulysses"), "invalid choice"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
