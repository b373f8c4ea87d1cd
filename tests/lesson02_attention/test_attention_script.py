"""Lesson 02's script: the sweep is shared out to any number of ranks and counts by formula."""

from pathlib import Path

import pytest
import torch

from lessons.lesson02_attention.experiments.kept_bytes import FULL, draw_sweep, kept_by_module
from shared.exercises.lessons import ROOT
from shared.measuring.memory import saved_bytes
from shared.model.attention import MultiHeadAttention

SCRIPT = ROOT / "lessons" / "lesson02_attention" / "train.py"
TINY = ("--preset", "tiny", "--device", "cpu")


@pytest.mark.full
def test_four_ranks_count_each_case_once_and_by_the_formula(launch_on) -> None:
    """The notebook launches two."""
    metrics = launch_on(SCRIPT, (4,), *TINY)[4][1]
    assert metrics["world_size"] == 4
    assert [row["L"] for row in metrics["table"]] == [32, 64, 128]
    assert len({row["rank"] for row in metrics["table"]}) == 3
    for row in metrics["table"]:
        for name, fused in (("by hand MiB", False), ("fused MiB", True)):
            want = kept_by_module(1, row["L"], 32, row["heads"], fused=fused)
            assert row[name] * 2**20 == want
        assert row["difference"] < 1e-6


def test_plain_python_with_all_flags(metrics_of, tmp_path: Path) -> None:
    flags = "--dtype bfloat16 --causal --heads 2 4 --steps 1"
    metrics = metrics_of(SCRIPT, *TINY, *flags.split())
    assert [(row["heads"], row["L"]) for row in metrics["table"]][-1] == (4, 128)
    assert metrics["dtype"] == "bfloat16"
    assert (tmp_path / "attention_sweep.png").stat().st_size > 10_000


def test_heads_that_do_not_divide_are_one_line(refused) -> None:
    words = "error: --heads 3: d_model is 32; take a divisor"
    assert refused(SCRIPT, *TINY, "--heads", 3) == words


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formula_of_the_module(fused: bool, causal: bool, dtype: torch.dtype) -> None:
    module = MultiHeadAttention(24, 3, fused=fused).to(dtype)
    x = torch.randn(2, 10, 24, dtype=dtype)
    kept = saved_bytes(lambda: module(x, x, x, causal=causal), ignore=tuple(module.parameters()))
    itemsize = x.element_size()
    assert kept == kept_by_module(2, 10, 24, 3, fused=fused, causal=causal, itemsize=itemsize)


def test_a_row_that_did_not_fit_is_drawn_around(tmp_path: Path) -> None:
    fits = {"L": 32, "heads": 2, "by hand MiB": 1.0, "fused MiB": 0.5, "time ratio": 2.0}
    table = [fits, {**fits, "L": 64, "by hand MiB": FULL, "time ratio": ""}]
    sizes = {"batch": 1, "d_model": 32, "causal": False, "itemsize": 4}
    draw_sweep(table, sizes).savefig(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").exists()


def test_saved_bytes_counts_a_storage_once_and_leaves_out_what_is_ignored() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    weight = torch.randn(6, 5, requires_grad=True)
    assert saved_bytes(lambda: (x @ weight, x.T.relu())) == x.nbytes + weight.nbytes + x.nbytes
    assert saved_bytes(lambda: (x @ weight, x[:2] @ weight)) == x.nbytes + weight.nbytes
    assert saved_bytes(lambda: x @ weight, ignore=(weight,)) == x.nbytes
