"""Train a language model whose feed-forward networks are experts, shared out over the ranks.

--ep ranks share one copy of the experts, groups of them have copies; without it as many share as
ranks and experts allow. All else is on every rank, and every rank has rows of its own. On one rank
all experts are there and nothing is sent. --balance says what keeps the loads even.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from lessons.lesson18_mixture_of_experts.experiments.results import (
    RECIPES,
    SIZES,
    Seen,
    bytes_needed,
    check_rows,
    conclude,
    ranks_an_expert_group,
)
from shared.measuring.timing import synchronized_now
from shared.measuring.traffic import count_traffic
from shared.mixture_of_experts.models import (
    expert_layers,
    give_experts,
    routings,
    share_out,
    total_loads,
)
from shared.mixture_of_experts.parallel import Parts
from shared.mixture_of_experts.routing import update_bias
from shared.model.language_model import LanguageModel
from shared.ranks.group import process_group
from shared.script import (
    autocast,
    choose_preset,
    lesson_parser,
    load_same_text,
    positive_float,
    positive_int,
    prepare,
    progress,
    run_script,
)
from shared.tensor_parallel.models import make_mesh
from shared.training.language_recipes import load_tokens, rows
from shared.training.schedules import set_learning_rate
from solutions.lesson18_mixture_of_experts import (
    Dispatcher,
    average_gradients,
    balance_loss,
    top_k_router,
    within_capacity,
)


def train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh,
    batch: tuple[torch.Tensor, torch.Tensor],
    args: argparse.Namespace,
    cast: torch.autocast,
) -> torch.Tensor:
    """One step of every rank on rows of its own; return the loss of these, without the balance."""
    tokens, follow = batch
    optimizer.zero_grad()
    with cast:
        logits = model(tokens)  # (B, L, V)
        loss = F.cross_entropy(logits.flatten(0, 1), follow.flatten())
    even = torch.stack([balance_loss(each) for each in routings(model)]).sum()
    weight = args.balance_weight if args.balance == "loss" else 0.0
    (loss + weight * even).backward()
    average_gradients(model, mesh)
    optimizer.step()
    return loss.detach()


def main() -> None:
    parser = lesson_parser(__file__, __doc__, text="stdlib", precision=True)
    parser.add_argument("--ep", type=positive_int, help="ranks that share the experts (most)")
    parser.add_argument("--experts", type=positive_int, help="experts of a layer (12; large 24)")
    parser.add_argument("--k", type=positive_int, default=2, help="experts of a token (2)")
    parser.add_argument("--capacity", type=positive_float, help="times even load (no limit)")
    what = "by an auxiliary loss, a bias of the router, or not (loss)"
    parser.add_argument("--balance", choices=("loss", "bias", "none"), default="loss", help=what)
    parser.add_argument("--balance-weight", type=positive_float, default=0.01, help="loss's (0.01)")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES, bytes_needed)
        cast = autocast(args, rank.device)
        args.experts = args.experts or SIZES[args.preset]
        ep, share = ranks_an_expert_group(args, rank), check_rows(recipe, rank)
        mesh = make_mesh(rank.device.type, dp=-1, ep=ep)
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        torch.manual_seed(args.seed)  # the same whole model on every rank, then a part is kept
        model = LanguageModel(recipe.config(vocab_size))
        give_experts(model, args.experts, args.k)
        parts = Parts(top_k_router, Dispatcher, within_capacity)
        share_out(model.to(rank.device), mesh["ep"].get_group(), args.capacity, parts)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
        mine = slice(share * rank.rank, share * (rank.rank + 1))
        seen, steps = Seen(), args.steps or recipe.steps
        for step in progress(range(1, steps + 1), rank, "training"):
            batch = rows(ids, step, args.seed, recipe.batch, recipe.length, mine)
            tokens, follow = (x.to(rank.device) for x in batch)
            set_learning_rate(optimizer, recipe.learning_rate(step, steps, recipe.peak))
            began = synchronized_now(rank.device)
            with count_traffic() if step == steps else nullcontext(seen.traffic) as seen.traffic:
                loss = train_step(model, optimizer, mesh, (tokens, follow), args, cast)
            seen.losses.append(loss)
            loads = total_loads(model)
            if args.balance == "bias":
                for layer, counts in zip(expert_layers(model), loads, strict=True):
                    update_bias(layer.bias, counts)
            seen.seconds.append(synchronized_now(rank.device) - began)
            seen.fullest.append(loads[0].max() / loads[0].double().mean())
        conclude(args, rank, mesh, recipe, model, seen)


if __name__ == "__main__":
    run_script(main)
