"""From token ids to padded batches: collate, and which pairs go into a batch together."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from shared.errors import InputError

EncodedPair = tuple[list[int], list[int]]
Lengths = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Batch:
    """Padded token ids of B pairs with their masks; S and T are the longest of this batch.

    The decoder reads `tgt_in` and must say `tgt_out`: the same tokens shifted by one, so at each
    position it sees what came before and is asked for what comes next (teacher forcing).
    Masks are True where attention may look.
    """

    src: Int[Tensor, "B S"]
    tgt_in: Int[Tensor, "B T"]
    tgt_out: Int[Tensor, "B T"]
    src_mask: Bool[Tensor, "B 1 1 S"]
    tgt_mask: Bool[Tensor, "B 1 T T"]
    # An int that is counted once on the CPU: counting on the GPU would wait for it every step.
    num_tokens: int

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on another device; see `moved`."""
        return replace(self, **{name: moved(x, device) for name, x in self._tensors()})

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory; DataLoader(pin_memory=True) calls this."""
        return replace(self, **{name: x.pin_memory() for name, x in self._tensors()})

    def _tensors(self) -> list[tuple[str, Tensor]]:
        return [(name, x) for name, x in vars(self).items() if isinstance(x, Tensor)]


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device. A GPU fetches it while this thread goes on: nobody waits.

    From ordinary memory a copy waits for all that the GPU has still to do: the step before.
    """
    if torch.device(device).type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def collate(
    pairs: list[tuple[list[int], list[int]]], pad_id: int = 0, bos_id: int = 1, eos_id: int = 2
) -> Batch:
    """Pad pairs of token ids to the longest of this batch and build the masks.

    The source ends in eos. The target is shifted: bos + tokens goes in, tokens + eos must come
    out. `num_tokens` counts the target positions that are not padding (eos included).

    Raises:
        ValueError: no pairs.
    """
    if not pairs:
        raise InputError("collate got 0 pairs; a batch needs at least 1")
    src = _pad([[*src, eos_id] for src, _ in pairs], pad_id)  # (B, S)
    tgt_in = _pad([[bos_id, *tgt] for _, tgt in pairs], pad_id)  # (B, T)
    tgt_out = _pad([[*tgt, eos_id] for _, tgt in pairs], pad_id)  # (B, T)
    T = tgt_in.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).tril()  # (T, T)
    return Batch(
        src=src,
        tgt_in=tgt_in,
        tgt_out=tgt_out,
        src_mask=(src != pad_id)[:, None, None, :],  # (B, 1, 1, S)
        tgt_mask=(tgt_in != pad_id)[:, None, None, :] & causal,  # (B, 1, T, T)
        num_tokens=sum(len(tgt) + 1 for _, tgt in pairs),
    )


def _pad(rows: list[list[int]], pad_id: int) -> Int[Tensor, "B L"]:
    longest = max(map(len, rows))
    return torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])


def pair_lengths(encoded: Sequence[EncodedPair]) -> list[tuple[int, int]]:
    """Source and target length of each pair as collate makes them: one more, for eos."""
    return [(len(src) + 1, len(tgt) + 1) for src, tgt in encoded]


def random_batches(
    lengths: Sequence[object], batch_size: int, seed: int, drop_last: bool = False
) -> list[list[int]]:
    """Shuffle the indices of `lengths` and cut them into batches of `batch_size`.

    Every index comes exactly once (with `drop_last` a short last batch is left out). The same
    seed gives the same batches: pass another one for each epoch.
    """
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; it must be at least 1")
    indices = list(range(len(lengths)))
    random.Random(seed).shuffle(indices)
    batches = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    if drop_last and batches and len(batches[-1]) < batch_size:
        batches.pop()
    return batches


def bucketed_batches(lengths: Lengths, max_tokens: int, seed: int) -> list[list[int]]:
    """Put pairs of like length together, as many as a budget of tokens takes.

    A batch costs its number of pairs times its longest sentence, padding included, for the
    longer of the two sides (as fairseq counts `--max-tokens`). Pairs of equal length are
    shuffled among themselves and the batches are shuffled, so the length of a batch says nothing
    about when it comes. Every index comes exactly once; the same seed gives the same batches.
    """
    for index, (src, tgt) in enumerate(lengths):
        if max(src, tgt) > max_tokens:
            raise InputError(
                f"pair {index} has {src} source and {tgt} target tokens, more than the budget of "
                f"{max_tokens} tokens a batch; raise the budget or leave long pairs out"
            )
    shuffle = random.Random(seed)
    indices = list(range(len(lengths)))
    shuffle.shuffle(indices)
    indices.sort(key=lambda i: (max(lengths[i]), lengths[i]))  # stable: ties stay shuffled
    batches: list[list[int]] = []
    for index in indices:
        # Sorted by the longer side, so the pair at hand is the longest of its batch.
        if not batches or (len(batches[-1]) + 1) * max(lengths[index]) > max_tokens:
            batches.append([])
        batches[-1].append(index)
    shuffle.shuffle(batches)
    return batches


def padding_share(batches: Sequence[Sequence[int]], lengths: Lengths) -> float:
    """Share of padding among all positions of both sides, from 0 (none) to 1."""
    real = padded = 0
    for batch in batches:
        for side in (0, 1):
            sizes = [lengths[index][side] for index in batch]
            real += sum(sizes)
            padded += len(sizes) * max(sizes, default=0)
    return 1 - real / padded if padded else 0.0


def rank_slice(batch: Sequence[int], rank: int, world_size: int) -> list[int]:
    """The part of a global batch that belongs to a rank: every world_size-th index.

    Strided, so a batch that is sorted by length is shared out evenly. All parts together are the
    global batch, each index once.
    """
    if not 0 <= rank < world_size:
        raise InputError(f"rank is {rank}; with {world_size} ranks it must be 0..{world_size - 1}")
    if len(batch) < world_size:
        raise InputError(
            f"a batch of {len(batch)} cannot be shared out among {world_size} ranks; "
            "take larger batches or fewer ranks"
        )
    return list(batch[rank::world_size])
