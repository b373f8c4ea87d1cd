"""Encoded pairs for torch's DataLoader: shared by workers, shared out among ranks."""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
from torch.utils.data import DataLoader, Dataset

from shared.data.batching import Batch, EncodedPair, collate, rank_slice
from shared.data.pairs import Pair
from shared.data.tokenizer import Tokenizer

Collate = Callable[[list[EncodedPair]], Batch]


class PairDataset(Dataset[EncodedPair]):
    """Encoded pairs, end to end in one tensor.

    Workers are forks that share the parent's memory until someone writes to it. Reading a Python
    list counts as writing, since it changes reference counts: millions of small lists would be
    copied into every worker, page by page. A tensor stays shared.
    """

    def __init__(self, encoded: Sequence[EncodedPair]) -> None:
        sides = [side for pair in encoded for side in pair]
        self._ids = torch.tensor(list(chain.from_iterable(sides)), dtype=torch.int32)
        self._ends = torch.tensor([0, *accumulate(map(len, sides))])  # side k: ends[k]..ends[k + 1]

    def __len__(self) -> int:
        return (len(self._ends) - 1) // 2

    def __getitem__(self, index: int) -> EncodedPair:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        start, middle, end = self._ends[2 * index : 2 * index + 3].tolist()
        return self._ids[start:middle].tolist(), self._ids[middle:end].tolist()

    def lengths(self) -> list[tuple[int, int]]:
        """Source and target length of each pair as collate makes them: one more, for eos."""
        sizes = (self._ends.diff() + 1).view(-1, 2)  # (pairs, 2)
        return [(src, tgt) for src, tgt in sizes.tolist()]


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: Tokenizer, max_len: int | None = None
) -> list[EncodedPair]:
    """Token ids of both sides of each pair; pairs longer than `max_len` tokens are left out.

    Lengths are counted as collate makes them, with eos.
    """
    src = tokenizer.encode_batch([pair.src for pair in pairs])
    tgt = tokenizer.encode_batch([pair.tgt for pair in pairs])
    encoded = list(zip(src, tgt, strict=True))
    if max_len is None:
        return encoded
    return [(a, b) for a, b in encoded if max(len(a), len(b)) < max_len]


def batch_loader(
    dataset: Dataset[EncodedPair],
    batches: Sequence[Sequence[int]],
    num_workers: int = 0,
    pin_memory: bool = False,
    rank: int = 0,
    world_size: int = 1,
    collate: Collate = collate,
) -> DataLoader[EncodedPair]:
    """A loader that yields the given batches in the given order, each one's part for this rank.

    `batches` are global batches of indices (random_batches, bucketed_batches): with the same
    seed every rank has the same list and takes its slice of each, so the ranks together see
    what one process alone would see, whatever the number of workers.

    Memory is pinned only where there is a GPU to copy to.
    """
    return DataLoader(
        dataset,
        batch_sampler=[rank_slice(batch, rank, world_size) for batch in batches],
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pin_memory and torch.cuda.is_available(),
    )
