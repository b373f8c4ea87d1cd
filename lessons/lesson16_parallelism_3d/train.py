"""Train a language model on a mesh of three axes: copies of it, stages of a copy, cut layers.

--dp, --tp and --pp are the sizes of the axes; what is -1 shares the ranks that are left. --zero
shares out the optimizer's states (1), gradients (2) and parameters (3) among the dp copies.
--checkpointing computes layers again in backward. --save writes a checkpoint that any other mesh
can --resume. The table has bytes on the fullest rank by formula and as counted, messages by axis.
"""

import argparse
from functools import partial

import torch

from lessons.lesson16_parallelism_3d.experiments.choosing import (
    RECIPES,
    as_cut,
    bytes_needed,
    choose_plan,
    idle_flags,
)
from lessons.lesson16_parallelism_3d.experiments.results import Seen, conclude, gradient_bytes
from shared.data.rows import Text
from shared.measuring.timing import synchronized_now
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.parallel3d.checkpoint import OnMesh
from shared.parallel3d.cutting import SCHEDULES
from shared.parallel3d.engine import Parallel3D
from shared.parallel3d.mesh import make_groups
from shared.planner.limits import check_shape
from shared.planner.memory import memory_per_rank
from shared.planner.models import spec_of
from shared.planner.specs import Plan
from shared.ranks.group import Rank, process_group
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
from shared.tensor_parallel.vocabulary import padded_vocabulary
from shared.training.language_recipes import load_tokens, rows
from shared.training.named_checkpoint import first_step, save_named
from shared.training.schedules import set_learning_rate
from solutions.lesson16_parallelism_3d import build_mesh, clip_gradients


def axis_size(text: str) -> int:
    """An argparse type: 1 or more, or -1 for what is left."""
    try:
        return -1 if text == "-1" else positive_int(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; -1 takes what is left") from None


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of this lesson."""
    meanings = {"dp": "copies of the model", "tp": "ranks of a layer", "pp": "stages of a copy"}
    for axis, what in meanings.items():
        words = f"{what} (-1: what is left)"
        parser.add_argument(f"--{axis}", type=axis_size, default=-1, metavar="N", help=words)
    parser.add_argument(
        "--schedule", choices=SCHEDULES, default="1f1b", help="of the stages (1f1b)"
    )
    parser.add_argument("--micro-batches", type=positive_int, help="of one copy, a step")
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help="stage of ZeRO (0)")
    parser.add_argument("--checkpointing", action="store_true", help="compute layers again")
    return parser


def train_step(engine: Parallel3D, batch: Text, max_norm: float, seen: Seen) -> None:
    """One step on a global batch, of which every copy takes its rows."""
    engine.optimizer.zero_grad()
    loss = engine.forward_backward(batch)
    before = gradient_bytes(engine)  # --zero 1 has whole gradients until here
    engine.average_gradients()
    seen.gradients = max(before, gradient_bytes(engine))
    if engine.replicas.in_parts:  # --zero: no rank has a whole gradient
        norm = engine.clip(max_norm)
    else:
        mesh = engine.mesh
        norm = clip_gradients(engine.pipeline.parameters(), max_norm, mesh.tp.group, mesh.pp.group)
    engine.optimizer.step()
    seen.losses.append(loss)
    seen.norms.append(norm)


def make_engine(
    args: argparse.Namespace, plan: Plan, config: TransformerConfig, rank: Rank
) -> Parallel3D:
    """This rank's part of the model, and its optimizer."""
    groups = build_mesh(plan.dp, plan.tp, plan.pp, rank.world_size)
    torch.manual_seed(args.seed)
    engine = Parallel3D(
        LanguageModel(config).to(rank.device),
        make_groups(groups),
        torch.optim.AdamW,
        num_micro_batches=plan.num_micro_batches,
        schedule=args.schedule,
        chunks=plan.chunks,
        zero=plan.zero,
        checkpoint=args.checkpointing,
        cast=autocast(args, rank.device),
        betas=(0.9, 0.95),
    )
    engine.pipeline.clock = partial(synchronized_now, rank.device)
    return engine


def main() -> None:
    parser = lesson_parser(
        __file__, __doc__, text="stdlib", precision=True, clip=True, checkpoint=True
    )
    args = add_flags(parser).parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES, bytes_needed)
        plan = choose_plan(args, recipe, rank.world_size)
        for words in idle_flags(args, plan) if rank.is_main else ():
            print(f"note: {words}", flush=True)
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        config = recipe.config(padded_vocabulary(vocab_size))
        spec = spec_of(config, recipe.length)
        check_shape(spec, plan)
        engine = make_engine(args, plan, config, rank)
        seen, steps = Seen(), args.steps or recipe.steps
        layout = OnMesh(engine)
        first = first_step(layout, layout.optimizer, args.resume, steps)
        for step in progress(range(first, steps + 1), rank, "training"):
            tokens, follow = rows(ids, step, args.seed, recipe.batch, recipe.length, slice(None))
            batch = Text(tokens, follow).to(rank.device)
            # --steps are the whole run's: one that is continued with the same has its rates.
            rate = recipe.learning_rate(step, steps, recipe.peak)
            set_learning_rate(engine.optimizer, rate)
            with seen.watching(engine, last=step == steps):
                train_step(engine, batch, args.max_norm, seen)
        predicted = memory_per_rank(spec, as_cut(plan, engine, recipe.num_layers))
        conclude(args, rank, plan, predicted, engine, seen, recipe.batch * recipe.length)
        if args.save:  # last: a disk that is full costs the checkpoint, not the results
            save_named(layout, layout.optimizer, args.save)


if __name__ == "__main__":
    run_script(main)
