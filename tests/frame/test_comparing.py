"""What a check takes for equal."""

from collections import OrderedDict

import numpy as np
import pytest
import torch

from shared.exercises.comparing import close, custom_eq_type
from shared.exercises.expecting import expect_close
from shared.exercises.properties import expect_gradients
from shared.exercises.wrong import Wrong


def test_one_rounding_to_float32_is_seen_in_float64_and_another_order_of_sums_is_not():
    numbers = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for power in (-3, 0, 6):
        want = numbers * 10.0**power
        with pytest.raises(Wrong):
            expect_close(want.float().double(), want, what="numbers through float32")
    assert close(numbers.flip(0).cumsum(0)[-1], numbers.sum(), None, None)


def test_a_tensor_does_not_answer_for_itself():
    want = torch.ones(3)
    got = torch.zeros(3)
    got.detach = got.to = lambda *a, **k: want
    with pytest.raises(Wrong):
        expect_close(got, want, what="ones")


def test_a_hook_on_what_an_answer_was_given_is_no_gradient():
    x = torch.ones(3, requires_grad=True)
    x.register_hook(torch.zeros_like)  # of the oracle, too: both are zero
    with pytest.raises(Wrong, match="a hook is left on x"):
        expect_gradients(3 * x, 2 * x, {"x": x}, what="twice x")


def test_a_type_that_only_says_that_it_is_the_language_s_is_not_trusted():
    methods = {"__eq__": lambda a, b: True, "__hash__": lambda a: 0, "__module__": "builtins"}
    liar = type("int", (int,), methods)
    assert custom_eq_type(liar(7), 8) is liar
    for honest in ({}.keys(), torch.float32, torch.ones(2).max(0), OrderedDict(), np.int64(3)):
        assert custom_eq_type(honest, 0) is None
