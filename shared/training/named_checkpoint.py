"""Checkpoints that any engine can read: whole names, parts on the ranks, torch's own format.

An engine's own cut says nothing to another engine. So every parameter, and what the optimizer
keeps for it, is given out under its name in the whole model, as a DTensor that says which part a
rank has; torch.distributed.checkpoint writes the parts side by side, and cuts them anew for
whoever loads. What an engine adds is a Layout. Learning rate and other settings are not saved.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from shared.errors import InputError
from shared.ranks.agreement import agree_on_folder, first_word, gathered
from shared.ranks.group import current_rank
from shared.training.checkpoint_files import cause_of
from shared.training.distributed_files import Reader, damage_of, load_distributed

# What belongs to a parameter of the optimizer: the parameter itself, or one of its states.
TensorOf = Callable[[nn.Parameter], Tensor]


class Layout(Protocol):
    """Where an engine has the tensors of a model, by their names in the whole model."""

    def state_of(self, tensor_of: TensorOf) -> dict[str, Tensor]:
        """What `tensor_of` finds for every parameter of which this rank has a part; a collective.

        Where ranks have different parts of a tensor it is a DTensor. A tied parameter is there
        under each of its names.
        """
        ...

    def load_state(self, tensor_of: TensorOf, values: Mapping[str, Tensor]) -> None:
        """Put what state_of() has given, and which was filled since, back in its place."""
        ...

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers, themselves."""
        ...


