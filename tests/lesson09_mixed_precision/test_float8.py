"""Training with products of 8 bits: what is rounded, and which scale a product needs."""

import torch

from lessons.lesson09_mixed_precision.experiments.float8 import rounded, train_with_products
from shared.training.reference_run import read_record

E4M3 = torch.float8_e4m3fn


def test_products_in_float32_are_the_recorded_run():
    losses = train_with_products((torch.float32, torch.float32), "none", 3)
    record = read_record()["losses"][:3]
    assert max(abs(a - b) for a, b in zip(losses, record, strict=True)) < 1e-5


def test_a_scale_belongs_to_the_numbers_that_are_added_up():
    x = torch.tensor([[448.0, 17.0], [7 * 2.0**-16, 2.0**-16]])
    assert rounded(x, E4M3, "none", 1).tolist() == [[448.0, 16.0], [0.0, 0.0]]
    assert rounded(x, E4M3, "tensor", 1).tolist() == [[448.0, 16.0], [0.0, 0.0]]
    assert rounded(x, E4M3, "row", 1).tolist() == [[448.0, 16.0], x[1].tolist()]
    down = rounded(x.T.contiguous(), E4M3, "row", 0)
    assert torch.equal(down, rounded(x, E4M3, "row", 1).T)
