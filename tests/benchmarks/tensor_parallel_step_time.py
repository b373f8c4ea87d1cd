"""Step time of lesson 14's layers as a ratio to torch's parallelize_module, in turns.

python tests/benchmarks/tensor_parallel_step_time.py [--steps 30] [--ranks 2]

The same two layers, batch and AdamW, on CPU ranks of one process group; torch's engine with one
DTensor for queries, keys and values, so that both send the same messages.
"""

import argparse

from lessons.lesson14_tensor_parallel.experiments.races import Work, race
from shared.measuring.timing import compare_seconds, median_ms
from shared.ranks.forked import run_ranks
from shared.results import format_table

ENGINES = ("tensor parallel", "torch's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for width in (128, 256, 512):
        work = Work(width=width)
        seconds = run_ranks(race, args.ranks, work, ENGINES, args.steps, timeout=900)[0]
        mine, theirs = (seconds[engine] for engine in ENGINES)
        rows.append(
            {"width": width, "by hand, ms": median_ms(mine), "torch's, ms": median_ms(theirs)}
            | compare_seconds(mine, theirs)
        )
    print(format_table(rows))


if __name__ == "__main__":
    main()
