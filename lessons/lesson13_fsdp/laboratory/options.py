"""What becomes of a sharding's arguments, and the calls that a subclass gets."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lessons.lesson13_fsdp.experiments.step_memory import Matrices, units_of
from lessons.lesson13_fsdp.laboratory.nets import Net
from lessons.lesson13_fsdp.laboratory.sharded_modules import HALF, Make
from shared.exercises.seeds import seed_all
from shared.measuring.traffic import count_traffic


@dataclass
class HookCalls:
    """The calls that a class derived from an answer gets in one step of three units."""

    forward: int  # calls of acquire()
    backward: int
    means: int  # calls of on_shard_gradient()
    early: int  # of these, the ones that did not find what shard.grad was in the end


def observe_acquired(answer: Any, rank: int) -> HookCalls:
    """A step under a class that overrides what an answer's hooks call."""
    noted: list[Any] = []
    found: list[tuple[Any, Tensor | None]] = []

    class Noting(answer):
        def acquire(self, unit: Any) -> None:
            noted.append(unit)
            super().acquire(unit)

        def on_shard_gradient(self, unit: Any) -> None:
            grad = unit.shard.grad
            found.append((unit, None if grad is None else grad.clone()))

    seed_all(0)
    net = Matrices(3)
    model: Any = Noting(net, units_of(net, "block"))
    loss = model(torch.randn(1, 64))
    forward = len(noted)
    loss.backward()
    model.finish_gradient_sync()
    early = sum(seen is None or not torch.equal(seen, unit.shard.grad) for unit, seen in found)
    return HookCalls(forward, len(noted) - forward, len(found), early)


class Ending(nn.Module):
    """Two products, and a parameter of the module's own whose gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).square().sum()


def observe_ending(make: Make, rank: int) -> int:
    """How many gathers the third step has; the first unit to be used is the first to leave."""
    seed_all(0)
    net = Ending()
    model = make(net, list(net.layers), None)
    for _ in range(3):
        with count_traffic() as traffic:
            model(torch.randn(1, 6)).backward()
            model.finish_gradient_sync()
    return traffic.count("all_gather")


@dataclass
class Alone:
    """A sharding over a group of one rank, beside another such group."""

    numel: int
    kept: int  # elements of the shards
    own: bool  # its numbers and buffers are this rank's
    group_sizes: set[int]


def observe_alone(answer: Any, rank: int) -> Alone:
    """Each of two ranks shards a module of its own over itself alone."""
    seed_all(rank)
    net, groups = Net(), [dist.new_group([0]), dist.new_group([1])]
    own = {name: x.detach().clone() for name, x in net.state_dict().items()}
    numel = sum(p.numel() for p in net.parameters())
    with count_traffic() as traffic:
        model = answer(net, None, group=groups[rank])
        model(torch.arange(5)).sum().backward()
        model.finish_gradient_sync()
    kept = sum(p.numel() for p in model.parameters())
    state = model.full_state_dict()
    same = all(torch.equal(state[name], x) for name, x in own.items() if name in state)
    return Alone(numel, kept, same, {call.group_size for call in traffic.calls})


def observe_frozen(make: Make, rank: int) -> tuple[int, int, int]:
    """A step of three units, the middle one frozen.

    Elements left after forward, those of the frozen one after backward, and reductions.
    """
    seed_all(0)
    net = Matrices(3)
    net.blocks[1].requires_grad_(False)
    model = make(net, units_of(net, "block"), None)
    with count_traffic() as traffic:
        loss = model(torch.randn(1, 64))
        left = sum(p.numel() for p in net.parameters())
        loss.backward()
        behind = sum(p.numel() for p in net.blocks[1].parameters())
        model.finish_gradient_sync()
    return left, behind, sum(c.op == "reduce_scatter" for c in traffic.calls if c.num_bytes > 16)


class Tokens(nn.Module):
    """An embedding, float32 positions added to it, and a product: three dtypes on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.product = nn.Embedding(5, 4), nn.Linear(4, 3)
        self.register_buffer("positions", torch.ones(6, 4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.product(self.embedding(ids) + self.get_buffer("positions"))


def observe_tokens(make: Make, rank: int) -> str:
    """What a model of tokens under bfloat16 ends in: the dtype that comes out, or the error."""
    net = Tokens()
    model = make(net, [net.embedding, net.product], None, HALF)
    try:
        return str(model(torch.arange(6) % 5).dtype)
    except RuntimeError as error:
        return str(error)


def observe_modes(make: Make, rank: int) -> tuple[bool, bool, bool]:
    """The module's own mode after eval(), and after train() again; whether both return self."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    model = make(net, None, None)
    selves = model.eval() is model
    evaluating = not net[1].training
    selves = model.train() is model and selves
    return evaluating, net[1].training, selves


class Branches(nn.Module):
    """A product with several outputs: one that nobody uses, one of no gradient, and the product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 7) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y = x @ self.weight
        return y.square(), {"signs": (y > 0).long(), "nothing": None, "product": y.tanh()}


class Branching(nn.Module):
    """Two of them, one after the other; the outputs that nobody uses have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branches() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        for each in self.branches:
            _, found = each(x)
            x = found["product"] + found["signs"]
        return x, None


def observe_outputs(make: Make, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients after a step of units with several outputs, and those of one process."""
    seed_all(0)
    net, twin = Branching(), Branching()
    twin.load_state_dict(net.state_dict())
    rows = [torch.randn(3, 7) for _ in range(2)]
    for x in rows:
        (twin(x)[0].square().mean() / 2).backward()
    model = make(net, list(net.branches), None)
    start = model.full_state_dict()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(rows[rank])[0].square().mean().backward()
    model.finish_gradient_sync()
    optimizer.step()
    after = model.full_state_dict()
    want = [p.grad for p in twin.parameters() if p.grad is not None]
    return [start[name] - after[name] for name, _ in twin.named_parameters()], want


def observe_output(make: Make, rank: int) -> torch.dtype:
    """What a module computes in on a mesh of 2 x 2 that is given bfloat16."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4))
    return make(net, None, (2, 2), HALF)(torch.zeros(1, 4)).dtype
