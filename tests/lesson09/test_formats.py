"""The two experiments: what is rounded, what is not, and which weights ever moved."""

import torch

from shared.experiments.lesson09_formats import layer_gradients, train_in_format, train_stored_in
from shared.training.reference_run import reference_batches, reference_model


def test_a_share_that_is_a_power_of_two_changes_no_bit_in_float32():
    assert train_in_format(torch.float32, 3, 2.0**-11) == train_in_format(torch.float32, 3)


def test_gradients_at_the_layers_shrink_with_the_share():
    whole, part = (layer_gradients(reference_model(), reference_batches()[0], s) for s in (1, 0.25))
    assert torch.equal(part, whole / 4)


def test_a_weight_that_has_moved_once_counts_from_then_on():
    shares = [train_stored_in(torch.bfloat16, steps, 1e-4)[1] for steps in (1, 4)]
    assert 0.15 < shares[0] <= shares[1] < 0.2
