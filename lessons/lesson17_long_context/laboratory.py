"""Attention by tiles and over ranks, observed: values, gradients, sizes, FLOPs, messages."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shared.exercises.rank_cases import RankCases, RankGroups
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.long_context.orders import cut_sequence, plain_order, positions_of
from shared.measuring.traffic import Call, count_traffic

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
Wrong = dict[str, tuple[Tensor, ...]]
HANG = "not every rank takes part in each message: the others wait for it"
FOREIGN = {
    "is not part of group": (
        "a rank's number among all ranks counts, not that in its group",
        "group_peer and group_dst count inside of the group, dst and src do not",
    ),
    IndexError: (
        "a rank's number among all ranks counts, not that in its group",
        "dist.get_rank(group)",
    ),
}


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The oracle: softmax over the keys that are seen, and the logsumexp; all in one piece."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    logsumexp = scores.logsumexp(-1)
    weights = (scores - logsumexp.masked_fill(logsumexp == -torch.inf, 0.0).unsqueeze(-1)).exp()
    return weights @ v, logsumexp


# 17.1


def handed_out(tiles: list[tuple[Tensor, Tensor]], alive: list[int]) -> Iterator[tuple]:
    """The tiles one by one; notes how many of those handed out are alive when one is asked for."""
    gone: list[weakref.ref] = []
    while tiles:
        alive.append(sum(each() is not None for each in gone))
        scores, values = tiles.pop(0)
        gone.append(weakref.ref(scores))
        tile = scores, values
        del scores, values
        yield tile
        del tile


# 17.2


class _Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel, self.shape = 0, ()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            # A view or an expanded tensor takes no memory.
            if isinstance(x, Tensor) and x._base is None and x.numel() > self.numel:
                self.numel, self.shape = x.numel(), tuple(x.shape)
        return result


@dataclass
class Watched:
    """What ran: FLOPs of the matrix products, the largest tensor that any operator made."""

    flops: int = 0
    largest: int = 0
    shape: tuple[int, ...] = ()


@contextlib.contextmanager
def watched() -> Generator[Watched]:
    """Watch the operators inside of the block, on this thread."""
    seen = Watched()
    with FlopCounterMode(display=False) as counter, _Largest() as largest:
        yield seen
    seen.flops, seen.largest, seen.shape = counter.get_total_flops(), largest.numel, largest.shape


@contextlib.contextmanager
def kept_for_backward() -> Generator[list[Tensor]]:
    """The tensors that autograd is given to keep."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


def tensors_on(ctx: Any) -> list[str]:
    """Names of a Function's attributes that hold tensors beside those that were saved."""
    attributes = vars(ctx) if hasattr(ctx, "__dict__") else {}
    return [
        name
        for name, value in attributes.items()
        if any(isinstance(x, Tensor) for x in tree_leaves(value))
    ]


# 17.3 and 17.4

ODD = {
    1: [[1, 0]],
    2: [[3, 0], [1, 2]],
    3: [[4, 0], [2, 5], [1, 3]],
    4: [[0, 5], [7, 1], [2, 6], [4, 3]],
}


def front_and_back(ranks: int) -> list[list[int]]:
    """The zigzag, for exercises that come after the one that asks for it."""
    chunks = range(2 * ranks)  # in other words than 17.3's answer, which no edition may hold
    return [list(pair) for pair in zip(chunks, reversed(chunks), strict=True)][:ranks]


THREE_EACH = {2: [[5, 0, 2], [1, 4, 3]]}
ORDERS = {"plain": plain_order, "zigzag": front_and_back, "mixed": ODD.__getitem__,
          "three chunks": THREE_EACH.__getitem__}  # fmt: skip


@dataclass(frozen=True)
class World(RankGroups):
    """Ranks on which an answer is tried; with two groups, one is of even ranks, one of odd
    ones, or the first half and the second."""

    order: str = "plain"
    causal: bool = True
    dtype: torch.dtype = F64
    longer: int = 1  # there are so many times as many keys as queries

    @property
    def size(self) -> int:
        """Ranks in a group."""
        return self.ranks // self.groups

    @property
    def table(self) -> list[list[int]]:
        """The order as the answer is given it."""
        return ORDERS[self.order](self.size)

    def __str__(self) -> str:
        words = (
            f"{self.size} ranks, {self.order} order, {'causal' if self.causal else 'not causal'}"
        )
        return words + (f", two groups{' of neighbours' * self.together}" * (self.groups > 1))


