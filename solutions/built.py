"""By which lesson a part of the course was built: one table, for the layers and for a class."""

import re
from functools import cache

# What is not listed is the frame's. The first line that fits counts.
BUILT = {
    "shared.training.precision": 9,
    "shared.training.checkpoint_files": 8,
    "shared.training.distributed_files": 8,
    "shared.training.named_checkpoint": 8,
    "shared.measuring.model_states": 9,
    "shared.measuring.casts": 9,
    "shared.measuring.activations": 11,
    "shared.model.embeddings": 1,
    "shared.model.attention": 2,
    "shared.model.modern": 23,
    "shared.model": 3,
    "shared.data.sampling": 7,
    "shared.data": 4,
    "shared.training": 4,
    "shared.measuring.traffic": 5,
    "shared.measuring.bandwidth": 5,
    "shared.ranks.links": 5,
    "shared.measuring.trace": 6,
    "shared.measuring.chrome": 12,
    "shared.measuring.peak": 12,
    "shared.ddp": 6,
    "solutions.ddp_buckets": 6,
    "shared.fault_tolerance": 8,
    "shared.sharding.fully_shard": 13,
    "shared.sharding.prefetch": 13,
    "shared.sharding.hybrid": 13,
    "shared.sharding.checkpoint": 13,
    "shared.sharding": 10,
    "shared.measuring.live": 10,
    "shared.tensor_parallel": 14,
    "shared.pipeline": 15,
    "shared.parallel3d": 16,
    "shared.long_context": 17,
    "shared.mixture_of_experts": 18,
    "shared.planner": 16,
    "shared.lora": 19,
    "shared.less_communication": 20,
    "shared.clusters": 21,
    "shared.ecosystem": 22,
    "shared.capstone": 23,
    # Of the book the pictures, by the last lesson that has one of a module's.
    "shared.book.nodes": 16,
    "shared.book.recorded": 14,
    "shared.book.recorded_fsdp": 13,
    "shared.book.recorded_pipeline": 15,
    "shared.book.offloading": 10,
    "shared.book.planned": 16,
    "shared.book.recorded_accelerate": 22,
    "shared.book.explorables": 23,
}

# Answers that lie in a module of an earlier lesson, which needs them: a class can read them from
# then on, in the week of the exercise as well. README's first lines in its edition say so.
NEEDED_BEFORE = {
    "13.1": 10,  # lesson 10's ZeRO-3 keeps its parameters in units that derive from FlatUnit
}


@cache
def built_in(name: str) -> int:
    """The lesson that built an imported module or name, which may say it itself; 0: the frame."""
    named = re.match(r"(?:solutions|shared)\.(?:\w+\.)?lesson(\d\d)", name)
    if named:
        return int(named.group(1))
    return next((n for part, n in BUILT.items() if f"{name}.".startswith(f"{part}.")), 0)
