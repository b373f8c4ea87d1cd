"""The next unit's gather on its way while this one computes."""

from typing import Any

import torch

from shared.sharding.flat_unit import FlatUnit, WholeUnit
from shared.sharding.fully_shard import FullyShard


class PrefetchingShard(FullyShard):
    """FullyShard that gathers one unit ahead, in the order which the step before had.

    At most one unit is on its way while others are in use. Nothing is gathered ahead across the end
    of a step, where the optimizer changes the shards, in an evaluation, or where the order differs
    from the one before. Units that are whole anyway (`keep_whole`) have no place in the order.
    Source: FSDP's forward and backward prefetch, Zhao et al. 2023, section 3.3.2.
    """

    _order: tuple[FlatUnit, ...] = ()  # of the step before
    _seen: tuple[FlatUnit, ...] = ()  # of this one, so far
    _training = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. One without gradients is no part of a step's order."""
        self._training = torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def acquire(self, unit: FlatUnit) -> None:
        """Wait for this unit, and start the next one where nothing else is on its way."""
        super().acquire(unit)
        if not self._training or isinstance(unit, WholeUnit):  # which never has to be fetched
            return
        self._seen = (*self._seen, unit)
        at = len(self._seen)
        if at < len(self._order) and self._order[at - 1] is unit:
            ahead = self._order[at]
            if not any(other.is_on_its_way for other in self.units):
                ahead.gather()

    def finish_gradient_sync(self) -> None:
        """As in FullyShard; this step's order is that of the next one."""
        if self._seen:  # called a second time, there is nothing new
            self._order = self._seen
        super().finish_gradient_sync()

    def _free_all(self) -> None:
        super()._free_all()
        self._seen = ()

    def _undo_forward(self, uses: dict[FlatUnit, tuple[int, int]]) -> None:
        super()._undo_forward(uses)
        self._seen = ()  # nothing is gathered ahead in a step whose order is broken
