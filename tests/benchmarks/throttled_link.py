"""Lesson 06's engines on two nodes with a slow link between them: what overlap is worth.

Two torchrun agents in two network namespaces of this machine, joined by a cable that lets through
the given rate each way (tc, token bucket). Linux, root, iproute2. What is run on node i is

    ip netns exec node<i> torchrun --nnodes=2 --nproc_per_node=1 --rdzv_backend=c10d \\
        --rdzv_endpoint=10.77.0.1:29500 lessons/lesson06_ddp/train.py --engine all

    python tests/benchmarks/throttled_link.py
    python tests/benchmarks/throttled_link.py --mbit 100 --figure link.png
    python tests/benchmarks/throttled_link.py --write     # keeps the table for lesson 05's figure
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from shared.exercises.lessons import ROOT
from shared.plots import MEANING, save_figure, use_style
from shared.ranks.launching import launch_nodes
from shared.ranks.links import throttled_links, why_not
from shared.results import format_table

SCRIPT = ROOT / "lessons" / "lesson06_ddp" / "train.py"
RECORD = ROOT / "lessons" / "lesson05_collectives" / "throttled_link.json"


def main() -> None:
    args = parse()
    if reason := why_not():
        sys.exit(f"no throttled links on this machine: {reason}")
    flags = ["--engine", "all", "--steps", str(args.steps), "--bucket-mb", str(args.bucket_mb)]
    if args.preset:
        flags += ["--preset", args.preset]
    tables = {}
    for mbit in args.mbit:
        with throttled_links(2, mbit) as links:
            tables[mbit] = launch_nodes(SCRIPT, 2, 1, flags, 400.0, links)["table"]
        print(f"two nodes, {mbit:g} Mbit/s each way, {args.steps} steps")
        print(format_table(tables[mbit]))
    if args.figure:
        draw(tables, args.figure)
    if args.write:
        mbit = args.mbit[0]
        record = {"mbit": mbit, "steps": args.steps, "table": tables[mbit]}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


def draw(tables: dict[float, list[dict]], path: Path) -> None:
    """Step times by engine, one group of bars a rate."""
    use_style()
    figure, ax = plt.subplots()
    for place, (mbit, table) in enumerate(tables.items()):
        rows = [row for row in table if row["engine"] != "single"]
        heights = [row["ms a step"] for row in rows]
        x = [i + place * 0.8 / len(tables) for i in range(len(rows))]
        shade = 1.0 - 0.5 * place / len(tables)
        ax.bar(x, heights, 0.7 / len(tables), alpha=shade, color=MEANING["communication"],
               label=f"{mbit:g} Mbit/s")  # fmt: skip
        ax.set_xticks(range(len(rows)), [row["engine"] for row in rows])
    ax.set(ylabel="time per step (ms)", title="Two nodes, a slow link: overlap hides what it can")
    ax.legend()
    save_figure(figure, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, nargs="+", default=[200.0], help="rates (200)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bucket-mb", type=float, default=1.0)
    parser.add_argument("--preset", default="small", choices=("tiny", "small", "large"))
    parser.add_argument("--figure", type=Path, help="draw the step times into this PNG")
    parser.add_argument("--write", action="store_true", help="keep it for lesson 05's figure")
    return parser.parse_args()


if __name__ == "__main__":
    main()
