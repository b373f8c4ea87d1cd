"""Wrong answers that people give to lesson 08, each with the words that its check must say."""

import contextlib
import copy
import os
import warnings
from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler

from shared.errors import InputError
from shared.exercises.mistakes import mistake
from shared.fault_tolerance.checkpoints import (
    checkpoint_content,
    checkpoint_path,
    checkpoints_in,
    from_rank_0,
    newest_sound,
    put_back,
    store,
)
from shared.fault_tolerance.checkpoints import load_checkpoint as right_load
from shared.fault_tolerance.checkpoints import resume_training as right_resume
from shared.fault_tolerance.checkpoints import save_checkpoint as right_save
from shared.fault_tolerance.fitting import refuse_unless_it_fits, unwrapped
from shared.fault_tolerance.random_states import random_states as right_states
from shared.fault_tolerance.random_states import set_random_states
from shared.ranks.group import current_rank
from shared.training.checkpoint_files import MARK, read_checkpoint
from shared.training.checkpoint_files import write_atomically as right_write

# 08.1a write_atomically


@contextlib.contextmanager
def _told(path):
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise InputError(f"checkpoint {path} cannot be written: {error}") from error


def _flush_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save({"mark": MARK, **content}, file)
        file.flush()
        os.fsync(file.fileno())


@mistake("08.1a", says="the mark is missing")
def write_atomically(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    torch.save(content, aside)
    aside.replace(path)


@mistake("08.1a", says="the save is not atomic: a process that dies in it takes the old file")
def write_atomically(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"mark": MARK, **content}, path)


@mistake("08.1a", says="the old file is removed before the new one has its name")
def write_atomically(path, content):
    aside = path.with_suffix(".part")
    _written(aside, content)
    path.unlink(missing_ok=True)
    aside.rename(path)
    _flush_folder(path.parent)


@mistake("08.1a", says="the folder is not made")
def write_atomically(path, content):
    with _told(path):
        path.parent.mkdir(exist_ok=True)
    right_write(path, content)


@mistake("08.1a", says="the folder is not flushed")
def write_atomically(path, content):
    with _told(path):
        aside = path.with_suffix(".part")
        _written(aside, content)
        aside.replace(path)


@mistake("08.1a", says="half a file is left beside the old one")
def write_atomically(path, content):
    with _told(path):
        aside = path.with_suffix(".part")
        _written(aside, content)
        aside.replace(path)
        _flush_folder(path.parent)


# 08.1b random_states


@mistake("08.1b", says="a generator is left out: python, numpy")
def random_states():
    return {"torch": torch.get_rng_state()}


@mistake("08.1b", says="a seed says where a generator began")
def random_states():
    return {"python": 0, "numpy": 0, "torch": torch.initial_seed()}


@mistake("08.1b", says="taking the states moves a generator")
def random_states():
    torch.manual_seed(torch.initial_seed())
    return right_states()


@mistake("08.1b", says="of numpy's state the place in its array is left out")
def random_states():
    states = right_states()
    return {**states, "numpy": (*states["numpy"][:2], 624, *states["numpy"][3:])}


@mistake("08.1b", says="CUDA's generator is left out once CUDA is in use")
def random_states():
    return {name: state for name, state in right_states().items() if name != "cuda"}


_asked = []


@mistake("08.1b", says="asked once more, it says where the generators stood the first time")
def random_states():
    known = [each for begun, each in _asked if begun == torch.initial_seed()]
    if not known:
        known = [right_states()]
        _asked.append((torch.initial_seed(), known[0]))
    return known[0]


# 08.1c save_checkpoint


def _save(folder, state, keep, *, change=lambda content: None, write=store):
    """The right save of a content in which something was changed, or written in another way."""
    content = checkpoint_content(state)
    change(content)
    path, said = checkpoint_path(folder, state.step), [None]
    if current_rank() == 0:
        try:
            write(path, content, keep)
        except InputError as error:
            said = [error]
    said = from_rank_0(said)
    if said[0]:
        raise said[0]
    return path


