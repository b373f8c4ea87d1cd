"""Lesson 04's reference run under the stages of this room."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shared.data.batching import Batch
from shared.errors import InputError
from shared.training.reference_run import Step, loss_of, shard
from shared.training.schedules import set_learning_rate
from shared.zero.stage3 import ZeroStage3
from shared.zero.stages import ZeroStage1, ZeroStage2

# What reference_optimizer takes; see there for the epsilon.
SETTINGS: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.98), "eps": 1e-5, "weight_decay": 0.01}


def build_zero(stage: int, model: nn.Module, **settings: Any) -> ZeroStage1:
    """The stage's optimizer over torch's AdamW. Raises ValueError for a stage that is none."""
    if stage == 3:
        return ZeroStage3(model, torch.optim.AdamW, **settings)
    if stage not in (1, 2):
        raise InputError(f"ZeRO by hand has the stages 1, 2 and 3, not {stage}")
    kind = ZeroStage1 if stage == 1 else ZeroStage2
    return kind(model.parameters(), torch.optim.AdamW, **settings)


def reference_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """The step of the reference run on this rank's rows, for `run_reference`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def step(batch: Batch, rate: float) -> float:
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        part = loss_of(model, shard(batch, rank, world_size), batch.num_tokens)
        (part * world_size).backward()  # the engine averages
        optimizer.step()
        total = part.detach()
        dist.all_reduce(total)
        return total.item()

    return step
