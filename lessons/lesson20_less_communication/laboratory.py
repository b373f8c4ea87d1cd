"""Hooks and outer steps, observed: under torch's DDP, with gradients that are known beforehand."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # what DDP imports: once here, not in every forked rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shared.exercises.on_ranks import on_ranks
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed
from shared.measuring.traffic import count_traffic

Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((3, 5), (4,), (12, 11), (1,), (10, 2, 8), (7,))
PATIENCE = 5.0  # seconds that a rank waits for one that should not wait for it
APART = "the ranks do not take part in the same messages: some wait for others"


@dataclass(frozen=True)
class World:
    """How many ranks, in how many groups, and the gradients: their dtype, steps and size."""

    ranks: int
    groups: int = 1
    dtype: torch.dtype = torch.float64
    steps: int = 4
    scale: float = 1.0
    zeros: bool = False  # the gradients of the third parameter are zero
    fill: float | None = None  # all gradients are this number
    holes: bool = False  # every third number of each gradient is exactly zero
    one_bucket: bool = False

    def members(self, rank: int) -> list[int]:
        """The ranks of a rank's group."""
        size = self.ranks // self.groups
        first = rank // size * size
        return list(range(first, first + size))

    def group(self, rank: int) -> Any:
        """A rank's group; None for one of all ranks. Collective."""
        if self.groups == 1:
            return None
        size = self.ranks // self.groups
        every = [dist.new_group(range(g * size, (g + 1) * size)) for g in range(self.groups)]
        return every[rank // size]

    def gradient(self, seed: int, rank: int, step: int, index: int) -> Tensor:
        """The gradient of a parameter on a rank, in a step."""
        number = seed + 10_007 * rank + 101 * step + index
        x = torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(number))
        if self.zeros and index == 2:
            x = torch.zeros_like(x)
        if self.fill is not None:
            x = torch.full_like(x, self.fill)
        if self.holes:
            x.view(-1)[::3] = 0
        return (self.scale * x).to(self.dtype)


@dataclass
class Call:
    """One call of a hook: which parameters, what came in, what was sent."""

    step: int
    names: tuple[int, ...]
    given: Tensor
    sent: list[tuple[str, int]]
    dtype: torch.dtype | None = None  # of the future's value


@dataclass
class Seen:
    """What one rank saw: the calls of its hook, and each step's gradients as DDP left them."""

    calls: list[Call] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


