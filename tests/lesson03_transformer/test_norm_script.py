"""Lesson 03: the script shares its variants out to any number of ranks; the notes are whole."""

import pytest

import solutions.lesson03_transformer as solution
from shared.exercises.lessons import ROOT, load_checks

SCRIPT = ROOT / "lessons" / "lesson03_transformer" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


def results(metrics: dict) -> list[dict]:
    """The runs without the rank that made them and how fast."""
    own = ("rank", "speed")
    return [{k: v for k, v in run.items() if k not in own} for run in metrics["runs"]]


def test_five_ranks_find_what_one_finds(launch_on, metrics_of):
    one = metrics_of(SCRIPT, *TINY)
    five = launch_on(SCRIPT, (5,), *TINY)[5][1]
    assert (one["world_size"], five["world_size"]) == (1, 5)
    assert results(one) == results(five)
    assert sorted(run["rank"] for run in five["runs"]) == [0, 1, 2, 3]
    # Warm-up changes the curve, and not the first gradient.
    runs = {(run["norm"], run["warmup"]): run for run in one["runs"]}
    for norm in ("pre", "post"):
        cold, warm = runs[norm, False], runs[norm, True]
        assert cold["first_gradients"] == warm["first_gradients"]
        assert cold["losses"][0] == warm["losses"][0]
        assert cold["losses"][2:] != warm["losses"][2:]


def test_users_own_pairs_are_read_and_the_figure_is_drawn(run_script, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (data / "train.en").write_text("".join(f"the number {i}\n" for i in range(60)))
    (data / "train.de").write_text("".join(f"die Zahl {i}\n" for i in range(60)))
    assert run_script(SCRIPT, *TINY, "--dataset", data, "--out", out).status == 0
    assert (out / "metrics.json").is_file()
    assert (out / "norms.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--peak", "-1"], "error: --peak must be a learning rate above 0, not -1.0"),
        (["--dataset", "/nowhere"], "error: "),
    ],
)
def test_bad_flags_are_one_line(flags, words, refused):
    assert refused(SCRIPT, *TINY, *flags).startswith(words)


def test_every_exercise_has_teaching_notes() -> None:
    checks = load_checks("03")
    assert solution.NOTES.keys() == checks.keys()
    for id, each in checks.items():
        points = "point" if each.difficulty == 1 else "points"
        head = f"{each.name}: {each.difficulty} {points}, {each.minutes} minutes."
        assert solution.NOTES[id].startswith(f"\n{head}\n"), f"{id}: begin with {head!r}"
