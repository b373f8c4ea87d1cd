"""One executor for all schedules: it does what stands in this rank's row of the table."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.errors import InputError
from shared.pipeline.schedules import Cell, Table, check_table
from shared.pipeline.stages import Activations, Part, Shapes
from shared.pipeline.transfer import Link, connect, recv_activation, send_activation

Loss = Callable[[Tensor, Any], Tensor]
Gradients = dict[nn.Parameter, Tensor | None]


@dataclass(frozen=True)
class Event:
    """What a rank has done, and when: seconds of the pipeline's clock, without the waiting."""

    cell: Cell
    start: float
    end: float


@dataclass
class Stage:
    """Parts of the model that one rank computes one after the other.

    `input_shapes(batch)` are the shapes that the previous stage sends, None for the first stage.
    `in_flight` has, for each micro-batch between its forward and its backward, the tensor at which
    backward begins; `peak_in_flight` is their largest number in the last step.
    """

    parts: Sequence[Part]
    input_shapes: Shapes | None
    in_flight: dict[int, Tensor] = field(default_factory=dict)
    peak_in_flight: int = 0


class Pipeline(nn.Module):
    """This rank's stages of a model, trained by any schedule.

    Args:
        parts: the whole model as parts (`parts_of`), with the same numbers on every rank. This
            rank keeps those of its own stages.
        cuts: the parts of each stage (`split_stages`).
        ranks: stage s is computed by ranks[s % len(ranks)]; by default all ranks of the world.
            Every rank of the world has to make its pipelines in the same order.
        sibling_pipelines: the ranks of each pipeline that the world makes at the same time (one a
            replica), this one's included, the same on every rank: making a group is a collective
            of the whole world.
        sum_tied: whether train_step sums the gradients of a parameter that several ranks have (a
            tied embedding). Without it, the caller does, over the groups in `tied`.

    `events` are those of the last step, by `clock`: time.perf_counter, or what is set instead. On
    a GPU work is only queued when a call comes back: set a clock that synchronizes, or an event
    ends, and a message has come, before it has.
    Raises InputError for cuts that leave a part out, for stages that the ranks cannot share
    evenly, and for several stages on a single rank.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        cuts: Sequence[range],
        ranks: Sequence[int] | None = None,
        sibling_pipelines: Sequence[Sequence[int]] = (),
        *,
        sum_tied: bool = True,
    ) -> None:
        super().__init__()
        self.ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        _check(parts, cuts, len(self.ranks))
        pipelines = sibling_pipelines or [self.ranks]
        self.num_stages, me, size = len(cuts), dist.get_rank(), len(self.ranks)
        self.stages: dict[int, Stage] = {}
        for s, cut in enumerate(cuts):
            if self.ranks[s % size] == me:
                input_shapes = parts[cut[0] - 1].shapes if s else None
                self.stages[s] = Stage([parts[i] for i in cut], input_shapes)
        self.own = nn.ModuleList(part for stage in self.stages.values() for part in stage.parts)
        self.links: dict[tuple[int, int], Link] = {}
        for members in pipelines:  # also those that this rank is not in: new_group is a collective
            self.links |= connect(len(cuts), members)
        self.events: list[Event] = []
        self.clock: Callable[[], float] = time.perf_counter
        owners = {i: s % size for s, cut in enumerate(cuts) for i in cut}
        self.tied = _tied(parts, owners, pipelines)
        self.sum_tied = sum_tied

    def train_step(
        self,
        table: Table,
        batches: Sequence[Any],
        loss: Loss,
        targets: Sequence[Any] | None = None,
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; gradients are added to what `.grad` holds.

        `batches[m]` is micro-batch m, the same on every rank. `loss(logits, targets[m])` is its
        part of the loss, with the batch itself where no `targets` are given. Parts and gradients
        are summed, so that for the mean over all tokens it divides by the tokens of all
        micro-batches. Returns the parts of the loss, by micro-batch, on the rank of the last
        stage, and nothing on the others.

        Raises InputError, before anything is sent, for a table of other ranks, stages or
        micro-batches. Where a part or the loss raises, this rank still exchanges the messages that
        its neighbours wait for, with NaN in them, and then raises: zero_grad() and a next step on
        all ranks go on as if this one had not been.
        """
        batches, targets = list(batches), list(batches if targets is None else targets)
        check_table(table, len(self.ranks), self.num_stages, len(batches))
        if len(targets) != len(batches):
            raise InputError(f"{len(targets)} targets for {len(batches)} micro-batches")
        row = [cell for cell in table[self.ranks.index(dist.get_rank())] if cell]
        self.events, losses = [], dict[int, Tensor]()
        for stage in self.stages.values():
            stage.peak_in_flight = 0
        for link in self.links.values():
            link.begin_step(self.clock)
        before = {p: p.grad for p in (self.tied if self.sum_tied else ())}
        for parameter in before:  # only what this step adds is summed over the ranks
            parameter.grad = None
        try:
            for cell in row:
                m = cell.micro_batch
                if cell.kind == "F":
                    start = self._forward(cell, batches[m], partial(_loss_of, loss, targets[m]))
                    self._let_go_gradients(cell, table)
                    if cell.stage + 1 == self.num_stages:
                        losses[m] = self.stages[cell.stage].in_flight[m].detach()
                else:
                    start = self._backward(cell)
                self.events.append(Event(cell, start, self.clock()))
        except Exception:
            self._give_up(row, batches, before)
            raise
        for link in self.links.values():
            link.finish()
        self._sum_tied(before)
        return [losses[m] for m in sorted(losses)]

    def _forward(self, cell: Cell, batch: Any, loss: Callable[[Tensor], Tensor]) -> float:
        """A micro-batch through a stage; returns when its input was there."""
        stage, activations = self.stages[cell.stage], Activations()
        if stage.input_shapes is not None:
            like = next(self.parameters())
            link = self.links[cell.stage, cell.stage - 1]
            activations = recv_activation(link, stage.input_shapes(batch), like.dtype, like.device)
        start = self.clock()
        for part in stage.parts:
            activations = part(activations, batch)
        if cell.stage + 1 < self.num_stages:
            link = self.links[cell.stage, cell.stage + 1]
            stage.in_flight[cell.micro_batch] = send_activation(link, *activations)
        else:
            stage.in_flight[cell.micro_batch] = loss(activations[-1])
        stage.peak_in_flight = max(stage.peak_in_flight, len(stage.in_flight))
        return start

    def _backward(self, cell: Cell) -> float:
        """Back through a stage, which frees its activations. Returns when the gradient had come."""
        start = self.clock()
        self.stages[cell.stage].in_flight.pop(cell.micro_batch).backward()
        link = self.links.get((cell.stage, cell.stage + 1))
        return start if link is None else max(start, link.received_at)

    def _let_go_gradients(self, cell: Cell, table: Table) -> None:
        """Drop the gradients that the previous stage had received when it sent this activation.

        No message answers a gradient; but a rank that has gone on in its row has received it.
        """
        link = self.links.get((cell.stage, cell.stage - 1))
        if link is None:
            return
        size, previous = len(self.ranks), cell.stage - 1
        row, previous_row = table[cell.stage % size], table[previous % size]
        sent = [c for c in row[: row.index(cell)] if c and c[::2] == ("B", cell.stage)]
        done = previous_row[: previous_row.index(Cell("F", cell.micro_batch, previous))]
        missing = sum(Cell("B", c.micro_batch, previous) not in done for c in sent)
        tensors = link.sent // max(len(sent), 1)  # of one micro-batch
        link.keep_last(missing * tensors)

    def _give_up(self, row: Sequence[Cell], batches: Sequence[Any], before: Gradients) -> None:
        """After an error: exchange what the neighbours wait for, and keep nothing of the step."""
        for stage in self.stages.values():
            stage.in_flight.clear()
        try:
            # Where a neighbour is gone there is nobody to exchange anything with.
            if not any(link.broken for link in self.links.values()):
                self._exchange_rest(row, batches)
                for parameter in before:
                    parameter.grad = torch.full_like(parameter, torch.nan)
                self._sum_tied(before)
        finally:
            for parameter, grad in before.items():
                parameter.grad = grad

    def _exchange_rest(self, row: Sequence[Cell], batches: Sequence[Any]) -> None:
        """Send, as NaN, and receive what this rank has not of all messages of a step."""
        like, planned = next(self.parameters()), Counter[tuple[Link, bool]]()
        for cell in row:
            for link, sends, shape in self._messages(cell, batches[cell.micro_batch]):
                planned[link, sends] += 1
                if planned[link, sends] <= (link.sent if sends else link.received):
                    continue  # before the error
                tensor = torch.full(shape, torch.nan, dtype=like.dtype, device=like.device)
                if sends:
                    link.send(tensor, link.activations if cell.kind == "F" else link.gradients)
                else:
                    link.receive(tensor, link.activations if cell.kind == "F" else link.gradients)
        for link in self.links.values():
            link.finish()

    def _messages(self, cell: Cell, batch: Any) -> Iterator[tuple[Link, bool, tuple[int, ...]]]:
        """The messages of one piece of work in their order: the link, whether it sends, a shape."""
        stage = self.stages[cell.stage]
        previous = self.links.get((cell.stage, cell.stage - 1))
        following = self.links.get((cell.stage, cell.stage + 1))
        inputs = [] if stage.input_shapes is None else stage.input_shapes(batch)
        outputs = stage.parts[-1].shapes(batch)
        came = (previous, inputs) if cell.kind == "F" else (following, outputs)
        goes = (following, outputs) if cell.kind == "F" else (previous, inputs)
        for sends, (link, shapes) in ((False, came), (True, goes)):
            if link is not None:
                yield from ((link, sends, shape) for shape in shapes)

    def _sum_tied(self, before: Gradients) -> None:
        """Sum what this step has added; then add what the gradients were `before` it."""
        for parameter, grad in before.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.tied[parameter])
            if grad is not None:
                parameter.grad += grad


def _loss_of(loss: Loss, target: Any, logits: Tensor) -> Tensor:
    return loss(logits, target)


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
            members = sorted(ranks[place] for place in where)
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
