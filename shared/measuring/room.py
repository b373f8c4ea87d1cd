"""Whether a preset fits into the memory of this rank's GPU, asked before anything is made."""

import argparse
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shared.errors import InputError
from shared.ranks.agreement import gathered
from shared.ranks.group import current_world_size

SURE = 0.9  # no prediction was more than 2 % above the peak that was seen: a tenth is left
MOST = 64  # ranks that are proposed

# Bytes on a rank: (arguments, preset, number of ranks, whether products are in bf16).
Needed = Callable[[argparse.Namespace, Any, int, bool], int]


def check_room(
    args: argparse.Namespace, presets: Mapping[str, Any], needed: Needed, half: bool
) -> None:
    """Raise InputError, the same on every rank, where `args.preset` needs more than a GPU has.

    It names what does fit: a smaller preset, and the fewest ranks, if these do. Where nothing
    does, the GPU is somebody else's.
    """
    ranks = current_world_size()
    free, total = min(gathered(torch.cuda.mem_get_info()))
    need = 0
    with contextlib.suppress(InputError):  # what cannot run so is the script's own to say
        need = needed(args, presets[args.preset], ranks, half)
    if SURE * need <= free:
        return
    advice = []
    if getattr(args, "checkpointing", None) is False:
        again = argparse.Namespace(**{**vars(args), "checkpointing": True})
        if fewest_ranks(again, presets[args.preset], needed, half, free, (ranks,)):
            advice.append("--checkpointing")
    smaller = [name for name in presets if name != args.preset]
    for name in reversed(smaller):
        if fewest_ranks(args, presets[name], needed, half, free, (ranks,)):
            advice.append(f"--preset {name}")
            break
    more = range(ranks + 1, MOST + 1)
    if more := fewest_ranks(args, presets[args.preset], needed, half, free, more):
        advice.append(f"{more} GPUs (torchrun --nproc_per_node)")
    own = getattr(args, "config", None)
    what = f"--config {own}" if own else f"--preset {args.preset}"
    others = "; `nvidia-smi` shows who has the rest" if free < SURE * total else ""
    raise InputError(
        f"{what} needs about {need / 1e9:.3g} GB on each of {ranks} GPU(s), of which one has "
        f"{free / 1e9:.3g} of {total / 1e9:.3g} GB free: take "
        f"{' or '.join(advice) or 'a GPU that nobody uses'}{others}"
    )


def fewest_ranks(
    args: argparse.Namespace,
    preset: Any,
    needed: Needed,
    half: bool,
    free: float,
    counts: Iterable[int] = range(1, MOST + 1),
) -> int | None:
    """The first of these numbers of ranks on which a preset fits; None for none."""
    for ranks in counts:
        with contextlib.suppress(InputError):  # so many cannot share the work
            if needed(args, preset, ranks, half) <= free:
                return ranks
    return None
