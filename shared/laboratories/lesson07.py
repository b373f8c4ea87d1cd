"""Lesson 07: the samplers of all ranks at once, and an evaluation under observation."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shared.exercises.expecting import expect
from shared.exercises.seeds import seed_all
from shared.measuring.traffic import count_traffic

TorchSampler = torch.utils.data.DistributedSampler


def parts(
    sampler: Callable[..., Any], length: int, ranks: int, epoch: int = 0, **options: Any
) -> list[list[int]]:
    """Return each rank's indices in one epoch."""
    made = [sampler(range(length), num_replicas=ranks, rank=r, **options) for r in range(ranks)]
    for each in made:
        each.set_epoch(epoch)
    return [list(iterator_of(each)) for each in made]


def iterator_of(sampler: Any) -> Iterator[int]:
    """Return iter(sampler), with better words than python's where `__iter__` gives no iterator."""
    made = sampler.__iter__()
    kind = "nothing" if made is None else f"a {type(made).__name__}"
    expect(
        hasattr(made, "__next__"),
        mistake="__iter__ returns nothing: is the `return` missing?"
        if made is None
        else f"__iter__ returns {kind}, which can be iterated over but is no iterator",
        expected="an iterator over this rank's indices",
        seen="None" if made is None else kind,
        hint="return iter(indices), or yield them",
    )
    return made


def interleaved(rank_parts: list[list[int]]) -> list[int]:
    """Return the ranks' samples in the order of the steps: what the group has had by when."""
    rounds = itertools.zip_longest(*rank_parts)
    return [index for each in rounds for index in each if index is not None]


def whole_epoch(length: int, epoch: int = 0, **options: Any) -> list[int]:
    """Return the common order of an epoch: torch's own, for one rank."""
    return parts(TorchSampler, length, 1, epoch, **options)[0]


def global_state_read_and_set(sampler: Callable[..., Any], length: int) -> tuple[bool, bool]:
    """Return whether the order follows the global random state, and whether iterating sets it."""
    orders, drawn = [], []
    for seed in (1, 2):
        seed_all(seed)
        orders.append(parts(sampler, length, 1)[0])
        drawn.append((torch.rand(1).item(), random.random()))
    alike = any(first == second for first, second in zip(*drawn, strict=True))
    return orders[0] != orders[1], alike


def place_in(order: list[int], rest: list[int]) -> str:
    """Return where in the order `rest` begins, in words; its samples if it is no rest of it."""
    begins = [start for start in range(len(order)) if rest == order[start:]]
    return f"sample {begins[0]} of it" if begins else f"{len(rest)} samples, {rest[:4]} and so on"


def is_plain(state: Any) -> bool:
    """Return whether a state is plain data, such as json can write."""
    try:
        json.dumps(state)
    except TypeError:
        return False
    return True


def group(
    sampler: Any, length: int, ranks: int, state: Any = None, epoch: int | None = None, **options
) -> list[Any]:
    """Return one resumable sampler a rank, all with the same state."""
    made = [sampler(length, num_replicas=ranks, rank=r, **options) for r in range(ranks)]
    for each in made:
        if state is not None:
            each.load_state_dict(state)
        if epoch is not None:
            each.set_epoch(epoch)
    return made


def take(samplers: list[Any], steps: int | None = None) -> list[int]:
    """Let every rank have `steps` samples (all that is left without); return them by step."""
    iterators = [iterator_of(sampler) for sampler in samplers]
    return interleaved([list(itertools.islice(each, steps)) for each in iterators])


class Samples:
    """A dataset of (index, value, weight)."""

    def __init__(self, values: list[float], weights: list[float] | None = None) -> None:
        weights = weights or [1.0] * len(values)
        self.rows = list(zip(range(len(values)), values, weights, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return self.rows[index]


@dataclass(frozen=True)
class Evaluation:
    """One rank's result, the samples it scored in each batch, its collectives and their bytes."""

    result: Any
    batches: list[list[int]]
    sent: list[tuple[str, int]]

    @property
    def share(self) -> list[int]:
        """The samples that this rank scored."""
        return [index for batch in self.batches for index in batch]


def watched_evaluation(
    rank: int, evaluate: Callable[..., Any], dataset: Samples, batch_size: int
) -> Evaluation:
    """Let this rank evaluate with a score that notes what it is given."""
    batches: list[list[int]] = []

    def score(samples: list[tuple[int, float, float]]) -> tuple[float, float]:
        batches.append([index for index, _, _ in samples])
        return sum(value for _, value, _ in samples), sum(weight for _, _, weight in samples)

    with count_traffic() as traffic:
        result = evaluate(score, dataset, batch_size)
    return Evaluation(result, batches, [(call.op, call.num_bytes) for call in traffic.calls])
