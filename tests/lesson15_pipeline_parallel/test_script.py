"""The script: schedules and ranks that share the curve; bad input."""

import runpy
from argparse import Namespace

import pytest

from shared.errors import InputError
from shared.exercises.lessons import ROOT

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


def test_what_two_ranks_cannot_share_is_refused():
    script = runpy.run_path(str(SCRIPT))
    given = Namespace(schedule="interleaved", micro_batches=3, chunks=7)
    with pytest.raises(InputError, match="3 are no multiple of it: take 4"):
        script["plan"](given, 2)
    costs = script["costs_of"](script["RECIPES"]["tiny"], 99)
    words = "--chunks 7: 12 parts of the model on 2 ranks; take 6 at most"
    with pytest.raises(InputError, match=words):
        script["cut"](given, costs, 2)
