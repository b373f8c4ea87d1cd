"""The script: meshes that share the curve, ways of balancing; bad input."""

import pytest

from shared.exercises.lessons import ROOT
from shared.ranks.launching import LaunchFailed, launch

SCRIPT = ROOT / "lessons" / "lesson18_mixture_of_experts" / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))


@pytest.fixture(scope="module")
def on_two(launch_on):
    """Folder and metrics on 2 ranks."""
    return launch_on(SCRIPT, (2,), *TINY, "--steps", "3")[2]


def test_ranks_share_the_experts_and_not_the_curve(on_two, metrics_of):
    (out, metrics), alone = on_two, metrics_of(SCRIPT, *TINY, "--steps", "3")
    for ranks, each in ((1, alone), (2, metrics)):
        (row,) = each["table"]
        assert (row["dp"], row["ep"]) == (1, ranks)
    assert metrics["losses"] == pytest.approx(alone["losses"], abs=1e-3)
    assert {path.name for path in out.iterdir()} == {"metrics.json", "experts.png"}


@pytest.mark.parametrize(
    ("ranks", "args", "shape"),
    [
        (2, ("--ep", "1"), (2, 1)),
        pytest.param(2, ("--balance", "bias"), (1, 2), marks=pytest.mark.full),
        pytest.param(2, ("--capacity", "1.0", "--k", "1"), (1, 2), marks=pytest.mark.full),
        pytest.param(4, ("--ep", "2"), (2, 2), marks=pytest.mark.full),
        pytest.param(5, (), (5, 1), marks=pytest.mark.full),
    ],
)
def test_every_mesh_and_option_runs(ranks, args, shape, on_two, launch_on):
    metrics = launch_on(SCRIPT, (ranks,), *TINY, "--steps", "3", *args)[ranks][1]
    (row,) = metrics["table"]
    assert (row["dp"], row["ep"]) == shape
    assert (row["kept"] < 1) == ("--capacity" in args)
    if args in (("--ep", "1"), ("--ep", "2"), ()):  # nothing but the mesh differs
        assert metrics["losses"] == pytest.approx(on_two[1]["losses"], abs=1e-3)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--k", "13"), "--k 13 of 12 experts: take a k from 1"),
        (("--ep", "2"), "--ep 2 on 1 ranks: a mesh of dp x ep has a place for every rank"),
        (("--experts", "0"), "whole number from 1 up"),
        (("--capacity", "0"), "must be a number above 0, got '0'"),
        (("--balance", "luck"), "invalid choice"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)


def test_experts_that_the_ranks_do_not_divide_are_refused_by_the_script():
    line = r"error: --experts 3 cannot be shared out evenly over --ep 2 ranks: take a number of"
    with pytest.raises(LaunchFailed, match=line) as caught:
        launch(SCRIPT, nproc=2, args=[*TINY, "--experts", "3", "--k", "1", "--ep", "2"])
    assert "Traceback" not in str(caught.value)
