"""The script: meshes that share the curve, a disk that is full; bad input."""

import errno
import json

import pytest
import torch.distributed.checkpoint as dcp

from lessons.lesson16_parallelism_3d.experiments.choosing import RECIPES, bytes_needed, choose_plan
from lessons.lesson16_parallelism_3d.experiments.results import headline
from shared.errors import InputError
from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson16_parallelism_3d" / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))


def test_one_process_is_a_mesh_of_one(metrics_of, tmp_path):
    metrics = metrics_of(SCRIPT, *TINY, "--steps", 4)
    (row,) = metrics["table"]
    assert row["mesh"] == "dp 1 x tp 1 x pp 1"
    assert [row[f"{axis} messages"] for axis in ("dp", "tp", "pp")] == [0, 0, 0]
    assert metrics["memory"]["measured"] == metrics["memory"]["predicted"]
    assert {path.name for path in tmp_path.glob("[!.]*")} == {"metrics.json", "parallel3d.png"}


@pytest.mark.full
def test_four_ranks_are_a_mesh_and_share_the_curve(launch_on, metrics_of):
    """One is continued on other ranks in tests/training/test_resumed_scripts.py."""
    args = (*TINY, "--steps", "2")
    metrics = launch_on(SCRIPT, (4,), *args)[4][1]
    (row,) = metrics["table"]
    assert row["mesh"] == "dp 1 x tp 2 x pp 2"
    assert row["bubble by formula, %"] == pytest.approx(20)  # 1 / (4 + 1)
    assert row["dp messages"] == 0
    assert min(row["tp messages"], row["pp messages"]) > 0
    assert metrics["memory"]["measured"] == metrics["memory"]["predicted"]
    assert metrics["losses"] == pytest.approx(metrics_of(SCRIPT, *args)["losses"], abs=1e-4)


def test_a_full_disk_costs_the_new_checkpoint_alone(tmp_path, run_script, monkeypatch):
    place = tmp_path / "saved"
    args = (*TINY, "--out", tmp_path / "out", "--save", place, "--steps")
    assert run_script(SCRIPT, *args, 1).status == 0
    before = {path.name: path.read_bytes() for path in place.iterdir()}

    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.filesystem, "_write_item", full)
    status, _, err = run_script(SCRIPT, *args, 2)
    assert status == 2
    assert f"checkpoint {place} cannot be written: No space left on device" in err
    assert "Traceback" not in err
    assert len(json.loads((tmp_path / "out" / "metrics.json").read_text())["losses"]) == 2
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"saved", "out"}


class Flags:
    def __init__(self, **given):
        chosen = {"dp": -1, "tp": -1, "pp": -1, "schedule": "1f1b", "micro_batches": None}
        vars(self).update(chosen, zero=0, checkpointing=False)
        vars(self).update(given)


@pytest.mark.parametrize(
    ("ranks", "given", "mesh"),
    [
        (1, {}, (1, 1, 1)),
        (2, {}, (1, 2, 1)),
        (3, {}, (1, 3, 1)),
        (4, {}, (1, 2, 2)),
        (5, {}, (1, 1, 5)),  # 12 heads cannot be cut over 5 ranks
        (6, {}, (1, 2, 3)),
        (8, {}, (2, 2, 2)),
        (8, {"dp": 1}, (1, 4, 2)),
        (8, {"tp": 1, "pp": 2}, (4, 1, 2)),
        (4, {"schedule": "interleaved", "pp": 2}, (1, 2, 2)),
    ],
)
@pytest.mark.parametrize("preset", RECIPES)
def test_a_mesh_is_chosen_for_any_number_of_ranks(ranks, given, mesh, preset):
    recipe = RECIPES[preset]
    plan = choose_plan(Flags(**given), recipe, ranks)
    assert (plan.dp, plan.tp, plan.pp) == mesh
    assert plan.batch == recipe.batch  # no micro-batch has a row less than another
    assert plan.bubble <= 0.5


def test_the_line_says_that_gpipe_was_not_what_was_predicted():
    row = dict.fromkeys(("measured", "MiB, predicted", "last loss"), 1.0) | {"mesh": "a mesh"}
    row |= dict.fromkeys(("dp messages", "tp messages", "pp messages"), 0)
    assert "predicted 1 for 1F1B (GPipe keeps" in headline(row, "gpipe")
    assert "1F1B" not in headline(row, "interleaved")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tp", "2"), "dp 1 x tp 2 x pp 1 is a mesh of 2 ranks, here are 1"),
        (("--dp", "0"), "whole number from 1 up, got '0'; -1 takes what is left"),
        (("--micro-batches", "121"), "has 120 of the 120 rows of a step, take 120 at most"),
        (("--zero", "4"), "invalid choice"),
        (("--schedule", "pipedream"), "invalid choice"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)


def test_what_the_model_cannot_be_cut_into_is_said():
    with pytest.raises(InputError, match="12 heads cannot be shared out evenly over tp = 5"):
        bytes_needed(Flags(tp=5), RECIPES["tiny"], 5, half=False)
