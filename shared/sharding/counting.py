"""What the engines of this room keep and send: bytes that are counted, and by formula."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from shared.errors import InputError
from shared.measuring.live import NEGLIGIBLE_BYTES
from shared.measuring.traffic import Traffic
from shared.sharding.stages import ZeroStage1

MOMENTS = 2  # Adam's
STATE_KINDS = ("weights", "gradients", "optimizer states")


def state_bytes(model: nn.Module, optimizer: ZeroStage1) -> dict[str, int]:
    """Bytes of the storages that this rank keeps now, by kind; `STATE_KINDS` in that order.

    Every storage counts once, for the first kind that has it: a float32 part that is its own
    master counts as weights. Step counts and other crumbs are left out.
    """
    seen: set[int] = set()
    buckets = [*optimizer.buckets, *getattr(optimizer, "frozen", [])]
    parameters = list(model.parameters())
    weights = [*parameters, *(b.flat for b in buckets), *(b.part for b in buckets)]
    gradients = [p.grad for p in parameters]
    gradients += [g for b in buckets for g in (b.filling, b.grad)]
    states = [b.master for b in optimizer.buckets]
    states += [x for state in optimizer.inner.state.values() for x in state.values()]
    kinds = zip(STATE_KINDS, (weights, gradients, states), strict=True)
    return {kind: _storage_bytes(tensors, seen) for kind, tensors in kinds}


def _storage_bytes(tensors: Iterable[object], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and storage.nbytes() >= NEGLIGIBLE_BYTES:
                total += storage.nbytes()
            seen.add(storage._cdata)
    return total


def formula(stage: int, world_size: int, *, half: bool = True) -> float:
    """Bytes a parameter: 16-bit weights with float32 masters (`half`), or float32 throughout.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1 and figure 1.
    """
    kinds = (2, 2, 12) if half else (4, 4, 8)
    # Stage 1 divides the last kind, stage 2 the last two, stage 3 all.
    return sum(
        size / (world_size if number + stage >= 3 else 1) for number, size in enumerate(kinds)
    )


def ring_bytes(traffic: Traffic) -> float:
    """Bytes that a rank sends if its collectives go around a ring, as NCCL's and lesson 05's do.

    With n ranks: reduce-scatter (n-1)/n of the whole, all-gather (n-1) times the part, all-reduce
    both, a broadcast the whole (but for the last of the ring), a reduce to one rank the whole on
    all but that rank: (n-1)/n where the ranks take turns. Raises InputError for any other.
    """
    total = 0.0
    for call in traffic.calls:
        n = call.group_size
        share = {"reduce_scatter": (n - 1) / n, "all_gather": n - 1, "broadcast": 1.0}
        share |= {"all_reduce": 2 * (n - 1) / n, "reduce": (n - 1) / n, "barrier": 0.0}
        if call.op not in share:
            raise InputError(f"{call.op} goes around no ring; known are {', '.join(share)}")
        total += call.num_bytes * share[call.op]
    return total


# Full sharding, by formula


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
