"""Which positions of a long sequence each rank holds, and how a sequence is cut by it.

An order says for each rank the numbers of its chunks: [[0, 3], [1, 2]] is a sequence of four equal
chunks, of which rank 0 holds the first and the last. All ranks hold as many.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from shared.errors import InputError

Order = Sequence[Sequence[int]]


def check_order(order: Order, ranks: int) -> None:
    """Raise InputError unless each rank has as many chunks, and each chunk one rank."""
    if len(order) != ranks:
        raise InputError(f"an order of {len(order)} ranks on {ranks}: each rank needs its chunks")
    chunks = sorted(chunk for own in order for chunk in own)
    if len({len(own) for own in order}) > 1 or chunks != list(range(len(chunks))) or not chunks:
        raise InputError(
            f"the order {[list(own) for own in order]} is no partition: every rank needs as many "
            "chunks, and each number from 0 on stands at one rank"
        )


def plain_order(ranks: int) -> list[list[int]]:
    """One chunk a rank, in the order of ranks."""
    return [[rank] for rank in range(ranks)]


def balanced_order(ranks: int) -> list[list[int]]:
    """Two chunks a rank, such that under a causal mask all ranks have as much to do.

    The zigzag: chunk r from the front and chunk r from the back. An early chunk is seen by many
    and sees little, a late one the other way round. In each step of the ring as well, every rank
    has two pairs of chunks to compute.
    Source: github.com/zhuzilin/ring-flash-attention; Brandon et al. 2023 (arXiv 2311.09431) order
    by stripes, for the same end.
    """
    return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]


def positions_of(order: Order, rank: int, length: int) -> Int[Tensor, "part"]:
    """The positions that a rank holds, in the order in which it holds them.

    Raises InputError where the length cannot be cut into as many equal chunks as the order has.
    """
    chunks = sum(len(own) for own in order)
    if length < 1 or length % chunks:
        fits = [n for n in (length - length % chunks, length + -length % chunks) if n > 0]
        raise InputError(
            f"a sequence of {length} positions cannot be cut into {chunks} equal chunks for "
            f"{len(order)} ranks: {' or '.join(str(n) for n in fits) or chunks} would do"
        )
    size = length // chunks
    return torch.cat([torch.arange(c * size, (c + 1) * size) for c in order[rank]])


def cut_sequence(x: Tensor, order: Order, rank: int, dim: int) -> Tensor:
    """A rank's part of a whole sequence, which lies along `dim`."""
    return x.index_select(dim, positions_of(order, rank, x.shape[dim]).to(x.device))