RINGS = (
    World(3, causal=False),
    World(3),
    World(2, "zigzag"),
    World(3, "mixed"),
    World(2, "three chunks"),
    World(4, "zigzag", groups=2),
    World(4, "zigzag"),
    World(2, "zigzag", dtype=BF16),
    World(2, causal=False, longer=2),
    World(1, "zigzag"),
)
EXCHANGES = (
    World(3, causal=False),
    World(2),
    World(4, groups=2),
    World(4, groups=2, together=True),  # over all ranks, groups that are not find their rows
    World(4),
    World(2, causal=False, longer=2),
    World(1),
)


@dataclass
class Seen:
    """What one rank saw: its results, those of one process, what was sent and computed."""

    got: tuple[Tensor, ...]
    want: tuple[Tensor, ...]
    calls: list[Call]
    part: int  # numbers in this rank's keys
    watched: Watched
    pairs: int  # query-key pairs of its chunks of which some are seen
    wrong: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    backward: list[Call] = field(default_factory=list)


def case_of(worlds: tuple[World, ...], observe: Callable[[World, int], Any]) -> Callable:
    """What each rank saw in a world: ranks start once for all worlds of one size."""
    sizes = {
        ranks: RankCases(
            ranks, {w: functools.partial(observe, w) for w in worlds if w.ranks == ranks}
        )
        for ranks in {w.ranks for w in worlds}
    }
    return lambda world: sizes[world.ranks].seen(
        world, apart=HANG, known=FOREIGN if world.groups > 1 else None
    )


def drawn(world: World, seed: int, rank: int, heads: int = 2) -> list[Tensor]:
    """The whole q, k, v and output's gradient of a rank's group: (B, H, L, d) in float64."""
    seed_all(seed + world.number(rank))
    length = 24 * world.longer
    shapes = [(2, heads, n, 5) for n in (24, length, length, 24)]
    return [torch.randn(*shape, dtype=F64).to(world.dtype).double() for shape in shapes]


@once_an_answer
def forwards(answer: Callable[..., Any]) -> Callable[[World], list[Seen]]:
    """An answer to 17.3b in every world."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Seen:
        q, k, v, _ = drawn(world, seed, rank)
        place, order, group = world.members(rank).index(rank), world.table, world.group(rank)
        mine = [cut_sequence(x, order, place, 2).to(world.dtype) for x in (q, k, v)]
        with count_traffic() as traffic, watched() as seen:
            got = answer(*mine, group, world.causal, order)
        rows = mine[0].double()
        want = attention(rows, k, v, visible(world, place))
        wrong: Wrong = {name: attention(rows, k, v, mask) for name, mask in rules(world, place)}
        if not world.causal and world.size > 1:
            each = zip(k.chunk(world.size, 2), v.chunk(world.size, 2), strict=True)
            blocks = zip(*(attention(rows, *kv) for kv in each), strict=True)
            outputs, logs = (torch.stack(x) for x in blocks)
            wrong["average"] = outputs.mean(0), logs.mean(0)
        pairs = seen_pairs(world, place)
        return Seen(tuple(got), want, traffic.calls, mine[1].numel(), seen, pairs, wrong)

    return case_of(RINGS, observe)


@once_an_answer
def backwards(answer: Callable[..., Any]) -> Callable[[World], list[Seen]]:
    """An answer to 17.3c in every world, with what a right forward leaves."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Seen:
        whole = drawn(world, seed, rank)
        place, order, group = world.members(rank).index(rank), world.table, world.group(rank)
        found, output, logsumexp = whole_gradients(world, whole)
        cuts = [cut_sequence(x, order, place, 2).to(world.dtype) for x in (*whole[:3], output)]
        rows = cut_sequence(logsumexp, order, place, 2).to(torch.promote_types(world.dtype, F32))
        upstream = cut_sequence(whole[3], order, place, 2).to(world.dtype)
        with count_traffic() as traffic, watched() as seen:
            got = answer(*cuts, rows, upstream, group, world.causal, order)
        n = world.size
        places = {"right": place, "next": (place + 1) % n, "previous": (place - 1) % n}
        parts = {
            name: [cut_sequence(x, order, at, 2) for x in found] for name, at in places.items()
        }
        want = tuple(parts.pop("right"))
        alone = whole_gradients(world, whole, of=place)[0]
        parts["own"] = [cut_sequence(x, order, place, 2) for x in alone]
        wrong: Wrong = {name: (want[0], *part[1:]) for name, part in parts.items()}
        wrong["apart"] = tuple(cut_sequence(x, order, place, 2) for x in apart(world, whole))
        pairs = seen_pairs(world, place)
        return Seen(tuple(got), want, traffic.calls, cuts[1].numel(), seen, pairs, wrong)

    return case_of(RINGS, observe)


