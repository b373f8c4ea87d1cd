"""What an engine that averages gradients is to those who train with it: six are compared."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.data.batching import Batch
from shared.errors import InputError
from shared.ranks.group import Rank
from shared.training.reference_run import Step, reference_optimizer, shard
from shared.training.schedules import set_learning_rate

ENGINES = ("single", "naive", "flat", "overlapped", "bucketed", "ddp")


@dataclass(frozen=True)
class Engine:
    """A model and what has to be called between backward() and step().

    `replicas` is the number of ranks whose gradients are averaged: 1 for "single", where every
    rank computes the whole batch by itself and nothing travels.
    """

    name: str
    model: nn.Module
    finish_gradient_sync: Callable[[], object]
    replicas: int

    def share(self, rank: Rank) -> tuple[int, int]:
        """Which part of a global batch is this rank's, of how many."""
        return rank.rank % self.replicas, self.replicas


# Of lesson 06's script: (engine, optimizer, batch, tokens of all ranks, autocast, smoothing,
# largest norm) -> this rank's part of the loss.
TrainStep = Callable[..., Tensor]
# Of the same: (name, model, number of ranks, size of buckets) -> engine.
Wrap = Callable[..., Engine]


def bucket_options(bucket_mb: float | None) -> dict[str, Any]:
    """The size of buckets as "bucketed" and torch's DDP take it; for None their own default.

    Raises InputError for a size that is none.
    """
    if bucket_mb is None:
        return {}
    if not 0 < bucket_mb < math.inf:
        raise InputError(f"--bucket-mb must be above 0 (and finite), got {bucket_mb}")
    return {"bucket_cap_mb": bucket_mb}


def reference_step(engine: Engine, rank: Rank, train_step: TrainStep) -> Step:
    """The step of lesson 04's reference run under this engine, for `run_reference`."""
    optimizer = reference_optimizer(list(engine.model.parameters()))

    def step(batch: Batch, rate: float) -> float:
        set_learning_rate(optimizer, rate)
        mine = shard(batch, *engine.share(rank)).to(rank.device)
        total = train_step(engine, optimizer, mine, batch.num_tokens, nullcontext(), 0.0, math.inf)
        if engine.replicas > 1:
            dist.all_reduce(total)
        return total.item()

    return step


def global_losses(engine: Engine, parts: list[Tensor]) -> list[float]:
    """The loss of every global batch from the ranks' parts. Collective where the engine is."""
    losses = torch.stack(parts)
    if engine.replicas > 1:
        dist.all_reduce(losses)
    return losses.tolist()
