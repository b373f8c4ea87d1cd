"""Train with DeepSpeed's pipeline, on GPUs or CPUs: torchrun --nproc_per_node=2 plain.py."""

import os

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if not torch.cuda.is_available():  # else its collectives for CPUs are compiled, in minutes
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}

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
    deepspeed.init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},  # with 0 clipping sees the first stage alone (0.19.8)
    }
    net = PipelineModule(list(make_net()), num_stages=world_size, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    data = make_data()
    sampler = DistributedSampler(data, num_replicas=1, rank=0)  # every rank the same samples
    rows = engine.train_micro_batch_size_per_gpu()
    loader = DataLoader(data, rows, sampler=sampler, drop_last=True, pin_memory=on_gpu)
    assert len(loader) % ACCUMULATE == 0, "whole steps alone: take other rows, or another BATCH"

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # or every epoch has the order of the first
        total = torch.zeros((), device=device)
        batches = iter(loader)
        num_steps = len(loader) // ACCUMULATE
        for _ in range(num_steps):
            total += engine.train_batch(batches)  # ACCUMULATE micro-batches, 1F1B, and the step
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / num_steps:.3f}")

    engine.save_checkpoint("plain_pipeline")  # every rank calls it and writes its own parts


if __name__ == "__main__":
    train()
    dist.destroy_process_group()
