"""Masters whose gradients are float32: the way of bf16 under torch's own AdamW."""

import torch
from torch import nn

from shared.measuring.model_states import bytes_by_kind
from shared.training.precision import MasterCopies


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
