"""Our attention where no check of lesson 02 looks: empty rows, pieces, kept weights and bytes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared.measuring.memory import saved_bytes
from shared.model.attention import (
    MultiHeadAttention,
    causal_mask,
    padding_mask,
    scaled_dot_product_attention,
    split_heads,
)


def triple(b, h, t, s, k, dtype=torch.float64):
    generator = torch.Generator().manual_seed(b * 100 + t)
    shapes = [(b, h, t, k), (b, h, s, k), (b, h, s, k)]
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("what", ["one query", "a whole sentence", "all"])
def test_an_empty_row_gives_zeros_and_finite_gradients(fused, dtype, what):
    q, k, v = triple(2, 3, 5, 5, 8, dtype=dtype)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    if what == "one query":
        mask[0, :, 2] = False
    elif what == "a whole sentence":
        mask[0] = False
    else:
        mask[:] = False
    empty = ~mask.any(-1).expand(2, 3, 5)
    with torch.autograd.set_detect_anomaly(True):  # no NaN may appear on the way either
        if fused:
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            output, weights = scaled_dot_product_attention(q, k, v, mask)
            assert not weights[empty].any()
        output.square().sum().backward()
    assert not output[empty].any()
    assert not q.grad[empty].any()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_heads_are_no_copy():
    x = torch.arange(24.0).view(1, 2, 12)
    assert split_heads(x, 3).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(("d_model", "num_heads"), [(8, 0), (8, 16)])
def test_heads_that_do_not_divide_are_named(d_model, num_heads):
    with pytest.raises(ValueError, match=rf"d_model \({d_model}\).*num_heads \({num_heads}\)"):
        MultiHeadAttention(d_model, num_heads)
    with pytest.raises(ValueError, match=rf"d_model \({d_model}\).*num_heads \({num_heads}\)"):
        split_heads(torch.zeros(1, 2, d_model), num_heads)


@pytest.mark.parametrize("fused", [False, True])
def test_kept_weights_are_torchs(fused):
    torch.manual_seed(0)
    ours = MultiHeadAttention(12, 3, fused=fused).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for name in ("weight", "bias"):
            parts = [getattr(part, name) for part in (ours.w_q, ours.w_k, ours.w_v)]
            getattr(theirs, f"in_proj_{name}").copy_(torch.cat(parts))
    x, tokens = torch.randn(2, 5, 12, dtype=torch.float64), torch.ones(2, 5)
    tokens[1, -2:] = 0
    ours.keep_weights = True
    ours(x, x, x, padding_mask(tokens), causal=True)
    hidden = {"key_padding_mask": tokens == 0, "attn_mask": ~causal_mask(5)[0, 0]}
    _, weights = theirs(x, x, x, **hidden, average_attn_weights=False)
    torch.testing.assert_close(ours.weights, weights)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_one_position_at_a_time_equals_all_at_once(fused, rotated):
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 2, fused=fused)
    if rotated:
        attention.rotate = lambda x, positions: x * (1 + positions)[:, None]
    x = torch.randn(3, 7, 8)
    whole = attention(x, x, x, causal=True)
    k, v = attention.project(x, x)
    for t in range(7):
        step = attention.attend(x[:, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], causal=True)
        torch.testing.assert_close(step, whole[:, t : t + 1])
    chunk = attention.attend(x[:, 4:], k, v, causal=True)
    torch.testing.assert_close(chunk, whole[:, 4:])


@pytest.mark.parametrize("length", [16, 64])
def test_saved_bytes_are_the_formula(length):
    b, h, k = 2, 4, 8
    q, key, v = triple(b, h, length, length, k, dtype=torch.float32)
    vectors, matrix = 4 * b * h * length * k, 4 * b * h * length * length
    by_hand = saved_bytes(lambda: scaled_dot_product_attention(q, key, v))
    assert by_hand == 3 * vectors + matrix
    # The fused kernel keeps its output and one log-sum-exp a row instead of the matrix.
    fused = saved_bytes(lambda: F.scaled_dot_product_attention(q, key, v))
    assert fused == 4 * vectors + 4 * b * h * length
    empty_rows, mask = 2 * b * length, causal_mask(length)
    masked = saved_bytes(lambda: scaled_dot_product_attention(q, key, v, mask))
    assert masked <= by_hand + mask.nbytes + vectors + empty_rows


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_saves_no_more_than_torchs_module(dropout):
    x = torch.randn(4, 32, 64, requires_grad=True)
    ours = MultiHeadAttention(64, 4, dropout=dropout, fused=True)
    theirs = nn.MultiheadAttention(64, 4, dropout=dropout, batch_first=True)
    mine = saved_bytes(lambda: ours(x, x, x))
    assert mine <= saved_bytes(lambda: theirs(x, x, x, need_weights=False)[0])
