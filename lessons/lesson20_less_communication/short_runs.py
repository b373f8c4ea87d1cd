"""Short trainings of one small model: with a hook for its messages, or by old gradients."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lessons.lesson20_less_communication.experiments import NEAR, RECIPE, Task, ddp_with
from shared.measuring.timing import repetitions
from shared.measuring.traffic import Call, count_traffic
from shared.model.language_model import LanguageModel
from shared.training.language_recipes import rows

SEEDS = range(repetitions(10))
STEPS = repetitions(30)
WIDTH = 32


def small_model(task: Task, seed: int) -> LanguageModel:
    """A model of half the width, for many short runs."""
    torch.manual_seed(seed)
    return LanguageModel(replace(task.config, d_model=WIDTH, d_ff=4 * WIDTH))


def trials(task: Task, **given: Any) -> list[float]:
    """`loss_after` for each seed."""
    return [loss_after(task, seed, **given) for seed in SEEDS]


def loss_after(
    task: Task,
    seed: int,
    *,
    rate: float = 3e-3,
    hook: Sequence[Any] = (),
    age: int = 0,
    updates: int = STEPS,
) -> float:
    """The mean loss of the last ten of some updates with AdamW, over all ranks.

    `hook` is a state and a hook for DDP. Each update is by the gradient of `age` steps before: that
    of a worker whose weights are so many updates old. As many updates are made at every age, and
    the last batches are the same.
    """
    model = small_model(task, seed)
    net = ddp_with(model, *hook) if hook else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))
    waiting, losses = deque[list[Tensor]](), []
    for step in range(updates + age):
        optimizer.zero_grad()
        loss = _loss(net, task, step - age if step >= age else updates + step, seed)
        loss.backward()
        losses.append(loss.detach())
        waiting.append([p.grad for p in parameters if p.grad is not None])
        if len(waiting) > age:
            for parameter, gradient in zip(parameters, waiting.popleft(), strict=True):
                parameter.grad = gradient
            optimizer.step()
    last = torch.stack(losses[-NEAR:]).mean()
    if hook:
        dist.all_reduce(last)
    return last.item() / (dist.get_world_size() if hook else 1)


def _loss(net: nn.Module, task: Task, step: int, seed: int) -> Tensor:
    ddp = isinstance(net, nn.parallel.DistributedDataParallel)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if ddp else (1, 0)
    share = RECIPE.batch // ranks
    mine = slice(share * rank, share * (rank + 1))
    tokens, follow = rows(task.ids, step + 1, seed, RECIPE.batch, RECIPE.length, mine)
    return F.cross_entropy(net(tokens).flatten(0, 1), follow.flatten())


def first_backward(task: Task, hook: Sequence[Any]) -> tuple[list[Call], Tensor]:
    """What DDP sends in the first backward, and the mean gradient that it leaves, flat."""
    model = small_model(task, 0)
    ddp = ddp_with(model, *hook)
    with count_traffic() as traffic:
        _loss(ddp, task, 0, 0).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return traffic.calls, flat