def whole_gradients(
    world: World, whole: list[Tensor], of: int | None = None
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Gradients of the whole q, k, v, output and logsumexp; `of` has one rank's queries count."""
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    length = whole[0].shape[2]
    seen = torch.ones(length, whole[1].shape[2], dtype=torch.bool)
    output, logsumexp = attention(*leaves, seen.tril() if world.causal else None)
    upstream = whole[3]
    if of is not None:
        kept = torch.zeros(length, 1, dtype=F64)
        kept[positions_of(world.table, of, length)] = 1
        upstream = upstream * kept
    return torch.autograd.grad(output, leaves, upstream), output.detach(), logsumexp.detach()


def apart(world: World, whole: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients where each pair of chunks is a softmax of its own."""
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    chunks = sum(len(each) for each in world.table)
    q, k, v, upstream = (x.chunk(chunks, 2) for x in (*leaves, whole[3]))
    total = torch.zeros((), dtype=F64)
    for i in range(chunks):
        for j in range(i + 1 if world.causal else chunks):
            lower = _lower(q[i], k[j]) if world.causal and i == j else None
            total = total + (attention(q[i], k[j], v[j], lower)[0] * upstream[i]).sum()
    return torch.autograd.grad(total, leaves)


def visible(world: World, place: int) -> Tensor:
    """Which keys of the whole sequence a rank's queries see."""
    queries, keys = positions_of(world.table, place, 24), torch.arange(24 * world.longer)
    ones = torch.ones(len(queries), len(keys), dtype=torch.bool)
    return keys <= queries[:, None] if world.causal else ones


def rules(world: World, place: int) -> Iterator[tuple[str, Tensor]]:
    """Which keys are seen where something is mistaken, by its name."""
    n, order, length = world.size, world.table, 24 * world.longer
    queries = positions_of(order, place, 24)
    owner = torch.zeros(length, dtype=torch.long)
    for rank in range(n):
        owner[positions_of(order, rank, length)] = rank
    right = visible(world, place)
    yield "own keys", right & (owner == place)
    if not world.causal:
        return
    yield "all", torch.ones_like(right)
    size = 24 // sum(len(each) for each in order)
    offset = torch.arange(24) % size <= (queries % size)[:, None]
    earlier = torch.arange(24) // size <= (queries // size)[:, None]
    yield "diagonal", offset & earlier
    claimed = torch.zeros(length, dtype=torch.long)
    for rank in range(n):  # the keys of rank r are taken for those of 2 place - r
        claimed[positions_of(order, rank, length)] = positions_of(order, (2 * place - rank) % n, 24)
    yield "backwards", claimed <= queries[:, None]
    local = torch.zeros(length, dtype=torch.long)
    for rank in range(n):
        local[positions_of(order, rank, length)] = torch.arange(24 // n) + rank * (24 // n)
    yield "own as diagonal", torch.where(owner == place, offset & earlier, right)
    yield "as they lie", local <= (torch.arange(24 // n) + place * (24 // n))[:, None]


def seen_pairs(world: World, place: int) -> int:
    """Query-key pairs of a rank in those pairs of chunks of which any is seen."""
    chunks = sum(len(each) for each in world.table)
    each = (24 // chunks) * (24 * world.longer // chunks)
    return each * sum(t <= m or not world.causal for m in world.table[place] for t in range(chunks))


@once_an_answer
def exchanges(answer: Callable[..., Tensor]) -> Callable[[World], list[Seen]]:
    """An answer to 17.4 in every world, forward and backward."""
    seed = fresh_seed()

    def observe(world: World, rank: int) -> Seen:
        whole = drawn(world, seed, rank, heads=12)
        place, order, group = world.members(rank).index(rank), world.table, world.group(rank)
        found, output, _ = whole_gradients(world, whole)
        mine = [cut_sequence(x, order, place, 2).requires_grad_() for x in whole[:3]]
        with count_traffic() as traffic, watched() as seen:
            y = answer(*mine, group, world.causal)
        with count_traffic() as back:
            upstream = cut_sequence(whole[3], order, place, 2)
            grads: list[Any] = [None] * 3
            if isinstance(y, Tensor) and y.grad_fn is not None and y.shape == upstream.shape:
                grads = list(torch.autograd.grad(y, mine, upstream, allow_unused=True))
        want = tuple(cut_sequence(x, order, place, 2) for x in (output, *found))
        q, k, v = (x.detach() for x in mine)
        whole_k, whole_v = whole[1:3]
        wrong = {
            "own keys": attention(q, k, v, _lower(q, k) if world.causal else None),
            "all": attention(q, whole_k, whole_v),
            "in place": attention(q, whole_k, whole_v, _lower(q, whole_k)),
        }
        got = (y.detach() if isinstance(y, Tensor) else y, *grads)
        part = mine[1].numel()
        return Seen(got, want, traffic.calls, part, seen, mine[0].numel(), wrong, back.calls)

    return case_of(EXCHANGES, observe)


def _lower(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
