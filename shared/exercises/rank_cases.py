"""Several cases of one answer on the same ranks: they start once, and fail one case at a time."""

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shared.exercises.guarding import call_guarded
from shared.exercises.on_ranks import raise_failure
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks

QUIET = 1.0  # seconds without any work after which ranks that wait for each other are ended
PATIENCE = 60.0  # seconds of processor time until ranks that are still at work are ended


class RankCases:
    """Cases that one group of ranks tries one after the other: functions of the rank, by a key.

    To start ranks takes longer than most cases. What the ranks saw of a case is kept once all are
    through with it, so a failure belongs to the case in which it came; the cases after it are
    tried again, by new ranks, if somebody asks for them.
    """

    def __init__(self, world_size: int, cases: Mapping[Any, Callable[[int], Any]]) -> None:
        self.world_size, self.cases = world_size, cases
        self._seen: dict[Any, list[Any]] = {}
        self._failed: dict[Any, RankFailed] = {}

    def outcome(self, case: Any) -> list[Any]:
        """Return what each rank returned; raises RankFailed where they failed in this case."""
        while case not in self._seen and case not in self._failed:
            self._try([key for key in self.cases if key not in {*self._seen, *self._failed}])
        if case in self._failed:
            raise self._failed[case]
        return self._seen[case]

    def seen(self, case: Any, *, apart: str, **words: Any) -> list[Any]:
        """Return what each rank returned; a failure is a finding, in the words of `on_ranks`."""
        try:
            return self.outcome(case)
        except RankFailed as failed:
            raise_failure(failed, apart=apart, **words)

    def _try(self, keys: list[Any]) -> None:
        with tempfile.TemporaryDirectory(prefix="cases_") as folder:
            files = [Path(folder, str(rank)) for rank in range(self.world_size)]

            def work(rank: int) -> None:
                with files[rank].open("wb") as file:
                    for key in keys:
                        result = call_guarded(self.cases[key], rank)
                        dist.barrier()  # a call too many must not meet one of the next case
                        pickle.dump(result, file)
                        file.flush()

            failed = None
            try:
                run_ranks(work, self.world_size, timeout=PATIENCE, quiet=QUIET)
            except RankFailed as error:
                failed = error
            through = list(zip(*map(_results, files), strict=False))
        self._seen |= {key: list(of_ranks) for key, of_ranks in zip(keys, through, strict=False)}
        if failed is not None:
            self._failed[keys[min(len(through), len(keys) - 1)]] = failed


def _results(file: Path) -> Iterator[Any]:
    """The results that a rank wrote; it may have been ended in the middle of one."""
    if file.exists():
        with file.open("rb") as opened:
            while True:
                try:
                    yield pickle.load(opened)
                except (EOFError, pickle.UnpicklingError):
                    return


@dataclass(frozen=True)
class RankGroups:
    """Ranks in groups: two of four ranks are [0, 2] and [1, 3], or `together` [0, 1] and [2, 3]."""

    ranks: int
    groups: int = field(default=1, kw_only=True)
    together: bool = field(default=False, kw_only=True)

    def number(self, rank: int) -> int:
        """Return which group is this rank's."""
        return rank * self.groups // self.ranks if self.together else rank % self.groups

    def members(self, rank: int) -> list[int]:
        """Return the ranks of this rank's group."""
        return [r for r in range(self.ranks) if self.number(r) == self.number(rank)]

    def group(self, rank: int) -> dist.ProcessGroup | None:
        """Return this rank's group, None for all ranks; every rank makes all groups."""
        if self.groups == 1:
            return None
        ranks = range(self.ranks)
        made = [
            dist.new_group([r for r in ranks if self.number(r) == index])
            for index in range(self.groups)
        ]
        return made[self.number(rank)]
