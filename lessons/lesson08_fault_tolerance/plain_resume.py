"""Train with torch's DDP, evaluate, and go on after a crash: torchrun as for lesson 06's plain.py.

The same command starts and resumes. On as many ranks (CPUs) the end is the same, bit for bit; a
GPU was not tried.
"""

import contextlib
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

EPOCHS, BATCH, ACCUMULATE = 3, 64, 2  # BATCH: of all ranks and micro-batches together
CHECKPOINT, SAVE_EVERY = "plain_resume.pt", 5  # in a folder that all nodes see; steps


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = [(16, 64), (64, 16)] * 4
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers[:-2])


def make_data(rows: int = 512, seed: int = 1) -> TensorDataset:
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sin().cumsum(1))


def save(total: Tensor, **state: Any) -> None:
    """All ranks call it: random states (dropout's) and sums are each rank's own."""
    on_gpu, of_ranks = total.is_cuda, [None] * dist.get_world_size()
    random = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]
    dist.all_gather_object(of_ranks, {"random": random, "total": total.cpu()})
    if dist.get_rank() == 0:
        torch.save({**state, "of_ranks": of_ranks}, f"{CHECKPOINT}.part")
        os.replace(f"{CHECKPOINT}.part", CHECKPOINT)  # a crash leaves the old one or the new one


@torch.no_grad()
def evaluate(net: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """The mean over all rows. Sums and counts are added up: the ranks have unlike numbers."""
    own = range(dist.get_rank(), len(data), dist.get_world_size())  # a sampler would repeat rows
    sums = torch.zeros(2, device=device)
    net.eval()
    for x, y in DataLoader(Subset(data, own), 8):
        x, y = x.to(device), y.to(device)
        sums += torch.stack([F.mse_loss(net(x), y, reduction="sum"), torch.ones_like(y).sum()])
    net.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def train() -> None:
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun sets it: this process's GPU on its node
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)  # or objects and .cuda() of all ranks use cuda:0
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    net = make_net().to(device)
    found, setters = None, (torch.set_rng_state, torch.cuda.set_rng_state)
    if os.path.exists(CHECKPOINT):
        found = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
        net.load_state_dict(found["model"])  # before it is wrapped
        assert len(found["of_ranks"]) == world_size, "its shares are of other ranks"
    torch.manual_seed(rank)  # for dropout; make_net() has given all ranks the same weights
    model = DistributedDataParallel(net, device_ids=[local_rank] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, done, total = 0, 0, torch.zeros((), device=device)
    if found:
        optimizer.load_state_dict(found["optimizer"])  # so would a schedule, and a GradScaler
        first, done, own = found["epoch"], found["done"], found["of_ranks"][rank]
        total += own["total"].to(device)
    data, held_out = make_data(), make_data(77, seed=2)
    sampler = DistributedSampler(data, drop_last=True)  # each rank its own samples
    rows = BATCH // world_size // ACCUMULATE
    loader = DataLoader(data, rows, sampler=sampler, drop_last=True, pin_memory=on_gpu)
    steps = len(loader) // ACCUMULATE
    assert len(loader) % ACCUMULATE == 0, "whole steps alone: take other rows, or another BATCH"

    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)  # or every epoch has the order of the first
        batches = enumerate(loader, start=1)
        for _ in itertools.islice(batches, done * ACCUMULATE):
            pass  # seen before the crash
        if found and epoch == first:
            for put, each in zip(setters, own["random"], strict=False):
                put(each)  # only now: a loader draws a seed when it begins
        for i, (x, y) in batches:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            last = i % ACCUMULATE == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = F.mse_loss(model(x), y)
                (loss / ACCUMULATE).backward()  # the last one averages over the ranks
            total += loss.detach()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done % SAVE_EVERY == 0 or done == steps:  # all ranks: it gathers
                    states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
                    save(total, **states, epoch=epoch, done=done)
        dist.all_reduce(total)
        held = evaluate(net, held_out, device)
        if rank == 0:
            loss = total.item() / world_size / len(loader)
            print(f"epoch {epoch}: loss {loss:.3f}, held out {held:.3f}", flush=True)
        done, total = 0, torch.zeros_like(total)


if __name__ == "__main__":
    train()
    dist.destroy_process_group()  # after train(): a model in DDP that outlives it may hang
