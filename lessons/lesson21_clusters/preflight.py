"""Look at all ranks and the links between them before a run of days begins.

Start it as you will start the run, on the same machines and with the same environment:

    torchrun --nproc_per_node=2 lessons/lesson21_clusters/preflight.py
    srun torchrun --nnodes=2 --nproc_per_node=gpu ... lessons/lesson21_clusters/preflight.py

It prints every rank's host, address, device, versions, memory, disk and clock; the variables that
are set for NCCL, gloo and torch; who reaches whom; latency and bandwidth of every pair; and who is
unlike the others. The addresses are those that gloo would take; NCCL chooses its own, so name one
interface in both, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME. Exit status 0: nothing found that
breaks a run. 1: something was found, or the ranks did not meet. The links take n (n - 1)
measurements: for hundreds of ranks start one a node.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from shared.clusters.addresses import meet, reach
from shared.clusters.links import LinkTable, measure_links
from shared.clusters.odd import find_odd
from shared.clusters.report import (
    GIB,
    Finding,
    Report,
    clock_findings,
    clock_offsets,
    disagreements,
    own_report,
    reports_of_all,
    unreached,
)
from shared.clusters.verdicts import describe_odd
from shared.plots import heat_map, use_style
from shared.ranks.group import own_device, process_group
from shared.results import format_table
from shared.script import checked_out, positive_float, run_script


def describe(reports: Sequence[Report], clocks: Sequence[float] = ()) -> str:
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
        | ({"clock s": round(clocks[each.rank], 3)} if clocks else {})
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


def say(findings: Sequence[Finding], *, last: bool) -> None:
    """Every finding a line; at the end, and where one breaks a run, the exit status."""
    for each in findings:
        print(f"{'BREAKS A RUN' if each.breaks else 'look at this'}: {each.words}")
    if any(each.breaks for each in findings):
        sys.stdout.flush()
    elif last:
        print("nothing found that breaks a run")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    parser.add_argument("--out", type=Path, default=Path("runs/preflight"), help="for the picture")
    what = "where the run will save; its disk is looked at (--out)"
    parser.add_argument("--saves", type=Path, help=what)
    parser.add_argument(
        "--disk", type=positive_float, default=1.0, help="GiB that a save needs (1)"
    )
    parser.add_argument("--mib", type=positive_float, default=4.0, help="MiB of a message (4)")
    what = "seconds to wait for the others (60)"
    parser.add_argument("--patience", type=positive_float, default=60.0, help=what)
    args = parser.parse_args()
    meeting = meet(args.patience)
    mine = own_report(meeting.rank, own_device(args.device), args.saves or args.out)
    reports = reports_of_all(meeting, mine)
    reached = reach(meeting, mine.address)
    findings = [*unreached(reports, reached), *disagreements(reports, disk=int(args.disk * GIB))]
    main_rank = meeting.rank == 0
    if any(any(row) for row in reached):  # no group would come about
        if main_rank:
            print(describe(reports))
            say(findings, last=True)
        sys.exit(1)
    with process_group(args.device) as rank:
        clocks = clock_offsets(rank)
        table = measure_links(rank.device, int(args.mib * 2**20))
        findings += clock_findings(clocks)
        for words, seconds in (("latency", table.small), ("bandwidth", table.large)):
            for odd in find_odd(seconds):
                findings.append(Finding((odd.rank,), f"{words}: {describe_odd(odd)}", breaks=False))
        if main_rank:
            print(f"{describe(reports, clocks)}\n{link_rows(table)}")
            picture = checked_out(args.out) / "links.png"
            draw_links(table).savefig(picture)
            print(f"drawn in {picture}")
            say(findings, last=True)
    if any(each.breaks for each in findings):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
