"""The script: engines, meshes and ranks that share the curve; bad input."""

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson14_tensor_parallel" / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))


@pytest.fixture(scope="module")
def on_three(launch_on):
    """Folder and metrics on 3 ranks."""
    return launch_on(SCRIPT, (3,), *TINY, "--steps", "3")[3]


def test_ranks_share_the_parameters_and_not_the_curve(on_three, metrics_of):
    (out, metrics), alone = on_three, metrics_of(SCRIPT, *TINY, "--steps", "3")
    (one,), (three,) = alone["table"], metrics["table"]
    assert [one[name] for name in ("tp", "dp", "messages a step")] == [1, 1, 0]
    assert [three[name] for name in ("tp", "dp", "messages a step")] == [3, 1, 12]
    assert 1 < 3 * three["parameters a rank"] / one["parameters a rank"] < 1.1
    assert metrics["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert {path.name for path in out.iterdir()} == {"metrics.json", "tensor_parallel.png"}


@pytest.mark.parametrize(
    ("ranks", "args", "shape"),
    [
        (2, ("--engine", "dtensor"), (2, 1)),
        pytest.param(2, ("--sequence-parallel",), (2, 1), marks=pytest.mark.full),
        pytest.param(4, ("--tp", "2"), (2, 2), marks=pytest.mark.full),
        pytest.param(5, (), (1, 5), marks=pytest.mark.full),
    ],
)
def test_every_engine_and_mesh_has_the_same_curve(ranks, args, shape, on_three, launch_on):
    metrics = launch_on(SCRIPT, (ranks,), *TINY, "--steps", "3", *args)[ranks][1]
    (row,) = metrics["table"]
    assert (row["tp"], row["dp"]) == shape
    assert metrics["losses"] == pytest.approx(on_three[1]["losses"], abs=1e-4)


def test_one_process_is_an_engine(on_three, metrics_of):
    losses = metrics_of(SCRIPT, *TINY, "--engine", "single", "--steps", 3)["losses"]
    assert losses == pytest.approx(on_three[1]["losses"], abs=1e-5)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tp", "2"), "--tp 2 on 1 ranks: a mesh of dp x tp has a place for every rank"),
        (("--tp", "0"), "whole number from 1 up"),
        (("--engine", "megatron"), "invalid choice"),
        (("--sequence-parallel", "--engine", "dtensor"), "leave out --engine dtensor"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
