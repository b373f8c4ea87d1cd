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
    deepspeed: bool = False  # whose pipelines refuse ZeRO-2 and 3, and have no chunks
    fused: bool = True
    lora: int = 0


def layouts(cluster: Cluster, asked: Asked = Asked()) -> Iterator[Plan]:
    """Every dp x tp x pp of all GPUs."""
    for tp in _divisors(cluster.gpus):
        for pp in _divisors(cluster.gpus // tp):
            if asked.tp in (None, tp) and asked.pp in (None, pp):
                yield Plan(dp=cluster.gpus // (tp * pp), tp=tp, pp=pp, precision=asked.precision)


def variants(model: ModelSpec, layout: Plan, batch: int, asked: Asked = Asked()) -> Iterator[Plan]:
    """A layout with every micro-batch, ZeRO stage, checkpointing and number of chunks.

    With `asked.deepspeed` a pipeline has ZeRO-0 or 1 (its `PipelineEngine` refuses the others,
    runtime/pipe/engine.py) and one stage a rank. Interleaved are stages of equally many layers, the
    first and the last of which may have one less (`shorter_ends`).
    """
    rows = batch // layout.dp
    micro = MICRO_BATCHES if asked.micro_batch is None else (asked.micro_batch,)
    zeros = (0, 1, 2, 3) if layout.dp > 1 else (0,)
    zeros = zeros if asked.zero is None else (asked.zero,)
    if layout.pp > 1 and asked.deepspeed:
        zeros = tuple(zero for zero in zeros if zero < 2)
    again: tuple[Checkpoint, ...] = ("none", "selective", "full")
    if model.fused_attention:
        again = ("none", "full")
    again = again if asked.checkpoint is None else (asked.checkpoint,)
    parts = CHUNKS if layout.pp > 1 and not asked.deepspeed else (1,)
    for size, zero, checkpoint, chunks in product(micro, zeros, again, parts):
        if rows % size or (chunks > 1 and rows // size % layout.pp):
            continue
        stages = layout.pp * chunks
        even = chunks == 1 or model.num_layers % stages == 0
        cut = None if even else shorter_ends(model.num_layers, stages)
        if not even and cut is None:
            continue
        yield replace(
            layout,
            chunks=chunks,
            micro_batch=size,
            num_micro_batches=rows // size,
            zero=zero,
            checkpoint=checkpoint,
            sequence_parallel=cuts_sequence(model, layout),
            cut=cut,
            fused=asked.fused,
            lora=asked.lora,
        )


def cuts_sequence(model: ModelSpec, plan: Plan) -> bool:
    """Whether a plan that is tried has sequence parallelism: wherever tp can cut the sequence."""
    return plan.tp > 1 and model.seq_len % plan.tp == 0


def shorter_ends(num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Layers of each stage where the first and the last have one less; None if that is uneven.

    Those two have the embeddings and the output matrix as well. Llama 3 lays 126 layers over 128
    stages so (Grattafiori et al. 2024, section 3.3.2).
    """
    layers, over = divmod(num_layers + 2, num_stages)
    return None if over else (layers - 1, *[layers] * (num_stages - 2), layers - 1)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
