"""Layer norms against torch's, what a layer keeps, and configurations that are refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared.errors import InputError
from shared.measuring.memory import saved_bytes
from shared.model.config import TransformerConfig
from shared.model.layers import (
    EncoderLayer,
    FusedLayerNorm,
    LayerNorm,
)

CONFIG = TransformerConfig(11, d_model=12, num_heads=3, num_layers=1, d_ff=20, dropout=0.0)


@pytest.mark.parametrize("kind", [LayerNorm, FusedLayerNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layer_norm_equals_torch(kind, dtype):
    norm = kind(9, eps=1e-3).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()
    x = (3 * torch.randn(2, 5, 9) + 1).to(dtype)
    want = F.layer_norm(x, (9,), norm.weight, norm.bias, 1e-3)
    tolerance = {"atol": 6e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(norm(x), want, **tolerance)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_fused_layer_keeps_no_more_than_torch(norm, dropout):
    config = replace(CONFIG, norm=norm, dropout=dropout, inner_dropout=dropout)
    layer = EncoderLayer(config)
    engine = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=dropout, batch_first=True, norm_first=norm == "pre"
    )
    x = torch.randn(2, 9, 12, requires_grad=True)
    ours = saved_bytes(lambda: layer(x), ignore=tuple(layer.parameters()))
    theirs = saved_bytes(lambda: engine(x), ignore=tuple(engine.parameters()))
    assert 0 < ours <= theirs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d_model": 13}, "13 is not divisible by num_heads=3"),
        ({"d_model": 15}, "d_model=15 is odd"),
        ({"d_model": 9, "positions": "rotary"}, "head_dim=3, which is odd"),
        ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
        ({"vocab_size": 10.5}, "vocab_size must be an integer, not 10.5"),
        ({"dropout": 1.0}, "dropout must be in [0, 1), not 1.0"),
        ({"inner_dropout": -0.1}, "inner_dropout must be in [0, 1), not -0.1"),
        ({"norm": "sandwich"}, "'pre' or 'post', not 'sandwich'"),
        ({"positions": "alibi"}, "sinusoidal, learned, rotary, none, not 'alibi'"),
        ({"pad_id": 11}, "pad_id must be in [0, 11), not 11"),
    ],
)
def test_a_bad_configuration_says_which_field_and_value(change, words):
    with pytest.raises(InputError) as caught:
        replace(CONFIG, **change)
    assert words in str(caught.value)
