"""Train with Accelerate, on GPUs or CPUs: torchrun --nproc_per_node=2 plain.py."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # or each rank trains alone where there is no GPU
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=order,
    )
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = make_data()
    rows = BATCH // accelerator.num_processes // ACCUMULATE  # of a rank
    loader = DataLoader(data, rows, shuffle=True, drop_last=True, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) % ACCUMULATE == 0, "whole steps alone: take other rows, or another BATCH"

    for epoch in range(EPOCHS):
        total = torch.zeros((), device=accelerator.device)
        for x, y in loader:  # on the device, each rank its own rows, a new order in each epoch
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)  # divides by ACCUMULATE
                if accelerator.sync_gradients:  # in the last micro-batch of a step
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # does nothing in the others, as zero_grad()
                optimizer.zero_grad()
            total += loss.detach()
        mean = accelerator.gather(total).mean().item() / len(loader)  # every rank calls gather
        accelerator.print(f"epoch {epoch}: loss {mean:.3f}")

    accelerator.wait_for_everyone()
    weights = accelerator.get_state_dict(model)  # every rank calls it
    accelerator.save(weights, "plain_accelerate.pt")  # rank 0 writes
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()  # ends the group, which DDP's model must not outlive


if __name__ == "__main__":
    train()
