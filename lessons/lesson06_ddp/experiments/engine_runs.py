"""What lesson 06's script keeps of each engine's run, and how it shows it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from shared.measuring.largest import largest
from shared.measuring.traffic import Traffic
from shared.plots import GREY, MEANING, VARIANTS, use_style
from shared.training.engine import DataParallelEngine

ROUNDING = 5e-6  # what another order of additions alone did to the reference curve, at most


@dataclass
class Run:
    """One engine in training, and what has been seen of it so far."""

    engine: DataParallelEngine
    losses: list[Float[Tensor, ""]] = field(default_factory=list)  # this rank's parts
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0  # of all ranks, in those seconds
    traffic: Traffic | None = None  # of one step; None: of none

    def share_slowest(self, device: torch.device) -> None:
        """Replace the seconds by those of the slowest rank, step by step; call on every rank."""
        seconds = torch.tensor(self.seconds, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds = seconds.tolist()


def median_ratio(mine: Sequence[float], other: Sequence[float]) -> float:
    """The median over steps of mine / other: both met the same batches, one after the other."""
    return statistics.median(a / b for a, b in zip(mine, other, strict=True))


def tabulate(
    runs: Sequence[Run], curves: Mapping[str, Sequence[float]], world_size: int
) -> list[dict[str, Any]]:
    """One row an engine: messages and MiB of a step, its speed and time as ratios, the last loss.

    What was not measured, in a run of one step or two, has no column. Efficiency is the share of a
    perfect speed-up: the time of "single", which does the whole batch alone, over the engine's,
    over the number of ranks. Both ratios are medians of the ratios of single steps, which engines
    took one after the other, and so no quotients of the medians in "ms a step".
    """
    seconds = {run.engine.name: run.seconds for run in runs}
    rows = []
    for run in runs:
        taken = run.seconds
        row: dict[str, Any] = {"engine": run.engine.name}
        if run.traffic is not None:
            row["all-reduces"] = run.traffic.count("all_reduce")
            row["MiB"] = round(run.traffic.bytes_of("all_reduce") / 2**20, 2)
        if taken:
            ranks = world_size if run.engine.num_replicas > 1 else 1
            row["tokens/s"] = round(run.tokens / sum(taken))
            row["ms a step"] = round(1000 * statistics.median(taken), 1)
            row["time / ddp by step"] = round(median_ratio(taken, seconds["ddp"]), 2)
            speedup = median_ratio(seconds["single"], taken)
            row["efficiency, %"] = round(100 * speedup / ranks, 1)
        rows.append({**row, "last loss": round(curves[run.engine.name][-1], 4)})
    return rows


def headline(table: Sequence[Mapping[str, Any]], gap: float) -> str:
    """The figure that matters: the bucketed engine beside torch's, where times were taken."""
    row = next(each for each in table if each["engine"] == "bucketed")
    if "time / ddp by step" not in row:
        return f"losses at most {gap:.0e} apart; too few steps to take times"
    ratio, number = row["time / ddp by step"], row["all-reduces"]
    return f"bucketed takes {ratio:.2f} of torch DDP's step, {number} all-reduces"


def largest_gap(curves: Mapping[str, Sequence[float]]) -> float:
    """The largest difference between two engines' losses at one step."""
    return largest(largest(step) - min(step) for step in zip(*curves.values(), strict=True))


def draw_losses(curves: Mapping[str, Sequence[float]], title: str) -> Figure:
    """The loss over the steps, a line an engine."""
    use_style()
    figure, ax = plt.subplots()
    _plot_losses(ax, curves, title)
    return figure


def draw_runs(table: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[float]]) -> Figure:
    """Left: the losses of all engines; right: the time of a step relative to torch's DDP."""
    title = f"Loss: the engines differ by {largest_gap(curves):.0e} at most"
    if "time / ddp by step" not in table[0]:
        return draw_losses(curves, title)
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    _plot_losses(left, curves, title)
    names = [row["engine"] for row in table]
    colors = [MEANING["engine"] if name == "ddp" else MEANING["by hand"] for name in names]
    colors = [GREY if n == "single" else c for n, c in zip(names, colors, strict=True)]
    bars = right.bar(names, [row["time / ddp by step"] for row in table], color=colors)
    right.bar_label(bars, fmt="%.2f")
    right.axhline(1.0, color=MEANING["theory"], linewidth=0.8, linestyle="--")
    right.set(ylabel="time of a step / torch's DDP", title="The same step, every engine")
    return figure


def _plot_losses(ax: Axes, curves: Mapping[str, Sequence[float]], title: str) -> None:
    for place, (name, losses) in enumerate(curves.items()):
        # The later, the thinner: curves that coincide are then all seen.
        width = 1.0 + 1.5 * (len(curves) - 1 - place)
        steps, marker = range(1, len(losses) + 1), "o" if len(losses) == 1 else None
        ax.plot(steps, losses, color=VARIANTS[place], linewidth=width, marker=marker, label=name)
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    ax.legend()
