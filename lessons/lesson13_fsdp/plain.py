"""Train with torch's fully_shard (FSDP2), on GPUs or CPUs: torchrun --nproc_per_node=2 plain.py."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, ACCUMULATE = 3, 64, 2  # BATCH: of all ranks and micro-batches together


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [(16, 64), (64, 16)] * 4
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.GELU())]
    return nn.Sequential(*layers[:-1])


def make_data() -> TensorDataset:
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().cumsum(1))


def train() -> None:
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it: this process's GPU on its node
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # or objects and .cuda() of all ranks use cuda:0
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    model = make_net().to(device)
    for layer in list(model)[::2]:  # a unit each: whole only while it computes
        fully_shard(layer)
    sharded = fully_shard(model)  # the same module, with methods of its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after: its states are parts, too
    data = make_data()
    sampler = DistributedSampler(data, drop_last=True)  # each rank its own samples
    rows = BATCH // world_size // ACCUMULATE
    loader = DataLoader(data, rows, sampler=sampler, drop_last=True, pin_memory=on_gpu)
    assert len(loader) % ACCUMULATE == 0, "whole steps alone: take other rows, or another BATCH"

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # or every epoch has the order of the first
        total = torch.zeros((), device=device)
        for i, (x, y) in enumerate(loader, start=1):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            last = i % ACCUMULATE == 0
            sharded.set_requires_gradient_sync(last)
            loss = F.mse_loss(model(x), y)
            (loss / ACCUMULATE).backward()  # the last one leaves each rank its part of the mean
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world_size / len(loader):.3f}")

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # every rank calls it, rank 0 has all
    if rank == 0:
        torch.save(weights, "plain_fsdp.pt")


if __name__ == "__main__":
    train()
    dist.destroy_process_group()
