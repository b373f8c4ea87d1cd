"""The matrix that moves codes, and how it and rotary are one thing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InputError
from solutions.lesson01_positional_encoding import rotary, shift_matrix, sinusoidal_encoding


@given(half=st.integers(1, 16), offset=st.integers(-200, 200), position=st.integers(200, 300))
@settings(max_examples=60, deadline=None)
def test_moves_every_position(half: int, offset: int, position: int) -> None:
    table = sinusoidal_encoding(501, 2 * half)
    moved = shift_matrix(offset, 2 * half) @ table[position]
    torch.testing.assert_close(moved, table[position + offset], rtol=0, atol=1e-6)


@given(half=st.integers(1, 16), offset=st.integers(-500, 500))
@settings(max_examples=30, deadline=None)
def test_is_a_rotation_whose_inverse_goes_back(half: int, offset: int) -> None:
    matrix = shift_matrix(offset, 2 * half)
    assert torch.equal(matrix.T, shift_matrix(-offset, 2 * half))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(2 * half))


def test_rotary_is_the_matrix_from_the_right() -> None:
    x = torch.randn(1, 12, generator=torch.Generator().manual_seed(0))
    for position in (0, 1, 17, 400):
        turned = rotary(x, torch.tensor([position]))
        torch.testing.assert_close(turned, x @ shift_matrix(position, 12), rtol=1e-5, atol=1e-6)


def test_refuses_odd_widths() -> None:
    with pytest.raises(InputError, match=r"not 5$"):
        shift_matrix(3, 5)
