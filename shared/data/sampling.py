"""Which rank reads which sample, in which epoch: samplers that share a dataset out."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from shared.errors import InputError


class DistributedSampler(Sampler[int]):
    """This rank's part of the indices 0..L-1: every num_replicas-th of one common order.

    All ranks draw the same permutation, from seed + epoch, and rank r takes entries r,
    r + num_replicas, ...: the ranks never have to talk to agree on who reads what. The order must
    be divisible by the ranks, or one of them would run one step more than the others and wait for
    them in it: either the first entries come once more at the end, or (`drop_last`) the tail is
    left out.

    Index for index what torch.utils.data.DistributedSampler gives.

    Raises InputError for a rank outside 0..num_replicas-1, and without a process group when
    num_replicas or rank is left to it.
    Source: torch/utils/data/distributed.py, whose arguments these are.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_replicas, self.rank = _place(num_replicas, rank)
        self.length = len(dataset)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def __len__(self) -> int:
        """The number of samples that this rank gets in an epoch; the same on every rank."""
        return self._rounded(self.length) // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        return iter(self._part(start=0))

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; without it the next one has the order of the last."""
        self.epoch = epoch

    def _rounded(self, count: int) -> int:
        """Return the nearest multiple of the ranks: below with drop_last, else above."""
        whole = count // self.num_replicas * self.num_replicas
        return whole if self.drop_last or whole == count else whole + self.num_replicas

    def _order(self) -> list[int]:
        """Return the order of this epoch, the same on every rank."""
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator).tolist()

    def _part(self, start: int) -> list[int]:
        """Return this rank's indices from entry `start` of the common order on."""
        order = self._order()
        rest = order[start:]
        rounded = self._rounded(len(rest))
        while len(rest) < rounded:  # more than once only where there are more ranks than samples
            rest += order[: rounded - len(rest)]
        return rest[self.rank : rounded : self.num_replicas]


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return world size and rank, asked of the process group where they are not given."""
    if num_replicas is None or rank is None:
        if not dist.is_initialized():
            raise InputError(
                f"num_replicas is {num_replicas}, rank is {rank}, and there is no process group "
                "to ask: give both, or open the group first"
            )
        num_replicas = dist.get_world_size() if num_replicas is None else num_replicas
        rank = dist.get_rank() if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise InputError(
            f"rank is {rank}; with num_replicas {num_replicas} it must be 0..{num_replicas - 1}"
        )
    return num_replicas, rank


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that resumes in the middle of an epoch, on any number of ranks.

    Its position is one number, the samples of this epoch that all ranks together have had. The
    common order does not depend on the world size, so what is left after `consumed` samples can
    be shared out among any number of ranks: none comes twice, none is left out (but for padding
    or drop_last at the very end, as ever).

        sampler.load_state_dict(state)
        for epoch in range(sampler.epoch, num_epochs):
            sampler.set_epoch(epoch)  # keeps the position: it is still the same epoch
            for batch in loader: ...

    `dataset` may be a number of samples. Raises InputError as DistributedSampler does, and where
    drop_last would leave every rank with nothing.
    """

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        samples = range(dataset) if isinstance(dataset, int) else dataset
        super().__init__(samples, num_replicas, rank, shuffle, seed, drop_last)
        if drop_last and self.length < self.num_replicas:
            raise InputError(
                f"{self.length} samples, {self.num_replicas} ranks, drop_last: every rank would "
                "get none; use fewer ranks, more data, or drop_last=False"
            )
        self._start = 0  # where the next iteration begins
        self._consumed = 0  # what iterations have handed out, all ranks together

    def __len__(self) -> int:
        """The number of samples that this rank still gets: fewer in a resumed epoch."""
        return self._rounded(self.length - self._start) // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        self._consumed = start = self._start
        for count, index in enumerate(self._part(start), start=1):
            # All ranks walk in step, so one sample here is num_replicas in all.
            self._consumed = min(start + count * self.num_replicas, self.length)
            yield index
        self._consumed, self._start = self.length, 0  # a further iteration is a whole epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; another one than that at hand begins at its first sample."""
        if epoch != self.epoch:
            self._start = self._consumed = 0
        self.epoch = epoch

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Epoch and position, the same on every rank, and what the order depends on.

        `consumed` is the number of samples of this epoch that all ranks together have trained on,
        counted from the epoch's beginning. Give it where a DataLoader has workers: they draw
        indices ahead of training, and what is left out here, that is what has been handed out,
        would skip the batches that still lay in the queue.
        """
        consumed = self._consumed if consumed is None else consumed
        most = max(self.length, self._rounded(self.length))  # padding is handed out as well
        if not 0 <= consumed <= most:
            raise InputError(
                f"consumed is {consumed}; an epoch has {self.length} samples, so it must be "
                f"0..{most}: count within the epoch, over all ranks"
            )
        return {
            "epoch": self.epoch,
            "consumed": min(consumed, self.length),  # not the padding
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken; the world size need not be the same.

        Whatever epoch and position the sampler had are replaced. Raises InputError when the state
        is of another dataset length, seed or shuffle: the order would be another one, and samples
        would come twice and not at all. The sampler is then as it was.
        """
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise InputError(
                    f"the state was taken with {name} {state[name]}, this sampler has "
                    f"{getattr(self, name)}: it would repeat some samples and skip others"
                )
        self.epoch = state["epoch"]
        self._start = self._consumed = state["consumed"]


class RepeatedOrderWarning(UserWarning):
    """A sampler gave the order of its last epoch again."""


class WatchedSampler:
    """Any sampler, with a warning when an epoch begins in the very order of the one before.

    That is what a forgotten `set_epoch` looks like, whoever forgot it. The first 64 entries are
    compared (all of a shorter epoch), so the warning comes early in the second epoch. There is none
    for an order that only rises, which is no shuffle and meant to repeat, and none for an epoch of
    fewer than 8 entries, whose order may repeat by chance.

    Wrap the sampler that goes into the DataLoader, on one rank; all else (`set_epoch`,
    `state_dict`, ...) is passed through.
    """

    FEWEST, MOST = 8, 64

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self._last: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []  # never more than was asked for: a resumable sampler counts that
        for entry in self.sampler:
            if len(first) < self.MOST:
                first.append(entry)
                if len(first) == self.MOST:
                    self._compare(first)
            yield entry
        if len(first) < self.MOST:
            self._compare(first)

    def __len__(self) -> int:
        assert isinstance(self.sampler, Sized), f"{type(self.sampler).__name__} has no length"
        return len(self.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # asked for by pickle and copy before __init__ has run
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def _compare(self, first: list[Any]) -> None:
        last, self._last = self._last, first
        if first == last and len(first) >= self.FEWEST and first != sorted(first):
            warnings.warn(
                f"the last two epochs began with the same {len(first)} samples in the same order: "
                "call set_epoch(epoch) on the sampler before each epoch",
                RepeatedOrderWarning,
                stacklevel=2,
            )
