"""Small language models of experts, trained with three ways to keep the loads even, or none."""

from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shared.measuring.timing import repetitions
from shared.mixture_of_experts.layer import MoELayer
from shared.mixture_of_experts.models import expert_layers, give_experts, share_out
from shared.mixture_of_experts.routing import (
    Routing,
    balance_loss,
    capacity_for,
    loads,
    update_bias,
    within_capacity,
)
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.model.layers import PositionwiseFeedForward

WORDS, LENGTH, ROWS = 64, 24, 32
TOPICS = (0.55, 0.25, 0.15, 0.05)  # how often a row is of each: text is not even, either
SWITCH = {"loss 0.01": 0.01, "loss 0.1": 0.1}  # the loss's weight (Fedus et al.), ten times that
RATE = 0.01  # what a bias moves by in a step
VARIANTS = ("dense", "nothing", *SWITCH, "bias")
SEEDS = repetitions(5)


@dataclass
class Trained:
    """One run: its loss on rows it has not seen, and how its router shared them out."""

    loss: float
    loads: list[float]  # by expert, the mean is 1
    dropped: dict[float, float]  # by capacity factor, the share of choices beyond it


def sentences(seed: int, rows: int = ROWS) -> Int[Tensor, "rows length"]:
    """Rows of one of four topics, each with a rule of its own: one of two words follows each."""
    draw = torch.Generator().manual_seed(seed)
    topic = torch.multinomial(torch.tensor(TOPICS), rows, replacement=True, generator=draw)
    factor, shift = torch.tensor([5, 7, 11, 13])[topic], torch.tensor([1, 4, 9, 16])[topic]
    words = [torch.randint(WORDS, (rows,), generator=draw)]
    for _ in range(LENGTH):
        coin = torch.randint(2, (rows,), generator=draw)
        words.append((factor * words[-1] + shift + coin) % WORDS)
    return torch.stack(words, 1)


def train(
    seed: int,
    variant: str,
    group: dist.ProcessGroup | None,
    num_experts: int = 8,
    k: int = 1,
    steps: int = 100,
) -> Trained:
    """Train a model of two layers in a group of one, and look at 256 new rows."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"d_model": 32, "num_heads": 2, "num_layers": 2, "d_ff": 64}
    model = LanguageModel(TransformerConfig(WORDS, dropout=0.0, max_len=LENGTH, **sizes))
    if variant != "dense":
        give_experts(model, num_experts, k)
        share_out(model, group)
    layers = expert_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        tokens = sentences(100_000 * seed + step)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        found = [layer.routing for layer in layers if layer.routing is not None]
        if variant in SWITCH:
            loss = loss + SWITCH[variant] * sum(balance_loss(each, group) for each in found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if variant == "bias":
            for layer, each in zip(layers, found, strict=True):
                update_bias(layer.bias, loads(each.experts, num_experts), RATE)
    return _look(model, seed)


@torch.no_grad()
def _look(model: LanguageModel, seed: int) -> Trained:
    tokens = sentences(100_000 * seed + 99_999, 256)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    found = [layer.routing for layer in expert_layers(model) if layer.routing is not None]
    by_expert = [_relative(each) for each in found]
    fullest = max(by_expert, key=max, default=[])
    dropped = {factor: _dropped(found, factor) for factor in (1.0, 1.25, 1.5, 2.0)} if found else {}
    return Trained(loss.item(), fullest, dropped)


def _relative(routing: Routing) -> list[float]:
    counts = loads(routing.experts, routing.probabilities.shape[-1]).double()
    return (counts / counts.mean()).tolist()


def _dropped(found: list[Routing], factor: float) -> float:
    """The share of the choices of all layers that are beyond a capacity."""
    kept = []
    for each in found:
        experts, num_experts = each.experts, each.probabilities.shape[-1]
        capacity = capacity_for(factor, experts.numel(), num_experts)
        kept.append(within_capacity(experts, num_experts, capacity).double().mean().item())
    return 1 - sum(kept) / len(kept)


def all_seeds(
    rank: int, variants: tuple[str, ...], seeds: int, k: int
) -> dict[tuple[str, int], Trained]:
    """Every variant by seed; the ranks share the runs, each of which is in one process."""
    runs = [(variant, seed) for variant in variants for seed in range(seeds)]
    alone = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    mine = runs[rank :: dist.get_world_size()]
    found = {run: train(run[1], run[0], alone, k=k) for run in mine}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return {run: each[run] for run in runs for each in everyone if run in each}


def parameters_and_operations(num_experts: int, k: int, d_model: int = 64) -> tuple[int, int]:
    """A layer's parameters, and the operations for a token in forward (a product counts two)."""
    networks = [PositionwiseFeedForward(d_model, 4 * d_model) for _ in range(num_experts)]
    layer = MoELayer(networks, d_model, k) if num_experts > 1 else networks[0]
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1000, d_model))
    parameters = sum(p.numel() for p in layer.parameters())
    return parameters, counter.get_total_flops() // 1000
