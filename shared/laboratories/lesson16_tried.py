"""Lesson 16: the models, plans and clusters that memory and seconds are asked for."""

import random
from collections.abc import Iterator
from dataclasses import replace

from shared.exercises.seeds import fresh_seed
from shared.planner.outcomes import Fitted
from shared.planner.specs import Cluster, ModelSpec, Plan

# 16.3

PLAIN = ModelSpec(5, 48, 6, 96, 132, 24)
POSITIONS = ModelSpec(7, 36, 6, 60, 90, 18, tied=False, num_positions=24)
LLAMA = ModelSpec(
    6, 96, 12, 132, 240, 36, num_kv_heads=6, gated=True, bias=False, norm="rms", tied=False
)
MEGATRON = ModelSpec(6, 48, 12, 192, 192, 48, dropout=True, fused_attention=False, num_positions=48)
LAID_OUT = (
    Plan(micro_batch=2, num_micro_batches=3),
    Plan(pp=2, num_micro_batches=4),
    Plan(pp=3, num_micro_batches=2, micro_batch=3),
    Plan(pp=4, num_micro_batches=6, checkpoint="full"),
    Plan(tp=2, num_micro_batches=2),
    Plan(tp=3, pp=3, num_micro_batches=5, sequence_parallel=True),
    Plan(tp=2, pp=2, num_micro_batches=2, checkpoint="selective", sequence_parallel=True),
    Plan(dp=2, tp=2, pp=2, num_micro_batches=4, zero=1),
    Plan(dp=4, tp=3, num_micro_batches=2, zero=1, checkpoint="full", sequence_parallel=True),
    Plan(dp=2, pp=3, num_micro_batches=4, zero=2),
    Plan(dp=4, tp=2, num_micro_batches=2, zero=3),
    Plan(dp=2, tp=3, pp=2, num_micro_batches=3),
    Plan(pp=2, chunks=2, num_micro_batches=4),
    Plan(dp=2, tp=2, pp=2, chunks=2, num_micro_batches=6, checkpoint="full", zero=1),
)


def byte_cases() -> Iterator[tuple[ModelSpec, Plan]]:
    """Every plan with every model, in mixed precision, and models that are drawn."""
    for plan in LAID_OUT:
        for model in (PLAIN, POSITIONS, LLAMA, MEGATRON):
            yield model, plan
    draw = random.Random(fresh_seed())
    for plan in LAID_OUT:
        heads = 6 * draw.randint(1, 3)
        yield (
            ModelSpec(
                num_layers=draw.randint(4, 11),
                d_model=heads * 4 * draw.randint(1, 3),  # units that ZeRO can cut without padding
                num_heads=heads,
                d_ff=24 * draw.randint(2, 5),
                vocab_size=24 * draw.randint(3, 10),
                seq_len=6 * draw.randint(2, 9),
                gated=draw.random() < 0.5,
                bias=draw.random() < 0.5,
                tied=draw.random() < 0.5,
                dropout=draw.random() < 0.5,
                fused_attention=draw.random() < 0.5,
            ),
            plan,
        )


def empty_stages() -> Iterator[tuple[ModelSpec, Plan]]:
    """Plans that give a stage the embedding or the head alone, as Llama 3 has it."""
    yield MEGATRON, Plan(pp=3, num_micro_batches=4, cut=(0, 4, 2), checkpoint="full")
    yield PLAIN, Plan(pp=2, num_micro_batches=2, cut=(5, 0), checkpoint="full")
    yield (
        MEGATRON,
        Plan(pp=2, chunks=2, num_micro_batches=4, cut=(0, 2, 3, 1), checkpoint="selective"),
    )


def in_float32() -> Iterator[tuple[ModelSpec, Plan]]:
    """Plans that keep everything in float32."""
    for plan in (Plan(), Plan(dp=2, tp=2, pp=2, num_micro_batches=2, zero=1, precision="float32")):
        yield POSITIONS, replace(plan, precision="float32")


# 16.4

FIT = Fitted(matmul=0.8, link=0.6, traffic=2.5)
NEAR = Cluster(64, 80e9, 3e8, 8, 4e6, 9e5, 2e7, latency=3e-4, achievable=0.7)
FAR = replace(NEAR, gpus=512, gpus_per_node=4, outer=2e5)
TIMED = (
    Plan(micro_batch=2, num_micro_batches=3),
    Plan(tp=2, num_micro_batches=2),
    Plan(tp=6, num_micro_batches=2, checkpoint="full"),
    Plan(pp=3, num_micro_batches=4),
    Plan(pp=2, tp=2, chunks=2, num_micro_batches=4, checkpoint="selective"),
    Plan(dp=4, num_micro_batches=3, zero=0),
    Plan(dp=2, tp=3, pp=2, num_micro_batches=2, overlap=False),
    Plan(dp=8, tp=2, pp=3, num_micro_batches=2, zero=1),
    Plan(dp=4, tp=2, num_micro_batches=3, zero=2, overlap=False),
    Plan(dp=6, pp=2, num_micro_batches=2, zero=3),
    Plan(dp=4, num_micro_batches=2, zero=3, overlap=False),
    Plan(dp=4, pp=2, num_micro_batches=4, zero=2),
    Plan(dp=8, tp=3, num_micro_batches=1, precision="float32"),
)


def timed_cases() -> Iterator[tuple[ModelSpec, Plan, Cluster, Fitted]]:
    """Every plan with models and clusters, and with numbers that are drawn."""
    draw = random.Random(fresh_seed())
    drawn = Cluster(
        256,
        80e9,
        10 ** draw.uniform(8, 9),
        draw.choice((4, 6, 8)),
        10 ** draw.uniform(6, 7),
        10 ** draw.uniform(5, 6),
        10 ** draw.uniform(7, 8),
        10 ** draw.uniform(-5, -3),
        draw.uniform(0.5, 1.0),
    )
    share = Fitted(draw.uniform(0.4, 0.9), draw.uniform(0.3, 0.9), draw.uniform(1.0, 4.0))
    for plan in TIMED:
        for model in (PLAIN, LLAMA, MEGATRON):
            for cluster, fitted in ((NEAR, FIT), (FAR, FIT), (drawn, share)):
                if plan.precision == "mixed" or model is not PLAIN:  # ours in float32 is exact
                    yield model, plan, cluster, fitted
