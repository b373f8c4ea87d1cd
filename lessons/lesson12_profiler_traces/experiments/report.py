"""What the script shows: a table of shares, who is late, a merged trace, the memory of a step."""

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import profile

from lessons.lesson12_profiler_traces.experiments.drawing import draw_memory, draw_step
from lessons.lesson12_profiler_traces.experiments.stragglers import lateness
from shared.errors import InputError
from shared.measuring.chrome import (
    is_message,
    memory_timeline,
    merge_ranks,
    rank_of,
    read_chrome,
    step_seconds,
)
from shared.measuring.memory import peak_memory
from shared.measuring.peak import peak_of
from shared.measuring.trace import file_alone, quiet_stderr
from shared.model.config import TransformerConfig
from shared.planner.models import spec_of
from shared.planner.peak import DDP, peak_bytes
from shared.planner.specs import Plan
from shared.plots import save_figure, use_style
from shared.ranks.group import Rank
from shared.results import write_results
from shared.script import checked_out

Trace = Mapping[str, Any]
_OURS = ("merged.json", "metrics.json")  # what stands beside the traces of a run
_NAMED = re.compile(r"rank|trace|kineto", re.IGNORECASE)


@dataclass(frozen=True)
class Size:
    """A model over bytes, and the batch of a rank."""

    d_model: int
    num_layers: int
    rows: int
    length: int

    def config(self) -> TransformerConfig:
        """The model's description: 256 tokens, one a byte."""
        return TransformerConfig(
            vocab_size=256, d_model=self.d_model, num_heads=4, num_layers=self.num_layers,
            d_ff=4 * self.d_model, dropout=0.0, max_len=self.length,
        )  # fmt: skip


def bytes_needed(args: argparse.Namespace, size: Size, ranks: int, half: bool) -> int:
    """The most bytes on each rank: see `check_room`."""
    if args.read:
        return 0
    spec = spec_of(size.config(), size.length)
    plan, beside = Plan(micro_batch=size.rows), DDP if args.engine == "ddp" else 0
    return peak_bytes(spec, plan, "autocast" if half else "float32", beside=beside)


PRESETS = {
    "tiny": Size(32, 2, 4, 32),
    "small": Size(128, 4, 16, 128),
    "large": Size(768, 12, 16, 1024),
}


class Readers(NamedTuple):
    """The lesson's functions that read a trace or a step: the script's own, or the learner's."""

    data_stall_fraction: Callable[[Trace], float]
    overlap_fraction: Callable[[Trace], float]
    model_flops_utilization: Callable[..., float]
    diagnose: Callable[[Trace, Trace], str]


@dataclass(frozen=True)
class Run:
    """One run on this rank: its fault, its trace, its fastest step without the profiler."""

    slow: str
    path: Path
    seconds: float
    losses: Tensor
    tokens: tuple[int, int]  # rows and length on this rank
    memory: float  # by recorded_memory


