"""The script: every engine trains the same model and keeps what the formula says; bad input."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from lessons.lesson13_fsdp.experiments import results
from shared.ranks.group import Rank
from shared.training.language_recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "lessons" / "lesson13_fsdp" / "train.py"
TINY = ("--preset", "tiny", "--steps", "4")


def test_by_hand_on_one_and_four_ranks(launch_on, metrics_of):
    (out, metrics), alone = launch_on(SCRIPT, (4,), *TINY)[4], metrics_of(SCRIPT, *TINY)
    for ranks, each in ((1, alone), (4, metrics)):
        (row,) = each["table"]
        assert each["world_size"] == ranks
        assert row["bytes a parameter"] == pytest.approx(12 / ranks, abs=0.05)
        assert (row["all_gather"], row["reduce_scatter"], row["all_reduce"]) == (10, 5, 0)
    assert metrics["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert {path.name for path in out.iterdir()} == {"metrics.json", "fsdp.png"}


@pytest.mark.full
def test_every_engine_keeps_its_bytes_and_clips_as_one_process(launch_on, metrics_of):
    # So short that Adam's epsilon counts: it hides longer ones by dividing by them.
    limit, engine = ("--steps", "3", "--max-norm", "1e-6"), ("--engine", "ddp")
    clipped, plain = (
        metrics_of(SCRIPT, *TINY, *args, *engine)["losses"] for args in (limit, limit[:2])
    )
    assert clipped != pytest.approx(plain, abs=1e-4)
    for name, kept in {"by_hand": 6, "fsdp2": 6, "hybrid": 12, "ddp": 16}.items():
        metrics = launch_on(SCRIPT, (2,), *TINY, *limit, "--engine", name)[2][1]
        (row,) = metrics["table"]
        assert metrics["losses"] == pytest.approx(clipped, abs=1e-5)
        assert row["bytes a parameter"] == pytest.approx(kept, abs=0.3)
        assert row["formula"] == pytest.approx(kept, abs=0.01)


@pytest.mark.parametrize(("units", "gathers"), [("root", 2), ("linear", 30)])
def test_units(units, gathers, metrics_of):
    metrics = metrics_of(SCRIPT, *TINY, "--units", units)
    assert f"{gathers} gathers a step" in metrics["headline"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--engine", "zero3"), "invalid choice"),
        (("--units", "layer"), "invalid choice"),
        (("--offload",), "use --engine fsdp2, not by_hand"),
        (("--engine", "fsdp2", "--offload"), "no GPU is here"),
        (("--search", "8"), "none is here"),
        (("--search", "0"), "0"),
        (("--mesh", "2x2"), "belongs to --engine hybrid"),
        (("--engine", "hybrid", "--mesh", "2x2"), "are 4 ranks, here are 1"),
        (("--engine", "hybrid", "--mesh", "two"), "two numbers are needed"),
        (("--steps", "1"), "--steps must be 2 or more"),
    ],
)
def test_bad_input_is_said_in_one_line(args, words, refused):
    assert words in refused(SCRIPT, "--preset", "tiny", *args)


def test_the_search_does_not_fill_the_cpu(monkeypatch):
    """A GPU says that it is full; the CPU stops the process, or another one."""
    monkeypatch.setattr(results, "memory_gib", lambda: 20)
    results.check_the_cpu(3 * 10**9)
    with pytest.raises(MemoryError):
        results.check_the_cpu(4 * 10**9)


def test_the_searchs_headline_says_where_the_cpus_memory_ended_it(monkeypatch):
    rank, ends = Rank(0, 0, 1, torch.device("cuda"), "nccl"), iter(["GPU", "GPU", "", "CPU"])
    monkeypatch.setattr(results, "largest_that_fits", lambda fits, most: (9, next(ends)))
    for name in ("destroy_process_group", "init_process_group"):
        monkeypatch.setattr(results.dist, name, lambda *_, **__: None)
    said: list[str] = []
    monkeypatch.setattr(results, "write_results", lambda *_, headline, **__: said.append(headline))
    results.search(Namespace(search=8), rank, RECIPES["tiny"], build=None)
    assert "by_hand 0.5, fsdp2 0.5 (or more), fsdp2, offloaded 0.5 (until the CPU's" in said[0]
