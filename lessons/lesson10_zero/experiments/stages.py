"""Lesson 10: the reference model under a stage of ZeRO; what a rank keeps, sends and needs."""

import contextlib
import gc
import hashlib
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.data.batching import Batch
from shared.measuring.live import count_live_bytes
from shared.measuring.model_states import bytes_by_kind
from shared.measuring.traffic import count_traffic
from shared.sharding.counting import ring_bytes
from shared.sharding.zero_reference import SETTINGS, build_zero
from shared.training.engine import DataParallelEngine, reference_curve
from shared.training.precision import MasterWeightAdamW
from shared.training.reference_run import (
    loss_of,
    reference_batches,
    reference_model,
    reference_optimizer,
    shard,
)

BF16 = torch.bfloat16
Stages = dict[int, Callable[..., Any]]  # the answers to 10.2b, 10.3 and 10.4b by stage


def under(stages: Stages, stage: int, model: nn.Module) -> Any:
    """The stage's optimizer for a model, with the reference run's settings over torch's AdamW."""
    trained = model if stage == 3 else model.parameters()
    return stages[stage](trained, torch.optim.AdamW, **SETTINGS)


def replicated(rank: int) -> tuple[dict[str, int], str]:
    """Bytes by kind after a step of DDP in bf16 with masters, and a checksum of AdamW's states."""
    model = reference_model(BF16)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = MasterWeightAdamW(model.parameters(), lr=1e-3)
    for batch in reference_batches()[:2]:
        optimizer.zero_grad()
        part(ddp, batch, rank).backward()
        optimizer.step()
    digest = hashlib.sha256()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                digest.update(value.numpy().tobytes())
    return bytes_by_kind(model, optimizer), digest.hexdigest()


def part(model: nn.Module, batch: Batch, rank: int) -> Tensor:
    """This rank's part of the mean loss, times the number of ranks, by which engines divide."""
    n = dist.get_world_size()
    return loss_of(model, shard(batch, rank, n), batch.num_tokens) * n


def each_stage(rank: int, run: Callable[..., Any], stages: Stages, *args: Any) -> dict[int, Any]:
    """What `run(rank, stages, stage, *args)` returns for every stage, on the same ranks."""
    return {stage: run(rank, stages, stage, *args) for stage in stages}


def kept_bytes(rank: int, stages: Stages, stage: int) -> dict[str, int]:
    """Live bytes of a rank after the backward of a second step in bf16, by kind.

    What is bfloat16 are weights, and after backward gradients too; what is float32 are masters
    and AdamW's moments. There are no activations before and after a step.
    """
    gc.freeze()  # what was there before is not looked through: collecting is quick
    with count_live_bytes() as live:
        model = reference_model(BF16)
        optimizer = under(stages, stage, model)
        for number, batch in enumerate(reference_batches()[:2]):
            optimizer.zero_grad()
            gc.collect()
            buffers = sum(b.nbytes for b in model.buffers())  # positions: no model state
            weights = live.now(BF16) - buffers
            part(model, batch, rank).backward()
            time.sleep(0.2 * number)  # gloo's thread lets go of the last message a moment later
            gradients = live.now(BF16) - buffers - weights
            optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        states = live.now(torch.float32)
    return {"parameters": weights, "gradients": gradients, "optimizer states": states}


def curve(rank: int, stages: Stages, stage: int, steps: int) -> list[float]:
    """The first losses of the reference run under a stage."""
    model = reference_model()
    engine = DataParallelEngine(model, under(stages, stage, model), dist.get_world_size())
    return reference_curve(engine, range(steps)).losses


def sent(rank: int, stages: Stages, stage: int, micro_batches: int = 1) -> tuple[float, list[str]]:
    """A step's bytes on a ring over (n-1)/n of the parameters', and the operations; 0: DDP."""
    model = reference_model()
    whole = sum(p.nbytes for p in model.parameters())  # before stage 3 takes them apart
    step, n = stepping(rank, stages, stage, model, micro_batches), dist.get_world_size()
    for batch in reference_batches()[: 1 if stage else 3]:  # DDP's buckets change in the second
        with count_traffic() as traffic:
            step(batch)
    return ring_bytes(traffic) / (whole * (n - 1) / n), traffic.ops


def found_norms(rank: int, stage: int) -> dict[str, float]:
    """The norm of a batch's mean gradient, by torch's clip_grad_norm_ and by the stage's; 0: DDP.

    Nothing is clipped: the largest norm allowed is infinite.
    """
    model = reference_model()
    optimizer = build_zero(stage, model, **SETTINGS) if stage else None
    trained = model if stage else without_buffers(model)
    part(trained, reference_batches()[0], rank).backward()
    found = {"torch": nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()}
    if optimizer is not None:
        found["stage"] = optimizer.clip_grad_norm_(math.inf).item()
    return found


def without_buffers(model: nn.Module) -> DistributedDataParallel:
    """DDP that does not send the buffers in every forward: positions never change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for it
        return DistributedDataParallel(model, broadcast_buffers=False)


def stepping(
    rank: int, stages: Stages, stage: int, model: nn.Module, micro_batches: int = 1
) -> Callable[[Batch], None]:
    """A training step under a stage, or under torch's DDP (0), which sends in its last backward."""
    ddp = without_buffers(model) if stage == 0 else None
    trained = model if ddp is None else ddp
    optimizer = (
        reference_optimizer(list(model.parameters())) if stage == 0 else under(stages, stage, model)
    )

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        for number in range(micro_batches):  # the same rows each time: only what is sent counts
            silent = ddp is not None and number < micro_batches - 1
            with ddp.no_sync() if silent else contextlib.nullcontext():
                part(trained, batch, rank).backward()
        optimizer.step()

    return step
