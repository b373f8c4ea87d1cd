"""Gradients on a mesh, averaged over the wrong ranks or by the wrong number, beside one process."""

import copy
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lessons.lesson18_mixture_of_experts.experiments.balancing import LENGTH, WORDS, sentences
from shared.ddp.averaging import average_flat
from shared.mixture_of_experts.marks import is_expert
from shared.mixture_of_experts.models import give_experts, share_out, whole_state
from shared.mixture_of_experts.parallel import average_gradients
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.tensor_parallel.models import make_mesh

MEANS = ("right", "experts by dp", "experts over all", "experts as they are")
OPTIMIZERS = ("SGD", "AdamW", "AdamW, clipped")


def average(how: str, model: nn.Module, mesh: DeviceMesh) -> None:
    """The right mean, or one of three wrong ones."""
    if how == "right":
        average_gradients(model, mesh)
        return
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    own = [p.grad for p in model.parameters() if is_expert(p) and p.grad is not None]
    average_flat(p.grad for p in model.parameters() if not is_expert(p) and p.grad is not None)
    if how == "experts by dp":
        average_flat(own, mesh["dp"].get_group())
    elif how == "experts over all":
        average_flat(own)


def clip(model: nn.Module, most: float, group: dist.ProcessGroup | None) -> None:
    """Clip by the norm of all parameters: experts are on one rank of the group, the rest on all."""
    squares = {True: 0.0, False: 0.0}
    for p in model.parameters():
        if p.grad is not None:
            squares[is_expert(p)] += p.grad.double().square().sum().item()
    total = torch.tensor(squares[True], dtype=torch.float64)
    if group is not None:
        dist.all_reduce(total, group=group)
    factor = min(1.0, most / (total.item() + squares[False]) ** 0.5)
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= factor


def steps_apart(rank: int, how: str, seed: int, steps: int) -> dict[str, tuple[float, float]]:
    """By optimizer, how far weights (relative) and losses are from one process after some steps."""
    mesh = make_mesh("cpu", dp=2, ep=2)
    sizes: dict[str, Any] = {"d_model": 16, "num_heads": 2, "d_ff": 32}
    config = TransformerConfig(WORDS, num_layers=1, dropout=0.0, max_len=LENGTH, **sizes)
    torch.manual_seed(seed)
    start = LanguageModel(config).double()
    give_experts(start, 4, 2)
    found = {}
    for optimizer in OPTIMIZERS:
        whole, mine = copy.deepcopy(start), copy.deepcopy(start)
        share_out(mine, mesh["ep"].get_group())
        pair = [(whole, None), (mine, mesh)]
        optimizers = [_optimizer(optimizer, model) for model, _ in pair]
        losses = [0.0, 0.0]
        for step in range(steps):
            tokens = sentences(1000 * seed + step, 8)
            for i, (model, where) in enumerate(pair):
                rows = tokens if where is None else tokens.chunk(4)[rank]
                loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
                optimizers[i].zero_grad()
                loss.backward()
                if where is not None:
                    average(how, model, where)
                    dist.all_reduce(loss.data)
                    loss.data /= 4
                if "clipped" in optimizer:
                    clip(model, 0.5, None if where is None else mesh["ep"].get_group())
                optimizers[i].step()
                losses[i] = loss.item()
        found[optimizer] = _apart(whole, mine, mesh), abs(losses[0] - losses[1])
    return found


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    more: dict[str, Any] = {"lr": 0.3} if name == "SGD" else {"lr": 1e-2}
    kind = torch.optim.SGD if name == "SGD" else torch.optim.AdamW
    return kind(model.parameters(), **more)


def _apart(whole: nn.Module, mine: nn.Module, mesh: DeviceMesh) -> float:
    """The largest difference of any weight, over the largest weight."""
    again = whole_state(mine, mesh["ep"].get_group())
    gaps = [(again[n] - p).abs().max() for n, p in whole.named_parameters() if n in again]
    return (max(gaps) / max(p.abs().max() for p in whole.parameters())).item()


def all_means(rank: int, seeds: int, steps: int) -> dict[tuple[str, int], dict]:
    """Every way of averaging by seed."""
    runs = [(how, seed) for how in MEANS for seed in range(seeds)]
    return {(how, seed): steps_apart(rank, how, seed, steps) for how, seed in runs}
