"""Positions where no check of lesson 01 looks: the learned table, pieces, dtypes, bad input."""

import pytest
import torch

from shared.errors import InputError
from shared.model.embeddings import (
    LearnedPositions,
    PositionalEncoding,
    sinusoidal_encoding,
)


@pytest.mark.parametrize("d_model", [1, -2])
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
