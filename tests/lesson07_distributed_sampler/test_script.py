"""The script: what each pitfall does on four ranks, the warning, and bad input."""

import warnings

import pytest

from lessons.lesson07_distributed_sampler.experiments.pitfalls import check_sizes
from shared.data.sampling import RepeatedOrderWarning
from shared.errors import InputError
from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson07_distributed_sampler" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.mark.full
def test_each_pitfall_shows_in_what_four_ranks_saw(launch_on):
    """The notebook launches two."""
    out, metrics = launch_on(SCRIPT, (4,), *TINY)[4]
    seen = {run["pitfall"]: run for run in metrics["runs"]}
    assert list(seen) == ["none", "no_set_epoch", "no_sampler", "padded_eval", "worker_seed"]
    for name, run in seen.items():
        assert run["different"] == (25 if name == "no_sampler" else 100)
        assert run["orders"] == (1 if name == "no_set_epoch" else 3)
        assert run["equal_noise"] == (100 if name == "worker_seed" else 0)
        assert (run["reported"] != run["exact"]) is (name == "padded_eval")
    assert seen["none"]["loss"] != seen["no_set_epoch"]["loss"]
    assert (out / "pitfalls.png").stat().st_size > 10_000


def test_a_forgotten_set_epoch_is_warned_of(tmp_path, run_script):
    args = (*TINY, "--out", tmp_path, "--pitfall", "no_set_epoch")
    with pytest.warns(RepeatedOrderWarning, match="began with the same 64 samples"):
        status, out, _ = run_script(SCRIPT, *args)
    assert status == 0
    assert "1 in 3 epochs" in out
    with warnings.catch_warnings():
        warnings.simplefilter("error", RepeatedOrderWarning)
        args = (*TINY, "--out", tmp_path, "--pitfall", "none")
        assert run_script(SCRIPT, *args)[::2] == (0, "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--samples", 10), "a global batch of 60, 10 samples, 1 ranks"),
        (("--samples", 10**8), "100000000 samples asked for"),
        (("--pitfall", "none", "--mine"), "--mine: no exercise"),
    ],
)
def test_bad_input_is_one_line(flags, words, refused):
    assert f"error: {words}" in refused(SCRIPT, *TINY, *flags)


def test_a_dataset_smaller_than_the_world_is_refused():
    with pytest.raises(InputError, match="3 samples and 4 ranks: a dataset smaller than the world"):
        check_sizes(samples=3, batch=4, world_size=4)
    with pytest.raises(InputError, match="a global batch of 2, 30 samples, 4 ranks"):
        check_sizes(samples=30, batch=2, world_size=4)
    with pytest.raises(InputError, match=r"a global batch of 9 .* by 2 ranks: try --batch 8 or 10"):
        check_sizes(samples=30, batch=9, world_size=2)
    check_sizes(samples=4, batch=4, world_size=4)
