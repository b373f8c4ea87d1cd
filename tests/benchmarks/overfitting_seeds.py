"""Lesson 04's overfitting from eight seeds: other 160 sentences, other first weights, other orders.

python tests/benchmarks/overfitting_seeds.py     about a minute on two idle cores
"""

import torch

from lessons.lesson04_training.experiments.overfitting import (
    FewSentences,
    averaged_loss,
    best_epoch,
    train_and_look,
)
from shared.data.corpora import load_corpus
from shared.results import format_table

EPOCHS = 14


def main() -> None:
    """Print a row for each seed: the best epoch, the last one, and two means of weights."""
    torch.set_num_threads(1)
    corpus, rows = load_corpus("grammar"), []
    for seed in range(8):
        few = FewSentences.draw(corpus, seed)
        model, epochs = train_and_look(few, EPOCHS, seed)
        at = best_epoch(epochs)
        best, last = epochs[at], epochs[-1]
        around = averaged_loss(model, epochs[max(0, at - 1) : at + 2], few.held_out)
        ends = averaged_loss(model, epochs[-3:], few.held_out)
        row: dict[str, float] = {"seed": seed, "best epoch": at + 1}
        row |= {"training, best": best.training, "training, last": last.training}
        row |= {"held out, best": best.held_out, "held out, last": last.held_out}
        row |= {"3 around best": around, "last 3": ends}
        row |= {"hits %, best": best.hits, "hits %, last": last.hits}
        rows.append({name: round(value, 2) for name, value in row.items()})
    print(format_table(rows))


if __name__ == "__main__":
    main()
