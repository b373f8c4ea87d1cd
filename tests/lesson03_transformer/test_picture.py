"""The picture of the whole model: its shapes are those of a forward pass."""

import torch

from lessons.lesson03_transformer.experiments.model_picture import recorded_shapes
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer


def test_shapes_are_recorded_and_the_model_is_left_as_it_was():
    model = Transformer(TransformerConfig(vocab_size=20, d_model=8, num_heads=2, num_layers=1))
    src, tgt = torch.randint(4, 20, (2, 7)), torch.randint(4, 20, (2, 5))
    shapes = recorded_shapes(model, src, tgt)
    assert shapes["src"] == (2, 7)
    assert shapes["encoder_layers.0"] == shapes["encoder_norm"] == (2, 7, 8)
    assert shapes["decoder_norm"] == (2, 5, 8)
    assert shapes["output"] == (2, 5, 20)
    assert not any(module._forward_hooks for module in model.modules())