@mistake("08.1c", says="the optimizer is left out")
def save_checkpoint(folder, state, keep=2):
    return _save(folder, state, keep, change=lambda content: content.pop("optimizer"))


@mistake("08.1c", says="the weights bear DDP's prefix")
def save_checkpoint(folder, state, keep=2):
    wrapped = state.model.state_dict()
    return _save(folder, state, keep, change=lambda content: content.update(model=wrapped))


@mistake("08.1c", says="the random states of one rank alone are in the file")
def save_checkpoint(folder, state, keep=2):
    mine = [right_states()]
    return _save(folder, state, keep, change=lambda content: content.update(random=mine))


@mistake("08.1c", says="the save is not atomic: half a file bears a checkpoint's name")
def save_checkpoint(folder, state, keep=2):
    def plainly(path, content, keep):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"mark": MARK, **content}, path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise InputError(f"{path} cannot be written: {error}") from error
        older = [each for each in checkpoints_in(folder) if each < path]
        for each in older[: max(0, len(older) - keep + 1)]:
            each.unlink()

    return _save(folder, state, keep, write=plainly)


@mistake("08.1c", says="it ends in an OSError, which is no InputError")
def save_checkpoint(folder, state, keep=2):
    if current_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    return right_save(folder, state, keep)


def _all_but(names, folder, keep, path):
    """On rank 0 the last of what a pattern finds stay; then all ranks go on."""
    if current_rank() == 0:
        older = sorted(each for each in folder.glob(names) if each.name < path.name)
        for each in older[: max(0, len(older) - keep + 1)]:
            each.unlink()
    if dist.is_initialized():
        dist.barrier()
    return path


@mistake("08.1c", says="a file goes whose name only begins as a checkpoint's")
def save_checkpoint(folder, state, keep=2):
    return _all_but("step_*.pt", folder, keep, right_save(folder, state, 1000))


@mistake("08.1c", says="a file goes whose number has seven digits")
def save_checkpoint(folder, state, keep=2):
    return _all_but("step_*[0-9].pt", folder, keep, right_save(folder, state, 1000))


# 08.2 load_checkpoint


@mistake("08.2", says="the optimizer's moments are not put back")
def load_checkpoint(folder, state):
    before = copy.deepcopy(state.optimizer.state_dict())
    path = right_load(folder, state)
    if path is not None:
        state.optimizer.load_state_dict(before)
    return path


def _load(folder, state, *, choose=newest_sound, fits=refuse_unless_it_fits, put=put_back):
    """The right load, with another choice of the file or another look at whether it fits."""
    found = [None, None, None]
    if current_rank() == 0:
        try:
            newest = choose(folder)
            if newest is not None:
                path, content = newest
                fits(path, content, state)
                found = [None, path, content]
        except InputError as error:
            found = [error, None, None]
    error, path, content = from_rank_0(found)
    if error is not None:
        raise error
    if content is not None:
        put(content, state)
    return path


@mistake("08.2", says="a folder that is not there is an error")
def load_checkpoint(folder, state):
    os.listdir(folder)
    return right_load(folder, state)


@mistake("08.2", says="the random states are not put back last")
def load_checkpoint(folder, state):
    def random_first(content, state):
        set_random_states(content["random"][current_rank()])
        unwrapped(state.model).load_state_dict(content["model"])
        for part in ("optimizer", "schedule", "sampler"):
            getattr(state, part).load_state_dict(content[part])
        state.step, state.losses[:] = content["step"], content["losses"]

    return _load(folder, state, put=random_first)


@mistake("08.2", says="a torn file sends the run back to the beginning")
def load_checkpoint(folder, state):
    def last_or_none(folder):
        try:
            paths = sorted(folder.glob("step_*.pt"))
            last = (paths[-1], read_checkpoint(paths[-1])) if paths else None
            return last if last is None or "origin" in last[1] else None
        except InputError as error:
            warnings.warn(f"{error}; beginning anew", stacklevel=2)
            return None

    return _load(folder, state, choose=last_or_none)


