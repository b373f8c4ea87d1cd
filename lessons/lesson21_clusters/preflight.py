"""Look at all ranks and the links between them before a run of days begins.

Start it as you will start the run, on the same machines and with the same environment:

    torchrun --nproc_per_node=2 lessons/lesson21_clusters/preflight.py
    srun torchrun --nnodes=2 --nproc_per_node=gpu ... lessons/lesson21_clusters/preflight.py

It prints every rank's host, address, device, versions, memory and disk; the variables that are set
for NCCL, gloo and torch; who reaches whom, with large packets too; then clocks, latency and
bandwidth of every pair; and who is unlike the others. --saves DIR has to be there, to take a file,
and to be the same folder on all nodes. The addresses are those that gloo would take; NCCL chooses
its own, so name one interface in both, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. Exit status 0:
nothing found that breaks a run (--strict: nothing found). 1: something was found. 2: the ranks did
not meet. The links take n (n - 1) measurements: for hundreds of ranks start one a node. A node on
which nobody starts this is torchrun's to wait for, not --patience's: no rank is there to speak.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from shared.clusters.addresses import Meeting, meet, reach
from shared.clusters.links import LinkTable, NoAnswer, measure_links
from shared.clusters.odd import find_odd
from shared.clusters.report import (
    GIB,
    Finding,
    Report,
    clock_findings,
    clock_offsets,
    disagreements,
    link_findings,
    own_report,
    reports_of_all,
    unreached,
)
from shared.clusters.saves import look_at_saves
from shared.clusters.verdicts import describe_odd
from shared.errors import InputError
from shared.plots import heat_map, use_style
from shared.ranks.group import Rank, own_device, process_group
from shared.ranks.torchrun import tell_torchrun
from shared.results import format_table
from shared.script import checked_out, given_path, positive_float, run_script


def describe(reports: Sequence[Report]) -> str:
    """A row a rank, and the variables that are set."""
    rows = [
        {
            "rank": each.rank,
            "host": each.host,
            "address": f"{each.address} ({each.interface})",
            "device": each.device,
            "torch": each.torch,
            "CUDA": each.cuda,
            "NCCL": each.nccl,
            "python": each.python,
            "free GiB": round(each.free / GIB, 1),
            "disk GiB": round(each.disk / GIB, 1),
        }
        for each in reports
    ]
    own = reports[0].variables
    whose = "" if all(each.variables == own for each in reports) else " (rank 0's)"
    told = "\n".join(f"  {name}={own[name]}{whose}" for name in sorted(own)) or f"  none{whose}"
    return f"{format_table(rows)}\nvariables set for NCCL, gloo and torch's groups:\n{told}"


def link_rows(table: LinkTable) -> str:
    """Latency and bandwidth of every pair, a row a sender."""
    n = len(table.small)
    texts = []
    for words, values, factor in (
        ("latency, us", table.small, 1e6),
        (f"bandwidth, MB/s ({table.num_bytes:,} bytes)", table.bandwidth, 1e-6),
    ):
        rows = [
            {"from": sender}
            | {
                f"to {to}": "" if to == sender else f"{factor * values[sender, to]:.4g}"
                for to in range(n)
            }
            for sender in range(n)
        ]
        texts.append(f"{words}\n{format_table(rows)}")
    return "\n".join(texts)


def draw_links(table: LinkTable) -> Figure:
    """The two matrices; four times the typical link is bright, and a slow rank a row or column."""
    use_style()
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4))
    ranks = [str(rank) for rank in range(len(table.small))]
    for ax, seconds, title in (
        (axes[0], table.small * 1e6, "One number: microseconds"),
        (axes[1], table.large * 1e3, f"{table.num_bytes / 2**20:g} MiB: milliseconds"),
    ):
        shown = seconds.clone().fill_diagonal_(float("nan"))
        image = heat_map(ax, shown, rows=ranks, columns=ranks)
        image.set_clim(0, shown.nan_to_num(0).max().clamp(min=4 * shown.nanmedian()).item())
        figure.colorbar(image, ax=ax)
        ax.tick_params(axis="x", rotation=0)
        ax.set(title=title, xlabel="to rank", ylabel="from rank")
    return figure


def say(findings: Sequence[Finding]) -> None:
    """Every finding a line."""
    for each in findings:
        print(f"{'BREAKS A RUN' if each.breaks else 'look at this'}: {each.words}", flush=True)


def look_at_out(meeting: Meeting, out: Path) -> list[Finding]:
    """Whether the folder of the picture takes a file; rank 0 alone looks."""
    try:
        if meeting.rank == 0:
            checked_out(out)
    except InputError as error:
        return [Finding((0,), str(error), breaks=False)]
    return []


def look_at_links(meeting: Meeting, rank: Rank, args: argparse.Namespace) -> list[Finding]:
    """Clocks, latency and bandwidth of all pairs, shown on rank 0; and what is odd about them.

    A message that does not come ends the measurement: over gloo every rank returns it.
    """
    clocks = clock_offsets(rank)
    try:
        table = measure_links(rank.device, int(args.mib * 2**20), seconds=args.patience)
    except RuntimeError as error:
        if isinstance(error, NoAnswer):
            meeting.store.set("stuck", str(error))
        if not waited_for(meeting, "stuck"):
            raise  # a rank has died, of something else
        words = meeting.store.get("stuck").decode(errors="replace")
        return [
            *clock_findings(clocks),
            Finding((), f"{words}; the links after it are not measured"),
        ]
    if rank.is_main:
        print(f"clocks, s ahead of rank 0's: {', '.join(f'{each:.3f}' for each in clocks)}")
        print(link_rows(table))
        if not look_at_out(meeting, args.out):
            draw_links(table).savefig(args.out / "links.png")
            print(f"drawn in {args.out / 'links.png'}", flush=True)
    found, named = clock_findings(clocks), set[int]()
    for words, seconds in (("latency", table.small), ("bandwidth", table.large)):
        for odd in find_odd(seconds):
            found.append(Finding((odd.rank,), f"{words}: {describe_odd(odd)}", breaks=False))
            named.add(odd.rank)
    return found + link_findings(table, named, 1e6 * args.at_least)


def waited_for(meeting: Meeting, key: str, seconds: float = 5.0) -> bool:
    """Whether somebody has written it into the store."""
    until = time.monotonic() + seconds
    while not (there := meeting.store.check([key])) and time.monotonic() < until:
        time.sleep(0.05)
    return there


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    add = parser.add_argument
    add("--out", type=given_path, default=Path("runs/preflight"), help="for the picture")
    add("--saves", type=given_path, help="where the run will save: one folder for all nodes")
    add("--disk", type=positive_float, default=1.0, help="GiB that a save needs (1)")
    add("--mib", type=positive_float, default=4.0, help="MiB of a message (4)")
    what = "seconds to wait for the others, and for each message between two (60)"
    add("--patience", type=positive_float, default=60.0, help=what)
    what = "MB/s that each link has to carry; a slower one breaks the run (0)"
    add("--at-least", type=positive_float, default=0.0, metavar="MB/S", help=what)
    add("--strict", action="store_true", help="whatever is found breaks the run")
    args = parser.parse_args()
    meeting = meet(args.patience)
    mine = own_report(meeting.rank, own_device(args.device), args.saves or args.out)
    reports = reports_of_all(meeting, mine)
    if meeting.rank == 0:
        print(describe(reports), flush=True)
    reached = reach(meeting, mine.address)
    findings = [*unreached(reports, reached), *disagreements(reports, disk=int(args.disk * GIB))]
    findings += look_at_saves(meeting, reports, args.saves) if args.saves else []
    findings += look_at_out(meeting, args.out)

    def told(found: list[Finding]) -> list[Finding]:
        found = [replace(each, breaks=each.breaks or args.strict) for each in found]
        say(found if meeting.rank == 0 else [])
        return found

    findings = told(findings)
    if not any(any(row) for row in reached):  # else no group would come about
        with process_group(args.device) as rank:
            findings += told(look_at_links(meeting, rank, args))
    if broken := [each.words for each in findings if each.breaks]:
        words = f"BREAKS A RUN: {'; '.join(broken)}"
        tell_torchrun(words, words)  # whose page is the last that is seen
        sys.exit(1)
    if meeting.rank == 0:
        print("nothing found that breaks a run")


if __name__ == "__main__":
    run_script(main)
