"""The script: meshes that share the curve, ways of balancing; bad input."""

from argparse import Namespace

import pytest
import torch

from lessons.lesson18_mixture_of_experts.experiments.results import ranks_an_expert_group
from shared.errors import InputError
from shared.exercises.lessons import ROOT
from shared.ranks.group import Rank

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


def test_experts_that_the_ranks_do_not_divide_are_refused():
    given, rank = Namespace(experts=3, k=1, ep=2), Rank(0, 0, 2, torch.device("cpu"), "gloo")
    line = "--experts 3 cannot be shared out evenly over --ep 2 ranks: take a number of"
    with pytest.raises(InputError, match=line):
        ranks_an_expert_group(given, rank)
