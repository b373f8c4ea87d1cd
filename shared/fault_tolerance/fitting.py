"""Whether a checkpoint belongs to the run that would resume from it."""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.data.sampling import ResumableSampler
from shared.errors import InputError
from shared.fault_tolerance.state import TrainingState
from shared.ranks.group import current_world_size

FORMAT = 1  # changes when older files can no longer be resumed


class SamplerOfData(ResumableSampler):
    """A ResumableSampler whose state names the data that its indices point into.

    A folder of the same name and length may hold another text: training would resume without a
    word, on samples that mean something else. `data` is a fingerprint; no checkpoint needs to know
    of it, since every checkpoint holds the sampler's state and asks the sampler whether it fits.
    """

    def __init__(self, data: str, length: int, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(length, num_replicas, rank, seed=seed)
        self.data = data

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position, what the order depends on, and the fingerprint of the data."""
        return super().state_dict(consumed) | {"data": self.data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was taken; raises InputError when it is of other data, too."""
        theirs = state.get("data", "unknown")
        if theirs != self.data:
            raise InputError(
                f"it was saved while training on data {theirs}, this run's data is {self.data}:"
                " give the data of then, or another folder for checkpoints"
            )
        super().load_state_dict(state)


def origin(state: TrainingState) -> dict[str, Any]:
    """Return what a reader compares first: format, number of ranks, classes, version of torch."""
    return {
        "format": FORMAT,
        "world_size": current_world_size(),
        "optimizer": type(state.optimizer).__name__,
        "schedule": type(state.schedule).__name__,
        "torch": str(torch.__version__),  # torch's own class could not be read back
    }


def refuse_unless_it_fits(path: Path, content: Mapping[str, Any], state: TrainingState) -> None:
    """Raise InputError, saying what differs, before anything of the run is changed.

    Compared are format, number of ranks, the classes and groups of the optimizer, names and
    shapes of the weights, and what the order of the data depends on. Another version of torch is
    only warned of: its kernels may round otherwise, so the last bits may differ.
    """
    theirs, ours = content["origin"], origin(state)
    if theirs["format"] != FORMAT:
        raise InputError(
            f"{path} has format {theirs['format']}, this code reads format {FORMAT}: resume "
            "with the version of the course that wrote it"
        )
    if theirs["world_size"] != ours["world_size"]:
        raise InputError(
            f"{path} was written by {theirs['world_size']} ranks, this run has "
            f"{ours['world_size']}, and random states cannot be shared out anew: start as many "
            "as then, or save for any number of them (save_elastic; the script: --save elastic)"
        )
    for name in ("optimizer", "schedule"):
        if theirs[name] != ours[name]:
            raise InputError(f"{path} was written with {theirs[name]}, this run has {ours[name]}")
    _refuse_another_model(path, content["model"], unwrapped(state.model).state_dict())
    groups = [
        [len(group["params"]) for group in optimizer["param_groups"]]
        for optimizer in (content["optimizer"], state.optimizer.state_dict())
    ]
    if groups[0] != groups[1]:
        raise InputError(
            f"{path}: its optimizer has groups of {groups[0]} parameters, this one of {groups[1]}"
        )
    try:  # a copy: its state does not say where the next iteration begins
        copy.deepcopy(state.sampler).load_state_dict(content["sampler"])
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if theirs["torch"] != ours["torch"]:
        warnings.warn(
            f"{path} was written with torch {theirs['torch']}, this is {ours['torch']}: the last "
            "bits may differ from those of a run that was not interrupted",
            stacklevel=2,
        )


def _refuse_another_model(
    path: Path, theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> None:
    for name in sorted(theirs.keys() | ours.keys()):
        shapes = [tuple(side[name].shape) if name in side else "missing" for side in (theirs, ours)]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"{path} is of another model: {name} is {shapes[0]} in it and {shapes[1]} here"
            )


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, torch.compile or both, whose weights have their own names."""
    for name in ("module", "_orig_mod"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return unwrapped(inner)
    return model
