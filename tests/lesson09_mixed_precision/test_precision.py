"""The proofs: scaler and AdamW beside torch's, the loss curve with and without a scale, bytes."""

import math

import pytest
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared.measuring.casts import operators_by_dtype
from shared.measuring.model_states import bytes_by_kind
from shared.ranks.forked import run_ranks
from shared.training.precision import DynamicLossScaler, MasterCopies, MasterWeightAdamW
from shared.training.reference_run import (
    checksum,
    compare_with_record,
    loss_of,
    plain_step,
    reference_batches,
    reference_model,
    reference_optimizer,
    run_reference,
    shard,
)
from shared.training.schedules import set_learning_rate
from solutions.lesson09_mixed_precision import accumulate

ROUNDING = 5e-6  # of another order of additions, see lesson 06


def scaled_curve(scaler, planted=None, steps=None):
    """Losses and checksum of the reference run under a scaler; one step may meet an infinity."""
    model = reference_model()
    optimizer = reference_optimizer(list(model.parameters()))
    count = 0

    def step(batch, rate):
        nonlocal count
        count += 1
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        loss = loss_of(model, batch, batch.num_tokens)
        scaler.scale(loss).backward()
        if count == planted:
            next(model.parameters()).grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    if steps is None:
        return run_reference(step), checksum(model)
    losses = [step(batch, 1e-3) for batch in reference_batches()[:steps]]
    return losses, checksum(model)


def test_the_curve_is_the_same_bit_for_bit_with_the_scale_on_and_off():
    model = reference_model()
    plain = run_reference(plain_step(model, reference_optimizer(list(model.parameters()))))
    losses, weights = scaled_curve(DynamicLossScaler(growth_interval=7))
    assert losses == plain
    assert weights == checksum(model)
    assert compare_with_record(losses) <= ROUNDING


@pytest.mark.parametrize("planted", [None, 3])
def test_the_scaler_trains_as_gradscaler_does(planted):
    ours = DynamicLossScaler(1024.0, 4.0, 0.25, 2)
    theirs = torch.amp.GradScaler("cpu", 1024.0, 4.0, 0.25, 2)
    assert scaled_curve(ours, planted, 6) == scaled_curve(theirs, planted, 6)
    assert ours.state_dict() == theirs.state_dict()


def accumulated(rank, world_size, num_micro, steps):
    """The reference run's losses from `num_micro` micro-batches on each rank, and the weights."""
    model = reference_model()
    ddp = DistributedDataParallel(model)
    optimizer = reference_optimizer(list(model.parameters()))
    scaler, losses = DynamicLossScaler(), []

    def step(batch, rate):
        set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        mine = shard(batch, rank, world_size)
        parts = [shard(mine, part, num_micro) for part in range(num_micro)]
        loss = accumulate(ddp, parts, lambda m, b: loss_of(m, b, b.num_tokens), scaler)
        scaler.step(optimizer)
        scaler.update()
        dist.all_reduce(loss)
        losses.append(loss.item())
        return losses[-1]

    return run_reference(step), checksum(model)


@pytest.mark.parametrize(("world_size", "num_micro"), [(1, 4), (2, 2), (4, 2)])
def test_accumulated_micro_batches_follow_the_curve(world_size, num_micro):
    curves = run_ranks(accumulated, world_size, world_size, num_micro, 50, timeout=280)
    assert len({weights for _, weights in curves}) == 1
    assert compare_with_record(curves[0][0]) <= ROUNDING


def halved(make, dtype=torch.bfloat16):
    """A small model in 16 bits after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)).to(dtype)
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 6, dtype=dtype)).float().square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bytes_a_parameter_by_kind(dtype):
    model, optimizer = halved(MasterWeightAdamW, dtype)
    count = sum(p.numel() for p in model.parameters())
    sizes = {kind: size / count for kind, size in bytes_by_kind(model, optimizer).items()}
    assert list(sizes.values()) == [2, 2, 0, 4, 4, 4]


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


def test_masters_follow_fp32_adamw_and_a_run_without_them_stands_still():
    twin = nn.Parameter(torch.ones(5))
    kept, lost = (nn.Parameter(torch.ones(5).bfloat16()) for _ in range(2))
    optimizers = [torch.optim.AdamW([twin]), MasterWeightAdamW([kept]), torch.optim.AdamW([lost])]
    for _ in range(50):
        for parameter, optimizer in zip((twin, kept, lost), optimizers, strict=True):
            parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
    master = optimizers[1].state[kept]["master"]
    torch.testing.assert_close(master, twin.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(kept, master.bfloat16())
    assert twin[0] < 0.96
    assert lost[0] == 1.0


def test_two_ranks_skip_together_and_stay_equal():
    def train(rank):
        scaler, weight = DynamicLossScaler(8.0, growth_interval=2), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        made = []
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(weight.square().sum()).backward()
            if rank == 1 and step == 2:
                weight.grad[0] = math.nan
            made.append(scaler.step(optimizer))
            scaler.update()
        return made, scaler.get_scale(), weight.tolist()

    first, second = run_ranks(train, 2)
    assert first == second
    assert first[:2] == ([True, True, False, True, True], 16.0)


def test_autocast_runs_products_in_bf16_and_norms_in_float32():
    model, batch = reference_model(), reference_batches()[0]

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch.src, batch.tgt_in)

    logits, seen = operators_by_dtype(forward)
    assert logits.dtype == torch.bfloat16
    assert {(read, written) for (op, read, written) in seen if op in ("addmm", "mm")} == {
        ("bf16", "bf16")
    }
    assert {read for (op, read, _) in seen if op == "native_layer_norm"} == {"fp32"}
