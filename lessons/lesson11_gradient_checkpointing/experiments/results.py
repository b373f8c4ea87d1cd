"""Lesson 11's script: sizes of the model, a step under counters, the table and the figure."""

import argparse
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from jaxtyping import Int
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shared.errors import InputError
from shared.measuring.activations import counting_saved
from shared.model.config import TransformerConfig
from shared.planner.models import spec_of
from shared.planner.peak import DDP, peak_bytes
from shared.planner.specs import Plan
from shared.plots import MEANING, use_style
from shared.ranks.group import Rank
from shared.results import write_results

VOCAB = 256  # bytes of text
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """A model and its batches: `batch` sequences on each rank."""

    num_layers: int
    d_model: int
    length: int
    batch: int
    steps: int

    def config(self) -> TransformerConfig:
        """The model's description; heads are 64 wide, and there are two at the least."""
        return TransformerConfig(
            vocab_size=VOCAB,
            d_model=self.d_model,
            num_heads=max(2, self.d_model // 64),
            num_layers=self.num_layers,
            d_ff=4 * self.d_model,
            max_len=self.length,
        )


PRESETS = {
    "tiny": Size(num_layers=4, d_model=32, length=32, batch=2, steps=4),
    "small": Size(num_layers=9, d_model=128, length=128, batch=4, steps=40),
    "large": Size(num_layers=36, d_model=1024, length=1024, batch=16, steps=100),
}


def bytes_needed(args: argparse.Namespace, size: Size, ranks: int, half: bool) -> int:
    """The most bytes on each rank, in the steps without checkpoints: see `check_room`."""
    spec = spec_of(size.config(), size.length)
    plan = Plan(micro_batch=size.batch)
    return peak_bytes(spec, plan, "autocast" if half else "float32", beside=DDP)


@dataclass
class Seen:
    """One run: its losses, the seconds of its timed steps and of those without checkpoints."""

    tokens: int  # a step and rank
    losses: list[Tensor] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    layers_again: int | str = 0
    held: int = 0  # bytes of activations at the end of forward
    peak: int = 0  # and at the worst moment
    planned: int = 0  # of the layers alone at the worst moment, by a plan
    flops: float = 0.0  # of a step, in forwards


def count_step(
    model: nn.Module, tokens: Int[Tensor, "batch length"], cast: torch.autocast, seen: Seen
) -> None:
    """Make one step under the counters, which would slow the timed ones down; nothing is sent."""
    devices = [tokens.device] if tokens.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        with FlopCounterMode(display=False) as forward, torch.no_grad(), cast:
            model(tokens[:, :-1])
        with counting_saved(model.parameters()) as saved, FlopCounterMode(display=False) as step:
            with cast:
                logits = model(tokens[:, :-1])
            seen.held = saved.now
            logits.float().logsumexp(-1).sum().backward()
    seen.peak, seen.flops = saved.peak, step.get_total_flops() / forward.get_total_flops()
    model.zero_grad()


def conclude(args: argparse.Namespace, rank: Rank, seen: Seen) -> None:
    """Average the ranks' losses; rank 0 writes table and figure. Call on all ranks.

    Raises InputError where a loss is not finite.
    """
    losses = torch.stack(seen.losses).float()
    dist.all_reduce(losses)
    losses /= rank.world_size
    if not math.isfinite(losses.sum()):
        raise InputError("a loss is not finite: try another --seed")
    if not rank.is_main:
        return
    row = result_row(args, rank, seen, losses)
    figures = {"checkpointing.png": draw_run(losses.tolist(), seen)}
    words = f"--checkpointing {args.checkpointing}: at most {row['peak, MiB']:.4g} MiB of "
    words += f"activations, {row['time / none']:.2f} of the time, "
    words += f"{seen.flops:.2f} forwards of FLOPs a step"
    write_results(args, rank, headline=words, table=[row], figures=figures, losses=losses.tolist())


def result_row(args: argparse.Namespace, rank: Rank, seen: Seen, losses: Tensor) -> dict[str, Any]:
    """The row of the table. Times are of forward and backward, with DDP's messages."""
    pairs = zip(seen.seconds, seen.plain_seconds or seen.seconds, strict=True)
    row = {
        "checkpointing": args.checkpointing,
        "layers again": seen.layers_again,
        "step, ms": round(1000 * statistics.median(seen.seconds), 2),
        "tokens/s": round(rank.world_size * seen.tokens / statistics.median(seen.seconds)),
        "time / none": round(statistics.median(mine / other for mine, other in pairs), 2),
        "FLOPs / forward": round(seen.flops, 3),
        "end of forward, MiB": round(seen.held / MIB, 3),
        "peak, MiB": round(seen.peak / MIB, 3),
        "last loss": round(losses[-1].item(), 4),
    }
    if seen.planned:
        row["peak of the layers, MiB"] = round(seen.planned / MIB, 3)
    if rank.device.type == "cuda" and len(losses) > len(seen.seconds) + 2:  # untimed steps alone
        row["allocator's peak, MiB"] = round(torch.cuda.max_memory_allocated(rank.device) / MIB)
    return row


def draw_run(losses: list[float], seen: Seen) -> Figure:
    """Left: the loss; right: activations at the end of forward and at the worst moment."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    left.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="Training")
    sizes = {"end of forward": seen.held / MIB, "worst moment": seen.peak / MIB}
    bars = right.barh(list(sizes), list(sizes.values()), color=MEANING["activations"])
    right.bar_label(bars, fmt="%.3g")
    right.invert_yaxis()
    right.set(xlabel="activations on a rank (MiB)", title=f"{seen.flops:.2f} forwards a step")
    return figure
