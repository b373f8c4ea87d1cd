"""What beam search and label smoothing do to lesson 04's BLEU, from five seeds.

python tests/benchmarks/decoding_seeds.py [--steps 300]     some minutes on one core
"""

import argparse
import statistics

import torch

from lessons.lesson04_training.experiments.smoothing_and_beams import (
    BEAMS,
    Task,
    bleu_by_beam,
    confidence,
    train_smoothed,
)
from shared.data.corpora import load_corpus
from shared.results import format_table

SEEDS, SMOOTHINGS = range(5), (0.0, 0.1)


def main() -> None:
    """Print a row for each model, and the differences that have the same seed on both sides."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sentences", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task, rows = Task.of(load_corpus("grammar"), args.sentences), []
    for seed in SEEDS:
        for smoothing in SMOOTHINGS:
            model = train_smoothed(task, smoothing, args.steps, seed)
            seen = confidence(model, task)
            row = {"seed": seed, "smoothing": smoothing, "loss": seen.loss}
            row |= {"hits %": seen.hits, "surest %": seen.surest, **bleu_by_beam(model, task)}
            rows.append(row)
            print(format_table([rounded(row)]), flush=True)
    print(format_table([rounded(row) for row in rows]))
    for smoothing in SMOOTHINGS:
        models = [row for row in rows if row["smoothing"] == smoothing]
        for name in list(BEAMS)[1:]:
            gains = [row[name] - row["greedy"] for row in models]
            print(f"smoothing {smoothing}: {name} above greedy, BLEU: {spread(gains)}")
    for name in ("loss", "hits %", "surest %", *BEAMS):
        pairs = zip(rows[0::2], rows[1::2], strict=True)
        changes = [smoothed[name] - plain[name] for plain, smoothed in pairs]
        print(f"smoothing 0.1 above 0, {name}: {spread(changes)}")


def rounded(row: dict[str, float]) -> dict[str, float]:
    """Two decimals."""
    return {name: round(value, 2) for name, value in row.items()}


def spread(values: list[float]) -> str:
    """Mean, and the smallest and largest of the seeds."""
    return f"{statistics.mean(values):+.2f} ({min(values):+.2f} to {max(values):+.2f})"


if __name__ == "__main__":
    main()
