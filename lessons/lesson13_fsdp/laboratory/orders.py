"""Lesson 13: which unit is whole, and which is on its way, while one computes."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lessons.lesson13_fsdp.laboratory.nets import Case, Net
from lessons.lesson13_fsdp.laboratory.options import (
    observe_acquired,
    observe_alone,
    observe_ending,
    observe_frozen,
    observe_modes,
    observe_output,
    observe_outputs,
    observe_tokens,
)
from lessons.lesson13_fsdp.laboratory.sharded_modules import (
    Make,
    Observed,
    observe_bytes,
    observe_calls,
    observe_half,
    observe_training,
    refusals,
)
from shared.exercises.noting import noted_waits
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import count_traffic
from shared.training.engine import finish

NUM_LAYERS = 4


@dataclass
class Moment:
    """While a layer computed: the layers that were whole, waits so far."""

    way: str
    layer: int
    whole: list[int]
    waits: int


@dataclass
class Orders:
    """What one rank saw of the steps, and the weights at their end."""

    start: dict[str, Tensor]
    state: dict[str, Tensor]
    steps: list[list[Moment]] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)  # of each step


class _Mark(torch.autograd.Function):
    """The identity; calls in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grads[0], None


class Layer(nn.Module):
    """A product that says when it computes, in forward and in backward."""

    def __init__(self, number: int, note: Callable[[str, int], None]) -> None:
        super().__init__()
        self.number, self.note = number, note
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        self.note("forward", self.number)
        y = x @ self.weight
        return _Mark.apply(y, functools.partial(self.note, "backward", self.number))


class Row(nn.Module):
    """Layers that are called in an order of the caller's."""

    def __init__(self, note: Callable[[str, int], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, note) for i in range(NUM_LAYERS))

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for i in order:
            x = self.layers[i](x)
        return x.square().sum()


STRAIGHT = tuple(range(NUM_LAYERS))
OTHER = (0, 2, 1, 3)
ORDERS = (STRAIGHT, STRAIGHT, STRAIGHT, OTHER, OTHER)


def row_input(seed: int, step: int, rank: int) -> Tensor:
    """One rank's rows of a step."""
    draw = torch.Generator().manual_seed(seed % 10_000 + 10 * step + rank)
    return torch.randn(2, 6, generator=draw) / 6


