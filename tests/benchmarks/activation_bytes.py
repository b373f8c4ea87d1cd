"""Bytes that one encoder layer keeps for its backward pass, ours against torch's, counted exactly.

`shared.measuring.memory.saved_bytes` sees every tensor that autograd saves. Tensors that share a
storage are counted once, with the size of the storage; parameters are left out, since they are kept
anyway.
No clock and no chance: the same numbers on every machine with this version of torch.

    python tests/benchmarks/activation_bytes.py
    python tests/benchmarks/activation_bytes.py --by-hand     # without the fused kernels, too
"""

import argparse
import sys
from typing import Literal

import torch
from torch import nn

from shared.measuring.memory import saved_bytes
from shared.model.config import TransformerConfig
from shared.model.layers import EncoderLayer

SIZES = {  # batch, length, d_model, heads, d_ff
    "course": (8, 24, 256, 4, 1024),
    "odd": (3, 17, 48, 3, 80),
    "base": (4, 64, 512, 8, 2048),
    "long": (1, 512, 256, 4, 1024),
}


def main() -> None:
    args = parse()
    print(f"one encoder layer, float32, {args.device}, torch {torch.__version__}; KiB saved")
    print(
        "{:8} {:5} {:8} {:9} {:>10} {:>10} {:>6}".format(
            "sizes", "norm", "dropout", "mask", "ours", "torch", "ratio"
        )
    )
    worst = 0.0
    for name, sizes in SIZES.items():
        for norm in ("pre", "post"):
            for dropout in (0.0, 0.1):
                for masked in (False, True):
                    ours, by_hand, theirs = compare(sizes, norm, dropout, masked, args.device)
                    worst = max(worst, ours / theirs)
                    row = f"{name:8} {norm:5} {dropout:<8} {'padding' if masked else 'none':9} "
                    row += f"{ours / 1024:10,.1f} {theirs / 1024:10,.1f} {ours / theirs:6.3f}"
                    if args.by_hand:
                        row += f"   by hand {by_hand / 1024:10,.1f} {by_hand / theirs:6.3f}"
                    print(row)
    print(f"highest ratio: {worst:.3f}")
    sys.exit(args.at_most is not None and worst > args.at_most)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--by-hand", action="store_true", help="show the unfused layer as well")
    parser.add_argument("--at-most", type=float, help="exit 1 if a ratio is higher")
    return parser.parse_args()


def compare(
    sizes: tuple[int, int, int, int, int],
    norm: Literal["pre", "post"],
    dropout: float,
    masked: bool,
    device: str,
) -> tuple[int, int, int]:
    """Bytes saved by our fused layer, our layer by hand, and torch's; dropout in equal places."""
    batch, length, d_model, heads, d_ff = sizes
    x = torch.randn(batch, length, d_model, device=device, requires_grad=True)
    kept = torch.arange(length, device=device) < length - masked * torch.arange(
        batch, device=device
    ).unsqueeze(1)
    mask = kept[:, None, None, :] if masked else None  # (B, 1, 1, L), True = seen
    counts = []
    for fused in (True, False):
        config = TransformerConfig(
            8, d_model, heads, 1, d_ff, dropout, norm, fused, inner_dropout=dropout
        )
        layer = EncoderLayer(config).to(device)
        counts.append(
            saved_bytes(lambda layer=layer: layer(x, mask), ignore=tuple(layer.parameters()))
        )
    engine = nn.TransformerEncoderLayer(
        d_model, heads, d_ff, dropout, batch_first=True, norm_first=norm == "pre", device=device
    )
    padding = ~kept if masked else None
    counts.append(
        saved_bytes(
            lambda: engine(x, src_key_padding_mask=padding), ignore=tuple(engine.parameters())
        )
    )
    return counts[0], counts[1], counts[2]


if __name__ == "__main__":
    main()
