"""The script: engines, meshes and ranks that share the curve; bad input."""

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson14_tensor_parallel" / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))


@pytest.fixture(scope="module")
def by_hand(launch_on):
    """Folder and metrics on 1 and 3 ranks."""
    return launch_on(SCRIPT, (1, 3), *TINY, "--steps", "3")


def test_ranks_share_the_parameters_and_not_the_curve(by_hand):
    for ranks, (out, metrics) in by_hand.items():
        (row,) = metrics["table"]
        assert (row["tp"], row["dp"]) == (ranks, 1)
        assert metrics["losses"] == pytest.approx(by_hand[1][1]["losses"], abs=1e-4)
        assert row["messages a step"] == (12 if ranks > 1 else 0)
        assert {path.name for path in out.iterdir()} == {"metrics.json", "tensor_parallel.png"}
    one, three = (by_hand[n][1]["table"][0]["parameters a rank"] for n in (1, 3))
    assert one / 3 < three < 1.1 * one / 3


@pytest.mark.parametrize(
    ("ranks", "args", "shape"),
    [
        (2, ("--engine", "dtensor"), (2, 1)),
        pytest.param(2, ("--sequence-parallel",), (2, 1), marks=pytest.mark.full),
        pytest.param(4, ("--tp", "2"), (2, 2), marks=pytest.mark.full),
        pytest.param(5, (), (1, 5), marks=pytest.mark.full),
    ],
)
def test_every_engine_and_mesh_has_the_same_curve(ranks, args, shape, by_hand, launch_on):
    metrics = launch_on(SCRIPT, (ranks,), *TINY, "--steps", "3", *args)[ranks][1]
    (row,) = metrics["table"]
    assert (row["tp"], row["dp"]) == shape
    assert metrics["losses"] == pytest.approx(by_hand[1][1]["losses"], abs=1e-4)


def test_one_process_is_an_engine(by_hand, metrics_of):
    losses = metrics_of(SCRIPT, *TINY, "--engine", "single", "--steps", 3)["losses"]
    assert losses == pytest.approx(by_hand[1][1]["losses"], abs=1e-5)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--tp", "2"), "--tp 2 on 1 ranks: a mesh of dp x tp has a place for every rank"),
        (("--tp", "0"), "whole number from 1 up"),
        (("--engine", "megatron"), "invalid choice"),
        (("--sequence-parallel", "--engine", "dtensor"), "leave out --engine dtensor"),
        (("--dataset", "nowhere"), "nowhere"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
