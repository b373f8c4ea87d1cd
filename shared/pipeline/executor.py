"""One executor for all schedules: it does what stands in this rank's row of the table."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.errors import InputError
from shared.pipeline.schedules import Cell, Table
from shared.pipeline.stages import Carry, Part, Shapes
from shared.pipeline.transfer import connect, recv_activation, send_activation

Loss = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True)
class Event:
    """What a rank has done, and when: seconds of the pipeline's clock, without the waiting."""

    cell: Cell
    start: float
    end: float


@dataclass
class Stage:
    """Parts of the model that one rank computes one after the other.

    `arrives` are the shapes that the stage before sends, None for the first stage. `alive` has,
    of the micro-batches between their forward and their backward, what backward begins at.
    """

    parts: Sequence[Part]
    arrives: Shapes | None
    alive: dict[int, Tensor] = field(default_factory=dict)
    most_alive: int = 0


class Pipeline(nn.Module):
    """This rank's stages of a model, trained by any schedule.

    Args:
        parts: the whole model as parts (`parts_of`), the same numbers on every rank. Those of
            other ranks' stages are let go.
        cuts: the parts of each stage (`split_stages`).
        ranks: stage s is computed by ranks[s % len(ranks)]; all ranks of the world by default.
            Every rank of the world has to make its pipelines in the same order.
        beside: where the world makes several pipelines at once, one for each replica, the ranks of
            all of them, the same on every rank: each takes part in making all the groups.

    A parameter that several ranks have (a tied embedding) gets the sum of their gradients.
    `events` are those of the last step. `clock` is time.perf_counter; where work is only started
    and not done when a call comes back (on a GPU), set a clock that waits for it.
    Raises InputError for a cut that leaves a part out, for stages that the ranks cannot share
    evenly, and for several stages on a single rank.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        cuts: Sequence[range],
        ranks: Sequence[int] | None = None,
        beside: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__()
        self.ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        _check(parts, cuts, len(self.ranks))
        pipelines = beside or [self.ranks]
        self.num_stages, me, size = len(cuts), dist.get_rank(), len(self.ranks)
        self.stages: dict[int, Stage] = {}
        for s, cut in enumerate(cuts):
            if self.ranks[s % size] == me:
                arrives = parts[cut[0] - 1].shapes if s else None
                self.stages[s] = Stage([parts[i] for i in cut], arrives)
        self.own = nn.ModuleList(part for stage in self.stages.values() for part in stage.parts)
        self.links = {k: v for each in pipelines for k, v in connect(len(cuts), each).items()}
        self.events: list[Event] = []
        self.clock: Callable[[], float] = time.perf_counter
        owners = {i: s % size for s, cut in enumerate(cuts) for i in cut}
        self.tied = _tied(parts, owners, pipelines)

    def train_step(self, table: Table, batches: Sequence[Any], loss: Loss) -> list[Tensor]:
        """Forward and backward of all micro-batches; gradients are added to what `.grad` holds.

        `batches[m]` is micro-batch m, the same on every rank. `loss(logits, batch)` is its part
        of the loss: parts and gradients are summed, so that for the mean over all tokens it
        divides by the tokens of all micro-batches. Returns the parts of the loss, by micro-batch,
        on the rank of the last stage, and nothing on the others.
        """
        self.events, losses = [], dict[int, Tensor]()
        before = [parameter.grad for parameter in self.tied]
        for parameter in self.tied:  # only what this step adds is summed over the ranks
            parameter.grad = None
        for cell in filter(None, table[self.ranks.index(dist.get_rank())]):
            batch = batches[cell.micro_batch]
            if cell.kind == "F":
                start = self._forward(cell, batch, loss, losses)
            else:
                start = self._backward(cell)
            self.events.append(Event(cell, start, self.clock()))
        for link in self.links.values():
            link.finish()
        self._sum_tied(before)
        return [losses[m] for m in sorted(losses)]

    def _forward(self, cell: Cell, batch: Any, loss: Loss, losses: dict[int, Tensor]) -> float:
        """A micro-batch through a stage; returns when its input was there."""
        stage, carry = self.stages[cell.stage], Carry()
        if stage.arrives is not None:
            like = next(self.parameters())
            link = self.links[cell.stage, cell.stage - 1]
            carry = recv_activation(link, stage.arrives(batch), like.dtype, like.device)
        start = self.clock()
        for part in stage.parts:
            carry = part(carry, batch)
        if cell.stage + 1 < self.num_stages:
            link = self.links[cell.stage, cell.stage + 1]
            stage.alive[cell.micro_batch] = send_activation(link, *carry)
        else:
            stage.alive[cell.micro_batch] = loss(carry[-1], batch)
            losses[cell.micro_batch] = stage.alive[cell.micro_batch].detach()
        stage.most_alive = max(stage.most_alive, len(stage.alive))
        return start

    def _backward(self, cell: Cell) -> float:
        """Back through a stage, which frees its activations. Returns when the gradient had come."""
        start = self.clock()
        self.stages[cell.stage].alive.pop(cell.micro_batch).backward()
        link = self.links.get((cell.stage, cell.stage + 1))
        return start if link is None else max(start, link.received_at)

    def _sum_tied(self, before: Sequence[Tensor | None]) -> None:
        for (parameter, group), grad in zip(self.tied.items(), before, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
            if grad is not None:
                parameter.grad += grad


def _tied(
    parts: Sequence[Part], owners: dict[int, int], pipelines: Sequence[Sequence[int]]
) -> dict[nn.Parameter, dist.ProcessGroup]:
    """Trained parameters that this and other ranks have, with the group of these ranks."""
    places: dict[nn.Parameter, set[int]] = {}
    for i, part in enumerate(parts):
        for parameter in part.parameters():
            if parameter.requires_grad:
                places.setdefault(parameter, set()).add(owners[i])
    tied = dict[nn.Parameter, dist.ProcessGroup]()
    for parameter, where in places.items():
        for ranks in pipelines if len(where) > 1 else ():  # every rank makes every group
            members = sorted(ranks[each] for each in where)
            group = dist.new_group(members)
            if dist.get_rank() in members:
                tied[parameter] = group
    return tied


def _check(parts: Sequence[Part], cuts: Sequence[range], num_ranks: int) -> None:
    if [i for cut in cuts for i in cut] != list(range(len(parts))) or not all(cuts):
        raise InputError(f"stages of the parts {list(map(list, cuts))} are no cut of {len(parts)}")
    if len(cuts) % num_ranks:
        raise InputError(f"{len(cuts)} stages cannot be shared evenly by {num_ranks} ranks")
    if num_ranks == 1 and len(cuts) > 1:
        raise InputError(f"one rank needs one stage: {len(cuts)} would send to themselves")
