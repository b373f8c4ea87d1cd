"""Lesson 16: one training step on a mesh of eight ranks, and what one process has of it."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy.random  # noqa: F401 - what seeding imports: once here, not in every forked rank
import torch
import torch._dynamo  # what optimizers import: once here, not in every forked rank
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lessons.lesson16_parallelism_3d.laboratory.gradients import groups_of
from shared.data.rows import NO_TARGET, Text
from shared.exercises.rank_cases import RankCases
from shared.exercises.remembered import once_an_answer
from shared.exercises.seeds import fresh_seed, seed_all
from shared.measuring.traffic import Call, count_traffic
from shared.model.config import TransformerConfig
from shared.model.language_model import LanguageModel
from shared.parallel3d.cutting import cut_model, cut_stages
from shared.parallel3d.mesh import make_groups
from shared.tensor_parallel.marks import cut_dim, is_tied_copy

TIED = "embedding.weight"
RATE = 0.1
VOCAB, LENGTH, STEPS = 24, 6, 2
HANG = "not every rank takes part in each message: the others wait for it"
Gradients = dict[str, Tensor]
CUT = ("w_q.", "w_k.", "w_v.", "linear1.", "w_o.weight", "linear2.weight", "embedding.", "output.")


@dataclass(frozen=True)
class World:
    """A mesh of eight ranks, and what is trained on it."""

    dp: int = 2
    tp: int = 2
    pp: int = 2
    order: tuple[str, ...] = ("pp", "dp", "tp")
    num_micro_batches: int = 3
    share: float = 100.0  # max_norm as a share of the first step's norm
    tied: bool = True
    frozen: bool = False  # the first layer is not trained

    @property
    def sizes(self) -> dict[str, int]:
        """Places of each axis."""
        return {"dp": self.dp, "tp": self.tp, "pp": self.pp}

    @property
    def name(self) -> str:
        """The mesh as a reader wants it."""
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank."""
        groups = groups_of(self.sizes, self.order)
        return {
            axis: next(group.index(rank) for group in lists if rank in group)
            for axis, lists in groups.items()
        }


WORLDS = (
    World(),
    World(order=("tp", "dp", "pp"), num_micro_batches=2, share=0.3),
    World(dp=1, pp=4, num_micro_batches=4, frozen=True),
    World(dp=4, pp=1, num_micro_batches=1, share=0.5, tied=False),
)


def build(world: World, seed: int) -> LanguageModel:
    """The whole model, the same wherever it is built."""
    seed_all(seed)
    tied = world.tied
    config = TransformerConfig(VOCAB, 16, 2, 4, 32, dropout=0.0, max_len=8, tie_embeddings=tied)
    model = LanguageModel(config)
    if world.frozen:
        model.layers[0].requires_grad_(False)
    return model


def batch_of(world: World, seed: int, step: int) -> Text:
    """Rows of 1 to 6 targets, ever more: no two replicas or micro-batches have as many."""
    draw = torch.Generator().manual_seed(seed + 1 + step)
    rows = 2 * world.dp * world.num_micro_batches + 1
    tokens = torch.randint(1, VOCAB, (rows, LENGTH + 1), generator=draw)
    targets = tokens[:, 1:].clone()
    for i, row in enumerate(targets):
        without = LENGTH - 1 - i * (LENGTH - 1) // (rows - 1)
        row[torch.randperm(LENGTH, generator=draw)[:without]] = NO_TARGET
    return Text(tokens[:, :-1].contiguous(), targets)


# One process


