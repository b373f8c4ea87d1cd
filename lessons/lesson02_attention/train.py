"""Attention by hand against the fused kernel: bytes kept for backward, and time.

The sweep over lengths and heads is dealt out to the ranks; rank 0 shows one table.

    torchrun --nproc_per_node=2 lessons/lesson02_attention/train.py
    torchrun --nproc_per_node=gpu lessons/lesson02_attention/train.py --dtype bfloat16 --causal
"""

import argparse
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons.lesson02_attention.experiments.kept_bytes import FULL, draw_sweep
from shared.errors import InputError
from shared.measuring.memory import saved_bytes
from shared.measuring.timing import fastest_seconds
from shared.model.attention import MultiHeadAttention
from shared.ranks.group import Rank, process_group
from shared.results import write_results
from shared.script import (
    choose_preset,
    lesson_parser,
    positive_int,
    prepare,
    progress,
    run_script,
)


@dataclass(frozen=True)
class Preset:
    """Sizes of the sweep; `steps` timed passes per case, of which the fastest counts."""

    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    d_model: int
    batch: int
    steps: int


PRESETS = {
    "tiny": Preset((32, 64, 128), (2,), 32, 1, 2),
    "small": Preset((64, 128, 256, 512, 1024, 2048), (2, 4, 8), 128, 1, 5),
    "large": Preset((512, 1024, 2048, 4096, 8192, 16384, 32768), (8, 16), 1024, 1, 10),
}


def share(preset: Preset, heads: list[int], rank: Rank) -> list[tuple[int, int]]:
    """This rank's (length, heads): dealt like cards, largest first, so that shares weigh alike."""
    cases = sorted(product(preset.lengths, heads), reverse=True)
    return cases[rank.rank :: rank.world_size]


def measure(attention: nn.Module, x: Tensor, steps: int, causal: bool) -> dict[str, Any]:
    """Output, kept bytes and seconds of a forward and backward; nothing when memory runs out."""

    def forward() -> Tensor:
        return attention(x, x, x, causal=causal)

    try:
        kept = saved_bytes(forward, ignore=tuple(attention.parameters()))
        seconds = fastest_seconds(lambda: forward().sum().backward(), steps, x.device)
        with torch.no_grad():
            return {"output": forward().float(), "bytes": kept, "seconds": seconds}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {}


def row(
    preset: Preset, case: tuple[int, int], args: argparse.Namespace, rank: Rank
) -> dict[str, Any]:
    """One line of the table: the same weights and input through both implementations."""
    length, heads = case
    torch.manual_seed(args.seed)
    dtype = getattr(torch, args.dtype)
    x = torch.randn(preset.batch, length, preset.d_model).to(rank.device, dtype)
    by_hand = MultiHeadAttention(preset.d_model, heads).to(rank.device, dtype)
    fused = MultiHeadAttention(preset.d_model, heads, fused=True).to(rank.device, dtype)
    fused.load_state_dict(by_hand.state_dict())
    steps = args.steps or preset.steps
    a, b = (measure(attention, x, steps, args.causal) for attention in (by_hand, fused))
    both = bool(a and b)
    return {
        "L": length,
        "heads": heads,
        "by hand MiB": a["bytes"] / 2**20 if a else FULL,
        "fused MiB": b["bytes"] / 2**20 if b else FULL,
        "bytes ratio": a["bytes"] / b["bytes"] if both else "",
        "fused ms": 1000 * b["seconds"] if b else "",
        "time ratio": a["seconds"] / b["seconds"] if both else "",
        "difference": float((a["output"] - b["output"]).abs().max()) if both else "",
        "rank": rank.rank,
    }


def headline(table: list[dict[str, Any]]) -> str:
    """The longest length at which both fitted, most heads."""
    fitted = [line for line in table if line["bytes ratio"]]
    if not fitted:
        return "no length fitted into memory by hand"
    last = max(fitted, key=lambda line: (line["L"], line["heads"]))
    return (
        f"L {last['L']}, {last['heads']} heads: by hand keeps {last['bytes ratio']:.1f} times "
        f"the bytes and takes {last['time ratio']:.1f} times the time of the fused kernel"
    )


def main() -> None:
    """Deal the sweep out, measure, gather, show."""
    parser = lesson_parser(__file__, __doc__, steps="timed passes of a case")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[0], help="of q, k, v (float32)")
    parser.add_argument("--causal", action="store_true", help="hide later words")
    parser.add_argument("--heads", type=positive_int, nargs="+", help="numbers (the preset's)")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        preset = choose_preset(args, rank.device, PRESETS)
        heads = args.heads or list(preset.heads)
        for number in heads:
            if preset.d_model % number:
                raise InputError(f"--heads {number}: d_model is {preset.d_model}; take a divisor")
        cases = progress(share(preset, heads, rank), rank, "sweep")
        shares: list[Any] = [None] * rank.world_size
        dist.all_gather_object(shares, [row(preset, case, args, rank) for case in cases])
        if rank.is_main:
            lines = [line for each in shares for line in each]
            table = sorted(lines, key=lambda line: (line["heads"], line["L"]))
            sizes = {"batch": preset.batch, "d_model": preset.d_model, "causal": args.causal}
            sizes["itemsize"] = torch.finfo(getattr(torch, args.dtype)).bits // 8
            figures = {"attention_sweep.png": draw_sweep(table, sizes)}
            words = headline(table)
            write_results(
                args, rank, headline=words, table=table, figures=figures, dtype=args.dtype
            )


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
