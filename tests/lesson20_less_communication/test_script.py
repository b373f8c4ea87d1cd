"""The script: what each method sends, torch's engines beside ours; bad input."""

import pytest

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson20_less_communication" / "train.py"
# A folder of text that is quickly read: the course's own sources.
TINY = ("--preset", "tiny", "--device", "cpu", "--dataset", str(ROOT / "shared" / "data"))


def run(launch_on, ranks, *args):
    """Metrics of a run."""
    return launch_on(SCRIPT, (ranks,), *TINY, *args)[ranks][1]


def same_bytes(metrics):
    """The bytes that were sent, which are those of the formula."""
    sent = metrics["bytes_sent"]
    assert sent["measured"] == pytest.approx(sent["predicted"], rel=1e-12)
    return sent["measured"]


@pytest.mark.full
def test_power_sgd_is_torchs_and_sends_what_the_formula_says(launch_on):
    ours = run(launch_on, 2, "--mbit", "100")
    torchs = run(launch_on, 2, "--engine", "torch")
    assert torchs["bytes_sent"]["predicted"] == same_bytes(ours)
    assert ours["losses"] == pytest.approx(
        torchs["losses"],
        abs=1e-3,  # float32, by QR and by Gram-Schmidt; in float64 they are equal to 1e-12
    )
    (row,) = ours["table"]
    assert row["message ms at 100 Mbit/s"] == pytest.approx(
        1000 * 8 * same_bytes(ours) / 100e6, abs=0.01
    )
    assert 0 < row["of all-reduce's"] < 0.6


@pytest.mark.parametrize(
    ("ranks", "args", "share"),
    [
        (3, ("--method", "fp16"), 0.5),
        (2, ("--method", "diloco", "--every", "4", "--steps", "8"), 0.25),
        pytest.param(1, ("--method", "one_bit"), "-", marks=pytest.mark.full),
        pytest.param(2, ("--method", "all_reduce"), 1.0, marks=pytest.mark.full),
        pytest.param(
            2, ("--method", "local_sgd", "--engine", "torch", "--steps", "8"), 1 / 8,
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_share_of_the_bytes(ranks, args, share, launch_on):
    metrics = run(launch_on, ranks, *args)
    (row,) = metrics["table"]
    if ranks == 1:
        assert row["of all-reduce's"] == share
        assert "one_bit on 1 rank sends nothing; loss " in metrics["headline"]
        return
    same_bytes(metrics)
    assert row["of all-reduce's"] == pytest.approx(share, abs=1e-4)


@pytest.mark.full
def test_what_sends_everything_has_the_losses_of_all_reduce(launch_on):
    plain = run(launch_on, 4, "--method", "all_reduce")["losses"]
    for method in (("hierarchical", "--nodes", "2"), ("topk", "--density", "1")):
        losses = run(launch_on, 4, "--method", *method)["losses"]
        assert losses == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--mbit", "0"), "must be a number above 0, got '0'"),
        (("--density", "0"), "a density of 0.0 sends no share of the numbers"),
        (("--rank", "0"), "a rank of 0 approximates no matrix: take 1 or more"),
        (("--every", "0"), "--every 0 steps is never: take 1 or more"),
        (
            ("--method", "hierarchical", "--nodes", "3"),
            "1 ranks cannot be shared out evenly over 3",
        ),
        (("--method", "topk", "--engine", "torch"), "--engine torch has no topk"),
        (("--engine", "torch", "--start", "1"), "cannot begin at --start 1: take 2 or more"),
        (("--method", "gossip"), "invalid choice"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, *TINY, *args)
