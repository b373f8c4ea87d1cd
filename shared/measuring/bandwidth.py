"""What a collective costs: seconds, the two bandwidths of nccl-tests, the line through them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.measuring.timing import fastest_seconds, repetitions
from shared.ranks import collectives


@dataclass(frozen=True)
class Line:
    """Seconds as a function of bytes: latency + bytes / bandwidth."""

    latency: float  # seconds
    bandwidth: float  # bytes per second

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that the line predicts for a message."""
        return self.latency + num_bytes / self.bandwidth


def fit_line(num_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the line of least relative error through measured times.

    Relative, because times range over four orders of magnitude: plain least squares would fit
    the longest message and call the latency whatever is left.
    """
    assert len(num_bytes) == len(seconds) >= 2, f"{len(num_bytes)} sizes, {len(seconds)} times"
    size = torch.tensor(num_bytes, dtype=torch.float64)
    time = torch.tensor(seconds, dtype=torch.float64)
    terms = torch.stack([torch.ones_like(size), size / size.max()], dim=1) / time[:, None]
    latency, rate = torch.linalg.lstsq(terms, torch.ones_like(time)[:, None]).solution.flatten()
    return Line(float(latency), float(size.max() / rate))


def bus_factor(op: str, world_size: int) -> float:
    """Return the share of the buffer that the busiest link carries at least.

    It turns one bandwidth into the other: bus = factor x algorithm.

    Algorithm bandwidth is the buffer's bytes over the time; its best value sinks as ranks are
    added. Times this factor it can be held against the link's speed, for any number of ranks.
    The buffer is the whole one: of all_gather the result, of reduce_scatter the input.
    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    n = world_size
    factors = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0}
    factors |= {"all_gather": (n - 1) / n, "reduce_scatter": (n - 1) / n}
    return factors[op]


def slowest_rank_seconds(
    run: Callable[[], Any], repeats: int, device: torch.device | str = "cpu"
) -> float:
    """Return the seconds of the fastest of some runs of a collective, on the slowest rank."""
    dist.barrier()
    taken = torch.tensor(fastest_seconds(run, repetitions(repeats), device), device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def all_gather(buffer: Tensor) -> Tensor:
    """Return the buffer, part r as rank r has it."""
    whole = torch.empty_like(buffer)
    collectives.all_gather(whole, buffer.chunk(dist.get_world_size())[dist.get_rank()]).wait()
    return whole


def reduce_scatter(buffer: Tensor) -> Tensor:
    """Return this rank's part of the sum."""
    part = torch.empty_like(buffer.chunk(dist.get_world_size())[dist.get_rank()])
    collectives.reduce_scatter(part, buffer).wait()
    return part
