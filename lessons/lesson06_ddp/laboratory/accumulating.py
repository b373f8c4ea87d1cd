"""One step of several micro-batches, under an engine that counts what it is asked."""

import contextlib
import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.exercises.expecting import recognise
from shared.exercises.nets import Case, Grads, clone, flat_grads, grads_of
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed

CASE = Case(2)
NUM_PARTS = (3, 1)
BATCHES = (0, 1, 1)  # two alike: which one is last is told by its place alone
HELD = 0.25  # what each rank's gradients hold before the step, times rank + 1


class PlainDDP(nn.Module):
    """A stand-in engine: right numbers, no overlap. Like torch's it decides in forward to send."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.on, self.sending = module, True, True
        self.finished, self.sent, self.late = 0, 0, False
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the model's; what follows in backward is sent unless no_sync is on now."""
        self.sending = self.on
        return self.module(*args, **kwargs)

    def average(self, parameter: nn.Parameter) -> None:
        """Average one gradient, as the hook of its parameter."""
        if self.sending and parameter.grad is not None:
            self.sent, self.late = self.sent + 1, self.late or not self.on
            self.finished += self.finished > 0  # nobody would wait for what is sent now
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None]:
        """Send nothing for a forward that runs in here."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def finish_gradient_sync(self) -> None:
        """Count the call: nothing is left to do."""
        self.finished += 1


@dataclass
class Accumulated:
    """What one rank saw of a step: `sent` messages, `most` graphs alive at once, and so on.

    `late` says that messages left although no_sync was on, `graph` that the returned loss still
    holds a graph, `finished` how often the engine was asked to finish.
    """

    seed: int
    start: dict[str, Tensor]
    grads: Grads
    loss: Any
    graph: bool
    sent: int
    late: bool
    finished: int
    most: int


def part_loss(model: Any, seed: int, rank: int, part: int) -> Tensor:
    """Return the loss of one micro-batch, each of another weight."""
    return CASE.loss(model, seed, rank, 0, part) * (part + 1) / 10


@once_an_answer
def accumulating(answer: Any) -> RankCases:
    """Return the laboratory of an answer to 06.5, by the number of micro-batches."""
    seed = fresh_seed()

    def step(parts: int, rank: int) -> Accumulated:
        torch.manual_seed(seed + rank)
        net = CASE.net()
        ddp = PlainDDP(net)
        start = clone(net.state_dict())
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, HELD * (rank + 1))
        graphs = most = 0  # forwards whose backward is still to come

        def loss_of(model: nn.Module, part: int) -> Tensor:
            nonlocal graphs, most
            recognise(
                {"loss_of is given another model than ddp": model is not ddp},
                expected="loss_of(ddp, micro_batch): ddp has to see the forward",
                seen=f"a {type(model).__name__}",
            )
            graphs += 1
            most = max(most, graphs)
            loss = part_loss(model, seed, rank, part)
            loss.register_hook(done_with)
            return loss

        def done_with(_: Tensor) -> None:
            nonlocal graphs
            graphs -= 1

        loss = answer(ddp, list(BATCHES[:parts]), loss_of)
        graph = isinstance(loss, Tensor) and loss.requires_grad
        plain = loss.detach() if isinstance(loss, Tensor) else loss
        return Accumulated(
            seed, start, grads_of(net), plain, graph, ddp.sent, ddp.late, ddp.finished, most
        )

    return RankCases(2, {parts: functools.partial(step, parts) for parts in NUM_PARTS})


def accumulate_nothing(answer: Any) -> Any:
    """Take a step without a micro-batch, on one rank."""
    return answer(PlainDDP(nn.Linear(2, 2)), [], lambda model, part: model(torch.ones(1, 2)).sum())


def interrupted(answer: Any) -> bool:
    """Return whether the engine sends again after a loss_of that raised."""
    ddp = PlainDDP(nn.Linear(2, 2))

    def loss_of(model: nn.Module, part: int) -> Tensor:
        raise KeyError("a batch that cannot be read")

    try:
        answer(ddp, [0, 1], loss_of)
    except KeyError:
        return ddp.on  # asked here: the traceback keeps a block that nobody has left alive
    return ddp.on


def twin_parts(seen: Accumulated, parts: int) -> tuple[list[Tensor], list[Tensor]]:
    """By rank: each micro-batch's flat gradients (parts, numbers) and their losses (parts)."""
    twin = CASE.net()
    twin.load_state_dict(seen.start)
    grads, losses = [], []
    for rank in range(2):
        own_grads, own_losses = [], []
        for part in BATCHES[:parts]:
            twin.zero_grad()
            value = part_loss(twin, seen.seed, rank, part)
            value.backward()
            own_losses.append(value.detach())
            own_grads.append(flat_grads(grads_of(twin)))
        grads.append(torch.stack(own_grads))
        losses.append(torch.stack(own_losses))
    return grads, losses
