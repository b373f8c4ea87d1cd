"""Right answers to lesson 08 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import contextlib
import io
import itertools
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

from shared.errors import InputError
from shared.fault_tolerance.fitting import origin
from shared.fault_tolerance.random_states import random_states
from shared.training.checkpoint_files import MARK, write_atomically
from solutions.alternatives.loading_checkpoints import (
    bare,
    everyone_is_asked,
    ranks,
    scattered,
    steps_in,
)

# 08.1a


def with_a_named_temporary_file(path, content):
    """The module tempfile makes the file aside; it is taken away where the rename failed."""
    path = Path(path)
    try:
        os.makedirs(path.parent, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                torch.save(dict(content, mark=MARK), file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:
        raise InputError(f"cannot write {path}: {error}") from error


def bytes_first(path, content):
    """Into memory first, then through descriptors alone."""
    memory = io.BytesIO()
    torch.save({"mark": MARK} | dict(content), memory)
    left = memory.getbuffer()
    aside = os.path.join(path.parent, f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(aside, path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(aside)
        raise InputError(f"{path} was not written ({error.strerror})") from error


# 08.1b


def from_the_dict_of_numpy():
    """numpy's state as a dict; torch's from its default generator."""
    state = np.random.get_state(legacy=False)
    keys = torch.tensor(state["state"]["key"].tolist(), dtype=torch.int64)
    kind, place = state["bit_generator"], state["state"]["pos"]
    found = {
        "python": random.getstate(),
        "numpy": (kind, keys, place, state["has_gauss"], state["gauss"]),
        "torch": torch.default_generator.get_state(),
    }
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def by_a_table_of_readers():
    """A table of functions, each called once."""

    def of_numpy():
        kind, keys, *rest = np.random.get_state()
        return kind, torch.as_tensor(np.asarray(keys, "int64")), *rest

    readers = {"python": random.getstate, "numpy": of_numpy, "torch": torch.random.get_rng_state}
    if torch.cuda.is_initialized():
        readers["cuda"] = torch.cuda.get_rng_state
    return {name: read() for name, read in readers.items()}


# 08.1c


def gathered_on_rank_0(folder, state, keep=2):
    """gather_object, since rank 0 alone needs the list; every rank hears the error in words."""
    number, rank = ranks()
    random_of_all = [random_states()] * number
    if number > 1:
        dist.gather_object(random_of_all[0], random_of_all if rank == 0 else None, dst=0)
    path, trouble = folder / f"step_{state.step:08}.pt", None
    if rank == 0:
        parts = ("optimizer", "schedule", "sampler")
        try:
            write_atomically(
                path,
                {name: getattr(state, name).state_dict() for name in parts}
                | {"model": bare(state.model).state_dict(), "random": random_of_all}
                | {"origin": origin(state), "step": state.step, "losses": state.losses},
            )
        except InputError as error:
            trouble = str(error)
        else:
            older = sorted(step for step in steps_in(folder) if step < state.step)
            for step in older[: max(0, len(older) - (keep - 1))]:
                steps_in(folder)[step].unlink()
    if number > 1:
        told = [trouble]
        dist.broadcast_object_list(told, src=0)
        [trouble] = told
    if trouble:
        raise InputError(trouble)
    return path


def prefix_consumed(folder, state, keep=2, write=write_atomically):
    """torch's own function takes the prefix away; an all_gather says how it went."""
    number, rank = ranks()
    weights = dict(state.model.state_dict())
    if isinstance(state.model, DistributedDataParallel):
        consume_prefix_in_state_dict_if_present(weights, "module.")
    everyone = [None] * number
    if dist.is_initialized():
        dist.all_gather_object(everyone, random_states())
    else:
        everyone[0] = random_states()
    path = folder.joinpath("step_" + str(state.step).zfill(8) + ".pt")
    outcome = None
    if rank == 0:
        content = {"origin": origin(state), "step": state.step, "losses": list(state.losses)}
        content |= {"random": everyone, "model": weights}
        for part in "optimizer", "schedule", "sampler":
            content[part] = getattr(state, part).state_dict()
        try:
            write(path, content)
            before = sorted(p for p in folder.glob("step_" + "[0-9]" * 8 + ".pt") if p < path)
            while len(before) > keep - 1:
                before.pop(0).unlink(missing_ok=True)
        except InputError as error:
            outcome = error
    if dist.is_initialized():
        outcomes = [None] * number
        dist.all_gather_object(outcomes, outcome)
        outcome = outcomes[0]
    if outcome is not None:
        raise outcome
    return path


def with_a_part_beside(folder, state, keep=2):
    """What a kill leaves is step_NNNNNNNN.part, beside the checkpoints and none of them."""

    def write(path, content):
        part = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                torch.save({"mark": MARK, **content}, file)
                os.fsync(file.fileno())
            part.replace(path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise InputError(f"{path} cannot be written") from error

    return prefix_consumed(folder, state, keep, write)


# 08.3


def endless_batches(sampler, batch_size):
    """Batch after batch, epoch after epoch; nothing is drawn before it is asked for."""
    while True:
        indices = iter(sampler)
        while batch := list(itertools.islice(indices, batch_size)):
            yield batch
        sampler.set_epoch(sampler.epoch + 1)


def by_a_generator(state, take_step, *, num_steps, batch_size, interval, save, load):
    """One loop over a generator of batches."""
    load(state)
    batches = endless_batches(state.sampler, batch_size)
    for step in range(state.step + 1, num_steps + 1):
        state.losses.append(take_step(next(batches)))
        state.schedule.step()
        state.step = step
        if step == num_steps or step % interval == 0:
            save(state)
    return list(state.losses)


def by_two_loops(state, take_step, *, num_steps, batch_size, interval, save, load):
    """torch's BatchSampler within a loop over epochs, each announced, the first one too."""
    load(state)
    epoch = state.sampler.epoch
    while state.step < num_steps:
        state.sampler.set_epoch(epoch)
        for indices in BatchSampler(state.sampler, batch_size, drop_last=False):
            loss = take_step(indices)
            state.losses = [*state.losses, loss]
            state.schedule.step()
            state.step += 1
            over = state.step >= num_steps
            if over or not state.step % interval:
                save(state)
            if over:
                break
        epoch += 1
    return state.losses


ALTERNATIVES = {
    "08.1a": [with_a_named_temporary_file, bytes_first],
    "08.1b": [from_the_dict_of_numpy, by_a_table_of_readers],
    "08.1c": [gathered_on_rank_0, prefix_consumed, with_a_part_beside],
    "08.2": [everyone_is_asked, scattered],
    "08.3": [by_a_generator, by_two_loops],
}
