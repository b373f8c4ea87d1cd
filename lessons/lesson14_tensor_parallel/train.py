"""Train a language model whose matrices are cut over the ranks.

--engine by_hand is the lesson's own, dtensor torch's parallelize_module for the layers, single one
process. Without --tp all ranks share one copy of the model, if its 12 heads allow; with it, ranks
that are left over are data-parallel copies. --sequence-parallel also cuts what lies between.
"""

import argparse
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from lessons.lesson14_tensor_parallel.experiments.results import (
    RECIPES,
    Seen,
    bytes_needed,
    conclude,
    ranks_a_model,
)
from shared.data.rows import Text
from shared.errors import InputError
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.model.language_model import LanguageModel
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
from shared.tensor_parallel.blocks import sequence_parallel_block
from shared.tensor_parallel.checkpoint import CutModel
from shared.tensor_parallel.engine import TensorParallelEngine
from shared.tensor_parallel.models import cut_vocabulary, make_mesh
from shared.tensor_parallel.torch_twin import groups_by_kind, torch_parallel_block
from shared.tensor_parallel.vocabulary import padded_vocabulary
from shared.training.engine import train_step
from shared.training.language_recipes import load_tokens, rows
from shared.training.named_checkpoint import first_step, save_named
from shared.training.schedules import set_learning_rate
from solutions.lesson14_tensor_parallel import parallel_block, vocab_parallel_cross_entropy


def cut(model: LanguageModel, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Cut the layers over one copy's ranks, then embedding and output by the vocabulary.

    In a step every rank of a copy then has the same rows, and its own part of the logits.
    """
    for layer in model.layers:
        if args.engine == "dtensor":
            torch_parallel_block(layer, mesh)
        elif args.sequence_parallel:
            sequence_parallel_block(layer, mesh)
        else:
            parallel_block(layer, mesh)
    cut_vocabulary(model, mesh, args.sequence_parallel)


def main() -> None:
    parser = lesson_parser(__file__, __doc__, text="stdlib", precision=True, checkpoint=True)
    engines = ("by_hand", "dtensor", "single")
    parser.add_argument("--engine", choices=engines, default="by_hand", help="(by_hand)")
    parser.add_argument("--tp", type=positive_int, help="ranks that share a copy (all)")
    parser.add_argument("--sequence-parallel", action="store_true", help="by_hand alone")
    args = parser.parse_args()
    if args.sequence_parallel and args.engine != "by_hand":
        raise InputError(f"--sequence-parallel is by hand: leave out --engine {args.engine}")
    with process_group(args.device) as rank:
        if args.engine == "single" and rank.world_size > 1:
            raise InputError(f"--engine single is one process, not {rank.world_size}")
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES, bytes_needed)
        cast = autocast(args, rank.device)
        mesh = make_mesh(rank.device.type, dp=-1, tp=ranks_a_model(args, recipe, rank))
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        torch.manual_seed(args.seed)
        model = LanguageModel(recipe.config(padded_vocabulary(vocab_size))).to(rank.device)
        if args.engine != "single":
            cut(model, mesh["tp"], args)
        optimizer = torch.optim.AdamW(groups_by_kind(model), betas=(0.9, 0.95))
        groups = mesh["tp"].get_group(), mesh["dp"].get_group()
        own: dict[str, Any] = {"cast": cast, "cross_entropy": vocab_parallel_cross_entropy}
        engine = TensorParallelEngine(model, optimizer, *groups, **own)
        seen, steps, layout = Seen(), args.steps or recipe.steps, CutModel(model, groups[0])
        first = first_step(layout, optimizer, args.resume, steps)
        copy, num_copies = engine.share
        share = recipe.batch // num_copies
        mine, num_tokens = slice(share * copy, share * (copy + 1)), recipe.batch * recipe.length
        for step in progress(range(first, steps + 1), rank, "training"):
            batch = rows(ids, step, args.seed, recipe.batch, recipe.length, mine)
            batch = Text(*batch).to(rank.device)
            set_learning_rate(optimizer, recipe.learning_rate(step, steps, recipe.peak))
            began = synchronized_now(rank.device)
            with count_traffic() if step == steps else nullcontext(seen.traffic) as seen.traffic:
                seen.losses.append(train_step(engine, batch, num_tokens).part * num_copies)
            seen.seconds.append(synchronized_now(rank.device) - began)
        conclude(args, rank, mesh, recipe, model, seen)
        if args.save:  # last: a disk that is full costs the checkpoint, not the results
            save_named(layout, optimizer, args.save)


if __name__ == "__main__":
    run_script(main)  # timed: --jobs runs it alone
