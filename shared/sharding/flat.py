"""Tensors laid end to end in one flat tensor, which is cut into a part for each rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from shared.errors import InputError
from shared.ranks.collectives import all_gather, reduce_scatter

HALVES = (torch.bfloat16, torch.float16)


def partition(
    tensors: Sequence[Tensor], num_parts: int
) -> tuple[Shaped[Tensor, "padded"], list[Shaped[Tensor, "part"]]]:
    """Return one flat copy of all tensors, zeros at its end, and its equal parts, which are views.

    The parts are as short as they can be: fewer than `num_parts` zeros are added. Writing to a part
    writes to the flat tensor. Raises ValueError for no tensor, for num_parts below 1, and for
    tensors of different dtypes or devices.
    """
    if not tensors or num_parts < 1:
        raise InputError(f"{len(tensors)} tensors cannot be cut into {num_parts} parts")
    kinds = {(str(tensor.dtype), str(tensor.device)) for tensor in tensors}
    if len(kinds) > 1:
        raise InputError(f"tensors of one dtype and device are needed, got {sorted(kinds)}")
    padding = -sum(tensor.numel() for tensor in tensors) % num_parts
    pieces = [tensor.detach().reshape(-1) for tensor in tensors]
    flat = torch.cat([*pieces, pieces[0].new_zeros(padding)])
    return flat, list(flat.view(num_parts, -1))


def views_of(flat: Shaped[Tensor, "padded"], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The places of tensors of these shapes in a flat tensor, one after the other, as views."""
    sizes = [shape.numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class FlatShard:
    """Parameters of one dtype in one flat tensor, of which every rank of a group owns a part.

    The numbers at the start are those of the group's first rank. Whole gradients are moved into
    `filling`, a flat tensor as well; reduce() starts their reduce-scatter, and finish() adds this
    rank's part of the mean to what it has (`_add`).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> None:
        self.parameters, self.group = list(parameters), group
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.trained = self.parameters[0].requires_grad
        self.num_ranks = dist.get_world_size(group)
        self.flat, _ = partition(self.parameters, self._num_shards)
        dist.broadcast(self.flat, group=group, group_src=0)
        self.filling: Tensor | None = None
        self._places: dict[nn.Parameter, Tensor] = {}
        self._reduced: Tensor | None = None
        self._reducing: dist.Work | None = None

    @property
    def _num_shards(self) -> int:
        return self.num_ranks

    @property
    def _index(self) -> int:
        return dist.get_rank(self.group)

    def pieces(self, flat: Shaped[Tensor, "padded"]) -> list[Tensor]:
        """The parameters' places in a flat tensor of this one's size, as views in their shapes."""
        return views_of(flat, self.shapes)

    def own_part(self, flat: Shaped[Tensor, "padded"]) -> Shaped[Tensor, "shard"]:
        """This rank's part of such a flat tensor, as a view."""
        return flat.view(self._num_shards, -1)[self._index]

    def full(self, part: Shaped[Tensor, "shard"]) -> list[Tensor]:
        """What a tensor shaped as the part is on all ranks together, in the parameters' shapes.

        For the part itself: the parameters. Every rank of the group takes part.
        """
        flat = part.new_empty(len(self.flat))
        all_gather(flat, part.detach(), self.group).wait()
        return self.pieces(flat)

    def point_at(self, flat: Shaped[Tensor, "padded"]) -> None:
        """Let every parameter be its piece of the flat tensor."""
        for parameter, piece in zip(self.parameters, self.pieces(flat), strict=True):
            parameter.data = piece

    # The gradients: collected, averaged, and only this rank's part kept

    @torch.no_grad()
    def collect(self, parameter: nn.Parameter) -> None:
        """Move this rank's share of a mean into the flat tensor; the gradient itself is freed."""
        if self.filling is None:  # zeros for what this rank does not use, and for the padding
            self.filling = torch.zeros_like(self.flat)
            self._places = dict(zip(self.parameters, self.pieces(self.filling), strict=True))
        if parameter.grad is not None:
            torch.mul(parameter.grad.to_dense(), 1 / self.num_ranks, out=self._places[parameter])
            parameter.grad = None

    def reduce(self) -> None:
        """Start to average the gradients; of the mean this rank gets its part.

        A parameter without gradient counts with zeros.
        """
        self.finish()
        for parameter in self.parameters:
            self.collect(parameter)
        assert self.filling is not None, "partition() refuses to lay out no parameter"
        self._reduce_scatter(self.filling)

    def _reduce_scatter(self, filling: Tensor) -> None:
        self._reduced = torch.empty_like(self.own_part(filling))
        self._reducing = reduce_scatter(self._reduced, filling, self.group)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for what reduce() has started, free the whole gradients, and add this rank's part.

        Does nothing where nothing is on its way.
        """
        if self._reducing is None or self.filling is None or self._reduced is None:
            return
        self._reducing.wait()
        if self._reduced is not self.filling:
            # At once: gloo's thread may hold the tensor for some milliseconds more.
            self.filling.untyped_storage().resize_(0)
        self._add(self._reduced)
        self._collect_anew()

    def _collect_anew(self) -> None:
        self.filling = self._reduced = self._reducing = None
        self._places.clear()

    def _add(self, mean: Shaped[Tensor, "shard"]) -> None:
        raise NotImplementedError

    def drop(self) -> None:
        """Forget the whole gradients: in .grad, what a failed backward collected, what travels."""
        if self._reducing is not None:
            self._reducing.wait()  # it still writes into memory of ours
        self._collect_anew()
        for parameter in self.parameters:
            parameter.grad = None


class PartWithMaster(FlatShard):
    """What ZeRO keeps of a flat tensor: the part in its own dtype, its mean gradient likewise.

    `part` is this rank's part, `master` what its optimizer updates: the part itself or, for 16-bit
    parameters that are trained, a float32 copy. `grad` is the mean over the ranks of this part.
    """

    part: Tensor
    master: nn.Parameter
    grad: Tensor | None = None

    def _keep(self, part: Tensor) -> None:
        half = part.dtype in HALVES and self.trained
        self.part = part
        self.master = nn.Parameter(part.float() if half else part, requires_grad=self.trained)

    def round(self) -> None:
        """Write a float32 master, rounded, into the part."""
        if self.master.data_ptr() != self.part.data_ptr():
            self.part.copy_(self.master.detach())

    def _add(self, mean: Tensor) -> None:
        self.grad = mean if self.grad is None else self.grad.add_(mean)

    def drop(self) -> None:
        """Forget all gradients, the averaged part too."""
        super().drop()
        self.grad = None


class Bucket(PartWithMaster):
    """Parameters that stay whole, as views of the flat tensor, of which each rank updates a part.

    `missing` are the parameters whose gradient of this backward is not collected yet.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(parameters, group)
        self._keep(self.own_part(self.flat))
        self.point_at(self.flat)
        self.missing = set(self.parameters)

    def gather(self) -> dist.Work:
        """Start to fetch the other ranks' parts, after they were updated."""
        return all_gather(self.flat, self.part, self.group)

    def collect(self, parameter: nn.Parameter) -> None:
        """Move a gradient into the flat tensor, or count it as zeros where there is none.

        Another part of it, from a re-entrant checkpoint's backward, is added.
        """
        if parameter in self.missing:
            super().collect(parameter)
            self.missing.discard(parameter)
        elif parameter.grad is not None:
            self._places[parameter].add_(parameter.grad, alpha=1 / self.num_ranks)
            parameter.grad = None

    def _collect_anew(self) -> None:
        super()._collect_anew()
        self.missing = set(self.parameters)
