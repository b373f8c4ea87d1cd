"""Training with products of 8 bits: what is rounded, and which scale a product needs."""

import pytest
import torch

from lessons.lesson09_mixed_precision.experiments.float8 import rounded, train_with_products
from lessons.lesson09_mixed_precision.laboratory import eight_bits
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


@pytest.mark.parametrize("by_row", [False, True])
def test_a_kernel_that_knows_one_scale_a_factor_is_enough_for_the_check(by_row, monkeypatch):
    """An older torch has no other on a CPU."""
    kernel = torch._scaled_mm

    def one_scale(a, b, scale_a, scale_b, **more):
        assert scale_a.numel() == scale_b.numel() == 1
        return kernel(a, b, scale_a=scale_a, scale_b=scale_b, **more)

    monkeypatch.setattr(torch, "_scaled_mm", one_scale)
    (x, _), (weight, _) = eight_bits.factor(0, 5, 24), eight_bits.factor(1, 7, 24, 6)
    (a, scale_a), (b, scale_b) = (eight_bits.in_8_bits(f, E4M3, by_row) for f in (x, weight))
    scales = {"scale_a": scale_a, "scale_b": scale_b.T.contiguous()}
    want = kernel(a, b.T, **scales, out_dtype=torch.float32)
    assert torch.equal(eight_bits.by_torch(x, weight, E4M3, by_row), want)
