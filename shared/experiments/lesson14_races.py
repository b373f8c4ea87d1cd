"""Lesson 14: one step of the same layers under several engines, in turns, and what each sends."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.ddp.averaging import average_flat
from shared.experiments.lesson14_blocks import make_block
from shared.tensor_parallel.blocks import parallel_block, sequence_parallel_block
from shared.tensor_parallel.models import make_mesh, sum_partial_gradients
from shared.tensor_parallel.torch_twin import groups_by_kind, torch_parallel_block

ENGINES = ("one process", "data parallel", "tensor parallel", "sequence parallel", "torch's")


@dataclass(frozen=True)
class Work:
    """Layers and a batch of all ranks."""

    width: int = 256
    layers: int = 2
    batch: int = 8
    length: int = 64


def race(rank: int, work: Work, engines: tuple[str, ...], steps: int) -> dict[str, list[float]]:
    """The seconds of each step of each engine, which take turns; the slowest rank's."""
    mesh = make_mesh("cpu", tp=dist.get_world_size())
    steppers = {engine: stepper(engine, work, rank, mesh) for engine in engines}
    seconds: dict[str, list[float]] = {engine: [] for engine in engines}
    for step in range(steps + 1):
        for engine, act in steppers.items():
            dist.barrier()
            began = time.perf_counter()
            act()
            taken = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if step:  # the first one makes AdamW's states
                seconds[engine].append(taken.item())
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """The median step of each engine in milliseconds."""
    return {engine: 1000 * statistics.median(each) for engine, each in seconds.items()}


def stepper(engine: str, work: Work, rank: int, mesh: object) -> Callable[[], None]:
    """A function that makes one step of an engine: forward, backward, messages, AdamW."""
    n = dist.get_world_size()
    blocks = [make_block(work.width, heads=8) for _ in range(work.layers)]
    cuts = {
        "tensor parallel": parallel_block,
        "sequence parallel": sequence_parallel_block,
        "torch's": torch_parallel_block,
    }
    if engine in cuts:
        for block in blocks:
            cuts[engine](block, mesh)  # ty: ignore[invalid-argument-type]
    stack = nn.ModuleList(blocks)
    optimizer = torch.optim.AdamW(groups_by_kind(stack), lr=1e-4)
    x = torch.randn(work.batch, work.length, work.width)
    if engine == "data parallel":
        x = x.chunk(n)[rank]
    if engine == "sequence parallel":
        x = x.chunk(n, 1)[rank]

    def step() -> None:
        if engine == "one process" and rank:
            return
        optimizer.zero_grad()
        y: Tensor = x
        for block in blocks:
            y = block(y, causal=True)
        y.square().mean().backward()
        if engine == "data parallel":
            average_flat(p.grad for p in stack.parameters() if p.grad is not None)
        if engine == "sequence parallel":
            sum_partial_gradients(stack)
        optimizer.step()

    return step
