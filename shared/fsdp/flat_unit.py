"""The parameters of a module as one flat tensor, of which every rank keeps its shard alone."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from shared.zero.flat import HALVES, all_gather, partition, reduce_scatter


class FlatUnit:
    """Parameters of one dtype, whole from gather() to free(), and otherwise a shard on each rank.

    `shard` is what an optimizer trains: float32 where the parameters compute in 16 bits. After
    `finish()` its gradient is the mean over the group of this part. Between uses a parameter has
    no elements, so that using it by mistake is an error about its size. The numbers at the start
    are those of the group's first rank.
    """

    # What FullyShard knows of its uses in a step:
    users = 0  # modules that compute with it now
    pending = 0  # uses in forward that backward has not come to

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        compute_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.parameters, self.group = list(parameters), group
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.trained = self.parameters[0].requires_grad
        self.num_ranks = dist.get_world_size(group)
        flat, _ = partition(self.parameters, self._num_shards)
        dist.broadcast(flat, group=group, group_src=0)
        master = torch.float32 if flat.dtype in HALVES else flat.dtype
        own = self.own_part(flat).to(master, copy=True)
        self.shard = nn.Parameter(own, requires_grad=self.trained)
        self.flat = torch.empty_like(flat, dtype=compute_dtype)
        self._gathering: dist.Work | None = None
        self._reducing: dist.Work | None = None
        self._filling = self._reduced = self.flat
        self.free()

    @property
    def _num_shards(self) -> int:
        return self.num_ranks

    @property
    def _index(self) -> int:
        return dist.get_rank(self.group)

    @property
    def is_whole(self) -> bool:
        """Whether the memory of the whole parameters is there, filled or being filled."""
        return self.flat.untyped_storage().nbytes() > 0

    def pieces(self, flat: Shaped[Tensor, "padded"]) -> list[Tensor]:
        """The parameters' places in a flat tensor of this unit, as views in their shapes."""
        sizes = [shape.numel() for shape in self.shapes]
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def own_part(self, flat: Shaped[Tensor, "padded"]) -> Shaped[Tensor, "shard"]:
        """This rank's part of a flat tensor of this unit, as a view."""
        return flat.view(self._num_shards, -1)[self._index]

    def full(self, part: Shaped[Tensor, "shard"]) -> list[Tensor]:
        """What a tensor shaped as the shard is on all ranks together, in the parameters' shapes.

        For the shard itself: the parameters, not rounded. Every rank of the group takes part.
        """
        flat = part.new_empty(len(self.flat))
        all_gather(flat, part.detach(), self.group).wait()
        return self.pieces(flat)

    # The parameters

    @torch.no_grad()
    def gather(self) -> None:
        """Start to make the parameters whole; does nothing where they are, or are on their way."""
        if self.is_whole:
            return
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        own = self.own_part(self.flat)
        own.copy_(self.shard)  # rounds, where 16 bits compute
        self._gathering = all_gather(self.flat, own, self.group)
        for parameter, piece in zip(self.parameters, self.pieces(self.flat), strict=True):
            parameter.data = piece

    def wait(self) -> None:
        """Wait until what gather() has started is there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def free(self) -> None:
        """Give the memory back. What autograd saved are views of it: whole again with the unit."""
        self.wait()  # nothing may be written into memory that is gone
        self.flat.untyped_storage().resize_(0)
        for parameter in self.parameters:
            parameter.data = self.flat.new_empty(0)

    # The gradients

    @torch.no_grad()
    def reduce(self) -> None:
        """Start to average the gradients; of the mean this rank gets its part, and frees the rest.

        A parameter without gradient counts with zeros. Call it where the unit is not needed whole.
        """
        self.finish()
        self._filling = self.flat.new_zeros(len(self.flat))
        for parameter, piece in zip(self.parameters, self.pieces(self._filling), strict=True):
            if parameter.grad is not None:
                torch.mul(parameter.grad, 1 / self.num_ranks, out=piece)
                parameter.grad = None
        self._send()

    def _send(self) -> None:
        self._reduced = self._filling.new_empty(len(self.shard))
        self._reducing = reduce_scatter(self._reduced, self._filling, self.group)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for what reduce() has started, and add it to the shard's gradient."""
        if self._reducing is None:
            return
        self._reducing.wait()
        if self._filling is not self._reduced:
            # At once: gloo's thread may hold the tensor for some milliseconds more.
            self._filling.untyped_storage().resize_(0)
        mean = self._reduced.to(self.shard.dtype)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)
        self._filling = self._reduced = self.flat
        self._reducing = None


class WholeUnit(FlatUnit):
    """Parameters too small to be worth a message: whole on every rank, as under DDP."""

    @property
    def _num_shards(self) -> int:
        return 1

    @property
    def _index(self) -> int:
        return 0

    def full(self, part: Shaped[Tensor, "shard"]) -> list[Tensor]:
        """The tensor itself, in the parameters' shapes; nothing is sent."""
        return self.pieces(part.detach())

    @torch.no_grad()
    def gather(self) -> None:
        """Let the parameters be what the optimizer has made of them; nothing is sent."""
        if self.flat.dtype == self.shard.dtype:
            self.flat = self.shard.detach()
        else:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            self.flat.copy_(self.shard)
        for parameter, piece in zip(self.parameters, self.pieces(self.flat), strict=True):
            parameter.data = piece

    def free(self) -> None:
        """Nothing is freed; at the start, the parameters become views of the one flat tensor."""
        self.gather()

    def _send(self) -> None:
        self._reduced = self._filling
        self._reducing = dist.all_reduce(self._filling, group=self.group, async_op=True)