class _Net(nn.Module):
    """Parameters whose gradients are what they are multiplied with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.each = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        """A loss whose derivatives these are."""
        return torch.stack([(p * g).sum() for p, g in zip(self.each, gradients, strict=True)]).sum()


def hooked(rank: int, hook: Callable[..., Any], make_state: Any, world: World, seed: int) -> Seen:
    """Some steps of DDP with a hook on this rank, in buckets that DDP sorts anew after the first.

    `make_state(group)` is the hook's state.
    """
    group, seen = world.group(rank), Seen()
    state, net = make_state(group), _Net(world.dtype)
    if not world.one_bucket:
        dist._DEFAULT_FIRST_BUCKET_BYTES = 400  # in this process alone; 1 MiB would hold all
    cap = 25 if world.one_bucket else 0.0005
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=cap)
    names = {p: index for index, p in enumerate(net.each)}
    futures: list[torch.futures.Future[Any]] = []

    def watching(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        own = tuple(names[p] for p in bucket.parameters())
        given = bucket.buffer().clone()
        with count_traffic() as traffic:
            future = hook(state, bucket)
        sent = [(call.op, call.num_bytes) for call in traffic.calls]
        seen.calls.append(Call(len(seen.results), own, given, sent))
        futures.append(future)
        return future

    ddp.register_comm_hook(state, watching)
    for step in range(world.steps):
        net.zero_grad()
        gradients = [world.gradient(seed, rank, step, i) for i in range(len(SHAPES))]
        ddp(gradients).backward()
        seen.results.append([p.grad.clone() for p in net.each if p.grad is not None])
    for call, future in zip(seen.calls, futures, strict=True):
        value = future.value()  # DDP has waited for it; an all_reduce's own is a list
        call.dtype = (value[0] if isinstance(value, list) else value).dtype
    residuals = getattr(state, "residuals", {})
    seen.state = {
        "residuals": {names[p]: r.clone() for p, r in residuals.items()},
        "own": all(r.untyped_storage().nbytes() == r.nbytes for r in residuals.values()),
        "steps": getattr(state, "steps", 0),
        "right": {names[p]: r.clone() for p, r in getattr(state, "right", {}).items()},
    }
    return seen


def late(rank: int, hook: Callable[..., Any], seed: int) -> bool:
    """Whether rank 0's hook is back before rank 1's has begun."""
    net, world = _Net(torch.float32), World(2, dtype=torch.float32)
    ddp = DistributedDataParallel(net)
    store, done = dist.distributed_c10d._get_default_store(), ["rank 0's hook is back"]
    came = [True]

    def watching(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        until = time.monotonic() + PATIENCE
        while rank == 1 and not store.check(done) and time.monotonic() < until:
            time.sleep(0.01)
        came[0] = rank == 0 or store.check(done)
        future = hook(state, bucket)
        if rank == 0:
            store.set(done[0], "")
        return future

    ddp.register_comm_hook(None, watching)
    ddp([world.gradient(seed, rank, 0, i) for i in range(len(SHAPES))]).backward()
    return came[0]


@once_an_answer
def hooks(hook: Callable[..., Any]) -> Callable[..., tuple[int, list[Seen]]]:
    """The laboratory of a hook: worlds and states in turn, each once."""
    known: dict[Any, tuple[int, list[Seen]]] = {}

    def observe(world: World, make_state: Any, key: Any = "") -> tuple[int, list[Seen]]:
        if (world, key) not in known:
            seed = fresh_seed()
            args = hook, make_state, world, seed
            known[world, key] = seed, on_ranks(hooked, world.ranks, *args, apart=APART)
        return known[world, key]

    return observe


def returns_early(hook: Callable[..., Any]) -> bool:
    """Whether a hook returns before its message has arrived."""
    quiet = 2 * PATIENCE  # the rank that waits sleeps nearly all of it
    return all(on_ranks(late, 2, hook, fresh_seed(), apart=APART, timeout=20, quiet=quiet))


# local SGD


@dataclass
class Outer:
    """What one rank saw of local SGD: parameters after each step, what it said, what was sent."""

    first: list[Tensor]
    start: list[Tensor]
    after: list[list[Tensor]] = field(default_factory=list)
    said: list[Any] = field(default_factory=list)
    sent: list[list[tuple[str, int]]] = field(default_factory=list)
    graph: bool = False


def move(world: World, seed: int, rank: int, step: int, index: int) -> Tensor:
    """By what a rank's own optimizer moves a parameter in a step."""
    return 0.1 * world.gradient(seed, rank, step, index)


def trained_apart(
    rank: int, answer: Callable[..., Any], world: World, seed: int, args: tuple[Any, ...]
) -> Outer:
    """Steps of an optimizer that moves each parameter by known numbers; the second is frozen."""
    group = world.group(rank)
    ps = [nn.Parameter(world.gradient(seed + 1, rank, 0, i)) for i in range(len(SHAPES))]
    ps[1].requires_grad_(False)
    seen = Outer([p.detach().clone() for p in ps], [])
    outer = answer(iter(ps), *args, group) if world.groups > 1 else answer(iter(ps), *args)
    seen.start = [p.detach().clone() for p in ps]
    for step in range(world.steps):
        with torch.no_grad():
            for index, p in enumerate(ps):
                if p.requires_grad:
                    p.sub_(move(world, seed, rank, step, index))
        with count_traffic() as traffic:
            seen.said.append(outer.step())
        seen.sent.append([(call.op, call.num_bytes) for call in traffic.calls])
        seen.after.append([p.detach().clone() for p in ps])
    seen.graph = any(p.grad_fn is not None for p in ps)
    return seen


