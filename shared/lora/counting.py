"""Bytes of a fine-tuning, counted on a rank and predicted from shapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shared.lora.layers import places_meant
from shared.lora.nf4 import BLOCK, SCALE_BLOCK
from shared.ranks.collectives import local_part

KINDS = ("frozen weights", "trained weights", "gradients", "optimizer states")
MOMENTS = 2  # Adam's


def counted_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this rank keeps now, by `KINDS`; of a sharded tensor its own part counts.

    The number of steps is left out, and so is what lives for a part of a step: activations, a
    weight that is gathered or dequantized.
    """
    found = dict.fromkeys(KINDS, 0)
    for p in model.parameters():
        found["trained weights" if p.requires_grad else "frozen weights"] += local_part(p).nbytes
        found["gradients"] += 0 if p.grad is None else local_part(p.grad).nbytes
    for state in optimizer.state.values():
        moments = (x for name, x in state.items() if name != "step" and isinstance(x, Tensor))
        found["optimizer states"] += sum(local_part(x).nbytes for x in moments)
    return found


@dataclass(frozen=True)
class Tuning:
    """A way to fine-tune: `method` is full, lora or qlora; the rest is for the last two."""

    method: str
    names: tuple[str, ...] = ()
    rank: int = 0


def predicted_bytes(
    model: nn.Module, tuning: Tuning, ranks: int = 1, rank: int = 0
) -> dict[str, int]:
    """What `counted_bytes` will find, after a step of Adam, from the shapes of the plain model.

    None of the adapted weights is tied.

    With several `ranks` every parameter is sharded along its first dim, as FSDP and ZeRO-3 do:
    rank by rank ceil(rows / ranks) of its rows, the last ranks fewer or none. One rank stands for
    DDP as well, on any number of ranks.
    """
    kept: list[tuple[tuple[int, ...], int, bool]] = []  # shape, bytes a number, trained
    adapted = {} if tuning.method == "full" else dict(places_meant(model, tuning.names))
    in_nf4 = {id(m.weight) for m in adapted.values() if tuning.method == "qlora"}
    for p in model.parameters():
        if id(p) not in in_nf4:
            kept.append((tuple(p.shape), p.element_size(), tuning.method == "full"))
    for linear in dict.fromkeys(adapted.values()):
        size = torch.promote_types(linear.weight.dtype, torch.float32).itemsize
        kept.append(((tuning.rank, linear.in_features), size, True))
        kept.append(((linear.out_features, tuning.rank), size, True))
        if tuning.method == "qlora":
            kept += [((n,), 1, False) for n in nf4_parts(linear.weight.numel())]
    trained = sum(_part(shape, ranks, rank) * size for shape, size, yes in kept if yes)
    frozen = sum(_part(shape, ranks, rank) * size for shape, size, yes in kept if not yes)
    return dict(zip(KINDS, (frozen, trained, trained, MOMENTS * trained), strict=True))


def nf4_parts(numel: int) -> tuple[int, int, int, int]:
    """Bytes of a weight's codes, its scales, their ranges, and their mean."""
    blocks = math.ceil(numel / BLOCK)
    return math.ceil(numel / 2), blocks, 4 * math.ceil(blocks / SCALE_BLOCK), 4


def _part(shape: Sequence[int], ranks: int, rank: int) -> int:
    """How many numbers of a tensor a rank has, of those sharded along dim 0."""
    rows = math.ceil(shape[0] / ranks)
    return max(0, min(rows, shape[0] - rank * rows)) * math.prod(shape[1:])
