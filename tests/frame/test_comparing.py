"""What a check takes for equal."""

import pytest
import torch

from shared.exercises.comparing import close
from shared.exercises.expecting import expect_close
from shared.exercises.wrong import Wrong


def test_one_rounding_to_float32_is_seen_in_float64_and_another_order_of_sums_is_not():
    numbers = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for power in (-3, 0, 6):
        want = numbers * 10.0**power
        with pytest.raises(Wrong):
            expect_close(want.float().double(), want, what="numbers through float32")
    assert close(numbers.flip(0).cumsum(0)[-1], numbers.sum(), None, None)
