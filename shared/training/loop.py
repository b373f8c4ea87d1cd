"""Training a translator on any number of ranks: whose batches, and one all-reduce a step.

Every rank computes the *sum* of its tokens' losses and of their gradients; the sums and the token
counts travel together in one all-reduce, and the division by the count comes last. A step on four
ranks is then the step that one process would take on the whole batch, whatever the lengths.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from shared.data.batching import Batch, bucketed_batches, rank_slice
from shared.errors import InputError
from shared.ranks.group import current_world_size
from shared.training.loss import label_smoothed_loss


def global_batches(
    lengths: Sequence[tuple[int, int]],
    max_tokens: int,
    num_steps: int,
    seed: int = 0,
    world_size: int = 1,
) -> list[list[int]]:
    """Which pairs all ranks together train on in each step: epochs of length-bucketed batches.

    `max_tokens` bounds the padded size of the *global* batch, which the ranks share out, so that
    the number of ranks changes neither the steps nor what is learnt in them. One exception: a
    batch with fewer pairs than ranks (an epoch's last few of a length) is left out, because a rank
    without data could not take part in the step.
    """
    batches: list[list[int]] = []
    for epoch in itertools.count():
        drawn = bucketed_batches(lengths, max_tokens, seed=seed + epoch)
        usable = [batch for batch in drawn if len(batch) >= world_size]
        if not usable:
            raise InputError(_no_batch(lengths, max_tokens, world_size))
        batches += usable
        if len(batches) >= num_steps:
            return batches[:num_steps]
    raise AssertionError("an endless count has ended")


def _no_batch(lengths: Sequence[tuple[int, int]], max_tokens: int, world_size: int) -> str:
    """Say what is too small when no batch has a pair for every rank: the data, or the budget."""
    if len(lengths) < world_size:
        return (
            f"{len(lengths)} training pairs cannot be shared out among {world_size} ranks: give"
            " more data, or start fewer ranks"
        )
    shortest = sorted(max(pair) for pair in lengths)[:world_size]
    return (
        f"{max_tokens} tokens a batch hold fewer pairs than there are ranks ({world_size}): allow"
        f" {world_size * shortest[-1]} tokens or more, or start fewer ranks"
    )


def batch_plan(
    lengths: Sequence[tuple[int, int]],
    max_tokens: int,
    num_steps: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> list[list[int]]:
    """Which pairs this rank trains on in each step: its share of each of `global_batches`."""
    batches = global_batches(lengths, max_tokens, num_steps, seed, world_size)
    return [rank_slice(batch, rank, world_size) for batch in batches]


def mean_over_ranks(
    parameters: Iterable[nn.Parameter], loss_sum: Float[Tensor, ""], num_tokens: int
) -> Float[Tensor, ""]:
    """Turn sums over this rank's tokens into means over all ranks' tokens, in one all-reduce.

    Gradients are replaced in place; the mean loss is returned. The two numbers ride at the end
    of the gradients' buffer, so that loss and count cost no message of their own. Lesson 06 does
    better than waiting for the whole of backward.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # Not by full_like: 16 bits cannot count tokens.
    count = torch.full((), num_tokens, dtype=torch.float32, device=loss_sum.device)
    ends = torch.stack([loss_sum.float(), count])
    if current_world_size() > 1:
        flat = torch.cat([grad.reshape(-1) for grad in grads] + [ends])
        dist.all_reduce(flat)
        pieces = flat[:-2].split([grad.numel() for grad in grads])
        if grads:
            torch._foreach_copy_(
                grads, [piece.view_as(g) for piece, g in zip(pieces, grads, strict=True)]
            )
        ends = flat[-2:]
    if grads:  # of a frozen model there are none
        torch._foreach_div_(grads, ends[1])
    return ends[0] / ends[1]


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Sequence[Batch], smoothing: float = 0.0) -> float:
    """Mean loss per unpadded target token over all batches, with dropout off."""
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    try:
        for batch in batches:
            loss = label_smoothed_loss(model(batch.src, batch.tgt_in), batch.tgt_out, smoothing)
            total += loss.item() * batch.num_tokens
            tokens += batch.num_tokens
    finally:
        model.train(was_training)
    return total / max(tokens, 1)


def average_weights(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several state dicts, tensor by tensor: the weights of the last few checkpoints.

    A model is not a linear function of its weights, so this needs checkpoints that lie close
    together, as the last ones of a run do. Raises ValueError if the names differ or none is given.
    """
    if not states or any(state.keys() != states[0].keys() for state in states):
        raise ValueError("averaging needs one or more state dicts with the same names")
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(first.dtype)
        for name, first in states[0].items()
    }
