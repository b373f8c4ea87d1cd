"""The samplers of all ranks at once, and an evaluation under observation."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from shared.exercises.expecting import alike, expect, recognise
from shared.exercises.on_ranks import on_one_rank, on_ranks
from shared.exercises.seeds import seed_all
from shared.measuring.traffic import count_traffic
from shared.ranks.failures import Failure

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


def global_state_read_set_moved(sampler: Callable[..., Any], length: int) -> list[bool]:
    """Return whether the order follows the global random state, and iterating sets or moves it."""
    orders, drawn, moved = [], [], False
    for seed in (1, 2):
        seed_all(seed)
        torch_before, python_before = torch.get_rng_state(), random.getstate()
        orders.append(parts(sampler, length, 1)[0])
        moved = moved or random.getstate() != python_before
        moved = moved or not torch.equal(torch.get_rng_state(), torch_before)
        drawn.append((torch.rand(1).item(), random.random()))
    alike = any(first == second for first, second in zip(*drawn, strict=True))
    return [orders[0] != orders[1], alike, moved]


def is_torchs_own(sampler: Callable[..., Any]) -> bool:
    """Return whether torch's sampler is set up when this one is, or is iterated over."""
    own, made = TorchSampler.__init__, []

    def noted(self: Any, *args: Any, **options: Any) -> None:
        made.append(self)
        own(self, *args, **options)

    with mock.patch.object(TorchSampler, "__init__", noted):
        list(sampler(range(4), num_replicas=2, rank=1))
    return bool(made)


class _Devices(TorchFunctionMode):
    """Notes whether any function of torch is handed a device of this name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.seen = name, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        devices = [str(each) for each in given if isinstance(each, str | torch.device)]
        self.seen = self.seen or self.name in devices
        return func(*args, **(kwargs or {}))


def uses_device(evaluate: Callable[..., Any]) -> bool:
    """Return whether the device that an evaluation is given is handed on to torch."""

    def look() -> bool:
        with _Devices("cpu:0") as devices:
            evaluate(lambda samples: (1.0, 1.0), Samples([1.0]), 1, "cpu:0")
        return devices.seen

    return on_one_rank(look)


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
    """A dataset of (index, value, weight), whose slices are no lists."""

    def __init__(self, values: list[float], weights: list[float] | None = None) -> None:
        weights = weights or [1.0] * len(values)
        self.rows = list(zip(range(len(values)), values, weights, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self.rows[index]) if isinstance(index, slice) else self.rows[index]


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
        kind = type(samples).__name__
        expect(isinstance(samples, list), expected="score is given a list", seen=f"a {kind}")
        batches.append([index for index, _, _ in samples])
        return sum(value for _, value, _ in samples), sum(weight for _, _, weight in samples)

    with count_traffic() as traffic:
        result = evaluate(score, dataset, batch_size)
    return Evaluation(result, batches, [(call.op, call.num_bytes) for call in traffic.calls])


# A slow machine gets its time; ranks that do nothing are not waited for.
on_all = partial(
    on_ranks, apart="the ranks wait for one another and never return", timeout=30.0, quiet=1.0,
    expected="as many collectives on every rank, whatever its share",
)  # fmt: skip


def evaluated(candidate: Any, dataset: Samples, *, ranks: int, batch_size: int) -> list[Evaluation]:
    """Return what every rank did; one that waits, has left or raised is a finding."""
    early = "a rank is already gone while another still waits for it in a collective"
    zero = "a rank without samples divides by 0"
    if len(dataset) >= ranks:
        zero = "a rank that has scored nothing divides by 0: a share that is smaller than "
        zero += "batch_size is a batch as well"
    return on_all(
        watched_evaluation, ranks, candidate, dataset, batch_size, hint="one all-reduce, last",
        known={
            Failure.PEER_LOST: (early, "no return before the all-reduce: add 0 and 0 instead"),
            ZeroDivisionError: (zero, "sums and divisors from every rank, also 0 and 0"),
        },
    )  # fmt: skip


def refuses_nothing(evaluate: Callable[..., Any], rank: int) -> bool:
    """Return whether this rank hears a ValueError for a dataset of 0 samples."""
    try:
        evaluate(lambda samples: (0.0, 0.0), Samples([]))
    except ValueError:
        return True
    return False


def common_state(samplers: list[Any]) -> Any:
    """Return the ranks' state, which must be the same everywhere and plain data."""
    states = [sampler.state_dict() for sampler in samplers]
    apart = [state for state in states if state != states[0]]
    recognise(
        {
            "the state differs from rank to rank: one file could not hold it": bool(apart),
            "the state is no plain data": lambda: not is_plain(states[0]),
        },
        expected="the same dict of numbers and words on every rank",
        seen=" and ".join(str(state) for state in [states[0], *apart[:1]]),
    )
    return states[0]


def resumed(sampler: Any, length: int, ranks: tuple[int, int], steps: Any, **options: Any) -> list:
    """Return samplers on ranks[1] that resume after `steps` (None: an epoch) on ranks[0]."""
    samplers = group(sampler, length, ranks[0], **options)
    take(samplers, steps)
    return group(sampler, length, ranks[1], common_state(samplers), **options)


def expect_from(begin: int, order: list[int], rest: list[int], looks_like: dict[str, Any]) -> None:
    """`rest` must be what is left of an epoch's order from sample `begin` on."""
    said = {
        "expected": f"to begin at sample {begin} of the epoch's order",
        "seen": place_in(order, rest),
        "hint": "the next iteration begins where load_state_dict says: share out order[consumed:]",
    }
    others = {words: value for words, value in looks_like.items() if value != order[begin:]}
    recognise(alike(rest, others), **said)
    expect(rest == order[begin:], **said)
