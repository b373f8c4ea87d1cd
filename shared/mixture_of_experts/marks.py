"""Which parameters belong to an expert: an attribute on them, read through here alone.

Such a parameter is not on every rank: its gradient is averaged over the ranks that have it.
"""

from torch import nn


def mark_expert(parameter: nn.Parameter) -> None:
    """Note that the ranks of an expert-parallel group have a different parameter each here."""
    parameter.of_expert = True  # ty: ignore[missing-attribute]


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether it is an expert's, and so on a part of the ranks alone."""
    return getattr(parameter, "of_expert", False)
