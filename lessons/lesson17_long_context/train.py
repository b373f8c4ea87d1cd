"""Train a language model whose sequences lie in parts on the ranks.

--engine ring keeps each rank's queries and lets keys and values travel; all_to_all swaps parts of
the sequence for heads; single is one process. All ranks share every sequence, and each has all
parameters: --length is the context that no rank has whole. The ring's tiles are plain torch, to be
read and not fast: for speed take torch's kernels, which --engine all_to_all has.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from lessons.lesson17_long_context.experiments.results import (
    RECIPES,
    Seen,
    bytes_needed,
    conclude,
    with_length,
)
from shared.errors import InputError
from shared.long_context.models import context_parallel, sum_gradients
from shared.long_context.orders import balanced_order, cut_sequence, plain_order
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
from shared.training.language_recipes import load_tokens, rows
from shared.training.schedules import set_learning_rate
from solutions.lesson17_long_context import all_to_all_attention, ring_backward, ring_forward


class Ring(torch.autograd.Function):
    """Keeps this rank's q, k, v, output and logsumexp; what visits on the ring is not kept."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *ring: Any) -> Any:
        output, logsumexp = ring_forward(q, k, v, *ring)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.ring = ring
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ring_backward(*ctx.saved_tensors, gradients[0], *ctx.ring)
        return *found, *(None for _ in ctx.ring)


def ring(order: list[list[int]], q: Any, k: Any, v: Any, is_causal: bool) -> torch.Tensor:
    return Ring.apply(q, k, v, None, is_causal, order)


def exchange(q: Any, k: Any, v: Any, is_causal: bool) -> torch.Tensor:
    return all_to_all_attention(q, k, v, None, is_causal)


def train_step(
    model: LanguageModel,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    total: int,
    cast: torch.autocast,
) -> torch.Tensor:
    """One step on this rank's positions of all rows; `total` are the tokens of all ranks."""
    tokens, follow = batch
    optimizer.zero_grad()
    with cast:
        logits = model(tokens)  # (B, L / n, V)
    loss = F.cross_entropy(logits.flatten(0, 1), follow.flatten(), reduction="sum") / total
    loss.backward()
    sum_gradients(model)  # each rank knows those of its own positions
    optimizer.step()
    return loss.detach()


def main() -> None:
    parser = lesson_parser(__file__, __doc__, text="stdlib", precision=True)
    engines = ("ring", "all_to_all", "single")
    parser.add_argument("--engine", choices=engines, default="ring", help="(ring)")
    parser.add_argument("--length", type=positive_int, help="tokens of context (the preset's)")
    args = parser.parse_args()
    with process_group(args.device) as rank:
        if args.engine == "single" and rank.world_size > 1:
            raise InputError(
                f"--engine single is one process, not {rank.world_size}: --engine ring"
            )
        prepare(args, rank, globals())
        recipe = choose_preset(args, rank.device, RECIPES, bytes_needed)
        cast = autocast(args, rank.device)
        order = (balanced_order if args.engine == "ring" else plain_order)(rank.world_size)
        recipe = with_length(recipe, args.length, order)
        ids, vocab_size = load_tokens(load_same_text(args), recipe)
        torch.manual_seed(args.seed)
        model = LanguageModel(recipe.config(vocab_size)).to(rank.device)
        if args.engine != "single":
            attend = partial(ring, order) if args.engine == "ring" else exchange
            context_parallel(model, None, args.engine, attend, order)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
        seen, steps, total = Seen(), args.steps or recipe.steps, recipe.batch * recipe.length
        for step in progress(range(1, steps + 1), rank, "training"):
            whole = rows(ids, step, args.seed, recipe.batch, recipe.length, slice(None))
            tokens, follow = (cut_sequence(x, order, dist.get_rank(), 1) for x in whole)
            batch = tokens.to(rank.device), follow.to(rank.device)
            set_learning_rate(optimizer, recipe.learning_rate(step, steps, recipe.peak))
            began = synchronized_now(rank.device)
            with count_traffic() if step == steps else nullcontext(seen.traffic) as seen.traffic:
                seen.losses.append(train_step(model, optimizer, batch, total, cast))
            seen.seconds.append(synchronized_now(rank.device) - began)
        conclude(args, rank, recipe, seen)


if __name__ == "__main__":
    run_script(main)
