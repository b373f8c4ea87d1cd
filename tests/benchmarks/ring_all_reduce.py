"""The ring all-reduce by hand: its bytes against the formula, its time against gloo's own.

Bytes must be exact; the time is shown, whatever it is. All take turns within one run, and a ratio
is the median over the turns. "Its two halves" is what 05.1 and 05.2 make of 05.3: four copies in
memory that is new in each call, the same messages.

    python tests/benchmarks/ring_all_reduce.py
    python tests/benchmarks/ring_all_reduce.py --ranks 4 --mib 16
"""

import argparse
import statistics
import sys

import torch
import torch.distributed as dist

from shared.exercises.mine import put_mine_in_place
from shared.measuring.bandwidth import slowest_rank_seconds
from shared.measuring.traffic import count_traffic
from shared.ranks.forked import run_ranks
from solutions.lesson05_collectives import (
    central_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
)


def two_halves(tensor: torch.Tensor) -> None:
    """The ring out of place, as the exercises compose it."""
    tensor.copy_(ring_all_gather(ring_reduce_scatter(tensor))[: tensor.numel()])


def measure(rank: int, numel: int, repeats: int) -> tuple[int, list[list[float]]]:
    """Bytes that left this rank, and seconds of each all-reduce by turns."""
    buffer = torch.zeros(numel)
    with count_traffic() as traffic:
        ring_all_reduce(buffer)
    operations = (dist.all_reduce, ring_all_reduce, two_halves, central_all_reduce)
    turns = [
        [slowest_rank_seconds(lambda run=run: run(buffer), 1) for run in operations]
        for _ in range(repeats)
    ]
    return traffic.sent_bytes, turns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    put_mine_in_place("05", globals(), mine=False)  # in a course without solutions/
    n, numel = args.ranks, args.mib * 2**20 // 4
    results = run_ranks(measure, n, numel, args.repeats, timeout=300)
    formula = 2 * (n - 1) * 4 * -(-numel // n)
    sent = [each for each, _ in results]
    print(f"bytes from each of {n} ranks: {sent[0]:,}; formula {formula:,}")
    gloo, *others = zip(*results[0][1], strict=True)
    print(f"{args.mib} MiB: gloo's own {1e3 * min(gloo):.0f} ms (the best of {args.repeats})")
    names = ("ring by hand", "its two halves", "central by hand")
    for name, times in zip(names, others, strict=True):
        ratios = sorted(a / b for a, b in zip(times, gloo, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"{name}: {statistics.median(ratios):.2f} times gloo's time ({spread})")
    sys.exit(sent != [formula] * n)


if __name__ == "__main__":
    main()
