"""Ranks that train alone for some steps, and then agree: local SGD and DiLoCo."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from shared.ddp.averaging import average_flat
from shared.errors import InputError
from shared.less_communication.states import Group


class LocalSGD:
    """Every `every` steps the ranks' parameters become the same again, in one message.

    What the ranks' parameters moved by since they last agreed is averaged, and taken for a gradient
    by an outer SGD with Nesterov momentum, which starts from where they last agreed. With an outer
    learning rate of 1 and no momentum that is the mean of the parameters (local SGD); DiLoCo takes
    0.7 and 0.9. Optimizer states stay each rank's own.
    Sources: Stich 2019 (arXiv 1805.09767); Douillard et al. 2023 (arXiv 2311.08105), algorithm 1.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        every: int,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        group: Group = None,
    ) -> None:
        """Give all ranks the parameters of the group's rank 0; frozen ones are left out.

        Raises InputError for an `every` below 1 and for a momentum that is not in [0, 1).
        """
        if every < 1:
            raise InputError(f"every {every} steps is never: take 1 or more")
        if not 0 <= outer_momentum < 1:
            raise InputError(f"an outer momentum of {outer_momentum}: take 0 or more, below 1")
        self.parameters = [p for p in parameters if p.requires_grad]
        self.every, self.group, self.steps = every, group, 0
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        for p in self.parameters:
            dist.broadcast(p.detach(), group=group, group_src=0)
        self.agreed = [p.detach().clone() for p in self.parameters]
        self.velocity = [torch.zeros_like(p) for p in self.agreed]

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the ranks' own optimizers; return whether the ranks agreed in it.

        Call after `optimizer.step()`. Sends nothing but in every `every`-th step.
        """
        self.steps += 1
        if self.steps % self.every:
            return False
        moved = [start - p for start, p in zip(self.agreed, self.parameters, strict=True)]
        average_flat(moved, self.group)
        rows = zip(self.parameters, self.agreed, self.velocity, moved, strict=True)
        for p, start, velocity, gradient in rows:
            velocity.mul_(self.outer_momentum).add_(gradient)
            start.sub_(gradient + self.outer_momentum * velocity, alpha=self.outer_lr)
            p.copy_(start)
        return True
