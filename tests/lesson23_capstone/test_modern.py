"""The modern blocks beside torch's own, what the planner counts, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared.capstone.config import ModelTable
from shared.capstone.resharding import read_part
from shared.capstone.tasks import build_model, model_spec
from shared.errors import InputError
from shared.model.modern import (
    ModernConfig,
    RMSNorm,
    SwiGLU,
    fused_grouped_attention,
    grouped_attention,
)


def test_the_gradients_of_rms_norm_are_torchs():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    own = RMSNorm(7).double()
    own.weight.data = weight
    leaves = x.requires_grad_(), own.weight
    ys = own(x), F.rms_norm(x, (7,), own.weight, own.eps)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaves) for y in ys))


def test_swiglu_is_its_formula_with_torchs_silu():
    torch.manual_seed(0)
    own, x = SwiGLU(6, 10), torch.randn(2, 3, 6)
    assert {n for n, _ in own.named_parameters()} == {
        "linear1.weight", "gate.weight", "linear2.weight"
    }  # fmt: skip
    want = (nn.SiLU()(x @ own.gate.weight.T) * (x @ own.linear1.weight.T)) @ own.linear2.weight.T
    assert torch.allclose(own(x), want, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt", "modern"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_planner_counts_the_models_parameters(kind, tied):
    table = ModelTable(kind, 32, 3, 4, 2 if kind == "modern" else 0, 48, length=16, tied=tied)
    spec = model_spec(table, 128)
    assert spec is not None
    assert sum(p.numel() for p in build_model(table, 128).parameters()) == spec.num_parameters


def test_heads_that_cannot_share_are_refused():
    with pytest.raises(InputError, match="num_kv_heads must divide"):
        ModernConfig(vocab_size=8, d_model=24, num_heads=6, num_kv_heads=4)
    with pytest.raises(InputError, match="is of modern models"):
        build_model(ModelTable("gpt", num_kv_heads=2), 64)


@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_queries_are_the_last_positions_as_by_hand(length, masked):
    torch.manual_seed(0)
    sizes = ((4, length), (2, 6), (2, 6))
    q, k, v = (torch.randn(2, n, t, 4, dtype=torch.float64).requires_grad_() for n, t in sizes)
    mask = None
    if masked:
        mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
        mask[1, ..., :2] = length == 6  # not the first of all queries: it would see nothing
    own, fused = (
        f(q, k, v, mask, causal=True) for f in (grouped_attention, fused_grouped_attention)
    )
    torch.testing.assert_close(own, fused)
    grads = (torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (own, fused))
    torch.testing.assert_close(*grads)


def test_a_part_of_nothing_is_empty():
    assert read_part(lambda file, begin, end: torch.zeros(end - begin), 0, 2, 2, 0).shape == (0,)
