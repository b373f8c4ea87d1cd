"""Train a language model that is sharded over the ranks.

--engine by_hand is the lesson's FullyShard with prefetch, hybrid the same on a mesh (--mesh 2x4:
two replicas of four shards), fsdp2 torch's fully_shard, ddp torch's DDP. --units says what is
gathered together. --search 8 finds the largest model that a GPU holds as one of 8 ranks.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shared.errors import InputError
from shared.experiments.lesson10_text import RECIPES, Recipe, load_tokens, rows, rows_a_rank
from shared.experiments.lesson13_memory import units_of
from shared.experiments.lesson13_run import (
    ADAMW,
    Run,
    conclude,
    config_of,
    kept_bytes,
    plain_storages,
    read_mesh,
    search,
    sizes_of,
)
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.model.language_model import LanguageModel
from shared.ranks.group import Rank, process_group
from shared.script import (
    choose_preset,
    lesson_parser,
    load_same_text,
    positive_int,
    prepare,
    progress,
    run_script,
)
from shared.training.schedules import set_learning_rate
from solutions.lesson13_fsdp import PrefetchingShard, hybrid_shard


def wrap(
    engine: str, model: nn.Module, args: argparse.Namespace, rank: Rank, offload: bool = False
) -> Run:
    """Shard the model: its units first, then what is left. The optimizer comes after this."""
    units = units_of(model, args.units)
    sizes, world_size = sizes_of(model, units), dist.get_world_size()
    half = torch.bfloat16 if rank.device.type == "cuda" else None
    if engine == "ddp":
        return Run(engine, DistributedDataParallel(model), sizes, 1)
    if engine == "by_hand":
        return Run(engine, PrefetchingShard(model, units, half), sizes, world_size)
    if engine == "hybrid":
        mesh = read_mesh(args.mesh, world_size)
        return Run(engine, hybrid_shard(model, mesh, units, half), sizes, mesh[1])
    settings: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    policy = MixedPrecisionPolicy(param_dtype=half)
    for unit in units:
        fully_shard(unit, mp_policy=policy, **settings)
    fully_shard(model, mp_policy=policy, **settings)
    return Run(engine, model, sizes, world_size)


def train_step(
    run: Run, optimizer: torch.optim.Optimizer, x: torch.Tensor, follow: torch.Tensor
) -> None:
    """One step: units come and go in forward and in backward, the optimizer updates shards."""
    optimizer.zero_grad()
    cast = run.engine == "ddp" and x.device.type == "cuda"  # the others cast by unit
    with torch.autocast(x.device.type, torch.bfloat16, enabled=cast):
        logits = run.model(x)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), follow.flatten())
    loss.backward()
    if run.engine in ("by_hand", "hybrid"):
        run.model.finish_gradient_sync()
    optimizer.step()
    run.losses.append(loss.detach())


def train(run: Run, ids: torch.Tensor, recipe: Recipe, args: argparse.Namespace, rank: Rank) -> int:
    """Train on the same rows whatever the number of ranks; the tokens of a step on all ranks."""
    optimizer = torch.optim.AdamW(run.model.parameters(), **ADAMW)
    share, steps = rows_a_rank(recipe, rank), args.steps or recipe.steps
    mine = slice(rank.rank * share, (rank.rank + 1) * share)
    for step in progress(range(1, steps + 1), rank, "training"):
        batch = rows(ids, step, args.seed, share * rank.world_size, recipe.length, mine)
        x, follow = (each.to(rank.device) for each in batch)
        set_learning_rate(optimizer, recipe.learning_rate(step, steps, recipe.peak))
        if step == steps:  # counted, which takes time of its own
            with count_traffic() as traffic:
                train_step(run, optimizer, x, follow)
            run.calls = {op: traffic.count(op) for op in set(traffic.ops)}
            continue
        dist.barrier()
        began = synchronized_now(rank.device)
        train_step(run, optimizer, x, follow)
        run.seconds.append(synchronized_now(rank.device) - began)
    optimizer.zero_grad()
    del x, follow, batch
    run.kept = kept_bytes(run.known)
    return share * rank.world_size * recipe.length


def main() -> None:
    parser = lesson_parser("13_fsdp", __doc__, text="stdlib")
    engines = ("ddp", "by_hand", "fsdp2", "hybrid")
    parser.add_argument("--engine", choices=engines, default="by_hand", help="(by_hand)")
    parser.add_argument("--units", choices=("root", "block", "linear"), default="block")
    parser.add_argument("--mesh", default="", metavar="RxS", help="hybrid: replicas x shards (2x)")
    parser.add_argument("--offload", action="store_true", help="fsdp2: shards in the CPU's memory")
    parser.add_argument("--search", type=positive_int, metavar="RANKS", help="the largest model")
    args = parser.parse_args()
    if args.offload and args.engine != "fsdp2":
        raise InputError(f"--offload is torch's: use --engine fsdp2, not {args.engine}")
    if args.mesh and args.engine != "hybrid":
        raise InputError(f"--mesh belongs to --engine hybrid, not to {args.engine}")
    if args.steps == 1:
        raise InputError("--steps must be 2 or more: the last step is counted, not timed")
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES)
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


if __name__ == "__main__":
    run_script(main)
