"""The parameters of a module as one flat tensor, of which every rank keeps its shard alone."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from shared.errors import InputError
from shared.ranks.collectives import all_gather
from shared.sharding.flat import HALVES, FlatShard, PartWithMaster


class FlatUnit(FlatShard):
    """Parameters of one dtype, whole from gather() to free(), and otherwise a shard on each rank.

    `shard` is what an optimizer trains: float32 where the parameters compute in 16 bits. After
    `finish()` its gradient is the mean over the group of this part. Between uses a parameter has
    no elements, so that using it by mistake is an error about its size. Call reduce() where the
    unit is not needed whole. torch's FSDP2 calls gather, wait, free: unshard, wait_for_unshard,
    reshard.
    """

    # What the hooks know of its uses in a step:
    users = 0  # modules that compute with it now
    pending = 0  # uses in forward that backward has not come to
    arrived = 0  # gradients that are complete

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        compute_dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(parameters, group)
        self._keep(self.own_part(self.flat))
        self.flat = torch.empty_like(self.flat, dtype=compute_dtype)
        self._gathering: dist.Work | None = None
        self._versions = list[int]()
        self.free()

    def _keep(self, part: Shaped[Tensor, "shard"]) -> None:
        wide = torch.float32 if part.dtype in HALVES else part.dtype
        self.shard = nn.Parameter(part.to(wide, copy=True), requires_grad=self.trained)

    @property
    def is_whole(self) -> bool:
        """Whether the memory of the whole parameters is there, filled or being filled."""
        return self.flat.untyped_storage().nbytes() > 0

    @property
    def is_on_its_way(self) -> bool:
        """Whether gather() has started a message that nobody has waited for."""
        return self._gathering is not None

    @property
    def _sent(self) -> Shaped[Tensor, "shard"]:
        return self.shard

    @torch.no_grad()
    def gather(self) -> None:
        """Start to make the parameters whole; does nothing where they are, or are on their way."""
        if self.is_whole:
            return
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        own = self.own_part(self.flat)
        own.copy_(self._sent)  # rounds, where 16 bits compute
        self._gathering = all_gather(self.flat, own, self.group)
        self.point_at(self.flat)

    def wait(self) -> None:
        """Wait until what gather() has started is there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def note_versions(self) -> None:
        """Before a forward: how often the parameters were written to."""
        self._versions = [parameter._version for parameter in self.parameters]

    def refuse_writes(self) -> None:
        """After it: InputError where it has written to a parameter, which free() would undo."""
        for parameter, version in zip(self.parameters, self._versions, strict=True):
            if parameter._version != version:
                raise InputError(
                    f"a parameter of shape {tuple(parameter.shape)} was written to in forward, and "
                    "what is gathered is given back: compute with a new tensor; write with "
                    "load_full_state_dict() or, under ZeRO-3, inside gathered(write=True)"
                )

    def free(self) -> None:
        """Give the memory back. What autograd saved are views of it: whole again with the unit."""
        self.wait()  # nothing may be written into memory that is gone
        self.flat.untyped_storage().resize_(0)
        for parameter in self.parameters:
            parameter.data = self.flat.new_empty(0)

    def _add(self, mean: Shaped[Tensor, "shard"]) -> None:
        mean = mean.to(self.shard.dtype)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)


class ZeroUnit(PartWithMaster, FlatUnit):
    """A unit of ZeRO-3, which keeps its part in 16 bits beside the float32 master, as its gradient.

    So a rank has 16/D bytes a parameter, as in the paper; FlatUnit has no 16-bit part, and a
    float32 gradient. `shard` is the master.
    """

    writing = 0  # gathered(write=True)s that are open

    def _keep(self, part: Shaped[Tensor, "shard"]) -> None:
        super()._keep(part.clone())
        self.shard = self.master

    @property
    def _sent(self) -> Shaped[Tensor, "shard"]:
        return self.part

    def refuse_writes(self) -> None:
        """Nothing, where store_back() will keep them."""
        if not self.writing:
            super().refuse_writes()

    def store_back(self) -> None:
        """Take over what was written to the parameters while they were whole.

        Where a new value equals the rounded master, the master stays: it may not have been written.
        """
        new = self.own_part(self.flat)
        if self.master.data_ptr() != self.part.data_ptr():  # what was not written stays float32
            master = self.master.detach()
            master.copy_(torch.where(new == self.part, master, new))
        self.part.copy_(new)


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
        self.point_at(self.flat)

    def refuse_writes(self) -> None:
        """Nothing, where parameters are views of the shard, which keep them."""
        if self.flat.dtype != self.shard.dtype:
            super().refuse_writes()

    def free(self) -> None:
        """Nothing is freed; at the start, the parameters become views of the one flat tensor."""
        self.gather()

    def _reduce_scatter(self, filling: Tensor) -> None:
        self._reduced = filling
        self._reducing = dist.all_reduce(filling, group=self.group, async_op=True)
