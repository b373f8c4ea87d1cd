"""Lesson 16: gradients of one model, handed out over ranks as a mesh of three axes cuts it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.random  # noqa: F401 - what seeding imports: once here, not in every forked rank
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import Call, count_traffic

AXES = ("pp", "dp", "tp")
HANG = "not every rank takes part in each message: the others wait for it"
SIZE = 12  # divisible by every tp that is tried


def groups_of(sizes: dict[str, int], order: Sequence[str]) -> dict[str, list[list[int]]]:
    """The groups of each axis, as views of torch have them: ranks in a box, seen along an axis."""
    ranks = torch.arange(math.prod(sizes.values())).view([sizes[axis] for axis in order])
    return {
        axis: ranks.movedim(i, -1).reshape(-1, sizes[axis]).tolist() for i, axis in enumerate(order)
    }


def front_groups(sizes: dict[str, int], order: Sequence[str]) -> dict[str, list[list[int]]]:
    """Lists of the right size where an axis is moved to the front: its ranks are then apart."""
    ranks = torch.arange(math.prod(sizes.values())).view([sizes[axis] for axis in order])
    return {
        axis: ranks.movedim(i, 0).reshape(-1, sizes[axis]).tolist() for i, axis in enumerate(order)
    }


@dataclass(frozen=True)
class World:
    """How many places each axis has, and what the gradients are."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    dtype: torch.dtype = torch.float32
    empty: bool = False  # the second stage has no gradient at all
    bare: bool = False  # the last rank of tp has no gradient of any part
    single: bool = False  # an axis of one rank is given as a group, not as None
    scale: float = 1.0
    limit: float = 1.0  # max_norm as a share of the norm
    once: bool = False  # the parameters come as a generator

    @property
    def ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.dp * self.tp * self.pp

    @property
    def name(self) -> str:
        """The mesh as a reader wants it."""
        return f"dp {self.dp} x tp {self.tp} x pp {self.pp}"

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank."""
        stage, rest = divmod(rank, self.dp * self.tp)
        return {"pp": stage, "dp": rest // self.tp, "tp": rest % self.tp}

    def plane(self, rank: int) -> list[int]:
        """The ranks that hold one copy of the model together with this one."""
        dp = self.place(rank)["dp"]
        return [r for r in range(self.ranks) if self.place(r)["dp"] == dp]

    def column(self, rank: int, axis: str) -> list[int]:
        """The ranks of this rank's group along an axis."""
        groups = groups_of({"dp": self.dp, "tp": self.tp, "pp": self.pp}, AXES)[axis]
        return next(group for group in groups if rank in group)

    def groups(self, rank: int) -> dict[str, dist.ProcessGroup | None]:
        """What is given as tp and pp; every rank makes all groups."""
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        own: dict[str, dist.ProcessGroup | None] = {"tp": None, "pp": None}
        for axis, lists in groups_of(sizes, AXES).items():
            if axis == "dp" or (sizes[axis] == 1 and not self.single):
                continue
            for members in lists:
                group = _group(tuple(members))
                own[axis] = group if rank in members else own[axis]
        return own


@functools.cache
def _group(members: tuple[int, ...]) -> dist.ProcessGroup | Any:
    """The group of these ranks, made once in each process: a collective of all ranks."""
    return dist.new_group(list(members))


@dataclass(frozen=True)
class Whole:
    """A gradient of the whole model, and how it is laid over the ranks."""

    stage: int
    gradient: Tensor | None
    dim: int | None = None  # along which it is cut over tp
    tied: bool = False  # the second copy of a weight that two stages have