class ModuleLayout:
    """The layout of a model whose tensors a rank has whole, or as torch's DTensors (FSDP2).

    Of `named`, by default the module's state dict, those count that the module has.
    """

    def __init__(self, module: nn.Module, named: Mapping[str, Tensor] | None = None) -> None:
        named = module.state_dict(keep_vars=True) if named is None else named
        own = {*module.parameters(), *module.buffers()}
        named = {name: x for name, x in named.items() if x in own}
        self.parameters = {name: x for name, x in named.items() if isinstance(x, nn.Parameter)}
        self._buffers = {name: x for name, x in named.items() if name not in self.parameters}

    def state_of(self, tensor_of: TensorOf) -> dict[str, Tensor]:
        """The tensors themselves, those that are cut with their place in the whole."""
        return {name: self._placed(tensor_of(p), p) for name, p in self.parameters.items()}

    def load_state(self, tensor_of: TensorOf, values: Mapping[str, Tensor]) -> None:
        """What state_of() gave is filled in place: nothing is left to do."""

    def buffers(self) -> dict[str, Tensor]:
        """The buffers of the module."""
        return dict(self._buffers)

    def _placed(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        return part


def save_named(
    layout: Layout,
    optimizer: Optimizer | None,
    folder: Path,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint. Every rank takes part; of equal tensors one rank writes.

    It is written beside `folder`, and takes its place when it is whole; `notes` are texts by file
    name, which rank 0 lays beside the tensors. Raises InputError on every rank where the disk
    refuses, or is not one for all ranks; a checkpoint that is there stays then.
    """
    place, main, why = folder.resolve(), current_rank() == 0, ""  # a link to a folder stays
    aside = place.with_name(f".{place.name}.part")
    if main:  # a killed save of more ranks has left files that nobody would write over
        shutil.rmtree(aside, ignore_errors=True)
    agree_on_folder(place.parent, "checkpoints:")  # and nobody writes before that is gone
    try:
        with _quiet():
            dcp.save(named_state(layout, optimizer), checkpoint_id=str(aside))
        if main:
            for name, text in (notes or {}).items():
                (aside / name).write_text(text, encoding="utf-8")
            _put_in_place(aside, place)
    except CheckpointException as failed:  # on every rank, whoever failed
        why = next(cause_of(error) for error, _ in failed.failures.values())
    except OSError as error:
        why = cause_of(error)
    if reason := first_word(why):
        if main:
            shutil.rmtree(aside, ignore_errors=True)
        raise InputError(f"checkpoint {folder} cannot be written: {reason}")


def _put_in_place(aside: Path, folder: Path) -> None:
    """Rename a folder, and remove the one that had the name."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def first_step(layout: Layout, optimizer: Optimizer, folder: Path | None, steps: int) -> int:
    """The step to begin with: 1, or the one after those of a checkpoint, which is loaded.

    In an empty folder there is none yet, so that one command serves every start of a run. `steps`
    are the whole run's: one that is continued with the same has its learning rates.
    Raises InputError where the checkpoint has made them all already.
    """
    begins = folder is None or is_empty(folder)
    first = 1 if begins else 1 + load_named(layout, optimizer, folder)
    if first > steps:
        raise InputError(f"--resume {folder} has made {first - 1} steps: give more --steps")
    return first


def is_empty(folder: Path) -> bool:
    """Whether a folder is there for every rank, with nothing in it yet; rank 0 says so.

    Raises InputError on every rank where a save was killed between its two renames.
    """
    place = folder.resolve()
    try:
        names = [path.name for path in place.iterdir()]
    except OSError:
        names = ["."]
    nothing, old = all(n.startswith(".") for n in names), place.with_name(f".{place.name}.old")
    kept = [old] * os.path.exists(old) + [place / n for n in names if n.endswith(".old")]
    why = f"{folder} holds no checkpoint, but {kept[0]}" if nothing and kept else ""
    if words := first_word(why):
        raise InputError(f"{words} is there, of a save that was killed: rename it to resume")
    empty = all(gathered(nothing and names != ["."]))
    if empty and current_rank() == 0:
        print(f"nothing to resume in {folder} yet: begins at step 1", flush=True)
    return empty


@torch.no_grad()
def load_named(layout: Layout, optimizer: Optimizer | None, folder: Path) -> int:
    """Continue from a checkpoint of any engine on any number of ranks; every rank takes part.

    The optimizer is new, or has trained before. Returns its steps, 0 where it counts none. Raises
    InputError on every rank for no checkpoint, and a tensor missing, damaged or of another shape.
    """
    state = named_state(layout, optimizer)
    _check(state, folder)
    with _quiet():
        try:
            load_distributed(state, folder)
        except CheckpointException as failed:
            why = next(cause_of(error) for error, _ in failed.failures.values())
            raise InputError(f"checkpoint {folder} cannot be read: {why}") from None
    layout.load_state(_itself, state["model"])
    if optimizer is None:
        return 0
    for key, values in state["optimizer"].items():
        layout.load_state(partial(_kept, optimizer, key), values)
    for kept in optimizer.state.values():
        _count(kept, int(state["step"]))
    return int(state["step"])


def named_state(layout: Layout, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """What is saved: {"model": by name, "optimizer": by kind of state and name, "step"}.

    An optimizer that has not made a step has its states after this, zeros but for masters:
    what begins with other numbers (Rprop, NAdam, ASGD) has to have made one.
    """
    state: dict[str, Any] = {"model": layout.state_of(_itself) | layout.buffers()}
    if optimizer is not None:
        _make_states(optimizer)
        keys = _keys(optimizer)
        state["optimizer"] = {key: layout.state_of(partial(_kept, optimizer, key)) for key in keys}
        steps = [float(kept["step"]) for kept in optimizer.state.values() if "step" in kept]
        state["step"] = torch.tensor(max(steps, default=0.0))
    return state


def _itself(parameter: nn.Parameter) -> Tensor:
    return parameter.detach()


def _kept(optimizer: Optimizer, key: str, parameter: nn.Parameter) -> Tensor:
    """What the optimizer keeps for a parameter; else zeros, or, of a master, the weights."""
    kept = optimizer.state.get(parameter, {})
    if key in kept:
        return kept[key]
    if key == "master":  # lesson 09's: zeros would replace the weights at the next step
        return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
    return torch.zeros_like(parameter.detach())


def _keys(optimizer: Optimizer) -> list[str]:
    """What the optimizer keeps that has a parameter's shape."""
    found = {
        key: None
        for parameter, kept in optimizer.state.items()
        for key, value in kept.items()
        if isinstance(value, Tensor) and value.shape == parameter.shape and key != "step"
    }
    return list(found)


def _make_states(optimizer: Optimizer) -> None:
    """Let an optimizer make the states that it lacks: a step that changes nothing."""
    groups = optimizer.param_groups
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    lacking = [p for p in trained if p not in optimizer.state]
    if not lacking:
        return
    gradients, rates = [p.grad for p in trained], [group["lr"] for group in groups]
    for p in trained:  # without a gradient it is left alone
        p.grad = None
    for p in lacking:
        p.grad = torch.zeros_like(p)
    for group in groups:
        group["lr"] = 0.0
    optimizer.step()
    for p, gradient in zip(trained, gradients, strict=True):
        p.grad = gradient
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    # Weight decay as a part of the gradient would leave a trace, and the step does not count.
    for kept in (optimizer.state[p] for p in lacking):
        for key, value in kept.items():
            if isinstance(value, Tensor) and key != "master":  # lesson 09's: the weights themselves
                value.zero_()
        _count(kept, 0)


def _count(kept: dict[str, Any], steps: int) -> None:
    """Let what an optimizer keeps for a parameter say so many steps: in a tensor, or an int."""
    if isinstance(kept.get("step"), Tensor):
        kept["step"].fill_(float(steps))
    elif "step" in kept:
        kept["step"] = steps


def _check(state: Mapping[str, Any], folder: Path) -> None:
    # Of one rank, perhaps: the others would wait for it.
    if problem := first_word(_problem(state, folder)):
        raise InputError(f"checkpoint {folder} {problem}")


def _problem(state: Mapping[str, Any], folder: Path) -> str:
    """Why the folder cannot be loaded into this state; "" where it can.

    Of its bytes every rank looks at a share.
    """
    try:
        stored = Reader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # whatever torch raises for what is no checkpoint
        return f"cannot be read ({type(error).__name__}: {error})"
    parts = {"model": state["model"]} | {
        f"optimizer.{key}": values for key, values in state.get("optimizer", {}).items()
    }
    for part, values in parts.items():
        for name, value in values.items():
            found = stored.get(f"{part}.{name}")
            if not isinstance(found, TensorStorageMetadata):
                wrapped = [w for w in ("module.", "_orig_mod.") if f"{part}.{w}{name}" in stored]
                inside = f', but "{wrapped[0]}{name}": save the model inside' if wrapped else ""
                return f"has no {part} {name}{inside}"
            if found.size != value.shape:
                return f"has {part} {name} of {tuple(found.size)}, here {tuple(value.shape)}"
    return damage_of(folder)


def _quiet() -> warnings.catch_warnings:
    """One process alone is no mistake: leave torch's warning about it out."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
