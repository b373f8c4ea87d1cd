"""What autograd keeps for backward, also where a recomputation or another hook decides it."""

import contextlib
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._C._autograd import _push_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from shared.measuring.live import LiveBytes, settle


class KeptBytes:
    """Bytes that are alive of what autograd was given to keep: `peak`, the most at any moment.

    Counted over distinct storages: a tensor and its views are one. `ignore` holds what exists
    anyway: parameters, and the batch.
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        self.peak = 0
        # Kept alive, so that nothing else gets their addresses.
        self._ignored = {_address(tensor): tensor.untyped_storage() for tensor in ignore}
        self._live = LiveBytes(negligible=1)

    def add(self, kept: Any) -> None:
        """Count the tensors in what is kept from now on, until they are freed."""
        tensors = [x for x in tree_leaves(kept) if isinstance(x, Tensor)]
        self._live.add(x for x in tensors if _address(x) not in self._ignored)
        if self.now() > self.peak:
            settle(0.001)  # gloo's thread may still hold what was sent and kept no more
            self.peak = max(self.peak, self.now())

    def now(self) -> int:
        """Bytes that are alive now."""
        return self._live.now()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def counting_kept(ignore: Iterable[Tensor] = ()) -> Generator[KeptBytes]:
    """Count what is kept inside the block, by forwards, recomputations and hooks of others.

    `counting_saved` sees a tensor only if no other hook has been set inside of its own, since the
    innermost alone is asked. Here every hook that is set inside the block is listened to: what
    counts is what it hands to autograd. torch's non-reentrant checkpoint hands over nothing in
    forward, then in backward all that it has computed again.

    Exact on any device for this thread. Not seen: what a hook keeps aside and does not hand over
    (such as the state of the random generator that checkpoint keeps), and temporaries.
    Source: torch.autograd.graph.saved_tensors_hooks, torch/utils/checkpoint.py.
    """
    counter = KeptBytes(ignore)

    def pack(inner: Callable[[Tensor], Any], x: Tensor) -> Any:
        try:
            kept = inner(x)
        except Exception:
            counter.add(x)  # a recomputation ends by an error when it has kept the last tensor
            raise
        counter.add(kept)
        return kept

    def enter(hooks: saved_tensors_hooks) -> None:
        _push_saved_tensors_default_hooks(partial(pack, hooks.pack_hook), hooks.unpack_hook)

    with (
        patch.object(saved_tensors_hooks, "__enter__", enter),
        saved_tensors_hooks(lambda x: x.detach(), lambda x: x),
    ):
        yield counter
