"""What a communication hook of torch's DDP is given, and remembers from one step to the next.

A hook is called with such a state and a bucket of gradients, once a bucket and step, and returns a
future whose value is the flat buffer that DDP shall take for the mean of the ranks' buffers.
Source: docs.pytorch.org/docs/stable/ddp_comm_hooks.html.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from shared.errors import InputError
from shared.ranks.collectives import Group as Group

Flat = Float[Tensor, "numbers"]
Matrix = Float[Tensor, "rows columns"]


def ready(buffer: Flat) -> torch.futures.Future[Tensor]:
    """A future that already has its value: for a hook that has waited for its messages itself."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


class ErrorFeedback:
    """A group, and for each parameter what was not sent of its gradients so far.

    Residuals are kept by parameter and not by the bucket's index: after its first backward DDP
    sorts the parameters into other buckets, and index 0 then stands for different numbers.
    """

    def __init__(self, group: Group = None) -> None:
        self.group = group
        self.residuals: dict[Tensor, Tensor] = {}

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return dist.get_world_size(self.group)

    def recall(self, bucket: dist.GradBucket) -> Flat:
        """What was kept for this bucket's parameters, flat and in their order; zeros at first."""
        kept = [
            self.residuals[p] if p in self.residuals else torch.zeros_like(gradient).flatten()
            for p, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        return torch.cat(kept)

    def keep(self, bucket: dist.GradBucket, residual: Flat) -> None:
        """Remember, in memory of its own, what this step did not send."""
        sizes = [gradient.numel() for gradient in bucket.gradients()]
        for p, part in zip(bucket.parameters(), residual.split(sizes), strict=True):
            self.residuals[p] = part.detach().clone()


class TopK(ErrorFeedback):
    """The state of `topk_with_error_feedback`; `density` is the share of numbers that is sent."""

    def __init__(self, density: float, group: Group = None) -> None:
        """Raises InputError for a density that is not above 0 and at most 1."""
        super().__init__(group)
        if not 0 < density <= 1:
            raise InputError(
                f"a density of {density} sends no share of the numbers: take one above 0 and at"
                " most 1, such as 0.01"
            )
        self.density = density

    def count(self, numbers: int) -> int:
        """How many of so many numbers are sent: at least one."""
        return max(1, round(self.density * numbers))


class LowRank(ErrorFeedback):
    """The state of `power_sgd`: rank, first step, and each matrix's right factor of last time."""

    def __init__(self, rank: int, start: int = 2, seed: int = 0, group: Group = None) -> None:
        """The first `start` steps send everything. Raises InputError for a rank below 1."""
        super().__init__(group)
        if rank < 1:
            raise InputError(f"a rank of {rank} approximates no matrix: take 1 or more, such as 2")
        if start < 0:
            raise InputError(f"a start of {start} is before the first step: take 0 or more")
        self.rank, self.start, self.steps = rank, start, 0
        self.right: dict[Tensor, Matrix] = {}
        self._draw = np.random.RandomState(seed)

    def pays(self, gradient: Tensor) -> bool:
        """Whether two factors have fewer than half of the numbers; never for a vector.

        The rule, and the numbers that `first_factors` draws, are those of torch's hook.
        """
        rows, rank = gradient.shape[0] if gradient.ndim else 1, self.rank_of(gradient)
        columns = gradient.numel() // max(rows, 1)
        return 2 * (rows + columns) * rank < rows * columns

    def rank_of(self, gradient: Tensor) -> int:
        """The rank, or the smaller side of a matrix that has fewer rows or columns."""
        rows = gradient.shape[0] if gradient.ndim else 1
        return min(rows, gradient.numel() // max(rows, 1), self.rank)

    def first_factors(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """A random (columns, rank) factor for each matrix of a bucket, the same on every rank."""
        draw = torch.Generator().manual_seed(self._draw.randint(1_000_000_000))
        return [
            torch.randn(m.shape[1], self.rank_of(m), generator=draw, dtype=m.dtype).to(m.device)
            for m in matrices
        ]
