"""Train a language model that is cut into stages, one or more on each rank.

--schedule gpipe, 1f1b or interleaved (with --chunks stages a rank) says in which order a rank does
its forwards and backwards. The stages are cut so that the slowest is as fast as can be. Every rank
has the tokens of a step, so that only vectors travel. The table has the bubble by formula and as
measured, timeline.png is the last step as it ran.
"""

import argparse
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shared.errors import InputError
from shared.experiments.lesson10_text import load_tokens, rows
from shared.experiments.lesson15_results import RECIPES, Seen, conclude, costs_of
from shared.measuring.timing import synchronized_now
from shared.model.language_model import LanguageModel
from shared.pipeline.executor import Pipeline
from shared.pipeline.schedules import Table
from shared.pipeline.stages import parts_of
from shared.ranks.group import process_group
from shared.script import (
    autocast,
    choose_preset,
    lesson_parser,
    load_same_text,
    positive_int,
    prepare,
    progress,
    run_script,
)
from shared.training.schedules import set_learning_rate
from solutions.lesson15_pipeline_parallel import (
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
    split_stages,
)


def plan(args: argparse.Namespace, world_size: int) -> Table:
    """The table of a step."""
    if args.schedule == "interleaved":
        return interleaved_schedule(world_size, args.micro_batches, args.chunks)
    schedule = gpipe_schedule if args.schedule == "gpipe" else one_f_one_b_schedule
    return schedule(world_size, args.micro_batches)


def check_sizes(args: argparse.Namespace, world_size: int, num_rows: int) -> None:
    """Choose the micro-batches where nobody did; raise InputError for sizes that do not fit."""
    if args.chunks > 1 and args.schedule != "interleaved":
        raise InputError(f"--chunks {args.chunks} is for --schedule interleaved")
    if args.chunks > 1 and world_size == 1:
        raise InputError(f"--chunks {args.chunks} on one rank: it would send to itself")
    if args.micro_batches is None:  # a multiple of the ranks, for interleaving
        args.micro_batches = world_size * math.ceil(8 / world_size)
    if args.micro_batches > num_rows:
        raise InputError(
            f"--micro-batches {args.micro_batches}: a step has {num_rows} rows, and a micro-batch "
            f"needs one; take {num_rows} or fewer"
        )


def main() -> None:
    parser = lesson_parser("15_pipeline_parallel", __doc__, text="stdlib", precision=True)
    parser.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved"), default="1f1b")
    parser.add_argument("--micro-batches", type=positive_int, help="of a step (8, or a few more)")
    parser.add_argument("--chunks", type=positive_int, default=1, help="stages a rank (1)")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe, cast = choose_preset(args, rank.device, RECIPES), autocast(args, rank.device)
        check_sizes(args, rank.world_size, recipe.batch)
        table = plan(args, rank.world_size)
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        torch.manual_seed(args.seed)
        parts = parts_of(LanguageModel(recipe.config(vocab_size)).to(rank.device))
        for part in parts:
            part.forward = cast(part.forward)
        costs = costs_of(recipe, vocab_size)
        pipeline = Pipeline(parts, split_stages(costs, rank.world_size * args.chunks))
        del parts
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=recipe.peak, betas=(0.9, 0.95))
        seen, steps, everything = Seen(), args.steps or recipe.steps, slice(0, recipe.batch)
        pipeline.clock = partial(synchronized_now, rank.device)

        def loss(logits: Tensor, batch: Tensor) -> Tensor:
            own = follow[batch.data_ptr()]
            total = F.cross_entropy(logits.flatten(0, 1).float(), own.flatten(), reduction="sum")
            return total / (recipe.batch * recipe.length)  # all tokens of the step

        for step in progress(range(1, steps + 1), rank, "training"):
            tokens, after = rows(ids, step, args.seed, recipe.batch, recipe.length, everything)
            batches = [x.to(rank.device) for x in tokens.tensor_split(args.micro_batches)]
            targets = [x.to(rank.device) for x in after.tensor_split(args.micro_batches)]
            follow = {x.data_ptr(): y for x, y in zip(batches, targets, strict=True)}
            set_learning_rate(optimizer, recipe.learning_rate(step, steps, recipe.peak))
            optimizer.zero_grad()
            dist.barrier()
            began = synchronized_now(rank.device)
            losses = pipeline.train_step(table, batches, loss)
            optimizer.step()
            seen.add(synchronized_now(rank.device) - began, losses, pipeline.events, began)
        conclude(args, rank, recipe, table, pipeline, seen)


if __name__ == "__main__":
    run_script(main)
