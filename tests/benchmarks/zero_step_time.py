"""Step time of lesson 10's stages as a ratio to DeepSpeed's, two CPU ranks, taking turns.

python tests/benchmarks/zero_step_time.py [--steps 20] [--ranks 2]

Both in float32 with torch's AdamW on the same model and rows, in one process with each other.
"""

import argparse

from lessons.lesson10_zero.experiments.asking_deepspeed import ask_deepspeed, parity_config
from shared.measuring.timing import compare_seconds, median_ms, slowest_of
from shared.results import format_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for stage in (1, 2, 3):
        config = parity_config(stage, reduce_bucket_size=1_000_000)
        config["zero_optimization"] |= {"allgather_bucket_size": 1_000_000}
        given = {"stage": stage, "steps": args.steps, "config": config}
        by_rank = ask_deepspeed("race", args.ranks, timeout=900, **given)
        mine, theirs = (
            slowest_of([rank[name] for rank in by_rank]) for name in ("by hand", "DeepSpeed")
        )
        rows.append(
            {"stage": stage, "by hand, ms": median_ms(mine), "DeepSpeed, ms": median_ms(theirs)}
            | compare_seconds(mine, theirs)
        )
    print(format_table(rows))


if __name__ == "__main__":
    main()
