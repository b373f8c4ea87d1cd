"""Train a language model whose matrices are cut over the ranks.

--engine by_hand is the lesson's own, dtensor torch's parallelize_module for the layers, single one
process. Without --tp all ranks share one copy of the model, if its 12 heads allow; with it, ranks
that are left over are data-parallel copies. --sequence-parallel also cuts what lies between.
"""

import argparse
from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh

from shared.errors import InputError
from shared.experiments.lesson10_text import load_tokens, rows
from shared.experiments.lesson14_results import (
    RECIPES,
    Seen,
    average_over,
    conclude,
    padded,
    ranks_a_model,
)
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
from shared.tensor_parallel.models import cut_vocabulary, make_mesh, sum_partial_gradients
from shared.tensor_parallel.torch_twin import groups_by_kind, torch_parallel_block
from shared.training.schedules import set_learning_rate
from solutions.lesson14_tensor_parallel import parallel_block, vocab_parallel_cross_entropy


def cut(model: LanguageModel, mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Cut the layers over one copy's ranks, then embedding and output by the vocabulary."""
    for layer in model.layers:
        if args.engine == "dtensor":
            torch_parallel_block(layer, mesh)
        elif args.sequence_parallel:
            sequence_parallel_block(layer, mesh)
        else:
            parallel_block(layer, mesh)
    cut_vocabulary(model, mesh, args.sequence_parallel)


def train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    batch: tuple[torch.Tensor, torch.Tensor],
    cast: torch.autocast,
) -> torch.Tensor:
    """One step; every rank of a copy has the same rows, and its own part of the logits."""
    tokens, follow = batch
    optimizer.zero_grad()
    with cast:
        logits = model(tokens)  # (B, L, V / tp)
    loss = vocab_parallel_cross_entropy(logits, follow, mesh["tp"].get_group()).mean()
    loss.backward()
    sum_partial_gradients(model, mesh["tp"].get_group())  # of norms, with --sequence-parallel
    average_over(mesh["dp"].get_group(), model)
    optimizer.step()
    return loss.detach()


def main() -> None:
    parser = lesson_parser("14_tensor_parallel", __doc__, text="stdlib", precision=True)
    parser.add_argument("--engine", choices=("by_hand", "dtensor", "single"), default="by_hand")
    parser.add_argument("--tp", type=positive_int, help="ranks that share a copy (all)")
    parser.add_argument("--sequence-parallel", action="store_true", help="by_hand alone")
    args = parser.parse_args()
    if args.sequence_parallel and args.engine != "by_hand":
        raise InputError(f"--sequence-parallel is by hand: leave out --engine {args.engine}")
    with process_group(args.device) as rank:
        if args.engine == "single" and rank.world_size > 1:
            raise InputError(f"--engine single is one process, not {rank.world_size}")
        prepare(args, rank, globals())
        recipe, cast = choose_preset(args, rank.device, RECIPES), autocast(args, rank.device)
        mesh = make_mesh(rank.device.type, dp=-1, tp=ranks_a_model(args, recipe, rank))
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        torch.manual_seed(args.seed)
        model = LanguageModel(recipe.config(padded(vocab_size))).to(rank.device)
        if args.engine != "single":
            cut(model, mesh["tp"], args)
        optimizer = torch.optim.AdamW(groups_by_kind(model), betas=(0.9, 0.95))
        seen, steps = Seen(), args.steps or recipe.steps
        share = recipe.batch // mesh["dp"].size()
        mine = slice(share * mesh["dp"].get_local_rank(), share * (mesh["dp"].get_local_rank() + 1))
        for step in progress(range(1, steps + 1), rank, "training"):
            batch = rows(ids, step, args.seed, recipe.batch, recipe.length, mine)
            tokens, follow = (x.to(rank.device) for x in batch)
            set_learning_rate(optimizer, recipe.learning_rate(step, steps, recipe.peak))
            began = synchronized_now(rank.device)
            with count_traffic() if step == steps else nullcontext(seen.traffic) as seen.traffic:
                seen.losses.append(train_step(model, optimizer, mesh, (tokens, follow), cast))
            seen.seconds.append(synchronized_now(rank.device) - began)
        conclude(args, rank, mesh, recipe, model, seen)


if __name__ == "__main__":
    run_script(main)
