"""Step time of lesson 15's executor as a ratio to torch.distributed.pipelining, in turns.

python tests/benchmarks/pipeline_step_time.py [--repeats 30] [--ranks 2]

The same stages, micro-batches and loss, forward and backward, on CPU ranks of one process group.
"""

import argparse

from lessons.lesson15_pipeline_parallel.experiments.beside_torch import SCHEDULES, beside_torch
from lessons.lesson15_pipeline_parallel.experiments.runs import token_rows
from shared.ranks.forked import run_ranks
from shared.results import format_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for name in SCHEDULES:
        found = run_ranks(
            beside_torch, args.ranks, name, 8, token_rows(32, 64), args.repeats, timeout=900
        )
        _, mine, theirs = found[0]
        rows.append(
            {
                "schedule": name,
                "by hand, ms": round(1000 * mine, 1),
                "torch's, ms": round(1000 * theirs, 1),
                "ratio of the fastest": round(mine / theirs, 3),
            }
        )
    print(format_table(rows))


if __name__ == "__main__":
    main()
