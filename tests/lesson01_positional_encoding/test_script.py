"""Lesson 01: the script shares its models out to any number of ranks and refuses in one line."""

from shared.exercises.lessons import ROOT

SCRIPT = ROOT / "lessons" / "lesson01_positional_encoding" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


def results(metrics: dict) -> list[dict]:
    """The runs without the rank that made them and how fast, in an order of their own."""
    own = ("rank", "speed")
    runs = [{k: v for k, v in run.items() if k not in own} for run in metrics["runs"]]
    return sorted(runs, key=lambda run: (run["task"], run["variant"], run["seed"]))


def test_three_ranks_find_what_one_finds(launch_on, metrics_of, tmp_path):
    one = metrics_of(SCRIPT, *TINY, "--seed", 3)
    three = launch_on(SCRIPT, (3,), *TINY, "--seed", "3")[3][1]
    assert (one["world_size"], three["world_size"]) == (1, 3)
    assert results(one) == results(three)
    assert len(three["table"]) == len({(r["task"], r["variant"], r["seed"]) for r in one["runs"]})
    assert {run["seed"] for run in one["runs"]} == {3}
    of_ranks = {(run["rank"], run["variant"]) for run in three["runs"]}
    assert sorted(rank for rank, _ in of_ranks) == [0, 0, 1, 2]
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_a_width_that_cannot_be_paired_is_one_line(refused):
    words = "error: --d-model 33 is no multiple of 4 (2 heads of pairs)"
    assert refused(SCRIPT, *TINY, "--d-model", 33) == words
