"""One training step, five ways to average its gradients: what lesson 06 compares."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.data.batching import Batch
from shared.errors import InputError
from shared.ranks.group import Rank
from shared.training.loss import label_smoothed_loss
from shared.training.reference_run import Step, loss_of, reference_optimizer, shard
from shared.training.schedules import set_learning_rate

ENGINES = ("single", "naive", "overlapped", "bucketed", "ddp")


@dataclass(frozen=True)
class Engine:
    """A model and what has to be called between backward() and step().

    `replicas` is the number of ranks whose gradients are averaged: 1 for "single", where every
    rank computes the whole batch by itself and nothing travels.
    """

    name: str
    model: nn.Module
    finish: Callable[[], None]
    replicas: int


def build_engine(
    name: str, model: nn.Module, parts: Any, world_size: int, bucket_cap_mb: float | None = None
) -> Engine:
    """Put `model` under the engine called `name`; `parts` holds the answers of lesson 06.

    `bucket_cap_mb` is for "bucketed" and "ddp"; None is their default, 25 MiB and a first bucket
    of 1 MiB. Raises InputError for a name that is not in ENGINES, and for a size that is none.
    """
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise InputError(f"bucket_cap_mb must be above 0 (and finite), got {bucket_cap_mb}")
    options: dict[str, Any] = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    if name == "single":
        return Engine(name, model, lambda: None, 1)
    if name == "naive":
        parts.broadcast_parameters(model)
        return Engine(name, model, lambda: parts.average_gradients(model), world_size)
    if name == "overlapped":
        wrapped = parts.OverlappedDDP(model)
        return Engine(name, wrapped, wrapped.finish_gradient_sync, world_size)
    if name == "bucketed":
        wrapped = parts.BucketedDDP(model, **options)
        return Engine(name, wrapped, wrapped.finish_gradient_sync, world_size)
    if name == "ddp":  # it waits at the end of backward by itself
        return Engine(name, DistributedDataParallel(model, **options), lambda: None, world_size)
    raise InputError(f"there is no engine {name!r}: choose from {', '.join(ENGINES)}")


def engine_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    global_tokens: int,
    learning_rate: float,
    loss_function: Callable[..., Tensor] = label_smoothed_loss,
) -> Float[Tensor, ""]:
    """One optimizer step; return this rank's part of the global batch's mean loss per token.

    A part is the sum over this rank's tokens, divided by the number of tokens of *all* ranks: the
    parts add up to the loss of the whole batch, however unequal they are. Engines average, so the
    part is multiplied by the number of ranks first.
    """

    def part() -> Tensor:
        loss = loss_function(engine.model(batch.src, batch.tgt_in), batch.tgt_out)
        return loss * (batch.num_tokens / global_tokens)

    return _update(engine, optimizer, part, learning_rate)


def reference_step(engine: Engine, rank: Rank) -> Step:
    """The step of lesson 04's reference run under this engine, for `run_reference`."""
    optimizer = reference_optimizer(list(engine.model.parameters()))

    def step(batch: Batch, rate: float) -> float:
        mine = batch if engine.replicas == 1 else shard(batch, rank.rank, engine.replicas)
        mine = mine.to(rank.device)
        part = partial(loss_of, engine.model, mine, batch.num_tokens)
        total = _update(engine, optimizer, part, rate)
        if engine.replicas > 1:
            dist.all_reduce(total)
        return total.item()

    return step


def _update(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    part: Callable[[], Tensor],
    learning_rate: float,
) -> Tensor:
    set_learning_rate(optimizer, learning_rate)
    optimizer.zero_grad()
    loss = part()
    (loss * engine.replicas).backward()
    engine.finish()
    optimizer.step()
    return loss.detach()
