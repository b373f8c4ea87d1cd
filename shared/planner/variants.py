"""Which plans are tried: layouts of all GPUs, and the variants of each."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from shared.planner.specs import Checkpoint, Cluster, ModelSpec, Plan, Precision

USABLE = 0.9  # of a GPU's memory: the rest is for the driver, the allocator's gaps, message buffers
MICRO_BATCHES = (1, 2, 4, 8, 16)
CHUNKS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Asked:
    """What somebody has decided already; None: all that can be."""

    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    checkpoint: Checkpoint | None = None
    micro_batch: int | None = None
    precision: Precision = "mixed"


def layouts(cluster: Cluster, asked: Asked = Asked()) -> Iterator[Plan]:
    """Every dp x tp x pp of all GPUs."""
    for tp in _divisors(cluster.gpus):
        for pp in _divisors(cluster.gpus // tp):
            if asked.tp in (None, tp) and asked.pp in (None, pp):
                yield Plan(dp=cluster.gpus // (tp * pp), tp=tp, pp=pp, precision=asked.precision)


def variants(model: ModelSpec, layout: Plan, batch: int, asked: Asked = Asked()) -> Iterator[Plan]:
    """A layout with every micro-batch, ZeRO stage, checkpointing and number of chunks."""
    rows = batch // layout.dp
    micro = MICRO_BATCHES if asked.micro_batch is None else (asked.micro_batch,)
    zeros = (0, 1, 2, 3) if layout.dp > 1 else (0,)
    zeros = zeros if asked.zero is None else (asked.zero,)
    again: tuple[Checkpoint, ...] = ("none", "selective", "full")
    if model.fused_attention:
        again = ("none", "full")
    again = again if asked.checkpoint is None else (asked.checkpoint,)
    for size, zero, checkpoint, chunks in product(micro, zeros, again, CHUNKS):
        if rows % size:
            continue
        uneven = model.num_layers % (layout.pp * chunks) or rows // size % layout.pp
        if chunks > 1 and (layout.pp == 1 or uneven):
            continue
        yield replace(
            layout,
            chunks=chunks,
            micro_batch=size,
            num_micro_batches=rows // size,
            zero=zero,
            checkpoint=checkpoint,
            sequence_parallel=layout.tp > 1 and model.seq_len % layout.tp == 0,
        )


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
