"""The encoder-decoder against torch.nn.Transformer, step by step decoding, and bad input."""

from dataclasses import replace

import pytest
import torch

from shared.errors import InputError
from shared.model.attention import padding_mask
from shared.model.config import TransformerConfig
from shared.model.torch_twin import TorchTwin, twin_tensors
from shared.model.transformer import Transformer

CONFIG = TransformerConfig(37, 24, 3, 2, 40, dropout=0.0, max_len=20)


def random_pair(config=CONFIG, batch=3, source=7, target=9):
    src = torch.randint(1, config.vocab_size, (batch, source))
    src[1, 4:] = config.pad_id
    return src, torch.randint(1, config.vocab_size, (batch, target))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "none"])
def test_outputs_and_gradients_equal_the_engine(norm, fused, tied, positions):
    config = replace(CONFIG, norm=norm, fused=fused, tie_embeddings=tied, positions=positions)
    model = Transformer(config).double()
    twin = TorchTwin(model).double()
    src, tgt = random_pair()
    got, want = model(src, tgt), twin(src, tgt)
    torch.testing.assert_close(got, want, atol=1e-11, rtol=0)
    pull = torch.randn_like(got)
    got.backward(pull)
    want.backward(pull)
    ours = twin_tensors(model, lambda parameter: parameter.grad)
    theirs = {name: each.grad for name, each in twin.named_parameters(remove_duplicate=False)}
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-10, rtol=1e-9)


def test_twins_take_the_same_dropout_rates():
    config = replace(CONFIG, dropout=0.2, inner_dropout=0.3)
    engine = TorchTwin(Transformer(config)).engine
    layer = engine.decoder.layers[1]
    assert (layer.dropout1.p, layer.dropout.p, layer.multihead_attn.dropout) == (0.2, 0.3, 0.3)


def ready_to_step(config):
    """A model, targets, the logits of all of them at once, and a cache before the first step."""
    model = Transformer(config).double().eval()
    src, tgt = random_pair()
    mask = padding_mask(src)
    return model, tgt, model(src, tgt), model.start_cache(model.encode(src, mask), mask)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_steps_with_a_cache_equal_the_whole(norm, fused, positions):
    config = replace(CONFIG, norm=norm, fused=fused, positions=positions)
    model, tgt, whole, cache = ready_to_step(config)
    for position in range(9):
        logits = model.step(tgt[:, position], cache)
        torch.testing.assert_close(logits, whole[:, position], atol=1e-11, rtol=0)
    assert cache.length == 9


def test_a_cache_can_be_reordered_repeated_and_cut():
    model, tgt, whole, cache = ready_to_step(CONFIG)
    for position in range(4):
        model.step(tgt[:, position], cache)
    rows = torch.tensor([1, 1, 0, 2, 0])
    wide, narrow = cache.select(rows), cache.select(torch.tensor([1]))
    for position in range(4, 9):
        logits = model.step(tgt[rows, position], wide)
        torch.testing.assert_close(logits, whole[rows, position], atol=1e-11, rtol=0)
    logits = model.step(tgt[1:2, 4], narrow)
    torch.testing.assert_close(logits, whole[1:2, 4], atol=1e-11, rtol=0)
    assert (cache.length, wide.length, narrow.length) == (4, 9, 5)


def test_a_cache_without_a_mask_serves_full_sources():
    model = Transformer(CONFIG).double().eval()
    src, tgt = torch.randint(1, 37, (2, 5)), torch.randint(1, 37, (2, 3))
    cache = model.start_cache(model.encode(src))
    steps = torch.stack([model.step(tgt[:, t], cache) for t in range(3)], dim=1)
    torch.testing.assert_close(steps, model(src, tgt), atol=1e-11, rtol=0)
    assert cache.select(torch.tensor([1])).src_mask is None


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_first_loss_is_that_of_a_guess(norm):
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(500, 64, 4, 3, 128, dropout=0.0, norm=norm))
    logits = model(torch.randint(4, 500, (8, 12)), torch.randint(4, 500, (8, 12)))
    assert 0.8 < logits.std().item() < 1.25


def test_tied_matrices_stay_one_through_a_state_dict():
    model = Transformer(CONFIG)
    other = Transformer(CONFIG)
    other.load_state_dict(model.state_dict())
    assert other.src_embedding.weight is other.output.weight is other.tgt_embedding.weight
    assert torch.equal(other.output.weight, model.output.weight)


@pytest.mark.parametrize("bad", [-1, 37, 4000])
@pytest.mark.parametrize("side", [0, 1])
def test_a_token_outside_the_vocabulary_is_named(bad, side):
    pair = random_pair()
    pair[side][0, 2] = bad
    with pytest.raises(InputError, match=rf"token id {bad} is outside .* 37 ids"):
        Transformer(CONFIG)(*pair)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_a_sequence_longer_than_max_len_is_refused(positions):
    model = Transformer(replace(CONFIG, positions=positions))
    src, tgt = torch.ones(1, 21, dtype=torch.long), torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(InputError, match=r"21 positions .* 20"):
        model(src, tgt)


def test_it_compiles_without_a_graph_break():
    model = Transformer(CONFIG).eval()
    src, tgt = random_pair()
    exported = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(exported(src, tgt), model(src, tgt))
