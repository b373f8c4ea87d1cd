"""Steps in turns: the same layers under several engines; a backward that waits or overlaps."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.ddp.averaging import average_flat
from shared.measuring.timing import repetitions
from shared.model.single_layer import make_block
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


class _Column(torch.autograd.Function):
    """A column-parallel product whose two gradients are computed in an order of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, overlap: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.overlap = overlap
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        x_gradient = gradients[0] @ weight
        work = dist.all_reduce(x_gradient, async_op=True)
        assert work is not None
        if not ctx.overlap:
            work.wait()
        w_gradient = gradients[0].T @ x  # needs nothing of what travels
        if ctx.overlap:
            work.wait()
        return x_gradient, w_gradient, None


def column_backward(
    rank: int, tokens: int, width: int, overlap: bool, steps: int
) -> tuple[float, Tensor, Tensor]:
    """The fastest backward of one column-parallel product in ms, and its two gradients.

    The matrix is (width, 2 width) on each rank; time is that of the slowest rank.
    """
    torch.manual_seed(0)
    x, upstream = torch.randn(tokens, width), torch.randn(2, tokens, 2 * width)[rank]
    weight = torch.randn(2, 2 * width, width)[rank].requires_grad_()
    x.requires_grad_()
    seconds = []
    for _ in range(repetitions(steps)):
        x.grad = weight.grad = None
        y = _Column.apply(x, weight, overlap)
        dist.barrier()
        began = time.perf_counter()
        y.backward(upstream)
        taken = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        seconds.append(taken.item())
    assert x.grad is not None
    assert weight.grad is not None
    return 1000 * min(seconds), x.grad, weight.grad