def recorded_memory(rank: Rank, folder: Path, step: Callable[[], Any]) -> float:
    """Write the memory of one forward and backward: a snapshot on a GPU, a figure on a CPU.

    The snapshot is for https://pytorch.org/memory_viz. Only rank 0 records, and all ranks train.
    Return the most bytes in use before: a GPU's tensors since the last call, or a process so far.
    """
    most = peak_memory(rank.device)
    if rank.device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        step()
        if rank.is_main:
            torch.cuda.memory._dump_snapshot(str(folder / "memory_snapshot.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.reset_peak_memory_stats(rank.device)
        return most
    with quiet_stderr(), profile(profile_memory=True, **file_alone()) as profiler:
        step()
    path = folder / f"memory_{rank.rank}.json"
    profiler.export_chrome_trace(str(path))
    timeline = memory_timeline(json.loads(path.read_text()))
    path.unlink()
    if rank.is_main:
        use_style()
        figure, ax = plt.subplots()
        draw_memory(ax, timeline)
        save_figure(figure, folder / "memory.png")
    return most


def conclude(
    args: argparse.Namespace,
    rank: Rank,
    runs: Sequence[Run],
    config: TransformerConfig,
    readers: Readers,
) -> None:
    """Read what all ranks wrote; rank 0 prints the table. Call on all ranks.

    Raises InputError where a loss is not finite.
    """
    dist.barrier()  # every rank has written its traces
    largest = torch.tensor([(run.seconds, run.memory) for run in runs], device=rank.device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    slowest, memory = largest.T.tolist()
    if not all(run.losses.isfinite().all() for run in runs):
        raise InputError(f"--slow {args.slow}: a loss is not finite")
    peak = peak_of(rank, args.precision)
    if not rank.is_main:
        return
    traces = [read_chrome(run.path) for run in runs]
    table = []
    for run, trace, seconds, used in zip(runs, traces, slowest, memory, strict=True):
        row = {"slow": run.slow, "step, ms": round(1000 * seconds, 2)}
        row["tokens/s"] = round(math.prod(run.tokens) * rank.world_size / seconds)
        share = readers.model_flops_utilization(config, run.tokens, seconds, peak)
        row["MFU, %"] = round(100 * share, 2)
        row |= shares(trace, traces[0], readers)
        row["latest rank"] = write_merged(run.path.parent, rank.world_size)
        row["peak MiB"] = round(used / 2**20)
        table.append(row)
    figure, axes = plt.subplots(len(runs), 1, figsize=(9, 2.4 * len(runs)), squeeze=False)
    for ax, run, trace in zip(axes[:, 0], runs, traces, strict=True):
        draw_step(ax, trace)
        ax.set_title(f"--slow {run.slow}: one step of rank 0")
    ratio = slowest[-1] / slowest[0]
    last = table[-1]
    words = f"{last['slow']}: {last['step, ms']} ms a step, MFU {last['MFU, %']} % of a measured "
    words += f"{peak / 1e9:.0f} GFLOP/s"
    words += f", {ratio:.2f} times the healthy step" if len(runs) > 1 else ""
    losses = {run.slow: run.losses.tolist() for run in runs}
    write_results(
        args, rank, headline=words, table=table, figures={"steps.png": figure}, losses=losses,
        peak_flops=peak, peak_mib=max(row["peak MiB"] for row in table),
    )  # fmt: skip


def shares(trace: Trace, healthy: Trace, readers: Readers) -> dict[str, Any]:
    """The columns that are read from a trace; one rank alone has nobody to send to."""
    sent = _sends(trace)
    return {
        "profiled, ms": round(1000 * step_seconds(trace), 2),
        "data stall, %": round(100 * readers.data_stall_fraction(trace), 1),
        "overlap, %": round(100 * readers.overlap_fraction(trace), 1) if sent else "-",
        "diagnosis": readers.diagnose(trace, healthy),
    }


def lacks_kernels(trace: Mapping[str, Any]) -> bool:
    """Whether NCCL's collectives are there as labels alone: a profile without the GPU's side."""
    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    on_gpu = any(e.get("cat") == "kernel" for e in spans)
    return not on_gpu and any(e.get("name", "").startswith("nccl:") for e in spans)


def _sends(trace: Trace) -> bool:
    """Whether there are several ranks, as far as the trace says, and messages between them."""
    several = trace.get("distributedInfo", {}).get("world_size", 2) > 1
    return several and any(is_message(e) for e in trace["traceEvents"])


def write_merged(folder: Path, world_size: int) -> str:
    """Merge the ranks' traces of a folder into merged.json, where all of them can be read here.

    Return the rank that comes to its messages last, and by how much of a step; "-" without merging.
    On several machines each holds its own: copy them together, then use --read.
    """
    paths = [folder / f"rank_{rank}.json" for rank in range(world_size)]
    here = [read_chrome(path) for path in paths if path.exists()]
    if len(here) < 2:
        return "-"
    merged = merge_ranks(here)
    (folder / "merged.json").write_text(json.dumps(merged))
    return latest(merged) if all(map(_sends, here)) else "-"


def latest(merged: Trace) -> str:
    """The rank that comes to its messages last, and by how much of a step; "nobody" by none."""
    late = lateness(merged)
    rank = max(late, key=late.__getitem__)
    if round(100 * late[rank]) == 0:
        return "nobody"
    return f"{rank} (by {100 * late[rank]:.0f} % of a step)"


def trace_files(folder: Path) -> list[Path]:
    """The files of a folder that are traces by their names, packed or not.

    As they lie there: rank_0.json, rank-0.json.gz (HTA), rank0_trace.json (torchtitan),
    HOST_PID.TIME.pt.trace.json.gz (tensorboard_trace_handler).
    """
    found = [each for each in folder.glob("*.json*") if each.name.endswith((".json", ".json.gz"))]
    found = sorted(each for each in found if each.name not in _OURS)
    return [each for each in found if _NAMED.search(each.name)] or found


def read_folder(args: argparse.Namespace, rank: Rank, readers: Readers) -> None:
    """A table of the traces in --read, one row a rank, and of several merged.json in --out.

    --read is a folder, or one file. Raises InputError where there are none, one cannot be read, or
    two say the same rank.
    """
    if not rank.is_main:
        return
    paths = [args.read] if args.read.is_file() else trace_files(args.read)
    if not paths:
        raise InputError(f"--read {args.read}: no trace there, *.json or *.json.gz")
    traces = sorted((read_chrome(path) for path in paths), key=rank_of)
    table = [{"rank": rank_of(each), **shares(each, traces[0], readers)} for each in traces]
    times = [row["profiled, ms"] for row in table]
    words = f"{len(traces)} rank{'s' * (len(traces) > 1)}, steps of {min(times)} to {max(times)} ms"
    if any(map(lacks_kernels, traces)):
        words += "; NCCL's labels without kernels: what they hide, and who is late, is not in there"
    if len(traces) > 1:
        merged = merge_ranks(traces)
        (checked_out(args.out) / "merged.json").write_text(json.dumps(merged))
        words += _who_is_late(merged) if all(map(_sends, traces)) else ""
    write_results(args, rank, headline=words, table=table)


def _who_is_late(merged: Trace) -> str:
    try:
        late = latest(merged)
    except InputError as error:
        return f"; who is late cannot be said: {error}"
    words = "nobody is late to send" if late == "nobody" else f"the last to send is rank {late}"
    return f"; {words}, if the clocks agree"