def model_of(world: World, seed: int) -> dict[str, Whole]:
    """A model's gradients by name: cut and whole ones, frozen ones, and a weight in two stages."""
    seed_all(seed)

    def draw(*shape: int, times: float = 1.0) -> Tensor:
        return (world.scale * times * torch.randn(shape)).to(world.dtype)

    embedding, last = draw(SIZE, 5), world.pp - 1
    model = {"embedding": Whole(0, embedding, 0)}
    for layer in range(2 * world.pp + 1):  # stages of 2 and 3 layers, or of 2, 0 and 5
        stage = min(layer // 2, last)
        stage = last if world.empty and stage == 1 else stage
        model |= {
            f"{layer}.column": Whole(stage, draw(SIZE, 5), 0),
            f"{layer}.column.bias": Whole(stage, draw(SIZE), 0),
            f"{layer}.row": Whole(stage, draw(3, SIZE), 1),
            f"{layer}.row.bias": Whole(stage, draw(7, times=2.0)),
            f"{layer}.norm": Whole(stage, draw(5, times=3.0)),
        }
    if world.pp > 1:
        model["output"] = Whole(last, embedding.clone(), 0, tied=True)
    for each in model.values() if world.bare else ():
        if each.gradient is not None and each.dim is not None:
            each.gradient.chunk(world.tp, each.dim)[-1].zero_()
    return model | {f"frozen {stage}": Whole(stage, None) for stage in range(world.pp)}


def whole_gradients(model: dict[str, Whole]) -> list[Tensor]:
    """The gradients of one process that has all of the model, each once, in float32."""
    return [x.gradient.float() for x in model.values() if x.gradient is not None and not x.tied]


def own_parameters(world: World, model: dict[str, Whole], rank: int) -> dict[str, nn.Parameter]:
    """What one rank has of the model, with its part of the gradients."""
    place, own = world.place(rank), {}
    for name, each in model.items():
        if each.stage != place["pp"]:
            continue
        part = each.gradient
        if part is not None and each.dim is not None:
            part = part.chunk(world.tp, each.dim)[place["tp"]]
        frozen = part is None
        shape = (4,) if part is None else part.shape
        parameter = nn.Parameter(torch.ones(shape, dtype=world.dtype), requires_grad=not frozen)
        bare = world.bare and each.dim is not None and place["tp"] == world.tp - 1
        parameter.grad = None if part is None or bare else part.clone()
        if each.dim is not None:
            parameter.cut_dim = each.dim  # ty: ignore[missing-attribute]
        if each.tied or (name == "embedding" and world.pp > 1):
            parameter.tied_copy = each.tied  # ty: ignore[missing-attribute]
        own[name] = parameter
    return own


@dataclass
class Squares:
    """The sums of squares on one rank: of parts, of copies, of what is tied."""

    parts: float
    copies: float
    tied: float
    by_rows: float  # of those parts that are cut along dimension 0


def squares_of(world: World, model: dict[str, Whole], rank: int) -> Squares:
    """What one rank has, counted in float64."""
    sums = {"parts": 0.0, "copies": 0.0, "tied": 0.0, "by_rows": 0.0}
    for name, p in own_parameters(world, model, rank).items():
        if p.grad is not None:
            each, square = model[name], p.grad.double().square().sum().item()
            kind = "copies" if each.dim is None else "parts"
            sums["tied" if each.tied else kind] += square
            sums["by_rows"] += square if each.dim == 0 and not each.tied else 0.0
    return Squares(**sums)


def none_is_all_ranks(world: World, of: dict[int, Squares], rank: int) -> float:
    """What a rank has where a group that is None is given to torch, for which it is all ranks."""
    everybody = list(of)

    def group(axis: str, size: int, at: int) -> list[int]:
        return world.column(at, axis) if size > 1 or world.single else everybody

    sums = {r: sum(of[i].parts for i in group("tp", world.tp, r)) + of[r].copies for r in everybody}
    return sum(sums[r] for r in group("pp", world.pp, rank))


# What each rank saw


@dataclass
class Seen:
    """What came of an answer on one rank."""

    model: dict[str, Whole]
    result: Any
    calls: list[Call]
    before: dict[str, Tensor] = field(default_factory=dict)  # the gradients, by name
    after: dict[str, Tensor | None] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)  # another tensor is in .grad now
    made: list[str] = field(default_factory=list)  # .grad was None
    weights: list[str] = field(default_factory=list)  # the parameter itself is another
    numbers: list[int] = field(default_factory=list)  # of each message


class _Numbers(TorchDispatchMode):
    """Writes down how many numbers a rank hands in with each message."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, the default, imports the compiler: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            sizes = [x.numel() for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.found += [min(sizes)] if sizes else []  # what is received may be more
        return func(*args, **(kwargs or {}))


def observe(
    answer: Callable[..., Any], clips: bool, seed: int, world: World, rank: int | None
) -> Seen:
    """One call of an answer; without a rank there is no process group."""
    groups = {} if rank is None else world.groups(rank)
    model = model_of(world, seed)
    own = own_parameters(world, model, rank or 0)
    kept = {name: p.grad for name, p in own.items() if p.grad is not None}
    before = {name: grad.clone() for name, grad in kept.items()}
    given: Any = (p for p in own.values()) if world.once else list(own.values())
    limits = (max_norm_of(world, model),) if clips else ()
    with count_traffic() as traffic, _Numbers() as numbers:
        result = answer(given, *limits, **groups)
    seen = Seen(model, result, traffic.calls, before, numbers=numbers.found)
    seen.made = [name for name, p in own.items() if name not in kept and p.grad is not None]
    seen.weights = [name for name, p in own.items() if not bool((p == 1).all())]
    seen.after = {name: None if own[name].grad is None else own[name].grad for name in kept}
    seen.replaced = [name for name, grad in kept.items() if own[name].grad is not grad]
    return seen


def max_norm_of(world: World, model: dict[str, Whole]) -> float:
    """The limit that is given: a share of the norm."""
    return world.limit * torch.nn.utils.get_total_norm(whole_gradients(model)).item()


BF16 = torch.bfloat16
NORMS = (
    World(tp=2, pp=2),
    World(dp=2, tp=2, single=True),
    World(dp=2, pp=2, dtype=BF16),
    World(dp=4),
    World(tp=3, bare=True),
    World(pp=3, empty=True, once=True),
)
CLIPS = (
    World(tp=2, pp=2, limit=0.02),
    World(tp=2, pp=2, limit=1.7),
    World(dp=2, pp=2, limit=0.4, once=True),
    World(tp=3, limit=0.5, scale=1e-7),
    World(pp=3, limit=0.6, empty=True, dtype=BF16),
)
ALONE = World()


@once_an_answer
def on_meshes(answer: Callable[..., Any], clips: bool) -> Callable[[World], list[Seen]]:
    """An answer to 16.2, or to 16.2b, on every mesh: ranks start once for meshes of one size."""
    seed, worlds = fresh_seed(), CLIPS if clips else NORMS
    work = functools.partial(observe, answer, clips, seed)
    rows = {
        n: RankCases(n, {w: functools.partial(work, w) for w in worlds if w.ranks == n})
        for n in {w.ranks for w in worlds}
    }
    known = {
        "NoneType": ("a parameter without a gradient is looked into: its .grad is None", ""),
        "non-empty": (NOTHING, ""),
        "'int' object": (NOTHING, ""),
        "'float' object": (NOTHING, ""),
    }
    return lambda world: rows[world.ranks].seen(world, apart=HANG, known=known)


NOTHING = "a rank that has no gradient at all has no sum: it is 0, as a tensor that can be sent"