@dataclass
class Twin:
    """A step in one process: sums of losses and their gradients, of each micro-batch by replica.

    `first` and `last` are the parts of a tied embedding's gradient: as embedding, as output.
    """

    world: World
    targets: list[list[int]]  # by replica and micro-batch
    losses: list[list[float]]
    gradients: list[list[Gradients]]
    positions: int
    limit: float = 0.0
    earlier: Gradients = field(default_factory=dict)  # of the step before, clipped

    @property
    def total(self) -> int:
        """Targets of the global batch."""
        return sum(map(sum, self.targets))

    def mean(self, weight: Callable[[int, int], float], replicas: range | None = None) -> Gradients:
        """Gradients of all micro-batches, or of some replicas', each with its weight."""
        found: Gradients = {}
        for r in replicas or range(self.world.dp):
            for m, each in enumerate(self.gradients[r]):
                for name, gradient in each.items():
                    found[name] = found.get(name, 0) + weight(r, m) * gradient
        return found

    def of_replica(self, replica: int, factor: float) -> Gradients:
        """What one replica knows of the batch's mean, times a factor."""
        return self.mean(lambda r, m: factor / self.total, range(replica, replica + 1))

    @property
    def right(self) -> Gradients:
        """Those of the mean over the batch's targets."""
        return self.mean(lambda r, m: 1 / self.total)

    @property
    def loss(self) -> float:
        """The mean over the batch's targets."""
        return sum(map(sum, self.losses)) / self.total


def joined(parts: Gradients, tied: bool) -> Gradients:
    """The model's gradients: a tied embedding has those of both of its uses."""
    if not tied:
        return parts
    whole = {name: x for name, x in parts.items() if name not in ("first", "last")}
    return whole | {TIED: parts["first"] + parts["last"]}


def is_cut(name: str) -> bool:
    """Whether tensor parallelism cuts the parameter of this name."""
    return any(part in name for part in CUT)


def norm_of(gradients: Gradients) -> float:
    """The 2-norm of all of them."""
    return torch.nn.utils.get_total_norm([*gradients.values()]).item()


