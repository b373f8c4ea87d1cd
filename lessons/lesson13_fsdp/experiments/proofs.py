"""Lesson 13: the same steps under several engines, for the notebook and the script's tests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from lessons.lesson13_fsdp.experiments.step_memory import WIDTH, Matrices, units_of
from shared.measuring.traffic import Call, count_traffic
from shared.training.engine import DataParallelEngine, finish, reference_curve
from shared.training.reference_run import reference_model, reference_optimizer

Wrap = Callable[[nn.Module, Sequence[nn.Module]], nn.Module]


def rows(step: int, rank: int, size: int = 4) -> Tensor:
    """One rank's rows of a step."""
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def whole_state(model: Any) -> dict[str, Tensor]:
    """The whole weights of a model under any engine, by the plain model's names."""
    if hasattr(model, "full_state_dict"):
        return model.full_state_dict()
    state = {name.removeprefix("module."): x for name, x in model.state_dict().items()}
    return {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in state.items()}


def train(wrap: Wrap, rank: int, steps: int = 3) -> dict[str, Tensor]:
    """The whole weights of `Matrices` after some steps of SGD with momentum."""
    torch.manual_seed(0)
    net = Matrices(3)
    model = wrap(net, units_of(net, "block"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        (model(rows(step, rank)) / 100).backward()
        finish(model)
        optimizer.step()
    return whole_state(model)


def train_alone(num_ranks: int, steps: int = 3) -> dict[str, Tensor]:
    """The same in one process, on the mean of the ranks' gradients."""
    torch.manual_seed(0)
    net = Matrices(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (net(rows(step, rank)) / (100 * num_ranks)).backward()
        optimizer.step()
    return net.state_dict()


def calls_of_a_step(wrap: Wrap, choice: str = "block") -> list[Call]:
    """What is sent in the third step of `Matrices`, in order."""
    torch.manual_seed(0)
    net = Matrices(3)
    model = wrap(net, units_of(net, choice))
    for step in range(3):
        with count_traffic() as traffic:
            model(rows(step, dist.get_rank())).backward()
            finish(model)
    return [call for call in traffic.calls if call.num_bytes > 16]


def counted(calls: Sequence[Call]) -> dict[str, int]:
    """How often each operation was called."""
    return {op: sum(c.op == op for c in calls) for op in sorted({c.op for c in calls})}


def with_fsdp1(
    net: nn.Module, units: Sequence[nn.Module], strategy: str = "FULL_SHARD"
) -> nn.Module:
    """torch's first FSDP, on the same units."""
    policy = CustomPolicy(lambda module: any(module is unit for unit in units))
    return FullyShardedDataParallel(
        net,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
    )


def curve(wrap: Wrap, steps: int) -> list[float]:
    """The first losses of the reference run under an engine; units are the blocks."""
    net = reference_model()
    model = wrap(net, units_of(net, "block"))
    optimizer = reference_optimizer(list(model.parameters()))
    engine = DataParallelEngine(model, optimizer, dist.get_world_size())
    return reference_curve(engine, range(steps)).losses


def checkpointed(wrap: Wrap, folder: Path, save: Any, load: Any, saving: bool) -> list[float]:
    """Losses of three steps after a checkpoint: made in three steps before, or loaded.

    A step's loss is that of all twelve rows, so that it does not depend on the number of ranks.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0 if saving else 1)  # who loads starts from other numbers
    net = Matrices(3)
    model = wrap(net, units_of(net, "block"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    if not saving:
        load(model, optimizer, folder)
    for step in range(0 if saving else 3, 6):
        if saving and step == 3:
            save(model, optimizer, folder)
        optimizer.zero_grad()
        loss = model(rows(step, 0, 12).chunk(n)[rank]) / 12 * n  # the engine averages
        loss.backward()
        finish(model)
        optimizer.step()
        total = loss.detach() / n
        dist.all_reduce(total)
        losses.append(total.item())
    return losses[-3:]
