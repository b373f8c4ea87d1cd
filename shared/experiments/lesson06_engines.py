"""What lesson 06's script keeps of each engine's run, and how it shows it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from shared.ddp.engines import Engine
from shared.measuring.traffic import Traffic
from shared.model.transformer import Transformer
from shared.plots import GREY, MEANING, VARIANTS, use_style
from shared.training.reference_run import TOLERANCE, compare_with_record, read_record

ROUNDING = 5e-6  # what another order of additions alone did to the reference curve, at most


@dataclass
class Run:
    """One engine in training: its model and optimizer, and what has been seen of it so far."""

    engine: Engine
    model: Transformer
    optimizer: torch.optim.Optimizer
    losses: list[Float[Tensor, ""]] = field(default_factory=list)  # this rank's parts
    seconds: list[float] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)  # of one step

    def curve(self) -> list[float]:
        """The loss of every global batch. Collective where the engine is: call on every rank."""
        losses = torch.stack(self.losses)
        if self.engine.replicas > 1:
            dist.all_reduce(losses)
        return losses.tolist()

    def share_slowest(self, device: torch.device) -> None:
        """Replace the seconds by those of the slowest rank, step by step; call on every rank."""
        seconds = torch.tensor(self.seconds, device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        self.seconds = seconds.tolist()


def ratio_of_medians(mine: Sequence[float], other: Sequence[float]) -> float:
    """The median over steps of mine / other: both met the same batches, one after the other."""
    return statistics.median(a / b for a, b in zip(mine, other, strict=True))


def tabulate(
    runs: Sequence[Run], curves: dict[str, list[float]], world_size: int
) -> list[dict[str, Any]]:
    """One row an engine: messages and MiB of a step, its time as ratios, the last loss.

    Efficiency is the share of a perfect speed-up: the time of "single", which does the whole
    batch alone, over the engine's, over the number of ranks.
    """
    seconds = {run.engine.name: run.seconds for run in runs}
    rows = []
    for run in runs:
        name, taken = run.engine.name, run.seconds
        row: dict[str, Any] = {
            "engine": name,
            "all-reduces": run.traffic.count("all_reduce"),
            "MiB": round(run.traffic.bytes_of("all_reduce") / 2**20, 2),
            "ms a step": round(1000 * statistics.median(taken), 1) if taken else "",
        }
        if "ddp" in seconds and taken:
            row["time / ddp"] = round(ratio_of_medians(taken, seconds["ddp"]), 2)
        if "single" in seconds and taken:
            speedup = ratio_of_medians(seconds["single"], taken)
            ranks = world_size if run.engine.replicas > 1 else 1
            row["efficiency, %"] = round(100 * speedup / ranks, 1)
        rows.append({**row, "last loss": round(curves[name][-1], 4)})
    return rows


def headline(table: Sequence[dict[str, Any]], scores: Sequence[dict[str, Any]] | None) -> str:
    """The figure that matters: the bucketed engine beside torch's, or a single engine's score."""
    row = next((each for each in table if each["engine"] == "bucketed"), table[-1])
    if scores:
        return f"{row['engine']}: BLEU {scores[0]['value']:.1f}, loss {row['last loss']:.3f}"
    if "time / ddp" not in row:
        return f"{row['engine']}: loss {row['last loss']:.3f}"
    ratio, number = row["time / ddp"], row["all-reduces"]
    return f"bucketed takes {ratio:.2f} of torch DDP's step, {number} all-reduces"


def curve_row(engine: Engine, losses: list[float], checksum: str) -> dict[str, Any]:
    """How far an engine's reference run lies from lesson 04's record.

    Raises AssertionError where it lies beyond the tolerance.
    """
    record = read_record()
    return {
        "engine": engine.name,
        "last loss": round(losses[-1], 6),
        "largest difference": compare_with_record(losses),
        "rounding": ROUNDING,
        "tolerance": TOLERANCE,
        "weights": "bit for bit" if checksum == record["checksum_final"] else "within rounding",
    }


def draw_runs(table: Sequence[dict[str, Any]], curves: dict[str, list[float]]) -> Figure:
    """Left: one loss curve for all engines; right: the time of a step relative to torch's DDP."""
    use_style()
    compared = "time / ddp" in table[0]
    figure, axes = plt.subplots(1, 2 if compared else 1, figsize=(10, 3.6), squeeze=False)
    left = axes[0, 0]
    for place, (name, losses) in enumerate(curves.items()):
        # The later, the thinner: curves that coincide are then all seen.
        width = 1.0 + 1.5 * (len(curves) - 1 - place)
        steps = range(1, len(losses) + 1)
        left.plot(steps, losses, color=VARIANTS[place], linewidth=width, label=name)
    left.set(xlabel="step", ylabel="loss (nats per token)")
    left.set_title("One curve, whatever the engine" if compared else "Training")
    left.legend()
    if compared:
        right = axes[0, 1]
        names = [row["engine"] for row in table]
        colors = [MEANING["engine"] if name == "ddp" else MEANING["by hand"] for name in names]
        colors = [GREY if n == "single" else c for n, c in zip(names, colors, strict=True)]
        bars = right.bar(names, [row["time / ddp"] for row in table], color=colors)
        right.bar_label(bars, fmt="%.2f")
        right.axhline(1.0, color=MEANING["theory"], linewidth=0.8, linestyle="--")
        right.set(ylabel="time of a step / torch's DDP", title="The same step, five ways")
    return figure