@mistake("08.2", says="ends in an error that no user understands")
def load_checkpoint(folder, state):
    return _load(folder, state, fits=lambda *each: None)


@mistake("08.2", says="every rank takes rank 0's random states")
def load_checkpoint(folder, state):
    def same_for_all(folder):
        newest = newest_sound(folder)
        if newest is not None:
            states = newest[1]["random"]
            states[:] = states[:1] * len(states)
        return newest

    return _load(folder, state, choose=same_for_all)


@mistake("08.2", says="a file is taken that is not named step_NNNNNNNN.pt")
def load_checkpoint(folder, state):
    def any_name(folder):
        others = [each for each in folder.glob("*.pt") if not each.name.startswith("step_")]
        return (others[0], read_checkpoint(others[0])) if others else newest_sound(folder)

    return _load(folder, state, choose=any_name)


# 08.3 resume_training


def _loop(
    state, take_step, *, num_steps, batch_size, interval, save,
    batches=BatchSampler, after_step=("schedule", "count", "save"),
):  # fmt: skip
    """The right loop. `after_step` is what comes after each step, in this order."""
    while state.step < num_steps:
        for indices in batches(state.sampler, batch_size, False):
            state.losses.append(take_step(indices))
            done = state.step + 1
            due = done % interval == 0 or done == num_steps
            for what in after_step:
                if what == "schedule":
                    state.schedule.step()
                elif what == "count":
                    state.step = done
                elif due:
                    save(state)
            if state.step == num_steps:
                return state.losses
        state.sampler.set_epoch(state.sampler.epoch + 1)
    return state.losses


@mistake("08.3", says="it never stops")
def resume_training(state, take_step, *, num_steps, load, **rest):
    right_resume(state, take_step, num_steps=num_steps, load=load, **rest)
    while True:
        for _ in state.sampler:
            break


@mistake("08.3", says="saved before the step is counted")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, take_step, **rest, after_step=("save", "schedule", "count"))


@mistake("08.3", says="the last, shorter batch of an epoch is left out")
def resume_training(state, take_step, *, load, **rest):
    def whole_batches(sampler, batch_size, drop_last):
        return BatchSampler(sampler, batch_size, drop_last=True)

    load(state)
    return _loop(state, take_step, **rest, batches=whole_batches)


@mistake("08.3", says="a batch goes on into the next epoch")
def resume_training(state, take_step, *, load, **rest):
    left = []  # which the epoch before did not fill a batch with

    def across(sampler, batch_size, drop_last):
        for index in sampler:
            left.append(index)
            if len(left) == batch_size:
                batch, left[:] = [*left], []
                yield batch

    load(state)
    return _loop(state, take_step, **rest, batches=across)


@mistake("08.3", says="steps are counted from 0 after a restart")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    begun = state.step
    state.step = 0
    losses = right_resume(state, take_step, load=lambda state: None, **rest)
    state.step += begun
    return losses


@mistake("08.3", says="a run that is done takes further steps")
def resume_training(state, take_step, *, num_steps, batch_size, load, **rest):
    rest |= {"num_steps": num_steps, "batch_size": batch_size}
    load(state)
    if state.step < num_steps:
        return right_resume(state, take_step, load=lambda state: None, **rest)
    state.sampler.set_epoch(state.sampler.epoch + 1)
    for indices in islice(BatchSampler(state.sampler, batch_size, False), 2):
        state.losses.append(take_step(indices))
    return state.losses


@mistake("08.3", says="only rank 0 calls save")
def resume_training(state, take_step, *, save, **rest):
    def on_rank_0(state):
        return save(state) if current_rank() == 0 else None

    return right_resume(state, take_step, save=on_rank_0, **rest)
