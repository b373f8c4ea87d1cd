"""The norm of a gradient that no rank has whole, and clipping by it."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from shared.sharding.clipping import scale_to, square_of
from shared.tensor_parallel.marks import cut_dim, is_tied_copy

# Of an axis of the mesh. Unlike a collective's `group`, where None is the world, None is an axis
# that is not there: nothing is sent along it.
AxisGroup = dist.ProcessGroup | None


def gradient_norm(
    parameters: Iterable[nn.Parameter], tp: AxisGroup = None, pp: AxisGroup = None
) -> Float[Tensor, ""]:
    """Return the 2-norm of the whole model's gradient, in float32, the same on every rank.

    `parameters` are this rank's. One with `cut_dim` is a part, which counts on every rank of `tp`;
    one without is a copy that all ranks of `tp` have, and counts once. One with `tied_copy = True`
    is a second copy, on another stage, of a weight that counts there. Gradients that are None
    count 0. `tp` and `pp` are this rank's groups, None where there is no such axis. One number is
    sent over each group. Call it when the gradients are averaged over the replicas; they are not
    changed. Source: Shoeybi et al. 2019 (arXiv 1909.08053); Megatron-LM's clip_grads.
    """
    parameters = list(parameters)
    return norm_of_pieces([(p, p.grad) for p in parameters if p.grad is not None], tp, pp)


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, tp: AxisGroup = None, pp: AxisGroup = None
) -> Float[Tensor, ""]:
    """Scale the gradients, in place, so that the whole model's norm is max_norm at the most.

    Multiplies by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does. Returns
    the norm as it was before. Raises InputError for a max_norm below 0.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, tp, pp)
    scale_to([p.grad for p in parameters if p.grad is not None], norm, max_norm)
    return norm


# What both rest on, for gradients that are pieces of tensors as well (ZeRO)

Pieces = Sequence[tuple[nn.Parameter, Tensor]]  # a parameter, and a piece of its gradient


def norm_of_pieces(pieces: Pieces, *groups: AxisGroup) -> Float[Tensor, ""]:
    """The norm of all ranks' pieces together; the first group is that of tensor parallelism.

    Copies count with a share on each rank of the first group, so that all ranks add the same
    numbers, and clip by the same factor to the last bit.
    """
    tp = groups[0]
    share = 1.0 if tp is None else 1.0 / dist.get_world_size(tp)
    device = next((gradient.device for _, gradient in pieces), _device(groups))
    total = torch.zeros((), device=device)
    for parameter, gradient in pieces:
        if not is_tied_copy(parameter):
            square = square_of(gradient)
            total += square if cut_dim(parameter) is not None else square * share
    for group in groups:
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(total, group=group)
    return total.sqrt()


def _device(groups: Iterable[AxisGroup]) -> torch.device:
    """Where a number has to be to be sent, on a rank that has no gradient."""
    nccl = any(group is not None and dist.get_backend(group) == "nccl" for group in groups)
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
