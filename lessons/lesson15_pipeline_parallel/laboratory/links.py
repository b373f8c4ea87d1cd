"""What travels between two stages, seen from both sides, and four pictures.

The laboratory itself is the other side: it receives when it has seen what was sent, and where.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lessons.lesson15_pipeline_parallel.laboratory.tables import read_orders
from shared.exercises.noting import noted_waits
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import Call, count_traffic
from shared.pipeline.schedules import Table, timetable
from shared.pipeline.transfer import Link

Answer = Callable[..., Any]
SHAPES = ((2, 3), (3, 2))  # as many bytes, so that an exchange is seen and does not hang
DTYPE = torch.bfloat16
BYTES = 12  # of one tensor
SENDER, RECEIVER = 1, 2  # of three ranks
LATE = 0.05  # seconds by which the laboratory sends later than the answer asks for it
BACKWARDS = (1, 0)  # the order in which two micro-batches go back
WAYS = {"activations": 2, "gradients": 3}  # ranks in the group: the count tells which it was


@dataclass
class Sent:
    """What the rank saw that tried the answer, and what the laboratory saw beside it."""

    given: list[list[Tensor]] = field(default_factory=list)  # by micro-batch
    came: list[list[Tensor]] = field(default_factory=list)
    results: list[str] = field(default_factory=list)  # what the answer returned, in words
    calls: list[Call] = field(default_factory=list)
    backward: list[Call] = field(default_factory=list)
    kept: int = 0  # messages in link.pending before anybody received
    held: int = 0  # tensors that are in memory when they have left and only the answer has them
    gradients: list[list[Tensor]] = field(default_factory=list)  # what should come back
    back: list[list[Tensor | None]] = field(default_factory=list)
    waits: int = 0  # for messages, while the answer received


def draw(seed: int, number: int) -> list[list[Tensor]]:
    """Two micro-batches of `number` tensors; the second tensor is no contiguous one."""
    seed_all(seed)
    pairs = [[torch.randn(shape, dtype=DTYPE) for shape in SHAPES[:number]] for _ in range(2)]
    return [[x.t().contiguous().t() if i == 1 else x for i, x in enumerate(p)] for p in pairs]


def link_of(rank: int) -> Link:
    """The way between sender and receiver; the third rank is in one of the groups alone."""
    activations, gradients = dist.new_group([SENDER, RECEIVER]), dist.new_group([0, 1, 2])
    return Link(RECEIVER if rank == SENDER else SENDER, activations, gradients)


def from_rank(what: Any, by: int) -> Any:
    """An object of one rank, on every rank."""
    boxes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(boxes, what)
    return boxes[by]


def as_wanted(calls: Sequence[Call], kept: int, way: str) -> bool:
    """Whether four messages have begun on this way, so that it is safe to receive them."""
    sends = [(c.num_bytes, c.group_size) for c in calls if c.op == "send"]
    return sends == [(BYTES, WAYS[way])] * 4 and kept == 4


def receive(link: Link, group: dist.ProcessGroup) -> list[Tensor]:
    """Two tensors, as the laboratory receives."""
    return [link.receive(torch.empty(shape, dtype=DTYPE), group) for shape in SHAPES]


def in_words(result: Any) -> str:
    """What is wrong with what send_activation returns; "" if nothing."""
    if not isinstance(result, Tensor):
        return f"{type(result).__name__}"
    if result.numel() != 1:
        return f"a tensor of shape {tuple(result.shape)}"
    return "" if result.requires_grad else "a number without a gradient"


@once_an_answer
def sending(answer: Answer) -> RankCases:
    """An answer to 15.2 on rank 1: "forward" alone, then "backward" as well, then the chains."""
    seed = fresh_seed()

    def observe(back: bool, rank: int) -> Sent:
        link, seen = link_of(rank), Sent(draw(seed, 2), gradients=draw(seed + 1, 2))
        leaves = [[x.clone().requires_grad_() for x in pair] for pair in seen.given]
        leaves[1][0].requires_grad_(False)  # its gradient comes all the same
        results, memories = list[Any](), list[StorageWeakRef]()
        if rank == SENDER:
            outputs = [[x * 1 for x in pair] for pair in leaves]
            memories = [StorageWeakRef(x.untyped_storage()) for pair in outputs for x in pair]
            with count_traffic() as traffic:
                results = [answer(link, *pair) for pair in outputs]
            del outputs
            seen.calls, seen.kept = traffic.calls, len(link.pending)
            seen.results = [in_words(each) for each in results]
        seen.calls, seen.kept, bad = from_rank((seen.calls, seen.kept, any(seen.results)), SENDER)
        if not as_wanted(seen.calls, seen.kept, "activations"):
            return seen
        if rank == RECEIVER:
            seen.came = [receive(link, link.activations) for _ in leaves]
        elif rank == SENDER:
            link.finish()
            seen.held = sum(not memory.expired() for memory in memories)
        seen.came = from_rank(seen.came, RECEIVER)
        if back and not bad:
            _gradients_to_sender(link, rank, seen, leaves, results)
        return seen

    return _cases(observe)


def _gradients_to_sender(
    link: Link, rank: int, seen: Sent, leaves: list[list[Tensor]], results: list[Any]
) -> None:
    if rank == RECEIVER:
        for m in BACKWARDS:
            for gradient in seen.gradients[m]:
                link.send(gradient, link.gradients)
    if rank == SENDER:
        with count_traffic() as traffic:
            for m in BACKWARDS:
                results[m].backward()
        seen.backward, seen.back = traffic.calls, [[x.grad for x in pair] for pair in leaves]
        seen.back[1][0] = seen.gradients[1][0]  # nobody asked for it
    seen.backward = from_rank(seen.backward, SENDER)
    if rank == RECEIVER and sum(c.op == "recv" for c in seen.backward) == 4:
        link.finish()
    KEPT.append(link)


KEPT: list[Link] = []  # a message that nobody took must not be torn down while ranks are at work


class _Nobody(Link):
    """A link that fills nothing and waits for nobody."""

    def __init__(self) -> None:
        self.pending = []

    def __getattr__(self, way: str) -> None:
        return None

    def receive(self, tensor: Tensor, group: Any) -> Tensor:
        return tensor


def asked_of_meta(answer: Answer) -> list[str]:
    """Where an answer to 15.2b has its tensors if "meta" is asked for; [] if it cannot tell."""
    with contextlib.suppress(Exception):  # whoever receives without the link has no group here
        return [x.device.type for x in answer(_Nobody(), [*SHAPES], DTYPE, "meta")]
    return []


def _receive_one(answer: Answer, seed: int, rank: int) -> Sent:
    """An answer to 15.2b on rank 2, for one shape."""
    link, seen = link_of(rank), Sent(draw(seed, 1))
    if rank == SENDER:
        link.send(seen.given[0][0], link.activations)
    if rank == RECEIVER:
        with count_traffic() as traffic:
            came = answer(link, [SHAPES[0]], DTYPE)
        seen.results, seen.calls = [f"{type(came).__name__} of {len(came)}"], traffic.calls
    seen = from_rank(seen, RECEIVER)
    KEPT.append(link)
    if rank == SENDER and len(seen.calls) == 1:
        link.finish()
    return seen


@once_an_answer
def receiving(answer: Answer) -> RankCases:
    """An answer to 15.2b on rank 2; the first tensor of the second micro-batch is not used."""
    seed = fresh_seed()

    def observe(back: bool, rank: int) -> Sent:
        link, seen = link_of(rank), Sent(draw(seed, 2), gradients=draw(seed + 1, 2))
        seen.gradients[1][0] = torch.zeros(SHAPES[0], dtype=DTYPE)
        came: list[Any] = []
        if rank == SENDER:
            time.sleep(LATE)
            for pair in seen.given:
                for x in pair:
                    link.send(x, link.activations)
        if rank == RECEIVER:
            with count_traffic() as traffic, noted_waits() as waits:
                came = [answer(link, [*SHAPES], DTYPE, "cpu") for _ in range(2)]
            seen.calls, seen.waits = traffic.calls, len(waits)
            seen.results = [f"{type(x).__name__} of {len(x)}" for x in came]
            seen.came = [[x.detach() for x in pair] for pair in came]
            seen.kept = sum(x.requires_grad for pair in came for x in pair)
        seen = from_rank(seen, RECEIVER)
        KEPT.append(link)
        if rank == SENDER and sum(c.op == "recv" for c in seen.calls) == 4:
            link.finish()
        if back and seen.kept == 4:
            _gradients_from_receiver(link, rank, seen, came)
        return seen

    return _cases(observe, one=functools.partial(_receive_one, answer, seed))


def _gradients_from_receiver(link: Link, rank: int, seen: Sent, came: list[Any]) -> None:
    seen.kept = 0
    if rank == RECEIVER:
        with count_traffic() as traffic:
            for m in BACKWARDS:
                used = [0, 1] if m == 0 else [1]
                parts = [(came[m][i] * seen.gradients[m][i]).sum() for i in used]
                torch.stack(parts).sum().backward()
        seen.backward, seen.kept = traffic.calls, len(link.pending)
    seen.backward, seen.kept = from_rank((seen.backward, seen.kept), RECEIVER)
    if as_wanted(seen.backward, seen.kept, "gradients"):
        pairs: list[Any] = [None, None]
        if rank == SENDER:
            for m in BACKWARDS:
                pairs[m] = receive(link, link.gradients)
        elif rank == RECEIVER:
            link.finish()
        seen.back = from_rank(pairs, SENDER)


def _cases(observe: Callable[[bool, int], Sent], **more: Callable[[int], Sent]) -> RankCases:
    both = {False: "forward", True: "backward"}
    own = {name: functools.partial(observe, back) for back, name in both.items()}
    return RankCases(3, own | more)


# The four pictures of 15.6: what each rank does, in its order.

PICTURES = {
    "A": (
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ),
    "B": ("F0 F1 B1 B0 F2 F3 B3 B2",) * 3,
    "C": ("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"),
    "D": ("F0 F1 F2 F3 B3 B2 B1 B0",) * 3,
}


def pictures() -> dict[str, Table]:
    """The tables of 15.6 by letter."""
    return {letter: timetable(read_orders(rows)) for letter, rows in PICTURES.items()}
