"""The norm of a gradient of which each rank has a part, and clipping by it."""

from collections.abc import Iterable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from shared.errors import InputError

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def square_of(gradient: Tensor) -> Tensor:
    """The sum of a gradient's squares, in float64: float32 has no square of 1e20."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.linalg.vector_norm(gradient.detach(), dtype=wide).double().square()


@torch.no_grad()
def scale_to(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm in place, to max_norm at the most.

    Raises InputError for a max_norm below 0.
    """
    if not max_norm >= 0:
        raise InputError(f"max_norm must be 0 or more, got {max_norm}")
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def clip_parts(
    parts: Sequence[Tensor],
    max_norm: float,
    group: dist.ProcessGroup | None,
    *,
    copies: Sequence[Tensor] = (),
    device: torch.device,
) -> Tensor:
    """Clip a gradient of which each rank of a group has its own parts, and equal copies of others.

    Returns the norm of all ranks' parts together, as it was before; one number is sent. Raises
    InputError for a max_norm below 0.
    """
    # In float64 whatever the parts are: a rank that has none sends the same kind of number.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        total += square_of(part)
    for copy in copies:  # so that all ranks add the same numbers
        total += square_of(copy) / dist.get_world_size(group)
    dist.all_reduce(total, group=group)
    kinds = (tensor.dtype for tensor in (*parts, *copies))
    norm = total.sqrt().to(reduce(torch.promote_types, kinds, torch.float32))
    scale_to([*parts, *copies], norm, max_norm)
    return norm
