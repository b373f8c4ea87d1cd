"""Tensors laid end to end in one flat tensor, which is cut into a part for each rank."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from shared.errors import InputError

# torch 2.13 renamed both and warns about the old names, torch 2.11 has the old names alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
HALVES = (torch.bfloat16, torch.float16)


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    """Start to fill `whole` with every rank's part, in the order of ranks; `part` may lie in it."""
    return _started(_all_gather(whole, part, group=group, async_op=True))


def reduce_scatter(
    part: Tensor, whole: Tensor, group: dist.ProcessGroup | None = None
) -> dist.Work:
    """Start to add up the ranks' wholes; each rank gets the part of the sum that is its own."""
    return _started(_reduce_scatter(part, whole, group=group, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


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
    kinds = {(str(each.dtype), str(each.device)) for each in tensors}
    if len(kinds) > 1:
        raise InputError(f"tensors of one dtype and device are needed, got {sorted(kinds)}")
    padding = -sum(each.numel() for each in tensors) % num_parts
    pieces = [each.detach().reshape(-1) for each in tensors]
    flat = torch.cat([*pieces, pieces[0].new_zeros(padding)])
    return flat, list(flat.view(num_parts, -1))


class Bucket:
    """Parameters of one dtype in one flat tensor, of which every rank updates its own part.

    The parameters become views of `flat`, with rank 0's numbers. `part` is this rank's part,
    `master` what its optimizer updates: the part itself or, for 16-bit parameters, a float32 copy.
    The gradients of a backward are collected in `filling`, a flat tensor as well, and end as
    `grad`: the mean over the ranks, of this rank's part alone. The ranks are those of `group`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None
    ) -> None:
        self.parameters, self.group = list(parameters), group
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.num_ranks, self.index = dist.get_world_size(group), dist.get_rank(group)
        self.flat, parts = partition(self.parameters, self.num_ranks)
        dist.broadcast(self.flat, group=group, group_src=0)
        self.part = parts[self.index]
        self._make_master()
        self.point_at(self.flat)
        self.missing = set(self.parameters)
        self.filling: Tensor | None = None
        self.grad: Tensor | None = None
        self._places: dict[nn.Parameter, Tensor] = {}
        self._reduced: Tensor | None = None
        self._work: dist.Work | None = None

    def _make_master(self) -> None:
        half = self.part.dtype in HALVES and self.parameters[0].requires_grad
        self.master = nn.Parameter(self.part.float() if half else self.part)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in a flat tensor of this bucket, as views in their shapes."""
        sizes = [shape.numel() for shape in self.shapes]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def own_part(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor of this bucket, as a view."""
        return flat.view(self.num_ranks, -1)[self.index]

    def full(self, part: Tensor) -> list[Tensor]:
        """What a tensor shaped as the part is on all ranks together, in the parameters' shapes."""
        flat = part.new_empty(len(self.flat))
        all_gather(flat, part.detach(), self.group).wait()
        return self.pieces(flat)

    def point_at(self, flat: Tensor) -> None:
        """Let every parameter be its piece of the flat tensor."""
        for parameter, piece in zip(self.parameters, self.pieces(flat), strict=True):
            parameter.data = piece

    # The parameters, after this rank's part was updated

    def round(self) -> None:
        """Write a float32 master, rounded, into the part."""
        if self.master.data_ptr() != self.part.data_ptr():
            self.part.copy_(self.master.detach())

    def gather(self) -> dist.Work:
        """Start to fetch the other ranks' parts."""
        return all_gather(self.flat, self.part, self.group)

    # The gradients: collected, averaged, and only this rank's part kept

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> None:
        """Move this rank's share of a mean into the flat tensor; the gradient itself is freed."""
        if self.filling is None:  # zeros for what this rank does not use, and for the padding
            self.filling = torch.zeros_like(self.flat)
            self._places = dict(zip(self.parameters, self.pieces(self.filling), strict=True))
        if parameter.grad is not None:
            torch.mul(parameter.grad, 1 / self.num_ranks, out=self._places[parameter])
            parameter.grad = None
        self.missing.discard(parameter)

    def send(self) -> None:
        """Start the reduce-scatter: of the sum over the ranks, each gets its own part alone."""
        for parameter in list(self.missing):
            self.take(parameter)
        assert self.filling is not None, "a bucket has at least one parameter"
        self._reduced = torch.empty_like(self.part)
        self._work = reduce_scatter(self._reduced, self.filling, self.group)

    def finish(self) -> None:
        """Wait for it and free the whole gradients; what a second backward brings is added."""
        if self._work is None or self._reduced is None or self.filling is None:
            return
        self._work.wait()
        # At once: gloo's thread may hold the tensor for some milliseconds more.
        self.filling.untyped_storage().resize_(0)
        self.grad = self._reduced if self.grad is None else self.grad.add_(self._reduced)
        self._work = self._reduced = self.filling = None
        self._places.clear()
        self.missing = set(self.parameters)
