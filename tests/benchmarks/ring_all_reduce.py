"""The ring all-reduce by hand: its bytes against the formula, its time against gloo's own.

Bytes must be exact; the time is shown, whatever it is. The two take turns within one run.

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
from solutions.lesson05_collectives import central_all_reduce, ring_all_reduce


def measure(rank: int, numel: int, repeats: int) -> tuple[int, list[list[float]]]:
    """Bytes that left this rank, and seconds of gloo's, the ring's and the central all-reduce."""
    buffer = torch.zeros(numel)
    with count_traffic() as traffic:
        ring_all_reduce(buffer)
    operations = (dist.all_reduce, ring_all_reduce, central_all_reduce)
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
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    put_mine_in_place("05", globals(), mine=False)  # in a course without solutions/
    n, numel = args.ranks, args.mib * 2**20 // 4
    results = run_ranks(measure, n, numel, args.repeats, timeout=300)
    formula = 2 * (n - 1) * 4 * -(-numel // n)
    sent = [each for each, _ in results]
    print(f"bytes from each of {n} ranks: {sent[0]:,}; formula {formula:,}")
    gloo, ring, central = zip(*results[0][1], strict=True)
    print(f"{args.mib} MiB: gloo's own {1e3 * min(gloo):.0f} ms (the best of {args.repeats})")
    for name, times in (("ring by hand", ring), ("central by hand", central)):
        ratios = sorted(a / b for a, b in zip(times, gloo, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(f"{name}: {statistics.median(ratios):.2f} times gloo's time ({spread})")
    sys.exit(sent != [formula] * n)


if __name__ == "__main__":
    main()
