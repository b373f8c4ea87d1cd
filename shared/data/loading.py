"""Encoded pairs for torch's DataLoader: shared by workers, shared out among ranks."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shared.data.batching import Batch, EncodedPair, collate, rank_slice
from shared.data.files import shorten
from shared.data.folder import announce
from shared.data.pairs import Pair
from shared.data.tokenizer import Tokenizer
from shared.errors import InputError

Collate = Callable[[list[EncodedPair]], Batch]


class PairDataset(Dataset[EncodedPair]):
    """Encoded pairs, end to end in one tensor.

    Workers are forks that share the parent's memory until someone writes to it. Reading a Python
    list counts as writing, since it changes reference counts: millions of small lists would be
    copied into every worker, page by page. A tensor stays shared.
    """

    def __init__(self, encoded: Iterable[EncodedPair]) -> None:
        ids, ends = array("i"), array("q", [0])  # side k of all sides is ids[ends[k] : ends[k + 1]]
        for pair in encoded:
            for side in pair:
                ids.extend(side)
                ends.append(len(ids))
        self._ids = torch.from_numpy(np.array(ids))
        self._ends = torch.from_numpy(np.array(ends))

    @classmethod
    def encode(
        cls, pairs: Sequence[Pair], tokenizer: Tokenizer, max_len: int | None = None
    ) -> "PairDataset":
        """The pairs in token ids; a pair with a side longer than `max_len` tokens is left out.

        How many were left out is said on stderr. Lengths are counted as collate makes them, with
        eos; `max_len` is the model's. One endless line in a million, met after hours of training,
        would otherwise end it.

        Raises:
            InputError: no pair is short enough.
        """
        data = cls(
            (src, tgt)
            for src, tgt in _encoded(pairs, tokenizer)
            if max_len is None or max(len(src), len(tgt)) < max_len
        )
        if left_out := len(pairs) - len(data):
            if len(data) == 0:
                raise InputError(f"none of {left_out} pairs is as short as {max_len} tokens")
            announce("data", [f"left out {left_out} pairs longer than {max_len} tokens"])
        return data

    def __len__(self) -> int:
        return (len(self._ends) - 1) // 2

    def __getitem__(self, index: int) -> EncodedPair:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        start, middle, end = self._ends[2 * index : 2 * index + 3].tolist()
        return self._ids[start:middle].tolist(), self._ids[middle:end].tolist()

    def __iter__(self) -> Iterator[EncodedPair]:
        return (self[index] for index in range(len(self)))

    def lengths(self) -> list[tuple[int, int]]:
        """Source and target length of each pair as collate makes them: one more, for eos."""
        sizes = (self._ends.diff() + 1).view(-1, 2)  # (pairs, 2)
        return [(src, tgt) for src, tgt in sizes.tolist()]


def _encoded(
    pairs: Sequence[Pair], tokenizer: Tokenizer, at_once: int = 10_000
) -> Iterator[EncodedPair]:
    """Token ids of each pair: in blocks, since a list of ids takes nine times a tensor's bytes."""
    for start in range(0, len(pairs), at_once):
        block = pairs[start : start + at_once]
        src = tokenizer.encode_batch([pair.src for pair in block])
        tgt = tokenizer.encode_batch([pair.tgt for pair in block])
        yield from zip(src, tgt, strict=True)


def check_lengths(
    sentences: Sequence[str], tokenizer: Tokenizer, max_len: int, what: str = "sentences"
) -> None:
    """Refuse sentences longer than a model takes, before the hours that it takes to train it.

    Lengths are counted with eos. What is to be translated cannot be left out as training pairs
    can: a score over the rest would be another score.
    """
    for number, ids in enumerate(tokenizer.encode_batch(sentences), start=1):
        if len(ids) + 1 > max_len:
            raise InputError(
                f"{what}: sentence {number} has {len(ids) + 1} tokens and the model takes "
                f"{max_len}; shorten it or take it out; it begins: {shorten(sentences[number - 1])}"
            )


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
