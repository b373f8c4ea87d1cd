"""The script: schedules and ranks that share the curve; bad input."""

import pytest

from shared.exercises.lessons import ROOT
from shared.ranks.launching import LaunchFailed

SCRIPT = ROOT / "lessons" / "lesson15_pipeline_parallel" / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))


@pytest.fixture(scope="module")
def on_three(launch_on):
    """Folder and metrics on 3 ranks."""
    return launch_on(SCRIPT, (3,), *TINY, "--steps", "3")[3]


def test_ranks_share_the_curve_and_the_first_keeps_one_micro_batch_a_rank(on_three, metrics_of):
    (out, of_three), alone = on_three, metrics_of(SCRIPT, *TINY, "--steps", "3")
    for ranks, metrics in ((1, alone), (3, of_three)):
        (row,) = metrics["table"]
        assert (row["ranks"], row["stages"]) == (ranks, ranks)
        assert row["micro-batches"] == {1: 8, 3: 9}[ranks]
        assert row["alive on rank 0"] == ranks
        assert row["bubble by formula, %"] == pytest.approx({1: 0.0, 3: 18.2}[ranks])
        assert 0 <= row["measured, %"] < 100
        parts = [row[name] for name in ("of it schedule", "unequal stages", "messages")]
        assert sum(parts) == pytest.approx(row["measured, %"], abs=0.2)  # each is rounded
        assert f"they wait {row['measured, %']} % of a step, {parts[0]} for" in metrics["headline"]
    assert of_three["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert {path.name for path in out.iterdir()} == {"metrics.json", "timeline.png"}


@pytest.mark.parametrize(
    ("ranks", "args", "alive"),
    [
        pytest.param(2, ("--schedule", "gpipe"), 8, marks=pytest.mark.full),
        (2, ("--schedule", "interleaved", "--chunks", "2"), 5),
        pytest.param(4, ("--micro-batches", "16"), 4, marks=pytest.mark.full),
    ],
)
def test_every_schedule_has_the_same_curve(ranks, args, alive, on_three, launch_on):
    metrics = launch_on(SCRIPT, (ranks,), *TINY, "--steps", "3", *args)[ranks][1]
    (row,) = metrics["table"]
    assert row["alive on rank 0"] <= alive
    assert metrics["losses"] == pytest.approx(on_three[1]["losses"], abs=1e-4)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--chunks", "2"), "--chunks 2 is for --schedule interleaved"),
        (("--chunks", "2", "--schedule", "interleaved"), "--chunks 2 on one rank"),
        (("--micro-batches", "0"), "whole number from 1 up"),
        (("--micro-batches", "17"), "a step has 16 rows"),
        (("--schedule", "pipedream"), "invalid choice"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--micro-batches", "3"), "3 are no multiple of it: take 4"),
        (("--chunks", "7"), "--chunks 7: 12 parts of the model on 2 ranks; take 6 at most"),
    ],
)
def test_what_the_ranks_cannot_share_is_said_in_one_line(args, words, launch_on):
    with pytest.raises(LaunchFailed, match=words):
        launch_on(SCRIPT, (2,), *TINY, "--schedule", "interleaved", *args)
