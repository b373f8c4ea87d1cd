"""Training a translator: the loss, the learning rate over time, one step on any number of ranks.

Every rank computes the *sum* of its tokens' losses and of their gradients; the sums and the token
counts travel together in one all-reduce, and the division by the count comes last. A step on four
ranks is then the step that one process would take on the whole batch, whatever the lengths.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from shared.data.batching import Batch, bucketed_batches, rank_slice
from shared.errors import InputError
from shared.ranks.group import current_world_size
from shared.training.loss import label_smoothed_loss
from shared.training.schedules import set_learning_rate


def batch_plan(
    lengths: Sequence[tuple[int, int]],
    max_tokens: int,
    num_steps: int,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> list[list[int]]:
    """Which pairs this rank trains on in each step: epoch after epoch of length-bucketed batches.

    `max_tokens` bounds the padded size of the *global* batch, which the ranks share out, so that
    the number of ranks changes neither the steps nor what is learnt in them. One exception: a
    batch with fewer pairs than ranks (an epoch's last few of a length) is left out, because a rank
    without data could not take part in the step.
    """
    plan: list[list[int]] = []
    for epoch in itertools.count():
        batches = bucketed_batches(lengths, max_tokens, seed=seed + epoch)
        usable = [batch for batch in batches if len(batch) >= world_size]
        if not usable:
            raise InputError(
                f"{max_tokens} tokens a batch hold fewer pairs than there are ranks "
                f"({world_size}): allow more tokens, or start fewer ranks"
            )
        plan += [rank_slice(batch, rank, world_size) for batch in usable]
        if len(plan) >= num_steps:
            return plan[:num_steps]
    raise AssertionError("an endless count has ended")


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    learning_rate: float,
    smoothing: float = 0.1,
    autocast: torch.dtype | None = None,
    loss_function: Callable[..., Tensor] = label_smoothed_loss,
) -> Float[Tensor, ""]:
    """One optimizer step on this rank's batch and its peers'; return the mean loss per token.

    `autocast` is torch.bfloat16 on a GPU; most CPUs are slower with it. The loss stays on the
    device: reading it waits for the GPU, which is the caller's choice.
    """
    device = batch.src.device.type
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
        logits = model(batch.src, batch.tgt_in)  # (B, T, V)
    loss_sum = loss_function(logits, batch.tgt_out, smoothing) * batch.num_tokens
    loss_sum.backward()
    loss = mean_over_ranks(model.parameters(), loss_sum.detach(), batch.num_tokens)
    set_learning_rate(optimizer, learning_rate)
    optimizer.step()
    return loss


def mean_over_ranks(
    parameters: Iterable[nn.Parameter], loss_sum: Float[Tensor, ""], num_tokens: int
) -> Float[Tensor, ""]:
    """Turn sums over this rank's tokens into means over all ranks' tokens, in one all-reduce.

    Gradients are replaced in place; the mean loss is returned. The two numbers ride at the end
    of the gradients' buffer, so that loss and count cost no message of their own. Lesson 06 does
    better than waiting for the whole of backward.
    """
    grads = [each.grad for each in parameters if each.grad is not None]
    ends = torch.stack([loss_sum.float(), torch.full_like(loss_sum, num_tokens).float()])
    if current_world_size() > 1:
        flat = torch.cat([grad.reshape(-1) for grad in grads] + [ends])
        dist.all_reduce(flat)
        pieces = flat[:-2].split([grad.numel() for grad in grads])
        torch._foreach_copy_(
            grads, [piece.view_as(g) for piece, g in zip(pieces, grads, strict=True)]
        )
        ends = flat[-2:]
    torch._foreach_div_(grads, ends[1])
    return ends[0] / ends[1]


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Sequence[Batch], smoothing: float = 0.0) -> float:
    """Mean loss per unpadded target token over all batches, with dropout off."""
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        loss = label_smoothed_loss(model(batch.src, batch.tgt_in), batch.tgt_out, smoothing)
        total += loss.item() * batch.num_tokens
        tokens += batch.num_tokens
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
