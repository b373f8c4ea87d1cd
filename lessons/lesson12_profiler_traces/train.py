"""Train a language model under the profiler: a trace a rank, a merged one, and where time goes.

--slow gives the run one fault and puts a healthy one beside it; --read DIR trains nothing."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lessons.lesson12_profiler_traces.experiments.report import (
    PRESETS,
    Readers,
    Run,
    Size,
    bytes_needed,
    conclude,
    read_folder,
    recorded_memory,
)
from shared.errors import InputError
from shared.measuring.timing import synchronized_now
from shared.measuring.trace import quiet_stderr
from shared.model.language_model import LanguageModel
from shared.ranks.group import Rank, process_group
from shared.script import (
    autocast,
    checked_out,
    choose_preset,
    lesson_parser,
    load_same_text,
    prepare,
    progress,
    run_script,
)
from solutions.lesson12_profiler_traces import (
    data_stall_fraction,
    diagnose,
    model_flops_utilization,
    overlap_fraction,
    profile_training,
)

FAULTS = ("none", "loader", "item", "buckets", "kernels", "straggler")
PLAN = {"wait": 1, "warmup": 2, "active": 3}  # steps
PLAIN = 4  # steps that are timed, without the profiler


class Windows(Dataset[Tensor]):
    """Pieces of a text as bytes; `pause` seconds pass before each, as from a slow disk."""

    def __init__(self, text: bytes, length: int, pause: float) -> None:
        if len(text) <= length:
            raise InputError(f"a text of {len(text)} bytes is shorter than a sequence of {length}")
        self.text, self.length, self.pause = text, length, pause

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.pause)
        start = index * self.length % (len(self.text) - self.length)  # round and round
        piece = self.text[start : start + self.length + 1]
        return torch.frombuffer(bytearray(piece), dtype=torch.uint8).long()


def loader(text: bytes, size: Size, rank: Rank, steps: int, pause: float) -> Iterator[Tensor]:
    """This rank's batches, in the order of the text, on its device."""
    firsts = [(step * rank.world_size + rank.rank) * size.rows for step in range(steps)]
    batches = [list(range(first, first + size.rows)) for first in firsts]
    for batch in DataLoader(Windows(text, size.length, pause / size.rows), batch_sampler=batches):
        yield batch.to(rank.device, non_blocking=True)


def loss_of(model: nn.Module, tokens: Tensor, cast: torch.autocast, slow: str = "none") -> Tensor:
    """The mean loss a token, with the faults that lie in the forward."""
    parts = tokens.split(1) if slow == "kernels" else (tokens,)
    with cast:
        logits = torch.cat([model(part[:, :-1]) for part in parts])
    if slow == "item":  # accuracy, one token at a time
        guesses = logits.detach().argmax(dim=-1).flatten()
        sum(a.item() == b.item() for a, b in zip(guesses, tokens[:, 1:].flatten(), strict=True))
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(slow: str, size: Size, text: bytes, rank: Rank, args: argparse.Namespace) -> Run:
    """Some steps under the profiler, then a few without it, which are the ones that are timed."""
    torch.manual_seed(args.seed)
    model: nn.Module = LanguageModel(size.config()).to(rank.device)
    if args.engine == "ddp":  # a bucket of a byte is a message for each parameter
        model = DistributedDataParallel(model, bucket_cap_mb=1e-6 if slow == "buckets" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    folder = checked_out(args.out / slow)
    losses, cast = list[Tensor](), autocast(args, rank.device)

    def remembered(model: nn.Module, batch: Tensor) -> Tensor:
        if slow == "straggler" and rank.rank == rank.world_size - 1:
            time.sleep(args.pause)  # as if this rank's process stood still
        loss = loss_of(model, batch, cast, slow)
        losses.append(loss.detach())  # not .item(): nothing waits for it
        return loss

    profiled = args.steps or sum(PLAN.values())
    batches = loader(text, size, rank, profiled + PLAIN, args.pause * (slow == "loader"))
    with quiet_stderr():
        first = (next(batches) for _ in progress(range(profiled), rank, f"{slow}, profiled"))
        path = profile_training(model, optimizer, first, remembered, folder, **PLAN)
    dist.barrier()
    began, taken = synchronized_now(rank.device), list[float]()
    for batch in batches:
        remembered(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append((now := synchronized_now(rank.device)) - began)
        began = now
    memory = recorded_memory(rank, folder, lambda: loss_of(model, batch, cast).backward())
    return Run(slow, path, min(taken), torch.stack(losses), (size.rows, size.length), memory)


def main() -> None:
    parser = lesson_parser(__file__, __doc__, text="stdlib", precision=True)
    parser.add_argument("--engine", choices=("single", "ddp"), default="ddp", help="(ddp)")
    parser.add_argument("--slow", choices=FAULTS, default="none", help="the run's one fault")
    parser.add_argument("--pause", type=float, default=0.5, help="of a slow rank or loader (0.5 s)")
    parser.add_argument("--read", type=Path, metavar="PATH", help="read traces, no training")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        readers = Readers(data_stall_fraction, overlap_fraction, model_flops_utilization, diagnose)
        if args.read:
            return read_folder(args, rank, readers)
        alone = args.engine == "single" or rank.world_size == 1
        if alone and args.slow in ("buckets", "straggler"):
            raise InputError(f"--slow {args.slow} needs --engine ddp on two ranks or more")
        if args.steps and args.steps < sum(PLAN.values()):
            raise InputError(f"--steps {args.steps}: the schedule takes {sum(PLAN.values())}")
        if not 0 < args.pause <= 60:
            raise InputError(f"--pause must be above 0 seconds, at most 60, got {args.pause}")
        size = choose_preset(args, rank.device, PRESETS, bytes_needed)
        text = load_same_text(args).train.encode()
        names = dict.fromkeys(("none", args.slow))  # a healthy run beside it
        runs = [train(name, size, text, rank, args) for name in names]
        conclude(args, rank, runs, size.config(), readers)


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
