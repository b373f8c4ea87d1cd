"""Step time of FullyShard by hand as a ratio to torch's fully_shard, two CPU ranks, taking turns.

python tests/benchmarks/fsdp_step_time.py [--steps 20] [--ranks 2] [--width 256] [--blocks 6]

A language model in float32 with torch's AdamW, the same units and rows, one step of each engine
after the other in the same processes.
"""

import argparse

import torch
import torch._dynamo  # ranks are forks: imported once
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lessons.lesson13_fsdp.experiments.step_memory import units_of, with_fsdp2
from shared.measuring.timing import compare_seconds, median_ms, slowest_of, synchronized_now
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.ranks.forked import run_ranks
from shared.results import format_table
from shared.sharding.fully_shard import FullyShard
from shared.sharding.prefetch import PrefetchingShard

ENGINES = ("fully_shard", "by hand", "with prefetch")
WARM = 3


def wrap(engine: str, config: TransformerConfig) -> nn.Module:
    torch.manual_seed(0)
    net = LanguageModel(config)
    units = units_of(net, "block")
    if engine == "fully_shard":
        return with_fsdp2(net, units)
    return (FullyShard if engine == "by hand" else PrefetchingShard)(net, units)


def race(rank: int, steps: int, config: TransformerConfig) -> dict[str, list[float]]:
    """Seconds of every step, by engine."""
    models = {name: wrap(name, config) for name in ENGINES}
    optimizers = {name: torch.optim.AdamW(m.parameters(), lr=1e-3) for name, m in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
    tokens = torch.randint(config.vocab_size, (4, config.max_len))
    device = tokens.device
    for step in range(steps + WARM):
        for name in ENGINES:
            model = models[name]
            dist.barrier()
            began = synchronized_now(device)
            optimizers[name].zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            if isinstance(model, FullyShard):
                model.finish_gradient_sync()
            optimizers[name].step()
            if step >= WARM:
                seconds[name].append(synchronized_now(device) - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=6)
    args = parser.parse_args()
    config = TransformerConfig(
        vocab_size=1000,
        d_model=args.width,
        num_heads=4,
        num_layers=args.blocks,
        d_ff=4 * args.width,
        dropout=0.0,
        max_len=64,
        tie_embeddings=False,
    )
    by_rank = run_ranks(race, args.ranks, args.steps, config, timeout=900)
    taken = {name: slowest_of([seconds[name] for seconds in by_rank]) for name in ENGINES}
    rows = [
        {"engine": name, "ms a step": median_ms(seconds)}
        | compare_seconds(seconds, taken["fully_shard"])
        for name, seconds in taken.items()
    ]
    print(format_table(rows))


if __name__ == "__main__":
    main()
