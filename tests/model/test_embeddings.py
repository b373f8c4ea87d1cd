"""Positions: against the formula, against torch's own complex numbers, and on bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InputError
from shared.model.embeddings import (
    LearnedPositions,
    PositionalEncoding,
    rotary,
    sinusoidal_encoding,
)


def test_encoding_equals_the_formula_everywhere() -> None:
    got = sinusoidal_encoding(50, 10)
    assert got.dtype == torch.float32
    for position in range(50):
        for i in range(5):
            angle = position / 10_000 ** (2 * i / 10)
            assert got[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert got[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)


@pytest.mark.parametrize("d_model", [7, 1, 0, -2])
def test_encoding_refuses_a_width_without_pairs(d_model: int) -> None:
    with pytest.raises(InputError, match=f"not {d_model}$"):
        sinusoidal_encoding(4, d_model)


def test_encoding_refuses_to_be_empty() -> None:
    with pytest.raises(InputError, match="max_len must be at least 1, not 0"):
        sinusoidal_encoding(0, 4)


@pytest.mark.parametrize("module_class", [PositionalEncoding, LearnedPositions])
def test_pieces_of_a_sequence_equal_the_whole(module_class) -> None:
    torch.manual_seed(0)
    module = module_class(6, max_len=9)
    x = torch.randn(2, 9, 6)
    pieces = [module(x[:, :4]), module(x[:, 4:5], start=4), module(x[:, 5:], start=5)]
    assert torch.equal(torch.cat(pieces, dim=1), module(x))


@pytest.mark.parametrize("module_class", [PositionalEncoding, LearnedPositions])
@pytest.mark.parametrize(("length", "start"), [(10, 0), (1, 9), (5, 6)])
def test_a_sequence_longer_than_the_encoding_is_named(module_class, length, start) -> None:
    module = module_class(6, max_len=9)
    with pytest.raises(InputError, match=rf"{start + length} positions .* which has 9"):
        module(torch.zeros(2, length, 6), start=start)


def test_encoding_is_saved_moved_and_not_trained() -> None:
    module = PositionalEncoding(6, max_len=9)
    assert list(module.state_dict()) == ["encoding"]
    assert list(module.parameters()) == []
    assert module.to(torch.float64).encoding.dtype == torch.float64
    assert module.to("meta").encoding.device.type == "meta"


def test_learned_table_is_trained_and_as_large_as_the_encoding() -> None:
    torch.manual_seed(0)
    module = LearnedPositions(64, max_len=100)
    assert [tuple(each.shape) for each in module.parameters()] == [(100, 64)]
    squares = module.table.weight.square().mean().item()
    assert squares == pytest.approx(sinusoidal_encoding(100, 64).square().mean().item(), rel=0.1)


@pytest.mark.parametrize("module_class", [PositionalEncoding, LearnedPositions])
def test_activations_keep_their_dtype(module_class) -> None:
    module = module_class(6, max_len=9)
    assert module(torch.zeros(1, 2, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


@given(
    half=st.integers(1, 12),
    positions=st.lists(st.integers(-3000, 3000), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_rotary_is_multiplication_by_a_complex_number(half, positions, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, len(positions), 2 * half, generator=generator, dtype=torch.float64)
    angles = torch.tensor(
        [[p / 10_000 ** (i / half) for i in range(half)] for p in positions], dtype=torch.float64
    )
    complex_x = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
    want = torch.view_as_real(complex_x * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    torch.testing.assert_close(rotary(x, torch.tensor(positions)), want)


@given(distance=st.integers(-500, 500), shift=st.integers(0, 5000))
@settings(max_examples=50, deadline=None)
def test_rotary_scores_depend_on_the_distance_alone(distance: int, shift: int) -> None:
    generator = torch.Generator().manual_seed(7)
    query, key = torch.randn(2, 1, 16, generator=generator, dtype=torch.float64)
    here, later = torch.tensor([1000]), torch.tensor([1000 + shift])
    score = (rotary(query, here) * rotary(key, here + distance)).sum()
    same = (rotary(query, later) * rotary(key, later + distance)).sum()
    torch.testing.assert_close(score, same, rtol=0, atol=1e-10)


def test_rotary_keeps_lengths_dtypes_and_gradients() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4)
    positions = torch.arange(5)
    torch.testing.assert_close(rotary(x, positions).norm(dim=-1), x.norm(dim=-1))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert rotary(x.to(dtype), positions).dtype == dtype
    wide = x[0].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda each: rotary(each, positions), (wide,))


def test_rotary_takes_positions_of_each_sentence() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    got = rotary(x, positions[:, None])
    for row in range(2):
        assert torch.equal(got[row], rotary(x[row], positions[row]))


def test_rotary_refuses_an_odd_head() -> None:
    with pytest.raises(InputError, match=r"not 5$"):
        rotary(torch.zeros(3, 5), torch.arange(3))
