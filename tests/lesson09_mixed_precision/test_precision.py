"""Masters whose gradients are float32, under torch's own AdamW; micro-batches of four ranks."""

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared.measuring.model_states import bytes_by_kind
from shared.ranks.forked import run_ranks
from shared.training.precision import DynamicLossScaler, MasterCopies, MasterWeightAdamW
from shared.training.reference_run import (
    checksum,
    loss_of,
    read_record,
    reference_model,
    reference_optimizer,
    run_reference,
    shard,
)
from shared.training.schedules import set_learning_rate
from solutions.lesson09_mixed_precision import accumulate


def test_eighteen_bytes_with_float32_gradients():
    model = nn.Linear(6, 11).bfloat16()
    copies = MasterCopies(model.parameters())
    optimizer = torch.optim.AdamW(copies.masters)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum().backward()
    copies.take_gradients()
    optimizer.step()
    copies.give_back()
    sizes = bytes_by_kind(model, optimizer)
    assert sum(sizes.values()) == 18 * sum(p.numel() for p in model.parameters())
    assert torch.equal(model.weight, copies.masters[0].bfloat16())


def accumulated(rank, steps):
    """The reference run's first losses from two micro-batches a rank, scaled, and the weights."""
    model, scaler = reference_model(), DynamicLossScaler()
    ddp = DistributedDataParallel(model)
    optimizer = reference_optimizer(list(model.parameters()))

    def step(batch, rate):
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        mine = shard(batch, rank, 4)
        parts = [shard(mine, part, 2) for part in range(2)]
        loss = accumulate(ddp, parts, lambda m, b: loss_of(m, b, b.num_tokens), scaler)
        scaler.step(optimizer)
        scaler.update()
        dist.all_reduce(loss)
        return loss.item()

    return run_reference(step, steps), checksum(model)


@pytest.mark.full
def test_scaled_micro_batches_of_four_ranks_follow_the_curve():
    """The notebook has two ranks, without a scale."""
    curves = run_ranks(accumulated, 4, 6)
    assert curves[0][0] == pytest.approx(read_record()["losses"][:6], abs=5e-6)
    assert len({weights for _, weights in curves}) == 1


def test_masters_of_float64_are_float64():
    start = torch.randn(5, dtype=torch.float64)
    found = []
    for kind in (MasterWeightAdamW, torch.optim.AdamW):
        parameter = nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=0.1, weight_decay=0.1)
        for _ in range(3):
            parameter.grad = torch.sin(parameter.detach())
            optimizer.step()
        found.append(parameter.detach())
    assert torch.allclose(*found, rtol=0, atol=1e-14)
