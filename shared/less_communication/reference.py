"""Lesson 04's reference run under torch's DDP with a hook, or under local SGD."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shared.data.batching import Batch
from shared.less_communication.local_sgd import LocalSGD
from shared.training.engine import DataParallelEngine
from shared.training.reference_run import (
    Step,
    loss_of,
    reference_model,
    reference_optimizer,
    shard,
)
from shared.training.schedules import set_learning_rate


def hooked_reference(
    state: Any = None, hook: Callable[..., Any] | None = None
) -> DataParallelEngine:
    """The reference run's engine on all ranks; without a hook DDP's own all-reduce."""
    ddp = DistributedDataParallel(reference_model())
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    optimizer = reference_optimizer(list(ddp.parameters()))
    return DataParallelEngine(ddp, optimizer, dist.get_world_size())


def local_reference(rank: int, every: int, outer_lr: float, outer_momentum: float) -> Step:
    """The step with every rank's own optimizer, which agree every `every` steps."""
    model, ranks = reference_model(), dist.get_world_size()
    optimizer = reference_optimizer(list(model.parameters()))
    local = LocalSGD(model.parameters(), every, outer_lr, outer_momentum)

    def step(batch: Batch, rate: float) -> float:
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        mine = shard(batch, rank, ranks)
        loss = loss_of(model, mine, mine.num_tokens)
        loss.backward()
        optimizer.step()
        local.step()
        part = loss.detach() * (mine.num_tokens / batch.num_tokens)
        dist.all_reduce(part)
        return part.item()

    return step
