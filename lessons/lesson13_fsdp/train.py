"""Train a language model that is sharded over the ranks.

--engine by_hand is the lesson's FullyShard with prefetch, hybrid the same on a mesh (--mesh 2x4:
two replicas of four shards), fsdp2 torch's fully_shard, ddp torch's DDP. --units says what is
gathered together. --search 8 finds the largest model that a GPU holds as one of 8 ranks.
"""

import argparse
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lessons.lesson13_fsdp.experiments.results import (
    ADAMW,
    Run,
    bytes_needed,
    check_flags,
    conclude,
    config_of,
    kept_bytes,
    layout_of,
    plain_storages,
    read_mesh,
    search,
    sizes_of,
)
from lessons.lesson13_fsdp.experiments.step_memory import units_of
from shared.data.rows import Text
from shared.errors import InputError
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.model.language_model import LanguageModel
from shared.ranks.group import Rank, process_group
from shared.script import (
    choose_preset,
    has_bf16,
    lesson_parser,
    load_same_text,
    positive_int,
    prepare,
    progress,
    run_script,
)
from shared.training.engine import DataParallelEngine, train_step
from shared.training.language_recipes import RECIPES, Recipe, load_tokens, rows, rows_a_rank
from shared.training.named_checkpoint import first_step, save_named
from shared.training.reference_run import loss_of
from shared.training.schedules import set_learning_rate
from solutions.lesson13_fsdp import PrefetchingShard, hybrid_shard


def wrap(
    name: str, model: nn.Module, args: argparse.Namespace, rank: Rank, offload: bool = False
) -> Run:
    """Shard the model: its units first, then what is left. The optimizer comes after this."""
    units = units_of(model, args.units)
    sizes, parts = sizes_of(model, units), dist.get_world_size()
    half = torch.bfloat16 if has_bf16(rank.device) else None
    if name == "ddp":
        model, parts = DistributedDataParallel(model), 1
    elif name == "by_hand":
        model = PrefetchingShard(model, units, half)
    elif name == "hybrid":
        mesh = read_mesh(args.mesh, parts)
        model, parts = hybrid_shard(model, mesh, units, half), mesh[1]
    else:
        settings: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        policy = MixedPrecisionPolicy(param_dtype=half)
        for unit in [*units, model]:
            fully_shard(unit, mp_policy=policy, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    cast = half if name == "ddp" else None  # the others cast by unit
    loss = partial(part_of_loss, cast)
    engine = DataParallelEngine(model, optimizer, dist.get_world_size(), loss=loss, name=name)
    return Run(engine, sizes, parts)


def part_of_loss(
    cast: torch.dtype | None, model: nn.Module, batch: Text, num_tokens: int
) -> torch.Tensor:
    """Units come and go in this forward, and again in backward."""
    with torch.autocast(batch.tokens.device.type, cast, enabled=cast is not None):
        return loss_of(model, batch, num_tokens)


def train(run: Run, ids: torch.Tensor, recipe: Recipe, args: argparse.Namespace, rank: Rank) -> int:
    """Train on the same rows whatever the number of ranks; the tokens of a step on all ranks."""
    share, steps, engine = rows_a_rank(recipe, rank), args.steps or recipe.steps, run.engine
    first = first_step(layout_of(engine), engine.optimizer, args.resume, steps)
    mine, size = slice(rank.rank * share, (rank.rank + 1) * share), share * rank.world_size
    limit = None if args.max_norm == math.inf else args.max_norm  # a norm is a message of its own
    for step in progress(range(first, steps + 1), rank, "training"):
        batch = Text(*rows(ids, step, args.seed, size, recipe.length, mine)).to(rank.device)
        set_learning_rate(engine.optimizer, recipe.learning_rate(step, steps, recipe.peak))
        dist.barrier()
        began = synchronized_now(rank.device)
        # Counted in the last step, which takes time of its own.
        with count_traffic() if step == steps else nullcontext() as traffic:
            run.losses.append(train_step(engine, batch, size * recipe.length, limit).part)
        if traffic is None:
            run.seconds.append(synchronized_now(rank.device) - began)
        else:
            run.calls = {op: traffic.count(op) for op in set(traffic.ops)}
    engine.optimizer.zero_grad()
    del batch
    run.kept = kept_bytes(run.known)
    return size * recipe.length


def main() -> None:
    parser = lesson_parser(__file__, __doc__, text="stdlib", clip=True, checkpoint=True)
    engines = ("ddp", "by_hand", "fsdp2", "hybrid")
    parser.add_argument("--engine", choices=engines, default="by_hand", help="(by_hand)")
    parser.add_argument("--units", choices=("root", "block", "linear"), default="block")
    parser.add_argument("--mesh", default="", metavar="RxS", help="hybrid: copies x shards (2xS)")
    parser.add_argument("--offload", action="store_true", help="fsdp2: shards in the CPU's memory")
    parser.add_argument("--search", type=positive_int, metavar="RANKS", help="the largest model")
    args = parser.parse_args()
    check_flags(args)
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES, bytes_needed)
        if args.offload and rank.device.type != "cuda":
            raise InputError("--offload moves shards between a GPU and the CPU: no GPU is here")
        if args.search:
            return search(args, rank, recipe, lambda e, m, o: wrap(e, m, args, rank, o))
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        torch.manual_seed(args.seed)
        known = plain_storages()
        model = LanguageModel(config_of(recipe, vocab_size))
        model = model if args.offload else model.to(rank.device)
        run = wrap(args.engine, model, args, rank, args.offload)
        buffers = (each.untyped_storage() for each in model.buffers())
        run.known = known | {each.data_ptr(): each for each in buffers}
        conclude(args, rank, run, train(run, ids, recipe, args, rank))
        if args.save:  # last: a disk that is full costs the checkpoint, not the results
            save_named(layout_of(run.engine), run.engine.optimizer, args.save)


if __name__ == "__main__":
    run_script(main)
