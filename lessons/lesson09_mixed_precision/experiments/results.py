"""What the script says before it starts, keeps of a run, and shows of it."""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn

from shared.data.batching import Batch
from shared.errors import InputError
from shared.measuring.model_states import bytes_by_kind
from shared.plots import MEANING, VARIANTS, use_style
from shared.ranks.group import Rank
from shared.results import write_results
from shared.script import has_bf16

PRECISIONS = ("fp32", "bf16", "fp16", "autocast_bf16", "autocast_fp16")


@dataclass
class Seen:
    """One precision in training: its losses, the seconds of its timed steps, its scales."""

    losses: list[Tensor] = field(default_factory=list)  # this rank's parts
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0  # in the timed steps
    scales: list[float] = field(default_factory=list)  # after each step
    skipped: int = 0


def warning_for(precision: str, device: torch.device) -> str:
    """Why this precision will be slow here, in one line; "" where it is not."""
    name = precision.removeprefix("autocast_")
    if name == "fp32":
        return ""
    if device.type == "cuda":
        fits = name == "fp16" or has_bf16(device)
        return "" if fits else "this GPU has no bf16 instructions and emulates them: try fp16"
    known = {
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported,
        "fp16": torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if known[name]():
        return ""
    return f"this CPU has no {name} instructions: a step may take many times as long as in fp32"


def cut(batch: Batch, parts: int) -> list[Batch]:
    """The rows of a batch in up to `parts` micro-batches, each with its own number of tokens."""
    pieces = []
    for rows in torch.arange(len(batch.src), device=batch.src.device).chunk(parts):
        mine = {name: x[rows] for name, x in vars(batch).items() if isinstance(x, Tensor)}
        count = int((mine["tgt_out"] != 0).sum())
        pieces.append(replace(batch, **mine, num_tokens=count))
    return pieces


def conclude(
    args: argparse.Namespace,
    rank: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seen: Seen,
    baseline: Seen,
) -> None:
    """Add up the ranks' parts of the losses; rank 0 writes table and figure. Call on all ranks.

    Raises InputError where a loss is not finite.
    """
    losses = torch.stack([torch.as_tensor(x, device=rank.device).float() for x in seen.losses])
    tokens = torch.tensor(seen.tokens, device=rank.device)
    dist.all_reduce(losses)
    dist.all_reduce(tokens)
    if not math.isfinite(losses.sum()):
        raise InputError(f"--precision {args.precision}: a loss is not finite; try autocast_bf16")
    seen.losses, seen.tokens = list(losses), int(tokens)
    count = sum(p.numel() for p in model.parameters())
    sizes = bytes_by_kind(model, optimizer)
    row = result_row(args.precision, args.engine, seen, baseline, sizes, count)
    if rank.is_main:
        figure = draw_run(losses.tolist(), seen.scales, row)
        words = f"{row['precision']}: {row['time / fp32']:.2f} of fp32's time, "
        words += f"{row['bytes a parameter']:g} bytes a parameter, loss {row['last loss']:.3f}"
        figures = {"precision.png": figure}
        write_results(
            args, rank, headline=words, table=[row], figures=figures, losses=losses.tolist()
        )


def result_row(
    precision: str, engine: str, seen: Seen, baseline: Seen, sizes: dict[str, int], count: int
) -> dict[str, Any]:
    """The row of the table: speed, bytes a parameter by kind, last loss, skipped steps."""
    pairs = zip(seen.seconds, baseline.seconds, strict=True)
    ratio = statistics.median(mine / theirs for mine, theirs in pairs)
    kinds = {f"{kind}, B": round(size / count, 2) for kind, size in sizes.items()}
    return {
        "precision": precision,
        "engine": engine,
        "tokens/s": round(seen.tokens / sum(seen.seconds)),
        "time / fp32": round(ratio, 2),
        "bytes a parameter": round(sum(sizes.values()) / count, 2),
        **kinds,
        "last loss": round(seen.losses[-1].item(), 4),
        "skipped": seen.skipped,
    }


def draw_run(losses: Sequence[float], scales: Sequence[float], row: dict[str, Any]) -> Figure:
    """Left: the loss; right: the loss scale where there is one, else the bytes by kind."""
    use_style()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    left.plot(range(1, len(losses) + 1), losses, color=MEANING["by hand"])
    left.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training in {row['precision']}")
    if scales:
        right.step(range(1, len(scales) + 1), scales, where="mid", color=MEANING["gradients"])
        right.set_yscale("log", base=2)
        right.set(xlabel="step", ylabel="loss scale", title=f"{row['skipped']} steps skipped")
    else:
        kinds = {name[:-3]: value for name, value in row.items() if name.endswith(", B") and value}
        bars = right.barh(list(kinds), list(kinds.values()), color=VARIANTS[: len(kinds)])
        right.bar_label(bars, fmt="%g")
        right.invert_yaxis()
        right.set(xlabel="bytes a parameter", title=f"{row['bytes a parameter']:g} in all")
    return figure
