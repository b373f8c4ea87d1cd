"""Right answers to 08.2 in another style, and what they share with those to 08.1c."""

import os
import re
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shared.errors import InputError
from shared.fault_tolerance.fitting import refuse_unless_it_fits
from shared.fault_tolerance.random_states import set_random_states
from shared.training.checkpoint_files import read_checkpoint


def ranks():
    """Number of ranks and own rank, 1 and 0 without a group."""
    if not dist.is_initialized():
        return 1, 0
    return dist.get_world_size(), dist.get_rank()


def bare(model):
    """The model inside DDP."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def steps_in(folder):
    """The checkpoints of a folder by step."""
    found = (re.fullmatch(r"step_(\d{8})\.pt", name) for name in os.listdir(folder))
    return {int(match[1]): folder / match[0] for match in found if match}


def put_back(state, content, rank):
    """Everything but the generators first, then the generators."""
    bare(state.model).load_state_dict(content["model"])
    for part in ("optimizer", "schedule", "sampler"):
        getattr(state, part).load_state_dict(content[part])
    state.step, state.losses = content["step"], list(content["losses"])
    set_random_states(content["random"][rank])


def newest(folder):
    """Rank 0's part: path and content, both None where there is no file."""
    found = sorted(steps_in(folder).items(), reverse=True) if folder.is_dir() else []
    for _, path in found:
        try:
            content = read_checkpoint(path)
            content["origin"]
        except (InputError, KeyError) as error:
            warnings.warn(f"skipped {path}: {error}", stacklevel=3)
        else:
            return path, content
    if found:
        raise InputError(f"{len(found)} files in {folder}, and none can be read")
    return None, None


def everyone_is_asked(folder, state):
    """Rank 0's finding travels; then all say whether it fits, and the first complaint counts."""
    number, rank = ranks()
    path: Any = None
    content: Any = None
    complaint: Any = None
    if rank == 0:
        try:
            path, content = newest(folder)
        except InputError as error:
            complaint = str(error)
    if number > 1:
        finding: list[Any] = [path, content, complaint]
        dist.broadcast_object_list(finding, src=0)
        path, content, complaint = finding
    if path is not None:
        try:
            refuse_unless_it_fits(path, content, state)
        except InputError as error:
            complaint = str(error)
    complaints = [complaint]
    if number > 1:
        complaints = [None] * number
        dist.all_gather_object(complaints, complaint)
    for each in complaints:
        if each is not None:
            raise InputError(each)
    if path is not None:
        put_back(state, content, rank)
    return path


def latest(folder):
    """What rank 0 tells: path and content, or an error, or nothing."""
    left: dict[int, Any] = steps_in(folder) if folder.exists() else {}
    told: dict[str, Any] = {}
    if left:
        told["error"] = f"no sound checkpoint among {len(left)} in {folder}"
    while left:
        path = left.pop(max(left))
        try:
            content = read_checkpoint(path)
        except InputError as error:
            warnings.warn(str(error) + f" ({path})", stacklevel=2)
            continue
        if "origin" in content:
            return {"path": path, "content": content}
        warnings.warn(f"{path} has no origin", stacklevel=2)
    return told


def scattered(folder, state):
    """Each rank gets its own random state, scattered; loops over candidates with max."""
    rank = ranks()[1]
    told, random_of_mine = latest(folder) if rank == 0 else {}, [None]
    if dist.is_initialized():
        box = [told]
        dist.broadcast_object_list(box, src=0)
        told = box[0]
    if "error" in told:
        raise InputError(told["error"])
    if not told:
        return None
    path, content = told["path"], told["content"]
    fits = torch.ones(())
    try:
        refuse_unless_it_fits(path, content, state)
    except InputError as error:
        fits, refusal = torch.zeros(()), error
    else:
        refusal = InputError(f"{path} does not fit on another rank")
    if dist.is_initialized():
        dist.all_reduce(fits, op=dist.ReduceOp.MIN)
    if not fits:
        raise refusal
    if dist.is_initialized():
        dist.scatter_object_list(random_of_mine, content["random"] if rank == 0 else None, src=0)
    else:
        random_of_mine = content["random"]
    put_back(state, content | {"random": {rank: random_of_mine[0]}}, rank)
    return path
