"""The picture of the heads: its shapes are those of a forward pass."""

import torch

from lessons.lesson02_attention.experiments.heads_picture import recorded_shapes
from shared.model.attention import MultiHeadAttention


def test_shapes_are_recorded_and_the_attention_is_left_as_it_was():
    attention = MultiHeadAttention(12, 3)
    shapes = recorded_shapes(attention, torch.randn(2, 5, 12))
    assert (
        shapes["x"] == shapes["projected"] == shapes["combined"] == shapes["output"] == (2, 5, 12)
    )
    assert shapes["heads"] == (2, 3, 5, 4)
    assert shapes["weights"] == (2, 3, 5, 5)
    assert not attention.w_q._forward_hooks and not attention.w_o._forward_hooks
    assert not attention.keep_weights
