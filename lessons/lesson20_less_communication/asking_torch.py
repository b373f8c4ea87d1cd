"""torch's PowerSGD over gloo, each callback run by the thread that runs backward."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook


class Done:
    """An all-reduce that is over, with the future that torch's hooks ask for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """Keep what was summed."""
        self.future: torch.futures.Future = torch.futures.Future()
        self.future.set_result([tensor])

    def get_future(self) -> torch.futures.Future:
        """The future, complete: what is hung on it runs at once."""
        return self.future


def power_sgd_of_torch(
    state: powerSGD_hook.PowerSGDState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Return what torch's `powerSGD_hook` returns, its messages one after the other.

    The hook starts its second and third message in callbacks, which over gloo run in gloo's own
    threads: the ranks' orders may differ, and a thread that still holds Python's objects when the
    group ends aborts the process. Here every message has come when its callback is hung on it.
    """
    plain = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        plain(tensor, *args, **kwargs)
        return Done(tensor) if async_op else None

    with patch.object(dist, "all_reduce", all_reduce):
        return powerSGD_hook.powerSGD_hook(state, bucket)
