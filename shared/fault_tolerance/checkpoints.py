"""Save a run so that it can be killed at any moment, and resumed as if it had not been.

A checkpoint holds what decides the next step: weights, optimizer, schedule, place in the data, and
each rank's random generators. With all of it, a run that was killed ends with the weights of one
that was not, bit for bit; without any one of them it is another run.
"""

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler

from shared.errors import InputError
from shared.fault_tolerance.fitting import origin, refuse_unless_it_fits, unwrapped
from shared.fault_tolerance.random_states import random_states, set_random_states
from shared.fault_tolerance.state import TakeStep, TrainingState
from shared.ranks.group import current_rank, current_world_size
from shared.training.checkpoint_files import (
    PART,
    read_checkpoint,
    refuse_what_cannot_be_read,
    write_atomically,
)

NAME = re.compile(r"step_(\d{8})\.pt")


def save_checkpoint(folder: Path, state: TrainingState, keep: int = 2) -> Path:
    """Write `folder/step_NNNNNNNN.pt` (eight digits); every rank calls it, rank 0 writes.

    `write_atomically` gets a dict of "origin" (origin(state)), "step", "losses", "random" (a list
    with the `random_states()` of every rank), and the state dicts of "model" (without DDP's
    "module." before the names, which are the bare model's otherwise; no model has a layer of its
    own that is called "module"), "optimizer", "schedule" and "sampler". Of the older files, those
    named step_NNNNNNNN.pt with a lower step than this one (their times say nothing), the last
    `keep` - 1 stay, however many of a higher step there are. A file of another name, such as
    best.pt, stays; a .part file may go. None goes before the new one is there, and no rank returns
    before that. Every rank returns the file's path.

    Raises InputError on every rank when rank 0 could not write (what was there before still is) or
    could not delete an older one (the new one is there).
    """
    if keep < 1:
        raise InputError(f"keep is {keep}; at least the newest checkpoint must be kept")
    content = checkpoint_content(state)  # all ranks take part: their random states are in it
    path = checkpoint_path(folder, state.step)
    said: list[Exception | None] = [None]
    if current_rank() == 0:
        try:
            store(path, content, keep)
        except Exception as error:
            said = [error]
    # In place of a barrier: the others wait here, and learn how it went. A rank 0 that left with
    # the error alone would leave them in the next all-reduce.
    said = from_rank_0(said)
    if said[0] is not None:
        raise said[0]
    return path


def checkpoint_content(state: TrainingState) -> dict[str, Any]:
    """Return what a checkpoint holds; every rank calls it: each has random states of its own.

    The tensors are the run's own, not copies: they change with the next step.
    """
    return {
        "origin": origin(state),
        "step": state.step,
        "losses": list(state.losses),
        "model": unwrapped(state.model).state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "schedule": state.schedule.state_dict(),
        "sampler": state.sampler.state_dict(),
        "random": _of_all_ranks(random_states()),
    }


def store(path: Path, content: Mapping[str, Any], keep: int) -> None:
    """Write one checkpoint on this rank; then delete those that are no longer needed."""
    refuse_what_cannot_be_read(content)
    write_atomically(path, content)
    # Only older ones. A file with a higher number could not be read, and this run will write that
    # step again; counting it would delete the last sound one.
    # And the partial files of processes that died while they wrote.
    torn = path.parent.glob(f".step_*{PART}")
    for file in [*outdated(checkpoints_in(path.parent), path, keep), *torn]:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{file} cannot be deleted: {error.strerror}") from error


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's file; the zeros let names sort like numbers."""
    return folder / f"step_{step:08d}.pt"


def outdated(checkpoints: Sequence[Path], newest: Path, keep: int) -> Sequence[Path]:
    """Of the checkpoints, oldest first: those before `newest`, but for the last `keep` - 1."""
    older = [checkpoint for checkpoint in checkpoints if checkpoint.name < newest.name]
    return older[: max(len(older) - (keep - 1), 0)]  # below 0 a slice would count from the end


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the files with a checkpoint's name, oldest first."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder for checkpoints")
    return sorted(path for path in folder.glob("step_*.pt") if NAME.fullmatch(path.name))


