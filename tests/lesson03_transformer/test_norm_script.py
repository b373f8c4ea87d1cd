"""Lesson 03: the script shares its variants out to any number of ranks; the notes are whole."""

import subprocess
import sys
from pathlib import Path

import pytest

import solutions.lesson03_transformer as solution
from shared.exercises.lessons import ROOT, load_checks
from shared.ranks.launching import launch

SCRIPT = ROOT / "lessons" / "lesson03_transformer" / "train.py"
TINY = ["--preset", "tiny", "--device", "cpu"]


@pytest.fixture(scope="module")
def by_ranks() -> dict[int, dict]:
    return {n: launch(SCRIPT, nproc=n, args=TINY) for n in (2, 5)}


def test_every_variant_is_trained_once_by_the_rank_whose_turn_it_is(by_ranks) -> None:
    for world_size, metrics in by_ranks.items():
        assert metrics["world_size"] == world_size
        assert len({run["variant"] for run in metrics["runs"]}) == len(metrics["runs"]) == 4
        loads = [sum(run["rank"] == rank for run in metrics["runs"]) for rank in range(world_size)]
        assert max(loads) - min(loads) <= (1 if world_size <= 4 else 2)


def test_results_do_not_depend_on_who_computed_them(by_ranks) -> None:
    def results(metrics: dict) -> list[dict]:
        own = ("rank", "speed")
        return [{k: v for k, v in run.items() if k not in own} for run in metrics["runs"]]

    assert results(by_ranks[2]) == results(by_ranks[5])


def test_warm_up_changes_the_curve_and_not_the_first_gradient(by_ranks) -> None:
    runs = {(run["norm"], run["warmup"]): run for run in by_ranks[2]["runs"]}
    for norm in ("pre", "post"):
        cold, warm = runs[norm, False], runs[norm, True]
        assert cold["first_gradients"] == warm["first_gradients"]
        assert cold["losses"][0] == warm["losses"][0]
        assert cold["losses"][2:] != warm["losses"][2:]


def test_users_own_pairs_are_read_and_the_figure_is_drawn(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    (data / "train.en").write_text("".join(f"the number {i}\n" for i in range(60)))
    (data / "train.de").write_text("".join(f"die Zahl {i}\n" for i in range(60)))
    command = [sys.executable, str(SCRIPT), *TINY, "--dataset", str(data), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert (out / "metrics.json").is_file()
    assert (out / "norms.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--peak", "-1"], "error: --peak must be a learning rate above 0, not -1.0\n"),
        (["--dataset", "/nowhere"], "error: "),
    ],
)
def test_bad_flags_are_one_line(tmp_path: Path, flags: list[str], words: str) -> None:
    command = [sys.executable, str(SCRIPT), *TINY, *flags, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith(words)
    assert done.stderr.count("\n") == 1


def test_every_exercise_has_teaching_notes() -> None:
    checks = load_checks("03")
    assert solution.NOTES.keys() == checks.keys()
    for id, each in checks.items():
        points = "point" if each.difficulty == 1 else "points"
        head = f"{each.name}: {each.difficulty} {points}, {each.minutes} minutes."
        assert solution.NOTES[id].startswith(f"\n{head}\n"), f"{id}: begin with {head!r}"
