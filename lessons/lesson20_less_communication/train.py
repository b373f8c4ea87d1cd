"""Train a language model with smaller or rarer messages, and count what a step sends.

--method names what is sent: all_reduce (everything), fp16, topk, one_bit, power_sgd, local_sgd (the
mean of the parameters every --every steps), diloco (that with outer momentum), hierarchical (sums
inside each of --nodes nodes first). --engine torch takes torch's own hook or averager where there
is one. --mbit gives the seconds of a step's messages over a link of so many megabits a second.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lessons.lesson20_less_communication.results import (
    RECIPES,
    Seen,
    bytes_needed,
    checked,
    conclude,
    torchs,
)
from shared.ddp.wrapping import ddp_of_fixed_buffers
from shared.less_communication.hierarchical import two_levels
from shared.less_communication.states import ErrorFeedback, LowRank, TopK, ready
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.model.language_model import LanguageModel
from shared.ranks.group import Rank, process_group
from shared.script import (
    autocast,
    choose_preset,
    lesson_parser,
    load_same_text,
    positive_float,
    prepare,
    progress,
    run_script,
)
from shared.training.language_recipes import load_tokens, rows, rows_a_rank
from shared.training.schedules import set_learning_rate
from solutions.lesson20_less_communication import (
    LocalSGD,
    fp16_hook,
    hierarchical_all_reduce,
    one_bit_with_error_feedback,
    power_sgd,
    topk_with_error_feedback,
)

METHODS = ("all_reduce", "fp16", "topk", "one_bit", "power_sgd", "hierarchical")
RARE = ("local_sgd", "diloco")


def wrap(
    args: argparse.Namespace, model: nn.Module, rank: Rank
) -> tuple[nn.Module, Callable[[], Any]]:
    """The model under DDP with a hook, or bare; and what is called after each optimizer step."""
    if args.engine == "torch":
        return torchs(args, model)
    if args.method in RARE:
        outer = (0.7, 0.9) if args.method == "diloco" else (1.0, 0.0)
        return model, LocalSGD(model.parameters(), args.every, *outer).step
    ddp = ddp_of_fixed_buffers(model)
    if args.method == "fp16":
        ddp.register_comm_hook(None, fp16_hook)
    elif args.method == "topk":
        ddp.register_comm_hook(TopK(args.density), topk_with_error_feedback)
    elif args.method == "one_bit":
        ddp.register_comm_hook(ErrorFeedback(), one_bit_with_error_feedback)
    elif args.method == "power_sgd":
        ddp.register_comm_hook(LowRank(args.rank, args.start), power_sgd)
    elif args.method == "hierarchical":
        levels = two_levels(args.nodes, rank.device.type)

        def by_levels(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            buffer = bucket.buffer().div_(rank.world_size)
            hierarchical_all_reduce(buffer, levels.inside, levels.across)
            return ready(buffer)

        ddp.register_comm_hook(None, by_levels)
    return ddp, lambda: None


def main() -> None:
    parser = lesson_parser(__file__, __doc__, text="stdlib", precision=True)
    parser.add_argument(
        "--method", choices=(*METHODS, *RARE), default="power_sgd", help="(power_sgd)"
    )
    parser.add_argument(
        "--engine", choices=("by_hand", "torch"), default="by_hand", help="(by_hand)"
    )
    parser.add_argument("--density", type=float, default=0.01, help="topk: share of numbers (0.01)")
    parser.add_argument("--rank", type=int, default=2, help="power_sgd: rank of a matrix (2)")
    parser.add_argument("--start", type=int, default=2, help="power_sgd: whole steps first (2)")
    parser.add_argument("--every", type=int, default=8, help="local SGD: steps between means (8)")
    parser.add_argument("--nodes", type=int, default=1, help="hierarchical: number of nodes (1)")
    parser.add_argument("--mbit", type=positive_float, help="a link's speed, Mbit/s")
    args = checked(parser.parse_args())
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES, bytes_needed)
        cast = autocast(args, rank.device)
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        torch.manual_seed(args.seed)
        bare = LanguageModel(recipe.config(vocab_size)).to(rank.device)
        model, after = wrap(args, bare, rank)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
        seen, steps, share = Seen(), args.steps or recipe.steps, rows_a_rank(recipe, rank)
        mine, batch = slice(share * rank.rank, share * (rank.rank + 1)), share * rank.world_size
        for step in progress(range(1, steps + 1), rank, "training"):
            tokens, follow = rows(ids, step, args.seed, batch, recipe.length, mine)
            tokens, follow = tokens.to(rank.device), follow.to(rank.device)
            set_learning_rate(optimizer, recipe.learning_rate(step, steps, recipe.peak))
            counted = step > steps - (args.every if args.method in RARE else 1)
            began = synchronized_now(rank.device)
            with count_traffic() if counted else nullcontext() as traffic:
                optimizer.zero_grad()
                with cast:
                    loss = F.cross_entropy(model(tokens).flatten(0, 1), follow.flatten())
                loss.backward()  # the hook sends a bucket as soon as it is full
                optimizer.step()
                after()  # of LocalSGD
            seen.add(loss.detach(), synchronized_now(rank.device) - began, traffic)
        conclude(args, rank, bare, recipe, batch, seen)


if __name__ == "__main__":
    run_script(main)
