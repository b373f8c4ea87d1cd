"""What full sharding keeps and sends, by formula: bytes at the worst moment, bytes on the wire."""

from collections.abc import Sequence

MOMENTS = 2  # Adam's


def part(size: int, num_ranks: int) -> int:
    """Elements of a shard: the unit's, padded to a multiple of the ranks."""
    return -(-size // num_ranks)


def bytes_at_rest(sizes: Sequence[int], num_ranks: int, moments: int = MOMENTS) -> int:
    """Bytes a rank keeps between steps: float32 shards, and the optimizer's moments of them."""
    return sum(4 * (1 + moments) * part(size, num_ranks) for size in sizes)


def peak_bytes(
    sizes: Sequence[int],
    num_ranks: int,
    *,
    itemsize: int = 4,
    moments: int = MOMENTS,
    ahead: int = 0,
) -> int:
    """The most bytes a rank has in a step of FullyShard, activations apart.

    `sizes` are the units' elements in the order of forward, `itemsize` the bytes of the dtype that
    computes; `ahead` is 1 with prefetch. In backward each unit needs its parameters and its
    gradients, or its gradients and the parameters of the next one: two units. The shards'
    gradients of the units that backward has passed are there, too.
    """
    rest, passed, most = bytes_at_rest(sizes, num_ranks, moments), 0, 0
    padded = [num_ranks * part(size, num_ranks) for size in sizes]
    for i in reversed(range(len(sizes))):
        early = sum(padded[max(i - ahead, 0) : i])  # gathered ahead, of the units before
        own = itemsize * (padded[i] + sizes[i] + early)
        most = max(most, rest + passed + own)
        if i:  # its gradients travel while the next unit is gathered
            next_ones = sum(padded[max(i - 1 - ahead, 0) : i])
            travelling = padded[i] + part(sizes[i], num_ranks) + next_ones
            most = max(most, rest + passed + itemsize * travelling)
        passed += 4 * part(sizes[i], num_ranks)
    return most


def sent_bytes(sizes: Sequence[int], num_ranks: int, itemsize: int = 4) -> int:
    """Bytes a rank sends in a step on a ring: two all-gathers and a reduce-scatter of each unit."""
    return 3 * (num_ranks - 1) * sum(itemsize * part(size, num_ranks) for size in sizes)
