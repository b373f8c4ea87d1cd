"""Share of communication hidden under compute, by bucket size, ours beside torch's DDP.

DDP stands there twice. As it comes, it copies every bucket back into the gradients while later ones
still travel: more work, and so more that hides. With `gradient_as_bucket_view=True` the gradients
are views into the buckets, as ours are; that is the like-for-like comparison.

python tests/benchmarks/ddp_overlap.py [--repeats 7] [--ranks 2] [--out FILE.png]
"""

import argparse
import runpy
import statistics
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch._dynamo  # once here instead of in every forked rank
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shared.exercises.lessons import ROOT
from shared.measuring.trace import overlap_fraction, record_trace
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.plots import MEANING, save_figure, use_style
from shared.ranks.forked import run_ranks
from shared.results import format_table
from shared.training.loss import label_smoothed_loss

wrap = runpy.run_path(str(ROOT / "lessons" / "lesson06_ddp" / "train.py"))["wrap"]
CONFIG = TransformerConfig(
    vocab_size=1000, d_model=256, num_heads=4, num_layers=3, d_ff=1024, dropout=0.0, max_len=64
)
CAPS = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 25.0]


def measure(rank: int, repeats: int) -> dict[tuple[str, float], list[float]]:
    """Hidden shares of every repeat by engine and bucket size, in turns."""
    engines = {}
    for cap in CAPS:
        for name in ("bucketed", "ddp"):
            model = Transformer(CONFIG)
            engines[name, cap] = wrap(name, model, dist.get_world_size(), cap)
        ddp = DistributedDataParallel(
            Transformer(CONFIG), bucket_cap_mb=cap, gradient_as_bucket_view=True
        )
        engines["ddp, views", cap] = replace(engines["ddp", cap], model=ddp)
    src, tgt = torch.randint(4, 1000, (2, 16, 20))

    def step(engine):
        engine.model.zero_grad()
        label_smoothed_loss(engine.model(src, tgt), tgt).backward()
        engine.finish_gradient_sync()

    shares = {key: [] for key in engines}
    for repeat in range(repeats + 2):
        for key, engine in engines.items():
            dist.barrier()
            if repeat < 2:
                step(engine)
            else:
                trace = record_trace(lambda engine=engine: step(engine))
                shares[key].append(overlap_fraction(trace))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    by_rank = run_ranks(measure, args.ranks, args.repeats, timeout=1200)
    middle = {
        key: 100 * statistics.median([share for shares in by_rank for share in shares[key]])
        for key in by_rank[0]
    }
    rows = [
        {
            "bucket MiB": cap,
            "ours, % hidden": round(middle["bucketed", cap], 1),
            "DDP, % hidden": round(middle["ddp", cap], 1),
            "DDP with views, % hidden": round(middle["ddp, views", cap], 1),
        }
        for cap in CAPS
    ]
    print(format_table(rows))
    best = {name: max(middle[name, cap] for cap in CAPS) for name, _ in middle}
    print("best:", ", ".join(f"{name} {share:.1f} %" for name, share in best.items()))
    if args.out:
        use_style()
        figure, ax = plt.subplots()
        for name, kind in (("bucketed", "by hand"), ("ddp", "engine"), ("ddp, views", "engine")):
            fill = "none" if "views" in name else "full"
            shares = [middle[name, cap] for cap in CAPS]
            ax.plot(CAPS, shares, "o", color=MEANING[kind], fillstyle=fill, label=name)
        ax.set(xscale="log", xlabel="bucket size (MiB)", ylabel="communication hidden (%)")
        ax.legend()
        save_figure(figure, args.out)


if __name__ == "__main__":
    main()
