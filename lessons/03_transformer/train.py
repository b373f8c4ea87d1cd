"""Does it matter where the norm stands? Four Transformers learn to translate, shared out to ranks.

torchrun --nproc_per_node=2 lessons/03_transformer/train.py

The variants are pre-LN and post-LN, each with and without warm-up; all else is equal: data, order,
seeds, peak learning rate. Rank r of n trains variants r, r + n, ...; rank 0 gathers the curves.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shared import script
from shared.data.batching import Batch, collate, random_batches
from shared.data.corpora import Empty, load_corpus
from shared.data.loading import PairDataset
from shared.data.tokenizer import Tokenizer
from shared.errors import InputError
from shared.exercises.answers import lesson_answers
from shared.experiments.lesson03_norms import draw_runs, frequency_loss, tabulate
from shared.model.config import Norm, TransformerConfig
from shared.plots import save_figure
from shared.ranks.group import Rank, process_group

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

    def __post_init__(self) -> None:
        if not 0 < self.peak < math.inf:
            raise InputError(f"--peak must be a learning rate above 0, not {self.peak}")


PRESETS = {
    "tiny": Preset(6, 3e-3, 3, 8, 200, 300, 16, 2, 2),
    "small": Preset(240, 5e-3, 80, 16, 15_000, 400, 32, 4, 4),
    "large": Preset(2000, 1e-3, 500, 256, 15_000, 1000, 256, 8, 12),
}


def load(dataset: str, empty: Empty, preset: Preset) -> tuple[PairDataset, Batch, int]:
    """Training pairs as token ids, one batch held out, and the size of the vocabulary."""
    corpus = load_corpus(dataset, empty=empty, max_train=preset.num_pairs)
    texts = [text for pair in corpus.train for text in (pair.src, pair.tgt)]
    tokenizer = Tokenizer.train(texts, preset.vocab_size)
    pairs, held_out = (
        PairDataset.encode(each, tokenizer, MAX_LEN)
        for each in (corpus.train, corpus.validation[:256])
    )
    return pairs, collate(list(held_out)), tokenizer.vocab_size


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy per unpadded target token, in nats; bf16 products on a GPU."""
    device = batch.src.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(batch.src, batch.tgt_in)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.tgt_out.flatten(), ignore_index=0)


def gradient_norms(model) -> list[float]:
    """Length of the gradient of each layer's feed-forward, encoder first, then decoder."""
    layers = [*model.encoder_layers, *model.decoder_layers]
    parts = [[each.grad.flatten() for each in layer.feed_forward.parameters()] for layer in layers]
    return [float(torch.cat(part).norm()) for part in parts]


def train(variant: tuple[Norm, bool], data, preset: Preset, parts, seed: int, rank: Rank) -> dict:
    """Train one model; return its losses, its gradients before step 1, its validation loss."""
    norm, warm = variant
    label = f"{norm}-LN, {'warm-up' if warm else 'no warm-up'}"
    torch.manual_seed(seed)
    pairs, held_out, vocab_size = data
    D, num_layers = preset.d_model, preset.num_layers
    config = TransformerConfig(
        vocab_size, D, preset.num_heads, num_layers, 4 * D, 0.0, norm, max_len=MAX_LEN
    )
    model = parts.Transformer(config).to(rank.device)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    epochs = (random_batches(pairs, preset.batch_size, seed + epoch) for epoch in itertools.count())
    batches = itertools.chain.from_iterable(epochs)
    losses, first_gradients = [], []
    for step in script.progress(range(1, preset.steps + 1), rank, label):
        batch = collate([pairs[index] for index in next(batches)]).to(rank.device)
        for group in optimizer.param_groups:
            group["lr"] = preset.peak * (min(1.0, step / preset.warmup) if warm else 1.0)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        first_gradients = first_gradients or gradient_norms(model)
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        validation = float(loss_of(model, held_out.to(rank.device)))
    losses = [round(each, 4) for each in torch.stack(losses).tolist()]
    result = {"variant": label, "norm": norm, "warmup": warm, "rank": rank.rank, "losses": losses}
    return result | {"first_gradients": first_gradients, "validation": validation}


def main() -> None:
    parser = script.lesson_parser("03_transformer", __doc__, dataset="grammar")
    parser.add_argument("--layers", type=script.positive_int, help="of each stack (the preset's)")
    parser.add_argument("--peak", type=float, help="learning rate (the preset's)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the variants run side by side, one process each
    with process_group(args.device) as rank:
        preset = script.choose_preset(args, rank.device, PRESETS)
        given = {"steps": args.steps, "num_layers": args.layers, "peak": args.peak}
        given = {key: value for key, value in given.items() if value is not None}
        preset = replace(preset, **given)
        out, parts = script.checked_out(args.out), lesson_answers("03", mine=args.mine)
        data = load(args.dataset, args.empty, preset)

        mine = VARIANTS[rank.rank :: rank.world_size]
        runs = [train(each, data, preset, parts, args.seed, rank) for each in mine]
        received: list | None = [None] * rank.world_size if rank.is_main else None
        dist.gather_object(runs, received)
        if received is not None:
            runs = sorted(itertools.chain(*received), key=lambda run: (run["norm"], run["warmup"]))
            floor = frequency_loss(data[1].tgt_out)
            save_figure(draw_runs(runs, floor), out / "norms.png")
            losses = ", ".join(f"{run['variant']} {run['validation']:.2f}" for run in runs)
            headline = f"validation loss (frequencies alone: {floor:.2f}): {losses}"
            table = tabulate(runs)
            script.write_metrics(out, rank, headline=headline, table=table, floor=floor, runs=runs)


if __name__ == "__main__":
    script.run_script(main)
