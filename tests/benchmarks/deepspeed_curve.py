"""DeepSpeed's stages on the one loss curve, all 50 steps; stage 3 on two ranks ten times.

python tests/benchmarks/deepspeed_curve.py [--repeats 10]

In older versions stage 3 was now and then wrong over gloo (0.19.3: 3 of about 27 runs).
"""

import argparse

from lessons.lesson10_zero.experiments.asking_deepspeed import ask_deepspeed, parity_config
from shared.results import format_table
from shared.training.reference_run import NUM_STEPS, compare_with_record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=10, help="of stage 3 on two ranks (10)")
    args = parser.parse_args()
    rows = []
    for ranks in (1, 2):
        for stage in range(4):
            repeats = args.repeats if (stage, ranks) == (3, 2) else 1
            config = parity_config(stage)
            runs = [
                ask_deepspeed("curve", ranks, config=config, steps=NUM_STEPS, timeout=600.0)[0]
                for _ in range(repeats)
            ]
            gaps = [compare_with_record(run) for run in runs]
            rows.append({"stage": stage, "ranks": ranks, "runs": repeats, "largest": max(gaps)})
            print(rows[-1], flush=True)
    print(format_table(rows))


if __name__ == "__main__":
    main()
