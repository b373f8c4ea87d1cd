"""What an engine of this room keeps and sends, counted: bytes by kind, bytes on a ring."""

from collections.abc import Iterable

from torch import Tensor, nn

from shared.measuring.live import CRUMB
from shared.measuring.traffic import Traffic
from shared.zero.stages import ZeroStage1

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
    for each in tensors:
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            if storage._cdata not in seen and storage.nbytes() >= CRUMB:
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
    both, a broadcast the whole (but for the last of the ring).
    """
    total = 0.0
    for call in traffic.calls:
        n = call.group_size
        share = {"reduce_scatter": (n - 1) / n, "all_gather": n - 1, "broadcast": 1.0}
        share |= {"all_reduce": 2 * (n - 1) / n, "barrier": 0.0}
        total += call.num_bytes * share[call.op]
    return total
