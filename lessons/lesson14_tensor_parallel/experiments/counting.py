"""What a layer sends and keeps on a rank, counted message by message."""

import contextlib
import copy
from collections.abc import Callable, Generator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shared.measuring.live import count_live_bytes, settle
from shared.measuring.traffic import Traffic, count_traffic
from shared.model.single_layer import make_block, make_layer
from shared.tensor_parallel.blocks import sequence_parallel_block
from shared.tensor_parallel.models import make_mesh

Cut = Callable[[Any, DeviceMesh], Any]
Pair = tuple[list[str], list[str], int, float]


def ring_all_reduce(x: Tensor, op: Any = None, group: Any = None) -> None:
    """Sum x over a group's ranks in a ring, in place, by 2 (n - 1) messages of a chunk each.

    Lesson 05 builds it; here it makes visible what an all-reduce puts on the wire.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    chunks = list(x.flatten().chunk(n))
    assert len({each.numel() for each in chunks}) == 1, f"{x.numel()} numbers, {n} ranks"
    for step in range(2 * (n - 1)):
        out, into = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        got = torch.empty_like(into)
        sent = dist.isend(out.contiguous(), group=group, group_dst=(rank + 1) % n)
        dist.recv(got, group=group, group_src=(rank - 1) % n)
        assert sent is not None
        sent.wait()
        chunks[(rank - step - 1) % n] = into + got if step < n - 1 else got
    x.copy_(torch.cat(chunks).view_as(x))


@contextlib.contextmanager
def on_a_ring() -> Generator[Traffic]:
    """Let each all-reduce go round our ring, and count what this rank sends."""
    with patch.object(dist, "all_reduce", ring_all_reduce), count_traffic() as traffic:
        yield traffic


def layer_traffic(
    rank: int, cut: Cut, batch: int, length: int, width: int
) -> tuple[list[str], list[str], int]:
    """One layer's operations in forward and in backward, and the bytes that this rank sends."""
    mesh = make_mesh("cpu", tp=dist.get_world_size())

    def once(counted: Callable[[], Any]) -> tuple[Traffic, Traffic]:
        block = cut(make_block(width), mesh)
        x = torch.zeros(batch, length, width, requires_grad=True)
        with counted() as forward:
            y = block(x, causal=True)
        with counted() as backward:
            y.sum().backward()
        return forward, backward

    forward, backward = once(count_traffic)
    sent = sum(each.sent_bytes for each in once(on_a_ring))
    return forward.ops, backward.ops, sent


def sequence_traffic(rank: int, batch: int, length: int, width: int) -> tuple[list[str], int]:
    """A sequence-parallel layer's operations, and the bytes that a rank sends for them in a ring.

    In a ring each rank sends its part of an all-gather n - 1 times, and of what it hands in for a
    reduce-scatter all but its own n-th.
    """
    n = dist.get_world_size()
    block = sequence_parallel_block(make_block(width), make_mesh("cpu", tp=n))
    x = torch.zeros(batch, length // n, width, requires_grad=True)
    with count_traffic() as traffic:
        block(x, causal=True).sum().backward()
    gathered, scattered = traffic.bytes_of("all_gather"), traffic.bytes_of("reduce_scatter")
    return traffic.ops, (n - 1) * gathered + (n - 1) * scattered // n


def pair_traffic(rank: int, tokens: int, width: int) -> dict[str, Pair]:
    """torch's column and row layer, in parts between them and gathered between them.

    Operations in forward and in backward, the bytes that this rank sends for both in a ring, and
    the largest difference of the output and the input's gradient from one process's.
    """
    n, whole = dist.get_world_size(), Replicate()
    column, row = ColwiseParallel(output_layouts=whole), RowwiseParallel(input_layouts=whole)
    kinds: dict[str, dict[str, ParallelStyle]] = {
        "parts stay parts": {"0": ColwiseParallel(), "2": RowwiseParallel()},
        "gathered, and cut again": {"0": column, "2": row},
    }
    factor = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1}
    x = torch.linspace(-1, 1, tokens * width).view(tokens, width).requires_grad_()
    found = {}
    for name, styles in kinds.items():
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        pair = parallelize_module(copy.deepcopy(alone), make_mesh("cpu", tp=n), styles)
        with count_traffic() as forward:
            y = pair(x)
        with count_traffic() as backward:
            (gradient,) = torch.autograd.grad(y.sum(), x)
        want = alone(x)
        (wanted,) = torch.autograd.grad(want.sum(), x)
        gap = max((a - b).abs().max().item() for a, b in ((y, want), (gradient, wanted)))
        calls = forward.calls + backward.calls
        sent = round(sum(factor[call.op] * call.num_bytes for call in calls))
        found[name] = forward.ops, backward.ops, sent, gap
    return found


def replica_traffic(rank: int, width: int) -> int:
    """The bytes that this rank sends when one layer's gradients are averaged over all ranks."""
    block = make_block(width)
    flat = torch.zeros(sum(p.numel() for p in block.parameters()))
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % dist.get_world_size())])
    with on_a_ring() as traffic:
        dist.all_reduce(padded)
    return traffic.sent_bytes


def kept_bytes(rank: int, cut: Cut, length: int = 48, parts: bool = False) -> int:
    """The bytes that one bf16 layer with dropout keeps for backward on this rank.

    Counted as what is alive after forward, with two layers less with one. `parts` gives the layer
    this rank's part of the sequence.
    """
    mesh = make_mesh("cpu", tp=dist.get_world_size())
    width = 64

    def alive(num_layers: int) -> int:
        torch.manual_seed(14)
        layers = [make_layer(attention_dropout=0.1, fused=False) for _ in range(num_layers)]
        stack = nn.Sequential(*(cut(each.bfloat16(), mesh) for each in layers))
        mine = length // mesh.size() if parts else length
        x = torch.randn(2, mine, width, dtype=torch.bfloat16, requires_grad=True)
        weights = list(stack.parameters())
        with count_live_bytes(weights) as live:
            y = stack(x)
            settle(0.005)  # gloo's thread may still hold what was sent
            kept = live.now() - sum(each.nbytes for each in weights)
        del y
        return kept

    return alive(3) - alive(2)
