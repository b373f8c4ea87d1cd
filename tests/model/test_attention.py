"""Our attention against PyTorch's: values, gradients, causality, empty rows, saved bytes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck

from shared.model.attention import (
    MultiHeadAttention,
    causal_mask,
    combine_heads,
    padding_mask,
    scaled_dot_product_attention,
    split_heads,
)

SHAPES = [(1, 1, 1, 1, 1), (2, 3, 5, 7, 4), (3, 1, 7, 5, 6)]  # B, H, T, S, K


def triple(b, h, t, s, k, dtype=torch.float64):
    generator = torch.Generator().manual_seed(b * 100 + t)
    shapes = [(b, h, t, k), (b, h, s, k), (b, h, s, k)]
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def random_mask(b, t, s):
    generator = torch.Generator().manual_seed(s)
    mask = torch.rand(b, 1, t, s, generator=generator) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_torchs(shape, masked, dtype):
    b, _, t, s, _ = shape
    mask = random_mask(b, t, s) if masked else None
    ours, theirs = triple(*shape, dtype=dtype), triple(*shape, dtype=dtype)
    output, weights = scaled_dot_product_attention(*ours, mask)
    expected = F.scaled_dot_product_attention(*theirs, attn_mask=mask)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1], dtype=dtype))
    grad = torch.randn_like(output)
    output.backward(grad)
    expected.backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("empty_row", [False, True])
def test_gradcheck(empty_row):
    mask = random_mask(2, 5, 7)
    mask[0, :, 2] = not empty_row
    assert gradcheck(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, mask), triple(2, 3, 5, 7, 4)
    )


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


def test_masks():
    tokens = torch.tensor([[5, 3, 0], [4, 0, 0]])
    assert padding_mask(tokens).tolist() == [[[[True, True, False]]], [[[True, False, False]]]]
    assert padding_mask(tokens, pad_id=3).shape == (2, 1, 1, 3)
    assert padding_mask(tokens, pad_id=3)[0, 0, 0].tolist() == [True, False, True]
    assert causal_mask(3)[0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]
    assert causal_mask(3).dtype == padding_mask(tokens).dtype == torch.bool


def test_heads_are_consecutive_parts_and_no_copy():
    x = torch.arange(24.0).view(1, 2, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (1, 3, 2, 4)
    assert heads[0, 1, 0].tolist() == [4, 5, 6, 7]
    assert heads.data_ptr() == x.data_ptr()
    assert torch.equal(combine_heads(heads), x)


@pytest.mark.parametrize(("d_model", "num_heads"), [(10, 4), (8, 0), (8, 16)])
def test_heads_that_do_not_divide_are_named(d_model, num_heads):
    with pytest.raises(ValueError, match=rf"d_model \({d_model}\).*num_heads \({num_heads}\)"):
        MultiHeadAttention(d_model, num_heads)
    with pytest.raises(ValueError, match=rf"d_model \({d_model}\).*num_heads \({num_heads}\)"):
        split_heads(torch.zeros(1, 2, d_model), num_heads)


def copy_of(ours: MultiHeadAttention, d_model: int, num_heads: int) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(d_model, num_heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        parts = [ours.w_q, ours.w_k, ours.w_v]
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
        theirs.out_proj.weight.copy_(ours.w_o.weight)
        theirs.out_proj.bias.copy_(ours.w_o.bias)
    return theirs


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("kind", "padded", "causal"),
    [
        (kind, *rest)
        for kind in ("self", "cross")
        for rest in itertools.product([False, True], repeat=2)
        if not (kind == "cross" and rest[1])
    ],
)
def test_equals_torch_with_copied_weights(fused, kind, padded, causal):
    torch.manual_seed(0)
    ours = MultiHeadAttention(12, 3, fused=fused).double()
    theirs = copy_of(ours, 12, 3)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    memory = x if kind == "self" else torch.randn(2, 7, 12, dtype=torch.float64)
    tokens = torch.ones(2, memory.shape[1], dtype=torch.long)
    tokens[1, -2:] = 0
    mask = padding_mask(tokens) if padded else None
    # nn.MultiheadAttention: True means masked.
    expected, weights = theirs(
        x,
        memory,
        memory,
        key_padding_mask=(tokens == 0) if padded else None,
        attn_mask=~causal_mask(5)[0, 0] if causal else None,
        average_attn_weights=False,
    )
    output = ours(x, memory, memory, mask, causal)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    mine = torch.cat([part.weight.grad for part in (ours.w_q, ours.w_k, ours.w_v)])
    torch.testing.assert_close(mine, theirs.in_proj_weight.grad)
    ours.keep_weights = True
    ours(x, memory, memory, mask, causal)
    torch.testing.assert_close(ours.weights, weights)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["flag", "mask", "flag and mask"])
def test_no_gradient_reaches_the_past_from_the_future(fused, how):
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 2, fused=fused)
    x = torch.randn(1, 6, 8, requires_grad=True)
    masks = {"flag": None, "mask": causal_mask(6), "flag and mask": padding_mask(torch.ones(1, 6))}
    output = attention(x, x, x, masks[how], causal=how != "mask")
    for t in range(6):
        (grad,) = torch.autograd.grad(output[0, t].sum(), x, retain_graph=True)
        assert grad[0, : t + 1].abs().sum(-1).min() > 0
        assert not grad[0, t + 1 :].any()


@pytest.mark.parametrize("fused", [False, True])
def test_a_padding_token_changes_nothing(fused):
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 2, fused=fused)
    tokens = torch.tensor([[4, 5, 6, 0, 0]])
    x = torch.randn(1, 5, 8)
    other = x.clone()
    other[:, 3:] = 100 * torch.randn(1, 2, 8)
    mask = padding_mask(tokens)
    assert torch.equal(attention(x, x, x, mask)[:, :3], attention(other, other, other, mask)[:, :3])


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


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_acts_in_training_alone(fused):
    torch.manual_seed(0)
    attention = MultiHeadAttention(8, 2, dropout=0.5, fused=fused)
    x = torch.randn(2, 6, 8)
    assert not torch.equal(attention(x, x, x), attention(x, x, x))
    attention.eval()
    assert torch.equal(attention(x, x, x), attention(x, x, x))


def saved_bytes(run) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward pass."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    del output
    return sum(storages.values())


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
