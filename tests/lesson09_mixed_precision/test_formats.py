"""The two experiments: what is rounded, what is not, and which weights ever moved."""

import torch

from lessons.lesson09_mixed_precision.experiments.formats import (
    round_stochastically,
    train_in_format,
    train_stored_in,
)


def test_a_share_that_is_a_power_of_two_changes_no_bit_in_float32():
    assert train_in_format(torch.float32, 3, 2.0**-11) == train_in_format(torch.float32, 3)


def test_a_weight_that_has_moved_once_counts_from_then_on():
    shares = [train_stored_in(torch.bfloat16, steps, 1e-4)[1] for steps in (1, 4)]
    assert 0.15 < shares[0] <= shares[1] < 0.2


def test_stochastic_rounding_gives_bf16_neighbours_whose_mean_is_the_number():
    value, draw = 1.0 - 0.003, torch.Generator().manual_seed(0)
    weights = torch.full((20_000,), value)
    round_stochastically([weights], draw)
    assert torch.equal(weights, weights.bfloat16().float())
    below, above = sorted(weights.unique().tolist())
    assert below < value < above
    assert above - below == 2.0**-8
    assert abs(weights.mean().item() - value) < 1e-4  # the nearest alone would be 9e-4 off
    exact = torch.tensor([0.0, 1.0, -0.5])
    round_stochastically([exact], draw)
    assert exact.tolist() == [0.0, 1.0, -0.5]


def test_without_a_rate_the_weights_are_trained_on_the_runs_own_schedule():
    losses, _ = train_stored_in(torch.float32, 3, None)
    assert losses == train_in_format(torch.float32, 3)