def load_checkpoint(folder: Path, state: TrainingState) -> Path | None:
    """Put the newest sound checkpoint of a folder back, on every rank; None if there is none.

    Rank 0 looks and reads, the others get it sent: they may be on machines that do not see the
    folder, and two ranks that chose different files would train two models. A file that is torn,
    damaged or not a checkpoint is named in a warning, and the one before it is taken.

    Raises InputError on every rank, with `state` and the random generators unchanged, when there
    are files but none can be read, and when the checkpoint is of another format, world size,
    model, optimizer or data than any of the ranks.
    """
    found: list[Any] = [None, None, None]
    if current_rank() == 0:
        try:
            found = [None, *(newest_sound(folder) or (None, None))]
        except Exception as error:
            found = [error, None, None]
    error, path, content = from_rank_0(found)
    if content is not None:
        try:
            refuse_unless_it_fits(path, content, state)
        except Exception as refused:
            error = refused
    # A rank that raised alone would leave the others in the next all-reduce, with half a run each.
    errors = [raised for raised in _of_all_ranks(error) if raised is not None]
    if errors:
        raise errors[0]
    if content is not None:
        put_back(content, state)
    return path


def newest_sound(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint that can be read, and its content; None where there is none."""
    paths = checkpoints_in(folder)
    for path in reversed(paths):
        try:
            content = read_checkpoint(path)
            if "origin" not in content:
                raise InputError(f"{path} holds no run to resume, only {sorted(content)[:4]}")
            return path, content
        except InputError as error:
            warnings.warn(f"{error}; the checkpoint before it is tried", stacklevel=3)
    if paths:
        raise InputError(
            f"none of the {len(paths)} checkpoints in {folder} can be read; move them away "
            "to start from the beginning"
        )
    return None


def put_back(content: Mapping[str, Any], state: TrainingState) -> None:
    """Load every part of a checkpoint into the run that it fits."""
    unwrapped(state.model).load_state_dict(content["model"])
    state.optimizer.load_state_dict(content["optimizer"])
    state.schedule.load_state_dict(content["schedule"])
    state.sampler.load_state_dict(content["sampler"])
    state.step, state.losses[:] = content["step"], content["losses"]
    # Last: whatever came before may have drawn.
    set_random_states(content["random"][current_rank()])


def resume_training(
    state: TrainingState,
    take_step: TakeStep,
    *,
    num_steps: int,
    batch_size: int,
    interval: int,
    save: Callable[[TrainingState], object],
    load: Callable[[TrainingState], object],
) -> list[float]:
    """Load what there is, train to `num_steps` in all, save every `interval` steps and at the end.

    `take_step(indices)` trains on this rank's next `batch_size` indices and returns the loss;
    the schedule is stepped after it. Epoch follows epoch, each announced to the sampler. All
    ranks call `save` and `load`. A run that is already at `num_steps` does nothing.
    Returns the losses of all steps, as the floats that `take_step` returned, also of those before
    the last interruption.
    """
    load(state)
    while state.step < num_steps:
        for indices in BatchSampler(state.sampler, batch_size, drop_last=False):
            state.losses.append(take_step(indices))
            state.schedule.step()
            state.step += 1  # before saving: the file must say that this step is done
            if state.step % interval == 0 or state.step == num_steps:
                save(state)
            if state.step == num_steps:
                return state.losses
        state.sampler.set_epoch(state.sampler.epoch + 1)
    return state.losses


def from_rank_0(objects: list[Any]) -> list[Any]:
    """Return rank 0's list on every rank; a rank that calls it early waits for the others."""
    if dist.is_initialized():
        dist.broadcast_object_list(objects, src=0)
    return objects


def restart_count() -> int:
    """Return how often torchrun has restarted these ranks; 0 the first time and without it."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _of_all_ranks(mine: Any) -> list[Any]:
    everyone: list[Any] = [mine] * current_world_size()
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    return everyone
