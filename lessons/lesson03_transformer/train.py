"""Does it matter where the norm stands? Four Transformers learn to translate, shared out to ranks.

torchrun --nproc_per_node=2 lessons/lesson03_transformer/train.py

The variants are pre-LN and post-LN, each with and without warm-up; all else is equal: data, order,
seeds, peak learning rate. Rank r of n trains variants r, r + n, ...; rank 0 gathers the curves.
"""

import argparse
import itertools
import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lessons.lesson03_transformer.experiments import norm_runs
from shared import script
from shared.data.batching import Batch, collate, random_batches
from shared.data.loading import PairDataset
from shared.data.tokenizer import Tokenizer
from shared.errors import InputError
from shared.measuring.timing import synchronized_now
from shared.model.config import Norm, TransformerConfig
from shared.model.transformer import Transformer
from shared.ranks.group import Rank, process_group
from shared.results import speed, write_results

MAX_LEN = 128  # tokens of a sentence; longer pairs are left out
VARIANTS: list[tuple[Norm, bool]] = [
    ("pre", False), ("post", False), ("pre", True), ("post", True),
]  # fmt: skip


@dataclass(frozen=True)
class Preset:
    steps: int
    peak: float  # learning rate, reached at once or after the warm-up
    warmup: int  # steps of the variants that warm up
    batch_size: int
    num_pairs: int
    vocab_size: int
    d_model: int
    num_heads: int
    num_layers: int  # of each stack


PRESETS = {
    "tiny": Preset(6, 3e-3, 3, 8, 200, 300, 16, 2, 2),
    "small": Preset(160, 5e-3, 50, 16, 4_000, 400, 32, 4, 4),
    "large": Preset(2000, 1e-3, 500, 256, 15_000, 1000, 256, 8, 12),
}


def load(args: argparse.Namespace, preset: Preset) -> tuple[PairDataset, Batch, int]:
    """Training pairs as token ids, one batch held out, and the size of the vocabulary."""
    corpus = script.load_same_corpus(args, preset.num_pairs)
    texts = [text for pair in corpus.train for text in (pair.src, pair.tgt)]
    tokenizer = Tokenizer.train(texts, preset.vocab_size)
    pairs = PairDataset.encode(corpus.train, tokenizer, MAX_LEN)
    held_out = PairDataset.encode(corpus.validation[:256], tokenizer, MAX_LEN)
    return pairs, collate(list(held_out)), tokenizer.vocab_size


def loss_of(model: nn.Module, batch: Batch, precision: torch.autocast) -> torch.Tensor:
    """Mean cross-entropy per unpadded target token, in nats."""
    with precision:
        logits = model(batch.src, batch.tgt_in)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.tgt_out.flatten(), ignore_index=0)


def train(variant: tuple[Norm, bool], data, preset: Preset, args, rank: Rank) -> dict:
    """Train one model; return its losses, its gradients before step 1, its validation loss."""
    norm, warm = variant
    label = f"{norm}-LN, {'warm-up' if warm else 'no warm-up'}"
    torch.manual_seed(args.seed)
    precision = script.autocast(args, rank.device)
    pairs, held_out, vocab_size = data
    D, num_layers = preset.d_model, preset.num_layers
    config = TransformerConfig(
        vocab_size, D, preset.num_heads, num_layers, 4 * D, 0.0, norm, max_len=MAX_LEN
    )
    model = Transformer(config).to(rank.device)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    epochs = (
        random_batches(pairs, preset.batch_size, args.seed + epoch) for epoch in itertools.count()
    )
    batches = itertools.chain.from_iterable(epochs)
    losses, first_gradients, taken, num_tokens = [], [], 0.0, 0
    for step in script.progress(range(1, preset.steps + 1), rank, label):
        batch = collate([pairs[index] for index in next(batches)]).to(rank.device)
        began = synchronized_now(rank.device)
        for group in optimizer.param_groups:
            group["lr"] = preset.peak * (min(1.0, step / preset.warmup) if warm else 1.0)
        loss = loss_of(model, batch, precision)
        optimizer.zero_grad()
        loss.backward()
        first_gradients = first_gradients or norm_runs.gradient_norms(model)
        optimizer.step()
        losses.append(loss.detach())
        taken += synchronized_now(rank.device) - began
        num_tokens += batch.num_tokens
    model.eval()
    with torch.no_grad():
        validation = float(loss_of(model, held_out.to(rank.device), precision))
    losses = [round(each, 4) for each in torch.stack(losses).tolist()]
    return {
        "variant": label, "norm": norm, "warmup": warm, "rank": rank.rank, "losses": losses,
        "first_gradients": first_gradients, "validation": validation,
        "speed": speed(taken, preset.steps, num_tokens, rank.device),
    }  # fmt: skip


def main() -> None:
    parser = script.lesson_parser(__file__, __doc__, dataset="grammar", precision=True)
    parser.add_argument("--layers", type=script.positive_int, help="of each stack (the preset's)")
    parser.add_argument("--peak", type=float, help="learning rate (the preset's)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the variants run side by side, one process each
    with process_group(args.device) as rank:
        script.prepare(args, rank, globals())
        preset = script.choose_preset(args, rank.device, PRESETS)
        given = {"steps": args.steps, "num_layers": args.layers, "peak": args.peak}
        preset = replace(preset, **{k: v for k, v in given.items() if v is not None})
        if not 0 < preset.peak < math.inf:
            raise InputError(f"--peak must be a learning rate above 0, not {preset.peak}")
        data = load(args, preset)
        mine = VARIANTS[rank.rank :: rank.world_size]
        runs = [train(each, data, preset, args, rank) for each in mine]
        received: list | None = [None] * rank.world_size if rank.is_main else None
        dist.gather_object(runs, received)
        if received is not None:
            runs = sorted(itertools.chain(*received), key=lambda run: (run["norm"], run["warmup"]))
            floor = norm_runs.frequency_loss(data[1].tgt_out)
            figures = {"norms.png": norm_runs.draw_runs(runs, floor)}
            losses = ", ".join(f"{run['variant']} {run['validation']:.2f}" for run in runs)
            headline = f"validation loss (frequencies alone: {floor:.2f}): {losses}"
            table = norm_runs.tabulate(runs)
            write_results(
                args, rank, headline=headline, table=table, figures=figures, floor=floor, runs=runs
            )


if __name__ == "__main__":
    script.run_script(main)
