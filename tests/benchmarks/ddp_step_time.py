"""Step time of lesson 06's engines as a ratio to torch's DDP, two CPU ranks, taking turns.

python tests/benchmarks/ddp_step_time.py [--steps 30] [--ranks 2]
"""

import argparse
import runpy
import time
from functools import partial

import torch
import torch._dynamo  # once here instead of in every forked rank
import torch.distributed as dist

from shared.ddp.engines import ENGINES
from shared.exercises.lessons import ROOT
from shared.measuring.timing import compare_seconds, median_ms, slowest_of
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.ranks.forked import run_ranks
from shared.results import format_table
from shared.training.loss import label_smoothed_loss

wrap = runpy.run_path(str(ROOT / "lessons" / "lesson06_ddp" / "train.py"))["wrap"]
CONFIG = TransformerConfig(
    vocab_size=4000, d_model=256, num_heads=4, num_layers=3, d_ff=1024, dropout=0.0, max_len=64
)


def measure(rank: int, steps: int) -> dict[str, list[float]]:
    """Seconds of every step by engine; all do the same shard, so "single" is compute alone."""
    engines, seconds, sgd = {}, {}, partial(torch.optim.SGD, lr=0.01)
    for name in ENGINES:
        torch.manual_seed(rank)
        engines[name] = wrap(name, Transformer(CONFIG), sgd, dist.get_world_size())
        seconds[name] = []
    src, tgt = torch.randint(4, 4000, (2, 16, 20))
    names = list(ENGINES)
    for step in range(steps + 3):
        for name in names[step % 5 :] + names[: step % 5]:
            dist.barrier()
            began = time.perf_counter()
            engines[name].optimizer.zero_grad()
            label_smoothed_loss(engines[name].model(src, tgt), tgt).backward()
            engines[name].average_gradients()
            engines[name].optimizer.step()
            if step >= 3:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    by_rank = run_ranks(measure, args.ranks, args.steps, timeout=1200)
    slowest = {name: slowest_of([seconds[name] for seconds in by_rank]) for name in ENGINES}
    rows = [
        {"engine": name, "ms": median_ms(seconds), "fastest ms": round(1000 * min(seconds), 1)}
        | compare_seconds(seconds, slowest["ddp"])
        for name, seconds in slowest.items()
    ]
    print(format_table(rows))


if __name__ == "__main__":
    main()
