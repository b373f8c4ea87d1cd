"""Train a language model that is cut into stages, one or more on each rank.

--schedule gpipe, 1f1b or interleaved (with --chunks stages a rank) says in which order a rank does
its forwards and backwards. The stages are cut so that the slowest is as fast as can be. Every rank
has the tokens of a step, so that only vectors travel. The table has the bubble by formula, and
what the ranks waited for; timeline.png is the last step as it ran.
"""

import argparse
import gc
import math
from functools import partial

import torch
import torch.distributed as dist

from lessons.lesson15_pipeline_parallel.experiments.runs import (
    RECIPES,
    Seen,
    bytes_needed,
    conclude,
    costs_of,
)
from shared.data.rows import Text
from shared.errors import InputError
from shared.measuring.timing import synchronized_now
from shared.model.language_model import LanguageModel
from shared.pipeline.engine import PipelineEngine
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
from shared.training.engine import train_step
from shared.training.language_recipes import load_tokens, rows
from shared.training.named_checkpoint import ModuleLayout, first_step, save_named
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


def cut(args: argparse.Namespace, costs: list[float], world_size: int) -> list[range]:
    """The parts of each stage."""
    most = max(len(costs) // world_size, 1)
    if args.chunks > most:
        have = f"{len(costs)} parts of the model on {world_size} ranks"
        raise InputError(f"--chunks {args.chunks}: {have}; take {most} at most")
    return split_stages(costs, world_size * args.chunks)


def main() -> None:
    parser = lesson_parser(__file__, __doc__, text="stdlib", precision=True, checkpoint=True)
    schedules = ("gpipe", "1f1b", "interleaved")
    parser.add_argument("--schedule", choices=schedules, default="1f1b", help="(1f1b)")
    parser.add_argument("--micro-batches", type=positive_int, help="of a step (8, or a few more)")
    parser.add_argument("--chunks", type=positive_int, default=1, help="stages a rank (1)")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES, bytes_needed)
        cast = autocast(args, rank.device)
        check_sizes(args, rank.world_size, recipe.batch)
        table = plan(args, rank.world_size)
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        torch.manual_seed(args.seed)
        model = LanguageModel(recipe.config(vocab_size)).to(rank.device)
        parts, named = parts_of(model), model.state_dict(keep_vars=True)
        for part in parts:
            part.forward = cast(part.forward)
        costs = costs_of(recipe, vocab_size)
        pipeline = Pipeline(parts, cut(args, costs, rank.world_size))
        layout = ModuleLayout(pipeline, named)  # this rank's stages, by their names in the model
        del parts, part, model, named
        gc.collect()  # a part whose forward is wrapped holds itself: other ranks' layers would stay
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=recipe.peak, betas=(0.9, 0.95))
        pipeline.clock = partial(synchronized_now, rank.device)
        engine = PipelineEngine(pipeline, table, optimizer)
        seen, steps, num_tokens = Seen(), args.steps or recipe.steps, recipe.batch * recipe.length
        first = first_step(layout, optimizer, args.resume, steps)
        for step in progress(range(first, steps + 1), rank, "training"):
            batch = rows(ids, step, args.seed, recipe.batch, recipe.length, slice(None))
            batch = Text(*batch).to(rank.device)
            set_learning_rate(optimizer, recipe.learning_rate(step, steps, recipe.peak))
            dist.barrier()
            began = synchronized_now(rank.device)
            loss = train_step(engine, batch, num_tokens).part  # the last stage's is the whole
            seen.add(synchronized_now(rank.device) - began, loss, pipeline.events, began)
        conclude(args, rank, recipe, table, pipeline, seen)
        if args.save:  # last: a disk that is full costs the checkpoint, not the results
            save_named(layout, optimizer, args.save)


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
