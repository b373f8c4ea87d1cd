"""Lesson 09's two experiments from five sets of first weights: what each 16-bit format costs.

python tests/benchmarks/format_seeds.py     about a minute on two cores
"""

import torch

from shared.experiments.lesson09_formats import train_in_format, train_stored_in
from shared.results import format_table
from shared.training.precision import DynamicLossScaler

SHARE, STEPS = 2.0**-11, 25


def main() -> None:
    """Print a row for each seed: losses in float32, differences in the other formats."""
    torch.set_num_threads(1)
    rows = []
    for seed in range(5):
        exact = train_in_format(torch.float32, STEPS, SHARE, seed=seed)[-1]
        scaler = DynamicLossScaler(2.0**24, growth_interval=5)
        runs = {
            "fp16": train_in_format(torch.float16, STEPS, SHARE, seed=seed),
            "bf16": train_in_format(torch.bfloat16, STEPS, SHARE, seed=seed),
            "fp16 scaled": train_in_format(torch.float16, STEPS, SHARE, scaler, seed),
        }
        kept, _ = train_stored_in(torch.float32, STEPS, 1e-4, seed)
        row = {"seed": seed, "fp32": round(exact, 4)}
        row |= {f"{name} - fp32": round(run[-1] - exact, 4) for name, run in runs.items()}
        row["weights in fp32"] = round(kept[-1], 4)
        for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            losses, moved = train_stored_in(dtype, STEPS, 1e-4, seed)
            row[f"weights in {name} - fp32"] = round(losses[-1] - kept[-1], 4)
            row[f"{name} weights moved, %"] = round(100 * moved, 1)
        rows.append(row)
    print(format_table(rows))


if __name__ == "__main__":
    main()
