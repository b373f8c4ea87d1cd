"""The published recipe is what the large preset says, and its size is the published one."""

import pytest

from shared.model.size import count_parameters
from shared.training.recipes import TRANSLATION
from shared.training.schedules import cosine_schedule, warmup_schedule


def test_the_large_preset_is_the_published_recipe():
    recipe = TRANSLATION["large"]
    assert (recipe.num_layers, recipe.d_model, recipe.d_ff, recipe.num_heads) == (4, 128, 256, 4)
    assert (recipe.dropout, recipe.warmup, recipe.steps, recipe.average) == (0.3, 2000, 8000, 10)
    assert recipe.max_tokens == 2 * 4096
    assert recipe.config(9_712).tie_embeddings
    assert count_parameters(recipe.config(9_712)) == pytest.approx(2.6e6, rel=0.1)


def test_its_rate_is_the_papers_curve_with_a_peak_of_its_own():
    recipe = TRANSLATION["large"]
    rates = [recipe.learning_rate(step, recipe.steps) for step in range(1, 8001)]
    assert max(rates) == rates[1999] == pytest.approx(5e-3)
    ratio = {rate / warmup_schedule(n, 128, 2000) for n, rate in enumerate(rates, start=1)}
    assert max(ratio) == pytest.approx(min(ratio))


def test_a_run_shorter_than_the_warmup_still_comes_down():
    recipe = TRANSLATION["small"]
    rates = [recipe.learning_rate(step, 10) for step in range(1, 11)]
    assert max(rates) == recipe.peak
    assert rates[-1] == pytest.approx(0.0)
    assert rates == [cosine_schedule(step, 5, 10, recipe.peak) for step in range(1, 11)]
