"""Decoding on real models: the cache, the beam, bad input."""

import itertools
from functools import partial

import pytest
import torch

from shared.data.tokenizer import Tokenizer
from shared.errors import InputError
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.ranks.forked import run_ranks
from shared.training.decoding import (
    beam_search,
    greedy_decode,
    length_divisor,
    translate,
    translate_together,
)


def random_model(seed: int, vocab_size: int = 6, **options) -> Transformer:
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "num_heads": 2, "num_layers": 2, "d_ff": 32, "dropout": 0.0, **options}
    model = Transformer(TransformerConfig(vocab_size, **sizes)).eval()
    with torch.no_grad():
        model.output.weight *= 3  # decided enough that rounding cannot change a choice
    return model


def some_sources(vocab_size: int = 6) -> torch.Tensor:
    src = torch.randint(3, vocab_size, (3, 5))
    src[1, 3:] = 0
    src[2, 4:] = 0
    return src


@torch.no_grad()
def without_cache(model: Transformer, src: torch.Tensor, max_len: int) -> torch.Tensor:
    said, ended = torch.ones_like(src[:, :1]), torch.zeros(len(src), dtype=torch.bool)
    while said.shape[1] <= max_len and not ended.all():
        logits = model(src, said)[:, -1]
        logits[:, 0] = -torch.inf
        token = logits.argmax(-1).masked_fill(ended, 0)
        ended |= token == 2
        said = torch.cat([said, token[:, None]], dim=1)
    return said[:, 1:]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_cached_greedy_equals_uncached_and_a_beam_of_one(seed, positions, norm):
    model = random_model(seed, positions=positions, norm=norm)
    src = some_sources()
    fast = greedy_decode(model, src, 9)
    assert torch.equal(fast, without_cache(model, src, 9))
    assert torch.equal(fast, beam_search(model, src, 9, beam_size=1))


@torch.no_grad()
def best_of_all(model, source, max_len, penalty):
    def score(tokens):
        log_p = model(source, torch.tensor([[1, *tokens[:-1]]]))[0].log_softmax(-1)
        total = sum(log_p[i, token].item() for i, token in enumerate(tokens))
        return total / length_divisor(len(tokens), penalty)

    every = [
        (*prefix, 2) for n in range(max_len) for prefix in itertools.product((1, 3, 4, 5), repeat=n)
    ]
    return max(every, key=score)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_the_best_of_all(penalty):
    model, src = random_model(0), some_sources()
    got = beam_search(model, src, 4, beam_size=300, length_penalty=penalty)
    for row, found in zip(src, got.tolist(), strict=True):
        want = best_of_all(model, row[row != 0][None], 4, penalty)
        assert tuple(t for t in found if t) == want


@pytest.mark.parametrize("decode", [greedy_decode, beam_search])
def test_bad_input_is_named(decode):
    model = random_model(0, max_len=8)
    with pytest.raises(InputError, match="token id 6 is outside the vocabulary"):
        decode(model, torch.tensor([[3, 6]]), 5)
    with pytest.raises(InputError, match="9 positions is longer than the encoding"):
        decode(model, torch.full((1, 9), 3), 5)
    endless = torch.full((1, 3), 3)
    with pytest.raises(InputError, match="longer than the encoding, which has 8"):
        greedy_decode(model, endless, 20, eos_id=-1)


def test_no_gradients_and_no_columns_for_max_len_zero():
    model, src = random_model(0), some_sources()
    assert greedy_decode(model, src, 0).shape == (3, 0)
    assert beam_search(model, src, 0).shape == (3, 0)


TEXTS = ["one two", "three", "two two one three", "three one one", "two"]


def text_model() -> tuple[Transformer, Tokenizer]:
    tokenizer = Tokenizer.train(TEXTS * 3, 300)
    return random_model(1, tokenizer.vocab_size), tokenizer


def test_translate_keeps_the_order_and_the_mode():
    model, tokenizer = text_model()
    model.train()
    together = translate(model, tokenizer, TEXTS, batch_size=len(TEXTS))
    assert model.training
    assert translate(model, tokenizer, TEXTS[::-1], batch_size=len(TEXTS)) == together[::-1]
    assert translate(model, tokenizer, TEXTS, partial(beam_search, beam_size=1)) == together
    assert translate(model, tokenizer, []) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_has_all_translations_in_order(ranks):
    model, tokenizer = text_model()
    # Sentences of one length: a translation may have twice the tokens of its batch's longest.
    texts = ["one two", "two one", "two three", "three one", "one one"]
    results = run_ranks(lambda rank: translate_together(model, tokenizer, texts), ranks)
    assert results == [translate(model, tokenizer, texts)] * ranks


class LengthsAlone:
    """A tokenizer that gives a token a letter."""

    def encode_batch(self, texts):
        return [[4] * len(text) for text in texts]

    def decode_batch(self, rows):
        return ["x" for _ in rows]


def test_a_sentence_that_is_too_long_for_one_rank_is_said_on_every_rank():
    def translated(rank):
        config = TransformerConfig(8, 8, 1, 1, 8, max_len=12)
        with pytest.raises(InputError):
            translate_together(Transformer(config), LengthsAlone(), ["aa", "a" * 30, "aa"])

    run_ranks(translated, 2, timeout=30)
