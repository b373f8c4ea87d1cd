"""Train a translator, measure it on sentences it has never seen, keep it, translate with it.

torchrun --nproc_per_node=2 lessons/lesson04_training/train.py
python lessons/lesson04_training/train.py --translate "Yesterday the old man bought a red car."
"""

import argparse
import time
from collections import deque
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lessons.lesson04_training.experiments.training_report import draw_training, list_examples
from shared.data.batching import collate
from shared.data.loading import PairDataset, batch_loader, check_lengths
from shared.data.tokenizer import Tokenizer
from shared.exercises.mine import put_mine_in_place
from shared.measuring.timing import synchronized_now
from shared.model.transformer import Transformer
from shared.ranks.group import Rank, process_group
from shared.results import format_table, speed, write_results
from shared.script import (
    autocast,
    choose_preset,
    lesson_parser,
    load_same_corpus,
    positive_int,
    prepare,
    progress,
    run_script,
)
from shared.training.checkpoint_files import copy_weights
from shared.training.decoding import (
    Decode,
    beam_search,
    greedy_decode,
    translate,
    translate_together,
)
from shared.training.loop import average_weights, global_batches, mean_loss, mean_over_ranks
from shared.training.loss import label_smoothed_loss
from shared.training.recipes import SHORT_TRANSLATION, TRANSLATION, Recipe
from shared.training.schedules import cosine_schedule, set_learning_rate, warmup_schedule
from shared.training.scoring import score_table
from shared.training.translator_files import load_translator, save_translator


def train(
    model: Transformer, loader: DataLoader, held_out: PairDataset, recipe: Recipe, rank: Rank,
    args: argparse.Namespace,
) -> tuple[list[float], list[tuple[int, float]]]:  # fmt: skip
    """Train in place; return the loss of every step and the held-out loss at every interval."""
    on_gpu = rank.device.type == "cuda"
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=on_gpu)
    unseen = collate(list(held_out)).to(rank.device)
    last: deque[dict[str, Tensor]] = deque(maxlen=recipe.average)
    losses, unseen_losses = [], []
    bar = progress(loader, rank, "training", total=args.steps)
    for step, batch in enumerate(bar, start=1):
        batch = batch.to(rank.device)
        optimizer.zero_grad()
        with autocast(args, rank.device):
            logits = model(batch.src, batch.tgt_in)  # (B, T, V)
            loss_sum = label_smoothed_loss(logits, batch.tgt_out, 0.1) * batch.num_tokens
        loss_sum.backward()  # gradients of this rank's tokens, added up
        # One all-reduce makes means over all ranks' tokens of them. Clipped after it: every rank
        # then finds the same norm, and takes the same step.
        loss = mean_over_ranks(model.parameters(), loss_sum.detach(), batch.num_tokens)
        nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)
        rate = recipe.learning_rate(step, args.steps, warmup_schedule, cosine_schedule)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        losses.append(loss)  # on the device: reading it would wait for a GPU
        if (args.steps - step) % recipe.interval == 0:
            last.append(copy_weights(model))
            if rank.is_main:  # the others wait in the next all-reduce
                unseen_losses.append((step, mean_loss(model, [unseen])))
    model.load_state_dict(average_weights(last))
    return torch.stack(losses).tolist(), unseen_losses


def run(args: argparse.Namespace, rank: Rank, decode: Decode) -> None:
    """Train, save, translate the test sentences and write down how well."""
    recipe = choose_preset(args, rank.device, TRANSLATION if args.steps else SHORT_TRANSLATION)
    args.steps, args.max_tokens = args.steps or recipe.steps, args.max_tokens or recipe.max_tokens
    corpus = load_same_corpus(args, recipe.num_train)
    tokenizer = Tokenizer.train((text for pair in corpus.train for text in pair), recipe.vocab_size)
    config = recipe.config(tokenizer.vocab_size)
    sources, references = map(list, zip(*corpus.test[: recipe.num_test], strict=True))
    check_lengths(sources, tokenizer, config.max_len, "test")
    torch.manual_seed(args.seed)  # the same first weights on every rank,
    model = Transformer(config).to(rank.device)
    torch.manual_seed(args.seed + 1 + rank.rank)  # and dropout of its own
    data = PairDataset.encode(corpus.train, tokenizer, config.max_len)
    held_out = PairDataset.encode(corpus.validation[:200], tokenizer, config.max_len)
    lengths = data.lengths()
    batches = global_batches(lengths, args.max_tokens, args.steps, args.seed, rank.world_size)
    workers = 2 if rank.device.type == "cuda" else 0  # on a GPU, in page-locked memory
    place = (rank.rank, rank.world_size)  # every rank takes its share of each batch
    loader = batch_loader(data, batches, workers, workers > 0, *place, collate=collate)

    began, cpu_began = synchronized_now(rank.device), time.process_time()
    losses, curve = train(model, loader, held_out, recipe, rank, args)
    seconds, cpu_seconds = synchronized_now(rank.device) - began, time.process_time() - cpu_began
    if rank.is_main:  # first of all: what training took hours for
        notes = {"steps": args.steps, "dataset": corpus.name}
        save_translator(args.out / "translator.pt", model, tokenizer, **notes)
    translations = translate_together(model, tokenizer, sources, decode)
    if not rank.is_main:
        return
    scores = score_table(translations, references)
    print(format_table(scores))
    num_tokens = sum(lengths[index][1] for batch in batches for index in batch)
    row = {"steps": args.steps, "last loss": round(losses[-1], 4)}
    row |= {"BLEU": scores[0]["value"], "exact, %": scores[-1]["value"]}
    row |= speed(seconds, args.steps, num_tokens, rank.device)
    words = f"BLEU {row['BLEU']:.1f}, {row['exact, %']:.1f} % exact"
    figures = {"training.png": draw_training(losses, curve, args.dataset)}
    write_results(
        args, rank, headline=words, table=[row], figures=figures, scores=scores, losses=losses,
        held_out=curve, training_seconds=round(seconds, 1), cpu_seconds=round(cpu_seconds, 1),
        examples=list_examples(sources, translations, references), notes=corpus.notes,
    )  # fmt: skip


def main() -> None:
    parser = lesson_parser(__file__, __doc__, dataset="grammar", precision=True, clip=True)
    parser.add_argument("--max-tokens", type=positive_int, help="padded tokens a step, all ranks")
    parser.add_argument("--beam", type=positive_int, default=5, help="beam size, 1: greedy (5)")
    parser.add_argument("--translate", nargs="+", metavar="SENTENCE", help="use the model in --out")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        if args.translate:  # writes nothing, and leaves --out as it is
            put_mine_in_place("04", globals(), mine=args.mine)
        else:
            prepare(args, rank, globals())
        decode = partial(beam_search, beam_size=args.beam) if args.beam > 1 else greedy_decode
        if not args.translate:
            run(args, rank, decode)
        elif rank.is_main:
            model, tokenizer, _ = load_translator(args.out / "translator.pt")
            print(*translate(model.to(rank.device), tokenizer, args.translate, decode), sep="\n")


if __name__ == "__main__":
    run_script(main)