def observe_orders(make: Make, seed: int, rank: int) -> Orders:
    """Five steps, the last two in another order; an evaluation before the third."""
    seed_all(seed)
    moments: list[Moment] = []

    def note(way: str, number: int) -> None:
        whole = [i for i, layer in enumerate(net.layers) if layer.get_parameter("weight").numel()]
        moments.append(Moment(way, number, whole, len(waits)))

    net = Row(note)
    start = {name: x.detach().clone() for name, x in net.state_dict().items()}
    # The order of use is another than that of the list.
    model = make(net, [net.layers[i] for i in (2, 0, 3, 1)], None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = Orders(start, {})
    with noted_waits() as waits:
        for step, order in enumerate(ORDERS):
            with count_traffic() as traffic:
                if step == 2:
                    with torch.no_grad():
                        model(row_input(seed, 9, 0), STRAIGHT)
                before = traffic.count("all_gather")
                waits.clear()
                moments.clear()
                optimizer.zero_grad()
                model(row_input(seed, step, rank), order).backward()
                finish(model)
                optimizer.step()
            seen.steps.append(list(moments))
            seen.gathers.append(traffic.count("all_gather") - before)
    seen.state = model.full_state_dict()
    return seen


def twin_orders(seed: int, start: dict[str, Tensor], num_ranks: int) -> dict[str, Tensor]:
    """The same steps in one process."""
    net = Row(lambda way, number: None)
    net.load_state_dict(start)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step, order in enumerate(ORDERS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (net(row_input(seed, step, rank), order) / num_ranks).backward()
        optimizer.step()
    return net.state_dict()


# The laboratories of 13.2 to 13.4

VALUES = (
    Case(3),
    Case(2, frozen=True, units="some"),
    Case(2, units="root"),
    Case(1),
)
MODELS = (  # all of it trained
    Case(3),
    Case(2, units="some"),
    Case(2, units="first"),
    Case(2, units="root"),
    Case(1),
)
SMALL = Case(2, keep_whole=13)  # the output's bias has 13 elements
KEPT = Case(2, keep_units=True)
TWICE, SHORT = Case(2, twice=True), Case(2, short=True)
SHORT_NAMED = Case(2, short=True, named=True)
MESHES = (
    Case(4, mesh=(2, 2)),
    Case(3, mesh=(3, 1)),
    Case(3, mesh=(1, 3), frozen=True),
    Case(4, mesh=(4, 1), accumulate=False),
)
CHOICES = ("root", "block", "linear")


def _nested_twice(net: Net) -> tuple[list[nn.Module], None]:
    """A unit whose child has the other unit as its own child."""
    inner = nn.Linear(2, 2)
    net.output.inside = nn.Sequential(inner)
    return [net.output, inner], None


BAD_UNITS: dict[str, Callable[[Net], Any]] = {
    "a unit that contains another": lambda net: ([net.layers, net.layers[0]], None),
    "a unit that contains another, two levels below it": _nested_twice,
    "a unit that is no part of the module": lambda net: ([nn.Linear(2, 2)], None),
    "a unit that is named twice": lambda net: ([net.output, net.output], None),
}
BAD_MESHES: dict[str, Callable[[Net], Any]] = {
    "a mesh of 2 x 2 on 3 ranks": lambda net: (None, (2, 2)),
    "a mesh of 1 x 2 on 3 ranks": lambda net: (None, (1, 2)),
    "a mesh of 2 x 3 on 3 ranks": lambda net: (None, (2, 3)),
}


Rows = dict[int, dict[Any, Callable[[int], Any]]]


def in_order(answer: Any) -> Make:
    """How 13.2b and 13.3 are called: (net, units, no mesh, compute dtype)."""
    return lambda net, units, mesh, compute=None, **more: answer(net, units, compute, **more)


def on_mesh(answer: Any) -> Make:
    """How 13.4 is called."""
    return lambda net, units, mesh, compute=None: answer(net, mesh, units, compute)


def _rows_of_all(answer: Any, make: Make, cases: Sequence[Case], seed: int) -> Rows:
    """What is seen of 13.2, 13.2b and 13.3 alike."""
    rows: Rows = {n: {} for n in (1, 2, 3)}
    for case in cases:
        rows[case.world_size][case] = functools.partial(_trained, make, case, seed)
    for choice in CHOICES:
        for n in (2, 3):
            rows[n][n, "calls", choice] = functools.partial(observe_calls, make, choice)
        rows[2]["bytes", choice] = functools.partial(observe_bytes, make, choice)
    rows[2]["refused"] = functools.partial(refusals, make, BAD_UNITS)
    rows[2]["outputs"] = functools.partial(observe_outputs, make)
    rows[2]["modes"] = functools.partial(observe_modes, make)
    rows[2]["alone"] = functools.partial(observe_alone, answer)
    return rows


@once_an_answer
def observed_model(answer: Any) -> Observed:
    """The laboratory of 13.2, whose class is given a module, units and a group alone."""

    def make(net: nn.Module, units: Any, mesh: Any = None, **more: Any) -> nn.Module:
        return answer(net, units, **more)

    return Observed(_rows_of_all(answer, make, MODELS, fresh_seed()))


@once_an_answer
def observed_sharding(answer: Any) -> Observed:
    """The laboratory of 13.2b and 13.3."""
    make, seed = in_order(answer), fresh_seed()
    rows = _rows_of_all(answer, make, (*VALUES, TWICE, SHORT, SHORT_NAMED, SMALL, KEPT), seed)
    kept = functools.partial(observe_calls, make, "block", reshard_after_forward=False)
    rows[2]["kept calls"] = kept
    rows[2]["half"] = functools.partial(_half, make, seed)
    rows[2]["orders"] = functools.partial(_orders, make, seed)
    rows[2]["ending"] = functools.partial(observe_ending, make)
    rows[2]["acquired"] = functools.partial(observe_acquired, answer)
    rows[2]["frozen"] = functools.partial(observe_frozen, make)
    rows[2]["tokens"] = functools.partial(observe_tokens, make)
    return Observed(rows)


@once_an_answer
def observed_mesh(answer: Any) -> Observed:
    """The laboratory of 13.4."""
    make, seed = on_mesh(answer), fresh_seed()
    rows: dict[int, dict[Any, Callable[[int], Any]]] = {n: {} for n in (3, 4)}
    for case in MESHES:
        rows[case.world_size][case] = functools.partial(_trained, make, case, seed)
    for mesh in ((2, 2), (4, 1)):
        rows[4]["calls", mesh] = functools.partial(observe_calls, make, "linear", mesh=mesh)
    rows[4]["neighbours"] = functools.partial(observe_neighbours, make)
    rows[4]["half"] = functools.partial(observe_output, make)
    rows[3]["refused"] = functools.partial(refusals, make, BAD_MESHES)
    return Observed(rows)


def observe_neighbours(make: Make, rank: int) -> list[int]:
    """The ranks on a mesh of 2 x 2 whose shards make up this rank's units."""
    seed_all(0)
    model = make(nn.Sequential(nn.Linear(4, 4, bias=False)), None, (2, 2))
    (shard,) = model.parameters()
    with torch.no_grad():
        shard.fill_(rank)
    return sorted({int(x) for x in model.full_state_dict()["0.weight"].flatten().tolist()})


def _trained(make: Make, case: Case, seed: int, rank: int) -> tuple[int, Any]:
    return seed, observe_training(make, case, seed, rank)


def _half(make: Make, seed: int, rank: int) -> tuple[int, Any]:
    return seed, observe_half(make, seed, rank)


def _orders(make: Make, seed: int, rank: int) -> tuple[int, Any]:
    return seed, observe_orders(make, seed, rank)
