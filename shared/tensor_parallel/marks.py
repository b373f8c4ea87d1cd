"""What a parameter tells about itself: an attribute on it, which every room reads through here.

    cut_dim            the dim along which the ranks of tp have a part each; absent: whole
    partial_gradient   a rank's gradient is a part of the sum over tp (sequence parallelism)
    tied_copy          a second copy of a weight that counts on an earlier stage

An attribute stays with the parameter through state dicts, optimizers and stages, where a table of
parameters would have to be handed on. ZeRO and checkpoints look at no other attribute.
"""

from torch import Tensor, nn


def mark_cut(parameter: nn.Parameter, dim: int) -> None:
    """Note that this is a rank's part along `dim`."""
    parameter.cut_dim = dim  # ty: ignore[missing-attribute]


def cut_dim(tensor: Tensor) -> int | None:
    """The dim along which ranks have parts; None for a tensor that is whole."""
    return getattr(tensor, "cut_dim", None)


def mark_partial(parameter: nn.Parameter) -> None:
    """Note that a rank's gradient of this parameter is a part of the sum."""
    parameter.partial_gradient = True  # ty: ignore[missing-attribute]


def is_partial(parameter: nn.Parameter) -> bool:
    """Whether the ranks' gradients have to be added up."""
    return getattr(parameter, "partial_gradient", False)


def mark_tied_copy(parameter: nn.Parameter) -> None:
    """Note that this weight counts on a different stage, where it is as well."""
    parameter.tied_copy = True  # ty: ignore[missing-attribute]


def is_tied_copy(parameter: nn.Parameter) -> bool:
    """Whether the weight counts on a different stage."""
    return getattr(parameter, "tied_copy", False)
