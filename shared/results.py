"""What a script leaves behind: a table on the screen, metrics.json and figures in a folder."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from shared.errors import InputError
from shared.measuring.memory import peak_memory
from shared.ranks.group import Rank
from shared.ranks.torchrun import RUN

ROOT = Path(__file__).resolve().parent.parent
TINY = "tiny, which shows that the code runs and nothing else: "
_started = time.perf_counter()


def write_results(
    args: argparse.Namespace,
    rank: Rank,
    *,
    headline: str,
    table: Sequence[Mapping[str, Any]],
    figures: Mapping[str, Figure] | None = None,
    **extra: Any,
) -> None:
    """Print the table, then write metrics.json and the figures to `args.out`; on rank 0, last.

    `headline` is the figure that matters, for run_all.sh's line; `table` is a list of rows, each
    a mapping from column to value; `figures` are PNG by file name, and are closed. `extra` must be
    JSON and goes in as it is. All files are written aside and renamed: none is ever half there.

    Raises InputError for a number that is not finite, and when the disk refuses; the table is on
    the screen by then.
    """
    assert rank.is_main, f"rank {rank.rank} must not write results"
    if args.preset == "tiny":
        headline = TINY + headline
    rows = [dict(row) for row in table]
    print(format_table(rows), flush=True)
    figures = figures or {}
    content = {"headline": headline, "table": rows, "figures": [*figures], **extra}
    if place := next(_not_finite(content), ""):
        raise InputError(
            f"{place} is not finite: the run has diverged, or was too short to measure; nothing was"
            f" written to {args.out}"
        )
    text = json.dumps(describe_run(args, rank) | content, indent=1, allow_nan=False) + "\n"
    write_whole(args.out, figures, text)
    print(f"{headline} ({args.out / 'metrics.json'})")


def describe_run(args: argparse.Namespace, rank: Rank) -> dict[str, Any]:
    """What a number depends on: command, seed, ranks, device, versions, commit, time."""
    return {
        "lesson": args.lesson,
        "run": os.environ.get(RUN, ""),
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "preset": args.preset,
        "arguments": " ".join(sys.argv[1:]),
        "seed": args.seed,
        "answers": args.answers,
        "world_size": rank.world_size,
        "device": torch.cuda.get_device_name() if rank.device.type == "cuda" else "cpu",
        "backend": rank.backend,
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - _started, 2),
        "peak_mib": round(peak_memory(rank.device) / 2**20),
    }


def commit() -> str:
    """Return the course's commit, with a "+" where files differ from it; "" without git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_whole(out: Path, figures: Mapping[str, Figure], metrics: str) -> None:
    """Write all files aside, then rename them all: the folder holds one run's files or none new.

    Raises InputError when the disk refuses, with what was there before left as it was.
    """
    aside = {name: out / f".{name}.part" for name in [*figures, "metrics.json"]}
    try:
        for name, figure in figures.items():
            figure.savefig(aside[name], format="png")
            plt.close(figure)
        aside["metrics.json"].write_text(metrics, encoding="utf-8")
        for name, path in aside.items():
            path.replace(out / name)
    except OSError as error:
        for path in aside.values():
            path.unlink(missing_ok=True)
        raise InputError(
            f"--out {out}: the results cannot be written ({error.strerror}); the table above is all"
            " that there is of this run"
        ) from None


@dataclass(frozen=True)
class Training:
    """What the ranks have seen together: the losses of a run, and its median step's seconds."""

    losses: list[float]
    step: float

    def row(self, tokens: int) -> dict[str, Any]:
        """Three columns: last loss, tokens/s, milliseconds a step of `tokens` on all ranks."""
        return {
            "last loss": round(self.losses[-1], 4),
            "tokens/s": round(tokens / self.step),
            "ms a step": round(1000 * self.step, 1),
        }


def of_all_ranks(
    rank: Rank,
    losses: Sequence[Tensor | float],
    seconds: Sequence[float],
    *,
    mean: bool = True,
    advice: str = "try another --seed",
) -> Training:
    """Bring together what the ranks have seen of the same steps; call it on every rank.

    A step's loss is the mean of the ranks' losses, or the sum where they are parts (`mean=False`);
    its seconds are those of the slowest rank. Raises InputError, with `advice`, where a loss is not
    finite, and where no step was timed.
    """
    if not seconds:
        raise InputError("no step was timed: give more --steps")
    found = torch.stack([torch.as_tensor(loss).float().to(rank.device) for loss in losses])
    slowest = torch.tensor(seconds, device=rank.device)
    dist.all_reduce(found)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if not found.isfinite().all():
        raise InputError(f"a loss is not finite: {advice}")
    return Training((found / (rank.world_size if mean else 1)).tolist(), median(slowest.tolist()))


def speed(seconds: float, steps: int, tokens: int, device: torch.device) -> dict[str, Any]:
    """Three columns of a training's row: tokens/s, milliseconds a step, peak memory of this rank.

    `tokens` are those of all ranks and all `steps`; memory is the device's on a GPU, the resident
    size of the whole process on a CPU.
    """
    return {
        "tokens/s": round(tokens / seconds),
        "ms a step": round(1000 * seconds / steps, 1),
        "peak MiB": round(peak_memory(device) / 2**20),
    }


def typical_speed(speeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each of `speed`'s columns over several runs; {} for none."""
    return {key: median(run[key] for run in speeds) for key in (speeds[0] if speeds else ())}


def _not_finite(value: Any, place: str = "") -> Iterator[str]:
    """Yield where NaN and infinities are, such as "table 0 loss"."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place.strip()} = {value}"
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _not_finite(part, f"{place} {key}")
    if isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _not_finite(part, f"{place} {index}")


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned text: words to the left, numbers to the right."""
    if not rows:
        return "(no rows)"
    columns = list(rows[0])
    texts = [[_text(row.get(column, "")) for column in columns] for row in rows]
    widths = [
        max(len(column), *(len(text[i]) for text in texts)) for i, column in enumerate(columns)
    ]
    numeric = [all(isinstance(row.get(c), int | float) for row in rows) for c in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(columns), rule, *(line(text) for text in texts)])


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
