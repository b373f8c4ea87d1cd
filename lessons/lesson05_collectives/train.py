"""A bandwidth test in the manner of nccl-tests: torch's collectives beside the ones by hand.

torchrun --nproc_per_node=2 lessons/lesson05_collectives/train.py
"""

import argparse
import os
from collections.abc import Callable
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from shared.measuring.bandwidth import (
    all_gather,
    bus_factor,
    fit_line,
    reduce_scatter,
    slowest_rank_seconds,
)
from shared.plots import MEANING, measured, theory, use_style
from shared.ranks.group import Rank, process_group
from shared.results import write_results
from shared.script import choose_preset, lesson_parser, prepare, progress, run_script
from solutions.lesson05_collectives import (
    central_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)

# (smallest and largest buffer as powers of two, their step, runs of each)
PRESETS = {"tiny": (10, 16, 3, 3), "small": (10, 26, 2, 5), "large": (10, 30, 2, 20)}
PLACE = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
Run = Callable[[Tensor], Tensor]


def in_place(operation: Callable[[Tensor], object], buffer: Tensor) -> Tensor:
    """An operation that overwrites its argument, as one that returns it."""
    operation(buffer)
    return buffer


def runs(rank: Rank) -> dict[tuple[str, str], Run]:
    """What is timed, by operation and maker."""

    def gather_by_hand(buffer: Tensor) -> Tensor:
        return ring_all_gather(buffer.chunk(rank.world_size)[rank.rank])

    return {
        ("all_reduce", "torch"): partial(in_place, dist.all_reduce),
        ("all_reduce", "ring by hand"): partial(in_place, ring_all_reduce),
        ("all_reduce", "central by hand"): partial(in_place, central_all_reduce),
        ("reduce_scatter", "torch"): reduce_scatter,
        ("reduce_scatter", "ring by hand"): ring_reduce_scatter,
        ("all_gather", "torch"): all_gather,
        ("all_gather", "ring by hand"): gather_by_hand,
        ("broadcast", "torch"): partial(in_place, partial(dist.broadcast, src=0)),
        ("broadcast", "tree by hand"): partial(in_place, tree_broadcast),
    }


def num_wrong(op: str, run: Run, rank: Rank) -> int:
    """Wrong values, over all ranks, in a short run on whole numbers whose result is known."""
    n = rank.world_size
    place = torch.arange(4 * n, device=rank.device) // 4
    whole = place.float() if op == "all_gather" else torch.full((4 * n,), float(rank.rank))
    came = run(whole.to(rank.device))
    expected = {"broadcast": torch.zeros_like(came), "all_gather": place.float()}
    bad = (came != expected.get(op, n * (n - 1) / 2)).sum()
    dist.all_reduce(bad)
    return int(bad)


def measure(rank: Rank, args: argparse.Namespace) -> list[dict]:
    """One row for each operation, maker and size; times are those of the slowest rank."""
    first, last, step, repeats = choose_preset(args, rank.device, PRESETS)
    rows = []
    cases = runs(rank)
    for (op, by), run in progress(list(cases.items()), rank, "collectives"):
        wrong = num_wrong(op, run, rank)
        for power in range(first, last + 1, step):
            # A multiple of the world size, as nccl-tests has it: no padding in the comparison.
            numel = 2**power // 4 // rank.world_size * rank.world_size
            buffer = torch.zeros(numel, device=rank.device)
            seconds = slowest_rank_seconds(partial(run, buffer), args.steps or repeats, rank.device)
            algorithm = buffer.nbytes / seconds / 1e9
            bus = algorithm * bus_factor(op, rank.world_size)
            rows.append(
                {"operation": op, "by": by, "KiB": buffer.nbytes / 1024, "us": 1e6 * seconds,
                 "algorithm GB/s": algorithm, "bus GB/s": bus, "wrong": wrong}
            )  # fmt: skip
    return rows


def draw(rows: list[dict], rank: Rank) -> tuple[Figure, dict[str, dict[str, float | None]]]:
    """Times with their line, and bus bandwidth, over the size; and the lines, by maker.

    Where times do not grow with the size, too few runs were timed: there is no bandwidth.
    """
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    colors = {"torch": "engine", "ring by hand": "by hand", "central by hand": "idle"}
    lines: dict[str, dict[str, float | None]] = {}
    for by, meaning in colors.items():
        mine = [row for row in rows if (row["operation"], row["by"]) == ("all_reduce", by)]
        size, us = [row["KiB"] for row in mine], [row["us"] for row in mine]
        fit = fit_line(size, us)
        grows = fit.bandwidth > 0 and fit.latency > 0
        rate = fit.bandwidth * 1024 / 1e3 if grows else None
        lines[by] = {"latency us": fit.latency if grows else None, "GB/s": rate}
        measured(axes[0], size, us, by, MEANING[meaning])
        if grows:
            label = "latency + bytes / bandwidth" if by == "torch" else ""
            theory(axes[0], size, [fit.seconds(s) for s in size], label)
        bus = [row["bus GB/s"] for row in mine]
        axes[1].plot(size, bus, "o-", color=MEANING[meaning], label=by)
    axes[0].set(title="All-reduce, the slowest rank's time", ylabel="time (us)", yscale="log")
    axes[1].set(title=f"Bus bandwidth, {rank.world_size} ranks, {rank.backend}", ylabel="GB/s")
    for ax in axes:
        ax.set(xlabel="buffer (KiB)", xscale="log")
        ax.legend()
    return figure, lines


def main() -> None:
    args = lesson_parser(__file__, __doc__, steps="timed runs of a size").parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        rows = measure(rank, args)
        places: list = [None] * rank.world_size
        dist.all_gather_object(places, {name: os.environ.get(name) for name in PLACE})
        if rank.is_main:
            last = {r["by"]: r for r in rows if r["operation"] == "all_reduce"}
            size, bus = last["torch"]["KiB"] / 1024, {by: r["bus GB/s"] for by, r in last.items()}
            headline = f"all-reduce of {size:.3g} MiB: {bus['torch']:.2f} GB/s on the bus"
            headline += f", ring by hand {bus['ring by hand']:.2f}"
            if rank.world_size == 1:
                headline = "one rank: nothing travels; start two with torchrun"
            figure, lines = draw(rows, rank)
            extra = {"figures": {"bandwidth.png": figure}, "places": places, "lines": lines}
            write_results(args, rank, headline=headline, table=rows, **extra)


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
