"""Checkpoints that another number of ranks can resume, by torch.distributed.checkpoint.

Each rank writes its part, in a folder per checkpoint, and reading is by name and place in the
tensor: who wrote it does not matter. Random states do not carry over: those of four ranks cannot be
shared out among two, so the generators are seeded anew after loading.
Source: docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

import copy
import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shared.errors import InputError
from shared.fault_tolerance.checkpoints import from_rank_0, outdated
from shared.fault_tolerance.state import TrainingState
from shared.ranks.agreement import first_word
from shared.training.distributed_files import damage_of, load_distributed

NAME = re.compile(r"step_\d{8}")


def save_elastic(folder: Path, state: TrainingState, keep: int = 2) -> Path:
    """Write the folder `folder/step_NNNNNNNN`; every rank calls it and writes its share.

    The file .metadata comes last and is renamed into place: a folder without it is unfinished.
    All ranks must see `folder`. Raises InputError on every rank when one of them cannot write.
    """
    path = folder / f"step_{state.step:08d}"
    try:
        dcp.save(elastic_content(state), checkpoint_id=path)
    except (CheckpointException, OSError) as error:
        raise InputError(f"checkpoint {path} cannot be written: {_reason(error)}") from error
    if dist.get_rank() == 0:
        for gone in outdated(elastic_checkpoints_in(folder), path, keep):
            (gone / ".metadata").unlink()  # first: half a folder must not pass for a whole one
            shutil.rmtree(gone, ignore_errors=True)
    return path


def load_elastic(folder: Path, state: TrainingState, seed: int = 0) -> Path | None:
    """Put the newest finished checkpoint back, whatever number of ranks wrote it; None if none.

    The generators are seeded from seed, step and rank: another run than the uninterrupted one
    where there is dropout, and the same one again each time it is resumed from there.
    Raises InputError on every rank when it cannot be read, is damaged, or is of another model or
    other data.
    """
    finished = elastic_checkpoints_in(folder) if dist.get_rank() == 0 else []
    (path,) = from_rank_0([finished[-1] if finished else None])
    if path is None:
        return None
    content = elastic_content(state)  # says what to read, and where to: the weights themselves
    own = {"progress": content["progress"]}
    if why := first_word(damage_of(path)):
        raise InputError(
            f"{path} cannot be loaded: it {why}; move it away and the one before it is used"
        )
    try:
        load_distributed(own, path)
        progress = json.loads(own["progress"])
        _refuse_other_data(path, progress["sampler"], state)
        load_distributed(content, path)
    except InputError:
        raise
    except (CheckpointException, OSError, RuntimeError, KeyError, ValueError) as error:
        raise InputError(
            f"{path} cannot be loaded into this model: {_reason(error)}; if it is damaged, move it "
            "away and the one before it is used"
        ) from error
    state.sampler.load_state_dict(progress["sampler"])  # counts samples, not samples per rank
    set_state_dict(
        state.model,
        state.optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    state.schedule.load_state_dict(progress["schedule"])
    state.step, state.losses[:] = progress["step"], progress["losses"]
    seeds = np.random.SeedSequence([seed, state.step, dist.get_rank()]).generate_state(3).tolist()
    generators = (torch.manual_seed, random.seed, np.random.seed)
    for seed_one, value in zip(generators, seeds, strict=True):
        seed_one(value)
    return path


def _refuse_other_data(path: Path, theirs: Mapping[str, Any], state: TrainingState) -> None:
    """Raise InputError on every rank where the sampler of one refuses: the others would wait."""
    why = ""
    try:
        copy.deepcopy(state.sampler).load_state_dict(theirs)
    except InputError as error:
        why = str(error)
    if reason := first_word(why):
        raise InputError(f"{path}: {reason}")


def elastic_content(state: TrainingState) -> dict[str, Any]:
    """Return what a checkpoint holds, the optimizer's tensors by the names of their parameters.

    By number, as `optimizer.state_dict()` has them, they would mean something else under another
    sharding. DDP's prefix is gone as well.
    """
    weights, moments = get_state_dict(state.model, state.optimizer)
    progress: Mapping[str, Any] = {
        "step": state.step,
        "losses": state.losses,
        "schedule": state.schedule.state_dict(),
        "sampler": state.sampler.state_dict(),
    }
    return {"model": weights, "optimizer": moments, "progress": json.dumps(progress)}


def elastic_checkpoints_in(folder: Path) -> list[Path]:
    """Return the finished checkpoints, oldest first."""
    paths = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name)]
    return sorted(path for path in paths if (path / ".metadata").is_file())


def _reason(error: BaseException) -> str:
    """Return the first rank's error in one line; the rest are tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        cause, _ = next(iter(error.failures.values()))
        return f"{type(cause).__name__}: {cause}".splitlines()[0]
    return str(error).splitlines()[0]
