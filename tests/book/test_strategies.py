"""The picture of the strategies: what lesson 16 asks of it, and its bars beside the planner."""

from typing import Any

import pytest

from shared.book.planned import one_gpu, short
from shared.book.strategies import FIRST, strategies
from shared.planner.memory import memory_per_rank
from shared.planner.models import MODELS
from shared.planner.specs import Plan


def fitting(kept: str) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """Of the 70B on 64 H100s the picture's numbers, and GB and seconds of what fits."""
    state = strategies("70b", "h100", 64, kept)
    memory, seconds = (dict(panel["rows"]) for panel in state["panels"])
    times = {name: sum(parts) for name, parts in seconds.items() if not isinstance(parts, str)}
    return state["numbers"], {name: sum(memory[name]) for name in times}, times


def test_what_the_lesson_says_of_the_70b_on_64_gpus():
    numbers, _, times = fitting("all activations")
    three = {"tensor 8, ZeRO-1", "tensor 8, ZeRO-3", "3D: tensor 8, pipeline 2"}
    assert set(times) == three | {FIRST} and numbers["ways that fit"] == 3
    assert times["3D: tensor 8, pipeline 2"] == pytest.approx(35.6, abs=0.05)
    numbers, sizes, times = fitting("inputs of layers")
    assert set(times) == three | {FIRST, "ZeRO-3, FSDP", "pipeline 8, ZeRO-1"}
    assert numbers["ways that fit"] == 5
    assert [short(sizes[n]) for n in ("ZeRO-3, FSDP", "pipeline 8, ZeRO-1")] == ["37.1", "65.7"]
    assert times.pop("ZeRO-3, FSDP") == pytest.approx(38.9, abs=0.05)
    assert times.pop(FIRST) == pytest.approx(37.6, abs=0.05)
    assert min(times.values()) > 47


def test_a_bar_is_as_long_as_its_sentence_says():
    for model, rows in (("8b", 4), ("405b", 16)):
        state = one_gpu(model, "mixed", rows, "all activations")
        ((_, parts),) = state["panels"][0]["rows"]
        whole = memory_per_rank(MODELS[model], Plan(micro_batch=rows)).total / 1e9
        assert short(sum(parts)) == short(whole)
        assert f" {short(whole)} GB where" in state["says"]