@once_an_answer
def local(answer: Callable[..., Any]) -> Callable[..., tuple[int, list[Outer]]]:
    """The laboratory of local SGD."""
    known: dict[Any, tuple[int, list[Outer]]] = {}

    def observe(world: World, *args: Any) -> tuple[int, list[Outer]]:
        if (world, args) not in known:
            seed = fresh_seed()
            given = answer, world, seed, args
            known[world, args] = seed, on_ranks(trained_apart, world.ranks, *given, apart=APART)
        return known[world, args]

    return observe


# two levels


@dataclass
class Summed:
    """What one rank saw of an all-reduce over two levels."""

    given: Tensor
    got: Tensor
    sent: list[tuple[str, int, tuple[int, ...]]]


def summed(
    rank: int, answer: Callable[..., Any], nodes: int, shape: tuple[int, ...], seed: int
) -> Summed:
    """One sum over ranks that are shared out over nodes, by new groups of this laboratory's own."""
    ranks = dist.get_world_size()
    m = ranks // nodes
    inside = [dist.new_group(range(node * m, (node + 1) * m)) for node in range(nodes)]
    across = [dist.new_group(range(place, ranks, m)) for place in range(m)]
    draw = torch.Generator().manual_seed(seed + rank)
    x = torch.randn(shape[::-1], generator=draw, dtype=torch.float64)
    x = x.permute(*reversed(range(x.ndim)))  # a matrix does not lie in one piece
    given = x.clone()
    with count_traffic() as traffic, torch.no_grad():
        answer(x, inside[rank // m], across[rank % m])
    sent = [(call.op, call.num_bytes, call.ranks) for call in traffic.calls]
    return Summed(given, x, sent)


@once_an_answer
def levels(answer: Callable[..., Any]) -> Callable[..., list[Summed]]:
    """The laboratory of an all-reduce over two levels."""

    def observe(nodes: int, inside: int, shape: tuple[int, ...]) -> list[Summed]:
        return on_ranks(summed, nodes * inside, answer, nodes, shape, fresh_seed(), apart=APART)

    return observe


# low rank


def factored(
    rank: int, answer: Callable[..., Any], world: World, seed: int, wide: int
) -> tuple[list[Tensor], list[Tensor], list[tuple[str, int]], bool]:
    """Matrices and new factors of this rank after one call, what was sent, factors untouched."""
    group = world.group(rank)
    matrices = given_matrices(world, seed, rank)
    factors = given_factors(world, seed, wide)
    before = [q.clone() for q in factors]
    with count_traffic() as traffic:
        new = answer(matrices, factors, group) if world.groups > 1 else answer(matrices, factors)
    kept = all(torch.equal(a, b) for a, b in zip(before, factors, strict=True))
    sent = [(call.op, call.num_bytes) for call in traffic.calls]
    return matrices, list(new), sent, kept


MATRICES = ((12, 11), (6, 9), (8, 7))


def given_matrices(world: World, seed: int, rank: int) -> list[Tensor]:
    """A rank's matrices."""
    draw = torch.Generator().manual_seed(seed + 1000 * rank)
    return [torch.randn(shape, generator=draw, dtype=world.dtype) for shape in MATRICES]


def given_factors(world: World, seed: int, wide: int) -> list[Tensor]:
    """The same factors on all ranks, of columns that are neither short nor at right angles."""
    draw = torch.Generator().manual_seed(seed + 7)
    return [3 * torch.rand(m, wide, generator=draw, dtype=world.dtype) for _, m in MATRICES]


def low_rank(answer: Callable[..., Any], world: World, wide: int) -> tuple[int, list[Any]]:
    """One call of an answer on the ranks of a world."""
    seed = fresh_seed()
    return seed, on_ranks(factored, world.ranks, answer, world, seed, wide, apart=APART)
