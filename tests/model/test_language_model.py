"""The decoder-only model: causal, built from encoder layers, as large as GPT-2 where it should."""

from dataclasses import replace

import pytest
import torch

from shared.errors import InputError
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel

CONFIG = TransformerConfig(31, 24, 3, 2, 40, dropout=0.0, max_len=20)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_no_position_depends_on_a_later_one(norm, positions):
    model = LanguageModel(replace(CONFIG, norm=norm, positions=positions)).double()
    tokens = torch.randint(1, 31, (2, 9))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 5) % 31
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], atol=1e-12, rtol=0)
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-3


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
def test_fused_equals_by_hand(positions):
    model = LanguageModel(replace(CONFIG, positions=positions)).double()
    by_hand = LanguageModel(replace(CONFIG, positions=positions, fused=False)).double()
    by_hand.load_state_dict(model.state_dict())
    tokens = torch.randint(1, 31, (2, 11))
    torch.testing.assert_close(model(tokens), by_hand(tokens), atol=1e-11, rtol=0)


def test_rotary_depends_on_distances_alone():
    """Without added positions, the same words further to the right predict the same."""
    model = LanguageModel(replace(CONFIG, positions="rotary", num_layers=1)).double()
    attention = model.layers[0].self_attention
    x = torch.randn(1, 6, 24, dtype=torch.float64)
    wide = torch.cat([torch.zeros(1, 5, 24, dtype=torch.float64), x], dim=1)
    mask = torch.zeros(1, 1, 11, 11, dtype=torch.bool)
    mask[..., 5:] = True
    shifted = attention(wide, wide, wide, mask, causal=True)[:, 5:]
    torch.testing.assert_close(shifted, attention(x, x, x, causal=True), atol=1e-12, rtol=0)


def test_a_language_model_learns_a_cycle():
    torch.manual_seed(0)
    model = LanguageModel(replace(CONFIG, vocab_size=6))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    tokens = torch.arange(18).remainder(6).unfold(0, 12, 1)  # every start of the cycle
    for _ in range(40):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_bad_tokens_and_lengths_are_refused():
    model = LanguageModel(CONFIG)
    with pytest.raises(InputError, match="token id 31 is outside"):
        model(torch.tensor([[1, 31]]))
    with pytest.raises(InputError, match="21 positions"):
        model(torch.ones(1, 21, dtype=torch.long))
