"""What stands before and after the script's training: its folder, rehearsal, table and figure."""

import argparse
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from lessons.lesson08_fault_tolerance.experiments.saving import Meter, time_saves
from shared.fault_tolerance.checkpoints import restart_count
from shared.fault_tolerance.fitting import unwrapped
from shared.fault_tolerance.state import TrainingState
from shared.plots import MEANING, use_style
from shared.ranks.agreement import agree_on_folder, refused_by_any
from shared.ranks.group import Rank
from shared.results import format_table, write_results
from shared.script import checked_out
from shared.training.reference_run import checksum, compare_with_record


def folder_for(args: argparse.Namespace, rank: Rank) -> Path:
    """Return the folder for checkpoints: one for each kind of run, so that another size begins.

    Raises InputError on every rank when one that has to write there cannot: rank 0, and with
    `--save elastic` all of them, for whom it has to be one and the same.
    """
    what = "reference" if args.reference else f"{args.preset}_{Path(args.dataset).name}"
    ranks = "elastic" if args.save == "elastic" else f"{rank.world_size}_ranks"
    name = f"{what}_seed{args.seed}_{args.steps}_steps_{ranks}"
    folder = args.checkpoints or args.out / "checkpoints" / name
    flag = "--checkpoints" if args.checkpoints else "--out"
    if args.save == "elastic":
        agree_on_folder(folder, flag)
        return folder
    with refused_by_any():
        if rank.is_main:
            checked_out(folder, flag)
    return folder


def conclude(
    args: argparse.Namespace,
    rank: Rank,
    state: TrainingState,
    meter: Meter,
    folder: Path,
    rehearsal: Callable[[], str],
) -> None:
    """Rehearse a restart, time four ways of saving, write it all down; every rank calls it."""
    losses = state.losses
    row: dict[str, Any] = {"steps": len(losses), "last start at step": meter.began_at}
    row |= {"restarts": restart_count(), "last loss": round(losses[-1], 3)} | meter.columns()
    headline, saves = f"loss {losses[-1]:.3f}; not rehearsed, not timed", []
    if not args.untimed:
        headline = rehearsal()
        saves = time_saves(folder / "timing", state, repeats=1 if args.reference else 3)
    if not rank.is_main:
        return
    extra: dict[str, Any] = {"began_at": meter.began_at, "restarts": restart_count()}
    if saves:
        shutil.rmtree(folder / "timing")
        print(format_table(saves), end="\n\n", flush=True)
        stops = [each["stops training, ms"] for each in saves[:2]]
        headline += f"; a save stops training {stops[0]} ms, in the background {stops[1]} ms"
        extra["saves"] = saves
    if args.reference:
        extra["difference_from_record"] = compare_with_record(losses)
    write_results(
        args, rank, headline=headline, table=[row], losses=losses,
        figures={"resumed.png": draw_run(losses, saves, meter.began_at)},
        checksum=checksum(unwrapped(state.model)), **extra,
    )  # fmt: skip


def draw_run(losses: Sequence[float], saves: Sequence[Mapping[str, Any]], began_at: int) -> Figure:
    """The losses of all steps, where the last start began, and what each way of saving costs."""
    use_style()
    figure, axes = plt.subplots(1, 2 if saves else 1, figsize=(10, 3.4), squeeze=False)
    left = axes[0, 0]
    left.plot(range(1, len(losses) + 1), losses, color=MEANING["compute"])
    if began_at:
        left.axvline(began_at, color=MEANING["theory"], linestyle="--", linewidth=1)
    title = f"Resumed from step {began_at}" if began_at else "One start, from step 0"
    left.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    if not saves:
        return figure
    right = axes[0, 1]
    ways = [each["way"].replace("torch.distributed.checkpoint", "dcp") for each in saves]
    right.barh(ways, [each["stops training, ms"] for each in saves], color=MEANING["idle"])
    right.invert_yaxis()
    right.set(
        xlabel="training stands still (ms)", title="What one save costs, by the way it is made"
    )
    return figure
