"""What loading data wrongly costs in validation loss, over twenty seeds, by number of epochs.

python tests/benchmarks/sampling_pitfalls.py [--seeds 20] [--samples 8192 4096 2048]

Always 256 steps of 4 x 32 samples; the more epochs, the less data. One process stands for four
ranks: the mean of their gradients is the gradient of their batches together.
"""

import argparse
import statistics

import torch

from lessons.lesson07_distributed_sampler.experiments import next_character
from shared.data.corpora import load_corpus
from shared.data.sampling import DistributedSampler
from shared.results import format_table

NUM_RANKS, BATCH, STEPS = 4, 32, 256
WAYS = ("right", "no set_epoch", "own shuffle", "same shuffle")


def rank_order(way: str, length: int, rank: int, epoch: int, seed: int) -> list[int]:
    """What a rank reads in an epoch, as far as the ranks with a sampler get."""
    if way in ("right", "no set_epoch"):
        sampler = DistributedSampler(range(length), NUM_RANKS, rank, seed=seed)
        sampler.set_epoch(epoch if way == "right" else 0)
        return list(sampler)
    own = rank if way == "own shuffle" else 0
    generator = torch.Generator().manual_seed(1000 * seed + 100 * own + epoch)
    return torch.randperm(length, generator=generator)[: length // NUM_RANKS].tolist()


def global_batches(way: str, length: int, seed: int) -> list[list[int]]:
    """The samples of all ranks, step by step."""
    batches = []
    for epoch in range(STEPS * NUM_RANKS * BATCH // length):
        orders = [rank_order(way, length, rank, epoch, seed) for rank in range(NUM_RANKS)]
        for start in range(0, len(orders[0]), BATCH):
            batches.append([i for order in orders for i in order[start : start + BATCH]])
    assert len(batches) == STEPS, f"{len(batches)} steps, {STEPS} wanted"
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    default = [8192, 4096, 2048]
    parser.add_argument("--samples", type=int, nargs="+", default=default, help="divisors of 32768")
    args = parser.parse_args()
    torch.set_num_threads(1)
    corpus, rows = load_corpus("grammar"), []
    for length in args.samples:
        train, validation = next_character.character_data(corpus, length)
        right: list[float] = []
        for way in WAYS:
            losses = []
            for seed in range(args.seeds):
                torch.manual_seed(seed)
                model = next_character.NextCharacter(len(train.alphabet))
                next_character.train_on(model, train, global_batches(way, length, seed), 0.2)
                losses.append(next_character.mean_loss(model, validation))
            right = right or losses
            paired = [a - b for a, b in zip(losses, right, strict=True)]
            rows.append(
                {
                    "epochs": STEPS * NUM_RANKS * BATCH // length,
                    "samples": length,
                    "way": way,
                    "validation loss": f"{statistics.mean(losses):.3f}",
                    "spread of seeds": f"{statistics.stdev(losses):.3f}",
                    "cost": f"{statistics.mean(paired):+.3f}",
                    "spread of the cost": f"{statistics.stdev(paired):.3f}",
                }
            )
    print(format_table(rows))


if __name__ == "__main__":
    main()
