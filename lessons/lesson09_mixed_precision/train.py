"""Train the translator in 16 bits: float32 masters, a loss scale, micro-batches weighted by tokens.

--precision bf16 or fp16 keeps the *weights* in the format; autocast_* keeps them in float32 and
casts inside the forward. --engine torch does the same with torch's own AdamW and GradScaler. A
float32 run beside it takes turns at the first steps, for the ratio of times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lessons.lesson09_mixed_precision.experiments.results import (
    PRECISIONS,
    Seen,
    conclude,
    cut,
    warning_for,
)
from shared.data.batching import Batch
from shared.data.loading import PairDataset, batch_loader
from shared.data.tokenizer import Tokenizer
from shared.measuring.timing import synchronized_now
from shared.model.config import TransformerConfig
from shared.model.transformer import Transformer
from shared.ranks.group import Rank, process_group
from shared.script import (
    choose_preset,
    lesson_parser,
    load_same_corpus,
    positive_int,
    prepare,
    progress,
    run_script,
)
from shared.training.loop import batch_plan
from shared.training.loss import label_smoothed_loss
from shared.training.precision import DynamicLossScaler, MasterCopies, MasterWeightAdamW
from shared.training.recipes import TRANSLATION
from shared.training.schedules import set_learning_rate
from solutions.lesson09_mixed_precision import accumulate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TIMED = slice(2, 12)  # steps of which the time is taken, beside a float32 run


@dataclass
class Run:
    """A model in a precision, and all that steps it."""

    model: Transformer
    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    masters: MasterCopies | None
    scaler: Any
    loss_of: Callable[[nn.Module, Batch], Tensor]
    seen: Seen


def build(precision: str, engine: str, config: TransformerConfig, rank: Rank) -> Run:
    """16-bit weights get masters; gradients that pass through fp16 get a loss scale."""
    cast, name = precision.startswith("autocast_"), precision.removeprefix("autocast_")
    weights, device, by_hand = "fp32" if cast else name, rank.device.type, engine == "by_hand"
    model = Transformer(config).to(rank.device, DTYPES[weights])
    # MasterWeightAdamW steps on 16-bit gradients. Those of fp16 are unscaled first, in float32.
    separate = weights == "fp16" or (weights == "bf16" and not by_hand)
    masters = MasterCopies(model.parameters()) if separate else None
    adamw = MasterWeightAdamW if by_hand and weights == "bf16" else torch.optim.AdamW
    trained = masters.masters if masters else list(model.parameters())
    optimizer = adamw(trained, lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
    scaler = None
    if name == "fp16":
        scaler = DynamicLossScaler() if by_hand else torch.amp.GradScaler(device)

    def loss_of(ddp: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(device, dtype=DTYPES[name] if cast else None, enabled=cast):
            logits = ddp(batch.src, batch.tgt_in)
        return label_smoothed_loss(logits, batch.tgt_out)  # in float32

    return Run(model, DistributedDataParallel(model), optimizer, masters, scaler, loss_of, Seen())


def train_step(run: Run, micro_batches: list[Batch], rate: float) -> None:
    """Scale, backward, unscale, clip, step, update: clipping between unscaling and the step."""
    run.ddp.zero_grad()
    run.optimizer.zero_grad()  # the masters' own gradients, where there are masters
    run.seen.losses.append(accumulate(run.ddp, micro_batches, run.loss_of, run.scaler))
    if run.masters:
        run.masters.take_gradients()  # to float32, before they are divided
    if run.scaler:
        run.scaler.unscale_(run.optimizer)
    trained = [p for group in run.optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(trained, 1.0)
    set_learning_rate(run.optimizer, rate)
    if run.scaler:
        before = run.scaler.get_scale()
        run.scaler.step(run.optimizer)
        run.scaler.update()
        run.seen.scales.append(run.scaler.get_scale())
        run.seen.skipped += run.scaler.get_scale() < before
    else:
        run.optimizer.step()
    if run.masters:
        run.masters.give_back()


def main() -> None:
    parser = lesson_parser(__file__, __doc__, dataset="grammar")
    what = "of weights and products (autocast_bf16)"
    parser.add_argument("--precision", choices=PRECISIONS, default="autocast_bf16", help=what)
    parser.add_argument("--engine", choices=("by_hand", "torch"), default="by_hand")
    parser.add_argument("--micro-batches", type=positive_int, default=2, help="a step and rank (2)")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, TRANSLATION)
        steps = args.steps or min(recipe.steps, 40)
        if rank.is_main and (words := warning_for(args.precision, rank.device)):
            print(f"note: {words}", flush=True)
        corpus = load_same_corpus(args, recipe.num_train)
        texts = [text for pair in corpus.train for text in pair]
        tokenizer = Tokenizer.train(texts, recipe.vocab_size)
        config = recipe.config(tokenizer.vocab_size)
        runs = []
        for precision, engine in ((args.precision, args.engine), ("fp32", "torch")):
            torch.manual_seed(args.seed)  # both begin with the same weights
            runs.append(build(precision, engine, config, rank))
        torch.manual_seed(args.seed + 1 + rank.rank)  # dropout of its own on every rank
        data = PairDataset.encode(corpus.train, tokenizer, config.max_len)
        plan = (data.lengths(), recipe.max_tokens, steps, args.seed, rank.rank, rank.world_size)
        for number, batch in enumerate(
            progress(batch_loader(data, batch_plan(*plan)), rank, "training")
        ):
            for run in runs if number < TIMED.stop else runs[:1]:
                dist.barrier()
                began = synchronized_now(rank.device)
                pieces = cut(batch.to(rank.device), args.micro_batches)
                train_step(run, pieces, recipe.learning_rate(number + 1, steps))
                if number in range(TIMED.start, TIMED.stop) or steps <= TIMED.start:
                    run.seen.seconds.append(synchronized_now(rank.device) - began)
                    run.seen.tokens += batch.num_tokens
        conclude(args, rank, runs[0].model, runs[0].optimizer, *(run.seen for run in runs))


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
