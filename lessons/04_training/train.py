"""Train a translator, measure it on sentences it has never seen, keep it, translate with it.

torchrun --nproc_per_node=2 lessons/04_training/train.py
python lessons/04_training/train.py --translate "Yesterday the old man bought a red car."
"""

import argparse
import time
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch
from torch.utils.data import DataLoader

from shared.data.batching import Batch
from shared.data.corpora import Pair, load_corpus
from shared.data.loading import PairDataset, batch_loader, check_lengths
from shared.data.tokenizer import Tokenizer
from shared.exercises.answers import lesson_answers
from shared.model.transformer import Transformer
from shared.plots import save_figure, use_style
from shared.ranks.group import Rank, process_group
from shared.script import (
    checked_out,
    choose_preset,
    lesson_parser,
    positive_int,
    progress,
    run_script,
    write_metrics,
)
from shared.training.checkpoint_files import copy_weights
from shared.training.decoding import Decode, translate, translate_together
from shared.training.loop import average_weights, batch_plan, mean_loss, training_step
from shared.training.recipes import TRANSLATION, Recipe
from shared.training.scoring import score_table
from shared.training.translator_files import load_translator, save_translator


def make_loader(
    pairs: list[Pair], tokenizer: Tokenizer, max_len: int, rank: Rank,
    args: argparse.Namespace, parts: SimpleNamespace,
) -> DataLoader:  # fmt: skip
    """This rank's batches, step by step; on a GPU made by two workers in page-locked memory."""
    encoded = PairDataset.encode(pairs, tokenizer, max_len)
    plan = batch_plan(
        encoded.lengths(), args.max_tokens, args.steps, args.seed, rank.rank, rank.world_size
    )
    on_gpu = rank.device.type == "cuda"
    workers = 2 if on_gpu else 0
    return batch_loader(encoded, plan, workers, pin_memory=on_gpu, collate=parts.collate)


def train(
    model: Transformer, loader: DataLoader[Batch], held_out: Batch, recipe: Recipe, rank: Rank,
    args: argparse.Namespace, parts: SimpleNamespace,
) -> tuple[list[float], list[tuple[int, float]]]:  # fmt: skip
    """Train in place; return the loss of every step and the held-out loss at every interval."""
    on_gpu = rank.device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=on_gpu)
    precision = torch.bfloat16 if on_gpu else None
    last: deque[dict[str, torch.Tensor]] = deque(maxlen=recipe.average)
    losses, held_out_losses = [], []
    for step, batch in enumerate(progress(loader, rank, "training"), start=1):
        batch = batch.to(rank.device, non_blocking=True)
        rate = recipe.learning_rate(step, args.steps, parts.warmup_schedule, parts.cosine_schedule)
        # Loss and gradients of this rank's pairs, one all-reduce, the same Adam step on all ranks.
        criterion = parts.label_smoothed_loss
        losses.append(training_step(model, optimizer, batch, rate, 0.1, precision, criterion))
        if (args.steps - step) % recipe.interval == 0:
            last.append(copy_weights(model))
            if rank.is_main:  # the others wait in the next all-reduce
                held_out_losses.append((step, mean_loss(model, [held_out])))
    model.load_state_dict(average_weights(last))
    return torch.stack(losses).tolist(), held_out_losses


def draw(losses: list[float], held_out: list, args: argparse.Namespace) -> None:
    """The loss curve as training.png."""
    use_style()
    figure, ax = plt.subplots()
    ax.plot(range(1, len(losses) + 1), losses, linewidth=0.8, label="training, label-smoothed")
    ax.plot(*zip(*held_out, strict=True), "o-", markersize=4, label="held out, not smoothed")
    ax.set(xlabel="step", ylabel="loss (nats per token)", title=f"Training on {args.dataset}")
    ax.legend()
    save_figure(figure, args.out / "training.png")


def main() -> None:
    parser = lesson_parser("04_training", __doc__, dataset="grammar")
    parser.add_argument("--max-tokens", type=positive_int, help="padded tokens a step, all ranks")
    parser.add_argument("--beam", type=positive_int, default=5, help="beam size, 1: greedy (5)")
    parser.add_argument("--translate", nargs="+", metavar="SENTENCE", help="use the model in --out")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        parts = lesson_answers("04", mine=args.mine)
        beam = partial(parts.beam_search, beam_size=args.beam)
        decode = beam if args.beam > 1 else parts.greedy_decode
        checkpoint = checked_out(args.out) / "translator.pt"
        if not args.translate:
            run(args, rank, parts, decode, checkpoint)
        elif rank.is_main:
            model, tokenizer, _ = load_translator(checkpoint)
            print(*translate(model.to(rank.device), tokenizer, args.translate, decode), sep="\n")


def run(
    args: argparse.Namespace, rank: Rank, parts: SimpleNamespace, decode: Decode, checkpoint: Path
) -> None:
    """Train, save, translate the test sentences and write down how well."""
    recipe = choose_preset(args, rank.device, TRANSLATION)
    args.steps, args.max_tokens = args.steps or recipe.steps, args.max_tokens or recipe.max_tokens
    corpus = load_corpus(args.dataset, empty=args.empty, max_train=recipe.num_train)
    tokenizer = Tokenizer.train((text for pair in corpus.train for text in pair), recipe.vocab_size)
    config = recipe.config(tokenizer.vocab_size)
    sources, references = map(list, zip(*corpus.test[: recipe.num_test], strict=True))
    check_lengths(sources, tokenizer, config.max_len, "test")
    torch.manual_seed(args.seed)  # the same first weights on every rank,
    model = Transformer(config).to(rank.device)
    torch.manual_seed(args.seed + 1 + rank.rank)  # and dropout of its own
    loader = make_loader(corpus.train, tokenizer, config.max_len, rank, args, parts)
    validation = PairDataset.encode(corpus.validation[:200], tokenizer, config.max_len)
    held_out = parts.collate(list(validation)).to(rank.device)
    began, cpu_began = time.perf_counter(), time.process_time()
    losses, curve = train(model, loader, held_out, recipe, rank, args, parts)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    if rank.is_main:  # first of all: what training took hours for
        save_translator(checkpoint, model, tokenizer, steps=args.steps, dataset=corpus.name)
    translations = translate_together(model, tokenizer, sources, decode)
    if not rank.is_main:
        return
    draw(losses, curve, args)
    table = score_table(translations, references)
    rows = islice(zip(sources, translations, references, strict=True), 10)
    examples = [{"source": s, "translation": t, "reference": r} for s, t, r in rows]
    headline = f"BLEU {table[0]['value']:.1f}, {table[-1]['value']:.1f} % exact"
    write_metrics(
        args.out, rank, headline=headline, table=table, training_seconds=round(seconds, 1),
        cpu_seconds=round(cpu_seconds, 1), losses=losses, held_out=curve, examples=examples,
        notes=corpus.notes,
    )  # fmt: skip


if __name__ == "__main__":
    run_script(main)