def twins(world: World, seed: int) -> Iterator[Twin]:
    """Each of the steps, in one process."""
    model, limit = build(world, seed), 0.0
    earlier: Gradients = {}
    for step in range(STEPS):
        twin = one_step(world, model, batch_of(world, seed, step))
        gradients = joined(twin.right, world.tied)
        limit = limit or world.share * norm_of(gradients)
        factor = min(1.0, limit / (norm_of(gradients) + 1e-6))
        twin.limit, twin.earlier = limit, earlier
        yield twin
        earlier = {name: factor * x for name, x in gradients.items()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in earlier:
                    p -= RATE * earlier[name]


def one_step(world: World, model: LanguageModel, batch: Text) -> Twin:
    """Losses and gradients of every micro-batch, with an output matrix that is not tied."""
    apart = build(World(tied=False), 0)
    apart.load_state_dict(model.state_dict())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    trained = {name: p for name, p in apart.named_parameters() if name not in frozen}
    rows, pieces = len(batch.tokens), world.dp * world.num_micro_batches
    ends = [i * rows // pieces for i in range(pieces + 1)]
    found = Twin(world, [], [], [], batch.targets.numel())
    for r in range(world.dp):
        counts, losses, gradients = [], [], []
        for m in range(world.num_micro_batches):
            i = r * world.num_micro_batches + m
            targets = batch.targets[ends[i] : ends[i + 1]]
            logits = apart(batch.tokens[ends[i] : ends[i + 1]])
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            grads = torch.autograd.grad(loss, list(trained.values()))
            counts.append(int((targets != NO_TARGET).sum()))
            losses.append(loss.item())
            names = {TIED: "first", "output.weight": "last"} if world.tied else {}
            gradients.append({names.get(n, n): g for n, g in zip(trained, grads, strict=True)})
        found.targets.append(counts)
        found.losses.append(losses)
        found.gradients.append(gradients)
    return found


# On the ranks


@dataclass
class Seen:
    """What came of one step on one rank."""

    loss: Any
    norm: Any
    steps: list[Gradients]  # the gradients at each of the optimizer's steps, by name
    dims: dict[str, int | None]  # along which they are cut
    copies: set[str]  # names of those that count on an earlier stage
    runs: int  # of the pipeline in the step
    in_flight: int  # micro-batches, at the most
    calls: list[Call]


class _Noting(torch.optim.SGD):
    """Plain SGD, which notes the gradients that it steps by."""

    def __init__(self, names: dict[str, nn.Parameter]) -> None:
        super().__init__([p for p in names.values() if p.requires_grad], lr=RATE)
        self.names, self.noted = names, list[Gradients]()

    def step(self, closure: Any = None) -> Any:
        found = {n: p.grad.clone() for n, p in self.names.items() if p.grad is not None}
        self.noted.append(found)
        return super().step(closure)


def clip(parameters: Iterable[nn.Parameter], max_norm: float, tp: Any, pp: Any) -> Tensor:
    """What a step is given to clip by: 16.2b, with copies counted by their share."""
    own = [(p, p.grad) for p in parameters if p.grad is not None]
    total = torch.zeros(())
    for p, gradient in own:
        share = 1.0 if cut_dim(p) is not None else 1 / dist.get_world_size(tp)
        total += share * (not is_tied_copy(p)) * torch.linalg.vector_norm(gradient) ** 2
    for group in (tp, pp):
        dist.all_reduce(total, group=group)
    for _, gradient in own:
        gradient *= torch.clamp(max_norm / (total.sqrt() + 1e-6), max=1.0)
    return total.sqrt()


def observe(
    answer: Callable[..., Any], seed: int, world: World, limit: float, rank: int
) -> list[Seen]:
    """The steps of an answer on one rank of the mesh."""
    mesh, model = make_groups(groups_of(world.sizes, world.order)), build(world, seed)
    cuts = cut_stages(model, world.pp)
    pipeline = cut_model(model, mesh, cuts, recompute=False, sequence_parallel=False)
    pipeline.sum_tied = False
    own, names = {id(p) for p in pipeline.parameters()}, dict[str, nn.Parameter]()
    for name, p in model.state_dict(keep_vars=True).items():
        known = any(p is each for each in names.values())
        if isinstance(p, nn.Parameter) and id(p) in own and not known:
            names[name] = p
    optimizer, runs, train = _Noting(names), [], pipeline.train_step

    def counted(*args: Any, **more: Any) -> Any:
        runs.append(1)
        return train(*args, **more)

    pipeline.train_step = counted
    found = []
    for step in range(STEPS):
        runs.clear()
        optimizer.noted = []
        with count_traffic() as traffic:
            got = answer(
                pipeline,
                optimizer,
                batch_of(world, seed, step),
                mesh,
                world.num_micro_batches,
                limit,
                clip,
            )
        loss, norm = (float(each) for each in got)
        peak = max(stage.peak_in_flight for stage in pipeline.stages.values())
        dims = {name: cut_dim(p) for name, p in names.items()}
        copies = {name for name, p in names.items() if is_tied_copy(p)}
        found.append(
            Seen(loss, norm, optimizer.noted, dims, copies, len(runs), peak, traffic.calls)
        )
    return found


@once_an_answer
def on_meshes(answer: Callable[..., Any]) -> Callable[[World], tuple[list[Twin], list[list[Seen]]]]:
    """By mesh the steps in one process, and what every rank saw of them.

    Each mesh has ranks of its own: the first shows most mistakes, and every group has threads, of
    which there are too many for the grader's limit where ranks make those of all meshes.
    """
    seed = fresh_seed()

    @functools.cache
    def alone(world: World) -> list[Twin]:
        return list(twins(world, seed))

    @functools.cache
    def ranks(world: World) -> RankCases:
        work = functools.partial(observe, answer, seed, world, alone(world)[0].limit)
        return RankCases(8, {world: work})

    def seen(world: World) -> tuple[list[Twin], list[list[Seen]]]:
        return alone(world), ranks(world).seen(world, apart=HANG, known=known)

    known = {"unpack": (TWO, ""), "not iterable": (TWO, ""), "iteration over a 0-d": (TWO, "")}
    return seen


TWO = "a step returns two numbers, the loss and the norm"
