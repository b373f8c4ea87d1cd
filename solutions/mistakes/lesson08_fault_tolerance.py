"""Wrong answers that people give to lesson 08, each with the words that its check must say."""

import contextlib
import io
import os
import random
import shutil
import tempfile
import warnings
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler

from shared.checking import mistake
from shared.checkpoint import MARK, read_checkpoint
from shared.errors import InputError
from shared.restarting.fitting import refuse_unless_it_fits, unwrapped
from shared.restarting.random_states import random_states as right_states
from shared.restarting.random_states import set_random_states
from shared.restarting.resuming import checkpoint_content, checkpoint_path, checkpoints_in, store
from shared.restarting.resuming import load_checkpoint as right_load
from shared.restarting.resuming import resume_training as right_resume
from shared.restarting.resuming import save_checkpoint as right_save

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


def _written(path, content, sync=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save({"mark": MARK, **content}, file)
        file.flush()
        if sync:
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


@mistake("08.1a", says="the final name itself is opened for writing")
def write_atomically(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    _written(aside, content)
    path.write_bytes(aside.read_bytes())
    aside.unlink()


@mistake("08.1a", says="the old file is removed before the new one has its name")
def write_atomically(path, content):
    aside = path.with_suffix(".part")
    _written(aside, content)
    path.unlink(missing_ok=True)
    aside.rename(path)
    _flush_folder(path.parent)


@mistake("08.1a", says="the file aside lies in another folder")
def write_atomically(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp()) / path.name
    _written(aside, content)
    shutil.move(aside, path)
    _flush_folder(path.parent)


@mistake("08.1a", says="renamed without os.fsync")
def write_atomically(path, content):
    aside = path.with_suffix(".part")
    with _told(path):
        _written(aside, content, sync=False)
        aside.replace(path)
        _flush_folder(path.parent)


@mistake("08.1a", says="os.fsync came before the file's own buffer was emptied")
def write_atomically(path, content):
    aside = path.with_suffix(".part")
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save({"mark": MARK, **content}, buffer)
        data = buffer.getvalue()
        with aside.open("wb") as file:
            for start in range(0, len(data), 1000):
                file.write(data[start : start + 1000])
            os.fsync(file.fileno())
        aside.replace(path)
        _flush_folder(path.parent)


@mistake("08.1a", says="the folder is not flushed")
def write_atomically(path, content):
    aside = path.with_suffix(".part")
    with _told(path):
        _written(aside, content)
        aside.replace(path)


@mistake("08.1a", says="a full disk is not told as an InputError")
def write_atomically(path, content):
    aside = path.with_suffix(".part")
    _written(aside, content)
    aside.replace(path)
    _flush_folder(path.parent)


@mistake("08.1a", says="half a file is left beside the old one")
def write_atomically(path, content):
    aside = path.with_suffix(".part")
    with _told(path):
        _written(aside, content)
        aside.replace(path)
        _flush_folder(path.parent)


# 08.1b random_states


@mistake("08.1b", says="a generator is left out: python, numpy")
def random_states():
    return {"torch": torch.get_rng_state()}


@mistake("08.1b", says="a generator is left out: numpy")
def random_states():
    return {"python": random.getstate(), "torch": torch.get_rng_state()}


@mistake("08.1b", says="a seed says where a generator began")
def random_states():
    return {"python": 0, "numpy": 0, "torch": torch.initial_seed()}


@mistake("08.1b", says="numpy's array is no plain value")
def random_states():
    return {**right_states(), "numpy": np.random.get_state()}


@mistake("08.1b", says="taking the states moves a generator")
def random_states():
    states = right_states()
    random.random()
    states["python"] = random.getstate()
    return states


# 08.1c save_checkpoint


def _with(change):
    """The right save of a content in which something was changed."""

    def save(folder, state, keep=2):
        content = checkpoint_content(state)
        change(content, state)
        said, path = [None], checkpoint_path(folder, state.step)
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                store(path, content, keep)
            except InputError as error:
                said = [error]
        if dist.is_initialized():
            dist.broadcast_object_list(said)
        if said[0]:
            raise said[0]
        return path

    return save


def _without(part):
    return _with(lambda content, state: content.pop(part))


@mistake("08.1c", says="the optimizer is left out")
def save_checkpoint(folder, state, keep=2):
    return _without("optimizer")(folder, state, keep)


@mistake("08.1c", says="the schedule is left out")
def save_checkpoint(folder, state, keep=2):
    return _without("schedule")(folder, state, keep)


@mistake("08.1c", says="the position in the data is left out")
def save_checkpoint(folder, state, keep=2):
    return _without("sampler")(folder, state, keep)


@mistake("08.1c", says="the random states are left out")
def save_checkpoint(folder, state, keep=2):
    return _without("random")(folder, state, keep)


@mistake("08.1c", says="the number of the step is left out")
def save_checkpoint(folder, state, keep=2):
    return _without("step")(folder, state, keep)


@mistake("08.1c", says="the weights bear DDP's prefix")
def save_checkpoint(folder, state, keep=2):
    return _with(lambda content, state: content.update(model=state.model.state_dict()))(
        folder, state, keep
    )


@mistake("08.1c", says="every rank writes")
def save_checkpoint(folder, state, keep=2):
    path = checkpoint_path(folder, state.step)
    store(path, checkpoint_content(state), keep)
    if dist.is_initialized():
        dist.barrier()
    return path


@mistake("08.1c", says="a collective stands inside `if rank == 0`")
def save_checkpoint(folder, state, keep=2):
    path = checkpoint_path(folder, state.step)
    content = checkpoint_content(state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        store(path, content, keep)
        if dist.is_initialized():
            dist.barrier()
    return path


@mistake("08.1c", says="rank 1 goes on before the file is there")
def save_checkpoint(folder, state, keep=2):
    path = checkpoint_path(folder, state.step)
    content = checkpoint_content(state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        store(path, content, keep)
    return path


@mistake("08.1c", says="the random states of one rank alone are in the file")
def save_checkpoint(folder, state, keep=2):
    return _with(lambda content, state: content.update(random=[right_states()]))(
        folder, state, keep
    )


@mistake("08.1c", says="both ranks get the random states of one")
def save_checkpoint(folder, state, keep=2):
    count = dist.get_world_size() if dist.is_initialized() else 1
    return _with(lambda content, state: content.update(random=[right_states()] * count))(
        folder, state, keep
    )


@mistake("08.1c", says="rank 0 left with its error, and the others wait for it in the barrier")
def save_checkpoint(folder, state, keep=2):
    path = checkpoint_path(folder, state.step)
    content = checkpoint_content(state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        store(path, content, keep)
    if dist.is_initialized():
        dist.barrier()
    return path


@mistake("08.1c", says="the error of rank 0 is lost")
def save_checkpoint(folder, state, keep=2):
    path = checkpoint_path(folder, state.step)
    content = checkpoint_content(state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        with contextlib.suppress(InputError):
            store(path, content, keep)
    if dist.is_initialized():
        dist.barrier()
    return path


@mistake("08.1c", says="an old checkpoint is removed before the new one is written")
def save_checkpoint(folder, state, keep=2):
    if (not dist.is_initialized() or dist.get_rank() == 0) and folder.is_dir():
        older = checkpoints_in(folder)
        for path in older[: max(0, len(older) - (keep - 1))]:
            path.unlink()
    return right_save(folder, state, keep)


@mistake("08.1c", says="the save is not atomic: half a file bears a checkpoint's name")
def save_checkpoint(folder, state, keep=2):
    def plainly(path, content):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"mark": MARK, **content}, path)

    path, said = checkpoint_path(folder, state.step), [None]
    content = checkpoint_content(state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            plainly(path, content)
            for each in checkpoints_in(folder)[:-keep]:
                each.unlink()
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            said = [InputError(f"{path} cannot be written: {error}")]
    if dist.is_initialized():
        dist.broadcast_object_list(said)
    if said[0]:
        raise said[0]
    return path


# 08.2 load_checkpoint


def _keeping(name):
    """The right load, after which one part of the state is as it was before."""

    def load(folder, state):
        part = getattr(state, name)
        before = {key: _copied(value) for key, value in unwrapped_state(part).items()}
        path = right_load(folder, state)
        if path is not None:
            unwrapped_part(part).load_state_dict(before)
        return path

    return load


def unwrapped_part(part):
    return unwrapped(part) if isinstance(part, torch.nn.Module) else part


def unwrapped_state(part):
    return unwrapped_part(part).state_dict()


def _copied(value):
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


@mistake("08.2", says="the optimizer's moments are not put back")
def load_checkpoint(folder, state):
    return _keeping("optimizer")(folder, state)


@mistake("08.2", says="the schedule is not put back")
def load_checkpoint(folder, state):
    return _keeping("schedule")(folder, state)


@mistake("08.2", says="the position in the data is not put back")
def load_checkpoint(folder, state):
    return _keeping("sampler")(folder, state)


@mistake("08.2", says="the number of the step is not put back")
def load_checkpoint(folder, state):
    path = right_load(folder, state)
    state.step = 0
    return path


@mistake("08.2", says="the state of torch's generator is not put back")
def load_checkpoint(folder, state):
    before = right_states()
    path = right_load(folder, state)
    if path is not None:
        now = right_states()
        set_random_states({**now, "torch": before["torch"]})
    return path


@mistake("08.2", says="the state of numpy's generator is not put back")
def load_checkpoint(folder, state):
    before = right_states()
    path = right_load(folder, state)
    if path is not None:
        set_random_states({**right_states(), "numpy": before["numpy"]})
    return path


def _load_from(choose, folder, state, fits=refuse_unless_it_fits):
    """Rank 0 chooses and reads, all put it back."""
    found = [None, None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            path, content = choose(folder)
            if path is not None:
                fits(path, content, state)
            found = [None, path, content]
        except InputError as error:
            found = [error, None, None]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    error, path, content = found
    if error is not None:
        raise error
    if path is not None:
        _put_back(content, state)
    return path


def _put_back(content, state):
    unwrapped(state.model).load_state_dict(content["model"])
    state.optimizer.load_state_dict(content["optimizer"])
    state.schedule.load_state_dict(content["schedule"])
    state.sampler.load_state_dict(content["sampler"])
    state.step, state.losses = content["step"], list(content["losses"])
    rank = dist.get_rank() if dist.is_initialized() else 0
    set_random_states(content["random"][rank])


@mistake("08.2", says="the newest is chosen by the file's time")
def load_checkpoint(folder, state):
    def by_time(folder):
        paths = sorted(folder.glob("step_*.pt"), key=lambda path: path.stat().st_mtime)
        return (paths[-1], read_checkpoint(paths[-1])) if paths else (None, None)

    return _load_from(by_time, folder, state)


@mistake("08.2", says="a torn file ends the run, though a sound one lies beside it")
def load_checkpoint(folder, state):
    def last(folder):
        paths = sorted(folder.glob("step_*.pt"))
        return (paths[-1], read_checkpoint(paths[-1])) if paths else (None, None)

    return _load_from(last, folder, state)


@mistake("08.2", says="a torn file sends the run back to the beginning")
def load_checkpoint(folder, state):
    def last_or_none(folder):
        paths = sorted(folder.glob("step_*.pt"))
        try:
            return (paths[-1], read_checkpoint(paths[-1])) if paths else (None, None)
        except InputError as error:
            warnings.warn(f"{error}; beginning anew", stacklevel=2)
            return None, None

    return _load_from(last_or_none, folder, state)


def _sound(folder, told=True, strict=True):
    paths = sorted(folder.glob("step_*.pt"))
    for path in reversed(paths):
        try:
            content = read_checkpoint(path)
            if "origin" in content:
                return path, content
            raise InputError(f"{path} is no run's")
        except InputError as error:
            if told:
                warnings.warn(str(error), stacklevel=2)
    if paths and strict:
        raise InputError(f"no checkpoint in {folder} can be read")
    return None, None


@mistake("08.2", says="a file is passed over in silence")
def load_checkpoint(folder, state):
    return _load_from(lambda folder: _sound(folder, told=False), folder, state)


@mistake("08.2", says="files that cannot be read pass for no files")
def load_checkpoint(folder, state):
    return _load_from(lambda folder: _sound(folder, strict=False), folder, state)


@mistake("08.2", says="ends in an error that no user understands")
def load_checkpoint(folder, state):
    return _load_from(_sound, folder, state, fits=lambda *each: None)


@mistake("08.2", says="a checkpoint of another number of ranks is accepted")
def load_checkpoint(folder, state):
    def only_the_model(path, content, state):
        refuse_unless_it_fits(path, {**content, "origin": _ours(state)}, state)

    return _load_from(_sound, folder, state, fits=only_the_model)


def _ours(state):
    return checkpoint_content(state)["origin"] if not dist.is_initialized() else {}


@mistake("08.2", says="it is refused after half of it was loaded")
def load_checkpoint(folder, state):
    def late(path, content, state):
        state.schedule.load_state_dict(content["schedule"])
        state.step = content["step"]
        refuse_unless_it_fits(path, content, state)

    return _load_from(_sound, folder, state, fits=late)


@mistake("08.2", says="every rank looks for itself")
def load_checkpoint(folder, state):
    path, content = _sound(folder)
    if path is not None:
        refuse_unless_it_fits(path, content, state)
        _put_back(content, state)
    return path


@mistake("08.2", says="every rank takes rank 0's random states")
def load_checkpoint(folder, state):
    def same_for_all(folder):
        path, content = _sound(folder)
        if path is not None:
            content["random"] = content["random"][:1] * len(content["random"])
        return path, content

    return _load_from(same_for_all, folder, state)


@mistake("08.2", says="rank 0 left with its error, and the others wait for it")
def load_checkpoint(folder, state):
    found = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = list(_sound(folder))
        if found[0] is not None:
            refuse_unless_it_fits(*found, state)
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    path, content = found
    if path is not None:
        _put_back(content, state)
    return path


# 08.3 resume_training


def _loop(state, take_step, num_steps, batch_size, interval, save, batches=None, order=None):
    """The right loop, with places in which to go wrong."""
    save_first = order == "save first"
    while state.step < num_steps:
        for indices in (batches or BatchSampler)(state.sampler, batch_size, False):
            state.losses.append(take_step(indices))
            due = (state.step + 1) % interval == 0 or state.step + 1 == num_steps
            if save_first and due:
                save(state)
            if order != "no schedule":
                if order == "save before the schedule":
                    state.step += 1
                    if due:
                        save(state)
                    state.schedule.step()
                    state.step -= 1
                else:
                    state.schedule.step()
            state.step += 1
            if due and order not in ("save first", "save before the schedule", "no end"):
                save(state)
            if order == "no end" and state.step % interval == 0:
                save(state)
            if state.step == num_steps and order != "whole epochs":
                return state.losses
        if order != "no set_epoch":
            state.sampler.set_epoch(state.sampler.epoch + 1)
        else:
            state.sampler.load_state_dict({**state.sampler.state_dict(), "consumed": 0})
    return state.losses


@mistake("08.3", says="nothing is loaded")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    return _loop(state, take_step, num_steps, batch_size, interval, save)


@mistake("08.3", says="every epoch has the same order")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    return _loop(state, take_step, num_steps, batch_size, interval, save, order="no set_epoch")


@mistake("08.3", says="the schedule is not stepped")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    return _loop(state, take_step, num_steps, batch_size, interval, save, order="no schedule")


@mistake("08.3", says="saved before the step is counted")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    return _loop(state, take_step, num_steps, batch_size, interval, save, order="save first")


@mistake("08.3", says="saved before the schedule is stepped")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    return _loop(
        state, take_step, num_steps, batch_size, interval, save, order="save before the schedule"
    )


@mistake("08.3", says="the end of the run is not saved")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    return _loop(state, take_step, num_steps, batch_size, interval, save, order="no end")


@mistake("08.3", says="past num_steps")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    return _loop(state, take_step, num_steps, batch_size, interval, save, order="whole epochs")


@mistake("08.3", says="the last, shorter batch of an epoch is left out")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    def whole_batches(sampler, batch_size, drop_last):
        return BatchSampler(sampler, batch_size, drop_last=True)

    load(state)
    return _loop(state, take_step, num_steps, batch_size, interval, save, whole_batches)


@mistake("08.3", says="the run begins anew: what was loaded is not used")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    sampler = state.sampler.state_dict()
    state.sampler.load_state_dict({**sampler, "epoch": 0, "consumed": 0})
    state.step = 0
    state.losses.clear()
    return _loop(state, take_step, num_steps, batch_size, interval, save)


@mistake("08.3", says="samples come twice: the epoch begins anew after a restart")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    sampler = state.sampler.state_dict()
    state.sampler.load_state_dict({**sampler, "consumed": 0})
    return _loop(state, take_step, num_steps, batch_size, interval, save)


@mistake("08.3", says="samples are skipped: the rest of the epoch is given up")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    if state.step:
        state.sampler.set_epoch(state.sampler.epoch + 1)
    return _loop(state, take_step, num_steps, batch_size, interval, save)


@mistake("08.3", says="steps are counted from 0 after a restart")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    begun = state.step
    state.step = 0
    losses = _loop(state, take_step, num_steps, batch_size, interval, save)
    state.step += begun
    return losses


@mistake("08.3", says="a run that is done takes further steps")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    load(state)
    done = state.step == num_steps
    if not done:
        return _loop(state, take_step, num_steps, batch_size, interval, save)
    state.sampler.set_epoch(state.sampler.epoch + 1)
    for indices in islice(BatchSampler(state.sampler, batch_size, False), 2):
        state.losses.append(take_step(indices))
    return state.losses


@mistake("08.3", says="only rank 0 calls save")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    def on_rank_0(state):
        if not dist.is_initialized() or dist.get_rank() == 0:
            save(state)

    return right_resume(
        state, take_step, num_steps=num_steps, batch_size=batch_size, interval=interval,
        save=on_rank_0, load=load,
    )  # fmt: skip


@mistake("08.3", says="only rank 0 calls load")
def resume_training(state, take_step, *, num_steps, batch_size, interval, save, load):
    def on_rank_0(state):
        if not dist.is_initialized() or dist.get_rank() == 0:
            load(state)

    return right_resume(
        state, take_step, num_steps=num_steps, batch_size=batch_size, interval=interval,
        save=save, load=on_rank_0,
    )  # fmt: skip
