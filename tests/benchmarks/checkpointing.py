"""`checkpoint` by hand against torch's: time and bytes, as ratios of one run.

python tests/benchmarks/checkpointing.py [--layers 8] [--width 256] [--repeats 12]

A forward and a backward of encoder layers, every one of them checkpointed. The three ways take
turns, and a ratio is the median over the turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shared.exercises.mine import put_mine_in_place
from shared.measuring.activations import counting_saved
from shared.measuring.timing import synchronized_now
from shared.model.config import TransformerConfig
from shared.model.layers import EncoderLayer
from solutions.lesson11_gradient_checkpointing import checkpoint


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    put_mine_in_place("11", globals(), mine=False)  # in a course without solutions/
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    config = TransformerConfig(8, d_model=args.width, d_ff=4 * args.width)
    layers = nn.ModuleList(EncoderLayer(config) for _ in range(args.layers)).to(device)
    x = torch.randn(4, 128, args.width, device=device, requires_grad=True)
    ways: dict[str, Callable[..., Any]] = {
        "none": lambda layer, x: layer(x),
        "by hand": checkpoint,
        "torch, re-entrant": partial(torch_checkpoint, use_reentrant=True),
        "torch, non-reentrant": partial(torch_checkpoint, use_reentrant=False),
    }

    def forward(way: Callable[..., Any]) -> torch.Tensor:
        result = x
        for layer in layers:
            result = way(layer, result)
        return result

    def bytes_kept(way: Callable[..., Any]) -> int:
        with counting_saved(layers.parameters()) as saved:
            forward(way).sum().backward()
            result = forward(way)
            kept = saved.now
            del result
        return kept

    # On a CPU the processor's time of this process, which others that run beside it hardly change.
    now = time.process_time if device.type == "cpu" else partial(synchronized_now, device)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    kept = {name: bytes_kept(way) for name, way in ways.items()}
    for _ in range(args.repeats):
        for name, way in ways.items():
            began = now()
            forward(way).sum().backward()
            seconds[name].append(now() - began)
    for name in ways:
        ratios = {
            other: statistics.median(
                a / b for a, b in zip(seconds[name], seconds[other], strict=True)
            )
            for other in ways
        }
        print(f"{name:22} bytes kept {kept[name]}", end="")
        print("".join(f", time / {other} {ratio:.3f}" for other, ratio in ratios.items()))
    print(f"bytes by hand / torch: {kept['by hand'] / kept['torch, non-reentrant']:.3f}")


if __name__ == "__main__":
    main()
