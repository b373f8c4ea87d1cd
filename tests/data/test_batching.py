"""Batches: the budget; each pair once, on any number of ranks and workers."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.data.batching import (
    Batch,
    bucketed_batches,
    collate,
    padding_share,
    pair_lengths,
    random_batches,
    rank_slice,
)
from shared.data.loading import PairDataset, batch_loader, check_lengths
from shared.data.pairs import Pair
from shared.data.rows import own_rows
from shared.data.tokenizer import Tokenizer
from shared.errors import InputError

SENTENCES = st.lists(st.integers(4, 50), max_size=9)
ENCODED = st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=12)
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=80)


def some_pairs(number: int, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    draw = random.Random(seed)
    return [
        tuple([draw.randint(4, 99) for _ in range(draw.randint(0, 30))] for _ in range(2))
        for _ in range(number)
    ]


# collate


def test_moving_a_batch_moves_every_tensor():
    batch = collate(some_pairs(3))
    moved = batch.to("meta")
    assert isinstance(moved, Batch)
    assert {x.device.type for x in vars(moved).values() if isinstance(x, torch.Tensor)} == {"meta"}
    assert moved.num_tokens == batch.num_tokens
    assert batch.src.device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_pinning_a_batch_pins_every_tensor():
    loader = batch_loader(PairDataset(some_pairs(4)), [[0, 1], [2, 3]], 1, pin_memory=True)
    for batch in loader:
        assert all(x.is_pinned() for x in vars(batch).values() if isinstance(x, torch.Tensor))


# which pairs go together


def flat(batches) -> list[int]:
    return sorted(index for batch in batches for index in batch)


@given(LENGTHS, st.integers(1, 20), st.integers(0, 5))
def test_random_batches_hold_each_index_once(lengths, batch_size, seed):
    batches = random_batches(lengths, batch_size, seed)
    assert flat(batches) == list(range(len(lengths)))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert batches == random_batches(lengths, batch_size, seed)
    full = random_batches(lengths, batch_size, seed, drop_last=True)
    assert full == [batch for batch in batches if len(batch) == batch_size]


@given(LENGTHS, st.integers(40, 300), st.integers(0, 5))
def test_bucketed_batches_hold_each_index_once_within_the_budget(lengths, max_tokens, seed):
    batches = bucketed_batches(lengths, max_tokens, seed)
    assert flat(batches) == list(range(len(lengths)))
    assert all(batches), "an empty batch"
    assert batches == bucketed_batches(lengths, max_tokens, seed)
    for batch in batches:
        for side in (0, 1):
            assert len(batch) * max(lengths[i][side] for i in batch) <= max_tokens


def test_seeds_change_batches_and_the_order_of_lengths():
    lengths = [(n % 30 + 1, n % 30 + 1) for n in range(3000)]
    first, second = (bucketed_batches(lengths, 300, seed) for seed in (0, 1))
    assert first != second
    assert set(map(frozenset, first)) != set(map(frozenset, second))
    longest = [max(lengths[i] for i in batch) for batch in first]
    assert longest != sorted(longest)
    assert random_batches(lengths, 8, 0) != random_batches(lengths, 8, 1)


def test_padding_by_hand():
    lengths = [(1, 3), (2, 2), (4, 4)]
    assert padding_share([[0], [1], [2]], lengths) == 0
    # sides of pairs 0 and 1: 1+2 of 2*2 and 3+2 of 2*3 positions
    assert padding_share([[0, 1]], lengths) == pytest.approx(2 / 10)
    assert padding_share([[0, 2], [1]], lengths) == pytest.approx(4 / 20)
    assert padding_share([], lengths) == 0


def test_padding_share_is_what_collate_pads():
    encoded = some_pairs(200)
    lengths = pair_lengths(encoded)
    batches = random_batches(lengths, 16, 0)
    collated = [collate([encoded[i] for i in batch]) for batch in batches]
    padded = sum(int((x == 0).sum()) for batch in collated for x in (batch.src, batch.tgt_out))
    total = sum(x.numel() for batch in collated for x in (batch.src, batch.tgt_out))
    assert padding_share(batches, lengths) == pytest.approx(padded / total)


def test_bad_batch_arguments():
    with pytest.raises(InputError, match="batch_size is 0"):
        random_batches([1, 2], 0, 0)
    with pytest.raises(InputError, match=r"pair 1 has 9 source and 30 target tokens.* 20 tokens"):
        bucketed_batches([(2, 2), (9, 30)], 20, 0)


# DataLoader and ranks


def test_dataset_gives_back_the_pairs():
    encoded = some_pairs(50)
    data = PairDataset(encoded)
    assert [data[i] for i in range(len(data))] == encoded
    assert data.lengths() == pair_lengths(encoded)
    assert len(PairDataset([])) == 0
    for outside in (-1, 50):
        with pytest.raises(IndexError, match=f"{outside} of 50"):
            data[outside]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_gives_the_batches_in_order_with_any_number_of_workers(num_workers):
    encoded = some_pairs(40)
    batches = bucketed_batches(pair_lengths(encoded), 120, 3)
    loader = batch_loader(PairDataset(encoded), batches, num_workers, pin_memory=True)
    assert len(loader) == len(batches)
    for got, indices in zip(loader, batches, strict=True):
        want = collate([encoded[i] for i in indices])
        for name, value in vars(want).items():
            assert torch.equal(torch.as_tensor(vars(got)[name]), torch.as_tensor(value)), name


@given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 3))
def test_ranks_share_out_each_global_batch(world_size, extra, seed):
    (batch,) = random_batches(range(world_size + extra), world_size + extra, seed)
    parts = [rank_slice(batch, rank, world_size) for rank in range(world_size)]
    assert flat(parts) == sorted(batch)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_loaders_of_all_ranks_see_the_global_batch():
    encoded = some_pairs(24)
    batches = random_batches(encoded, 6, 0)
    data = PairDataset(encoded)
    whole = batch_loader(data, batches)
    ranks = [batch_loader(data, batches, rank=rank, world_size=3) for rank in range(3)]
    for one, *parts in zip(whole, *ranks, strict=True):
        assert one.num_tokens == sum(part.num_tokens for part in parts)
        rows = [row[row != 0].tolist() for part in parts for row in part.src]
        assert sorted(rows) == sorted(row[row != 0].tolist() for row in one.src)


def test_a_batch_smaller_than_the_world():
    with pytest.raises(InputError, match="batch of 2 cannot be shared out among 3 ranks"):
        rank_slice([4, 5], 0, 3)
    with pytest.raises(InputError, match=r"rank is 3; with 3 ranks it must be 0\.\.2"):
        rank_slice([4, 5, 6], 3, 3)


def test_the_learners_collate_can_be_used():
    loader = batch_loader(PairDataset(some_pairs(4)), [[0, 1], [2, 3]], collate=len)
    assert list(loader) == [2, 2]


def test_encoding_pairs_and_leaving_out_long_ones(caplog):
    pairs = [Pair("a b", "a"), Pair("a", "a b c d e f g h"), Pair("", "a")]
    tokenizer = Tokenizer.train(["a b c d e f g h"] * 3, 300)
    encoded = [(tokenizer.encode(pair.src), tokenizer.encode(pair.tgt)) for pair in pairs]
    assert pair_lengths(encoded) == [(3, 2), (2, 9), (1, 2)]
    for max_len, kept in ((None, [0, 1, 2]), (9, [0, 1, 2]), (8, [0, 2])):
        data = PairDataset.encode(pairs, tokenizer, max_len)
        assert [data[i] for i in range(len(data))] == [encoded[i] for i in kept]
    assert [r.getMessage() for r in caplog.records] == [
        "data: left out 1 pairs longer than 8 tokens"
    ]
    with pytest.raises(InputError, match="none of 3 pairs is as short as 1 tokens"):
        PairDataset.encode(pairs, tokenizer, max_len=1)


def test_sentences_that_the_model_cannot_take():
    tokenizer = Tokenizer.train(["a b c d e f g h"] * 3, 300)
    sentences = ["a b", "a b c d e", "a b c d e f g h"]
    check_lengths(sentences, tokenizer, 9, "test")
    with pytest.raises(InputError, match=r"test: sentence 3 has 9 tokens .* takes 8; .*: a b c d"):
        check_lengths(sentences, tokenizer, 8, "test")


def test_encoding_in_blocks_changes_nothing():
    pairs = [Pair(f"a {n}", f"b {n}") for n in range(25_000)]
    tokenizer = Tokenizer.train(["a b 1234567890"] * 3, 300)
    data = PairDataset.encode(pairs, tokenizer)
    assert len(data) == len(pairs)
    for n in (0, 9_999, 10_000, 20_000, 24_999):
        assert tuple(map(tokenizer.decode, data[n])) == pairs[n]


@given(ENCODED, st.integers(1, 3))
def test_micro_batches_of_pairs_count_their_own_tokens(pairs, count):
    batch = collate(pairs * count)
    pieces = own_rows(batch, 0, 1, count)
    assert [each.num_tokens for each in pieces] == [int((x.tgt_out != 0).sum()) for x in pieces]
    assert sum(each.num_tokens for each in pieces) == batch.num_tokens
