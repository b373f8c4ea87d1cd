"""Wrong answers that people give to lesson 08, each with the words that its check must say."""

import contextlib
import copy
import io
import os
import random
import shutil
import tempfile
import warnings
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
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
from shared.ranks.group import current_rank, current_world_size
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


def _written(path, content, sync=True):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save({"mark": MARK, **content}, file)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def _write_aside(path, content, *, sync=True, flush=True):
    """The right steps in their order; how they failed is neither told nor cleaned up."""
    aside = path.with_suffix(".part")
    _written(aside, content, sync)
    aside.replace(path)
    if flush:
        _flush_folder(path.parent)


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


@mistake("08.1a", says="the old file is moved out of the way")
def write_atomically(path, content):
    aside, backup = path.with_suffix(".part"), path.with_suffix(".bak")
    _written(aside, content)
    if path.exists():
        path.replace(backup)
    aside.replace(path)
    backup.unlink(missing_ok=True)
    _flush_folder(path.parent)


@mistake("08.1a", says="the file aside lies in another folder")
def write_atomically(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp()) / path.name
    _written(aside, content)
    shutil.move(aside, path)
    _flush_folder(path.parent)


@mistake("08.1a", says="the folder is not made")
def write_atomically(path, content):
    with _told(path):
        path.parent.mkdir(exist_ok=True)
    right_write(path, content)


@mistake("08.1a", says="renamed without os.fsync")
def write_atomically(path, content):
    with _told(path):
        _write_aside(path, content, sync=False)


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
    with _told(path):
        _write_aside(path, content, flush=False)


@mistake("08.1a", says="the folder is flushed before the rename")
def write_atomically(path, content):
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _flush_folder(path.parent)
        _write_aside(path, content, flush=False)


@mistake("08.1a", says="a full disk is not told as an InputError")
def write_atomically(path, content):
    _write_aside(path, content)


@mistake("08.1a", says="half a file is left beside the old one")
def write_atomically(path, content):
    with _told(path):
        _write_aside(path, content)


@mistake("08.1a", says="a file beside it is removed")
def write_atomically(path, content):
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    right_write(path, content)
    for other in path.parent.iterdir():
        if other != path:
            other.unlink()


@mistake("08.1a", says="content was changed in place")
def write_atomically(path, content):
    content["mark"] = MARK
    right_write(path, content)


@mistake("08.1a", says="os.fsync comes after the rename")
def write_atomically(path, content):
    with _told(path):
        _write_aside(path, content, sync=False, flush=False)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
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


@mistake("08.1b", says="has_gauss and cached_gaussian are left out")
def random_states():
    states = right_states()
    return {**states, "numpy": (*states["numpy"][:3], 0, 0.0)}


@mistake("08.1b", says="of numpy's state the place in its array is left out")
def random_states():
    states = right_states()
    return {**states, "numpy": (*states["numpy"][:2], 624, *states["numpy"][3:])}


@mistake("08.1b", says="'cuda' is there although CUDA is not in use")
def random_states():
    return {"cuda": None, **right_states()}


@mistake("08.1b", says="CUDA's generator is left out once CUDA is in use")
def random_states():
    return {name: state for name, state in right_states().items() if name != "cuda"}


@mistake("08.1b", says="'cuda' is not the state of the current device")
def random_states():
    states = right_states()
    if "cuda" in states:
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


@mistake("08.1b", says="CUDA is asked where it is not in use")
def random_states():
    return right_states() | (
        {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    )


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


def _without(part):
    return lambda content: content.pop(part)


@mistake("08.1c", says="the optimizer is left out")
def save_checkpoint(folder, state, keep=2):
    return _save(folder, state, keep, change=_without("optimizer"))


@mistake("08.1c", says="the schedule is left out")
def save_checkpoint(folder, state, keep=2):
    return _save(folder, state, keep, change=_without("schedule"))


@mistake("08.1c", says="the position in the data is left out")
def save_checkpoint(folder, state, keep=2):
    return _save(folder, state, keep, change=_without("sampler"))


@mistake("08.1c", says="the random states are left out")
def save_checkpoint(folder, state, keep=2):
    return _save(folder, state, keep, change=_without("random"))


@mistake("08.1c", says="the number of the step is left out")
def save_checkpoint(folder, state, keep=2):
    return _save(folder, state, keep, change=_without("step"))


@mistake("08.1c", says="the weights bear DDP's prefix")
def save_checkpoint(folder, state, keep=2):
    wrapped = state.model.state_dict()
    return _save(folder, state, keep, change=lambda content: content.update(model=wrapped))


@mistake("08.1c", says="'subweight' for 'submodule.weight'")
def save_checkpoint(folder, state, keep=2):
    names = {name.replace("module.", ""): x for name, x in state.model.state_dict().items()}
    return _save(folder, state, keep, change=lambda content: content.update(model=names))


@mistake("08.1c", says="'bed.weight' for 'embed.weight'")
def save_checkpoint(folder, state, keep=2):
    names = {name.lstrip("module."): x for name, x in state.model.state_dict().items()}
    return _save(folder, state, keep, change=lambda content: content.update(model=names))


@mistake("08.1c", says="'weight' for 'embed.weight'")
def save_checkpoint(folder, state, keep=2):
    names = {name.split(".", 1)[-1]: x for name, x in state.model.state_dict().items()}
    return _save(folder, state, keep, change=lambda content: content.update(model=names))


@mistake("08.1c", says="the random states of one rank alone are in the file")
def save_checkpoint(folder, state, keep=2):
    mine = [right_states()]
    return _save(folder, state, keep, change=lambda content: content.update(random=mine))


@mistake("08.1c", says="both ranks get the random states of one")
def save_checkpoint(folder, state, keep=2):
    mine = [right_states()] * current_world_size()
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


@mistake("08.1c", says="a file of a later step counts among the older ones")
def save_checkpoint(folder, state, keep=2):
    path = right_save(folder, state, 1000)
    for each in checkpoints_in(folder)[:-keep]:
        each.unlink()
    return path


@mistake("08.1c", says="a file goes while there are fewer than keep")
def save_checkpoint(folder, state, keep=2):
    path = right_save(folder, state, 1000)
    if current_rank() == 0:
        older = [each for each in checkpoints_in(folder) if each < path]
        for each in older[: len(older) - (keep - 1)]:
            each.unlink()
    _meet()
    return path


@mistake("08.1c", says="it ends in an OSError, which is no InputError")
def save_checkpoint(folder, state, keep=2):
    if current_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    return right_save(folder, state, keep)


@mistake("08.1c", says="the losses are not the floats of state.losses")
def save_checkpoint(folder, state, keep=2):
    def rounded(content):
        content["losses"] = torch.tensor(content["losses"]).tolist()

    return _save(folder, state, keep, change=rounded)


@mistake("08.1c", says="an old checkpoint is removed before the new one is written")
def save_checkpoint(folder, state, keep=2):
    if current_rank() == 0 and folder.is_dir():
        older = checkpoints_in(folder)
        for path in older[: max(0, len(older) - (keep - 1))]:
            path.unlink()
    return right_save(folder, state, keep)


@mistake("08.1c", says="a file goes whose name only begins as a checkpoint's")
def save_checkpoint(folder, state, keep=2):
    path = right_save(folder, state, 1000)
    if current_rank() == 0:
        older = sorted(each for each in folder.glob("step_*.pt") if each.name < path.name)
        for each in older[: max(0, len(older) - keep + 1)]:
            each.unlink()
    _meet()
    return path


def _meet():
    if dist.is_initialized():
        dist.barrier()


def _save_untold(folder, state, keep, *, write=store, then=_meet):
    """Rank 0 writes, then all meet, and nobody is told how it went."""
    path, content = checkpoint_path(folder, state.step), checkpoint_content(state)
    if current_rank() == 0:
        write(path, content, keep)
    then()
    return path


@mistake("08.1c", says="rank 0 left with its error, and the others wait for it in the barrier")
def save_checkpoint(folder, state, keep=2):
    return _save_untold(folder, state, keep)


@mistake("08.1c", says="the error of rank 0 is lost")
def save_checkpoint(folder, state, keep=2):
    def quietly(path, content, keep):
        with contextlib.suppress(InputError):
            store(path, content, keep)

    return _save_untold(folder, state, keep, write=quietly)


@mistake("08.1c", says="rank 1 continues before the file is there")
def save_checkpoint(folder, state, keep=2):
    return _save_untold(folder, state, keep, then=lambda: None)


@mistake("08.1c", says="a collective stands inside `if rank == 0`")
def save_checkpoint(folder, state, keep=2):
    def and_meet(path, content, keep):
        store(path, content, keep)
        _meet()

    return _save_untold(folder, state, keep, write=and_meet, then=lambda: None)


@mistake("08.1c", says="every rank writes")
def save_checkpoint(folder, state, keep=2):
    path = checkpoint_path(folder, state.step)
    store(path, checkpoint_content(state), keep)
    _meet()
    return path


@mistake("08.1c", says="best.pt is removed")
def save_checkpoint(folder, state, keep=2):
    path = right_save(folder, state, keep)
    for other in sorted(folder.glob("*.pt"))[:-keep]:
        other.unlink()
    return path


@mistake("08.1c", says="keep=1 removes nothing")
def save_checkpoint(folder, state, keep=2):
    return right_save(folder, state, keep if keep > 1 else 1000)  # [:-0] is nothing at all


@mistake("08.1c", says="files are removed by their time")
def save_checkpoint(folder, state, keep=2):
    path = right_save(folder, state, 1000)
    others = [each for each in checkpoints_in(folder) if each != path]
    by_time = sorted(others, key=lambda each: each.stat().st_mtime, reverse=True)
    for other in by_time[keep - 1 :]:
        other.unlink(missing_ok=True)
    return path


@mistake("08.1c", says="the model is left in eval()")
def save_checkpoint(folder, state, keep=2):
    state.model.eval()
    return right_save(folder, state, keep)


@mistake("08.1c", says="losses are missing: every step of the run has one")
def save_checkpoint(folder, state, keep=2):
    def shortened(content):
        content["losses"] = content["losses"][-1:]

    return _save(folder, state, keep, change=shortened)


@mistake("08.1c", says="the path is returned on rank 0 alone")
def save_checkpoint(folder, state, keep=2):
    path = right_save(folder, state, keep)
    return path if current_rank() == 0 else None


@mistake("08.1c", says="a file of a later step is removed")
def save_checkpoint(folder, state, keep=2):
    path = right_save(folder, state, keep)
    if current_rank() == 0:
        for each in checkpoints_in(folder):
            if each.name > path.name:
                each.unlink()
    return path


# 08.2 load_checkpoint


def _keeping(name):
    """The right load, after which one part of the state is as it was before."""

    def load(folder, state):
        part = getattr(state, name)
        before = copy.deepcopy(_inner(part).state_dict())
        path = right_load(folder, state)
        if path is not None:
            _inner(part).load_state_dict(before)
        return path

    return load


def _inner(part):
    return unwrapped(part) if isinstance(part, torch.nn.Module) else part


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


def _keeping_generator(name, folder, state):
    """The right load, after which one generator is as it was before."""
    before = right_states()
    path = right_load(folder, state)
    if path is not None:
        set_random_states({**right_states(), name: before[name]})
    return path


@mistake("08.2", says="the state of torch's generator is not put back")
def load_checkpoint(folder, state):
    return _keeping_generator("torch", folder, state)


@mistake("08.2", says="the state of numpy's generator is not put back")
def load_checkpoint(folder, state):
    return _keeping_generator("numpy", folder, state)


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


@mistake("08.2", says="the random states are not put back last")
def load_checkpoint(folder, state):
    def random_first(content, state):
        set_random_states(content["random"][current_rank()])
        unwrapped(state.model).load_state_dict(content["model"])
        for part in ("optimizer", "schedule", "sampler"):
            getattr(state, part).load_state_dict(content[part])
        state.step, state.losses[:] = content["step"], content["losses"]

    return _load(folder, state, put=random_first)


def _last(folder, key=None):
    """The last file, whatever is in it."""
    paths = sorted(folder.glob("step_*.pt"), key=key)
    return (paths[-1], read_checkpoint(paths[-1])) if paths else None


@mistake("08.2", says="the newest is chosen by the file's time")
def load_checkpoint(folder, state):
    def by_time(folder):
        return _last(folder, key=lambda path: path.stat().st_mtime)

    return _load(folder, state, choose=by_time)


@mistake("08.2", says="a damaged file is loaded as if it were sound")
def load_checkpoint(folder, state):
    def unchecked(folder):
        for path in reversed(checkpoints_in(folder)):
            try:
                content = torch.load(path, map_location="cpu", weights_only=True)
                content["origin"]
                return path, content
            except Exception as error:
                warnings.warn(f"{path}: {error}", stacklevel=2)
        return newest_sound(folder)

    return _load(folder, state, choose=unchecked)


@mistake("08.2", says="rank 1 has loaded the checkpoint and returns no path")
def load_checkpoint(folder, state):
    path = right_load(folder, state)
    return path if current_rank() == 0 else None


@mistake("08.2", says="a file without 'origin' is taken for a checkpoint")
def load_checkpoint(folder, state):
    def any_content(folder):
        for path in reversed(checkpoints_in(folder)):
            try:
                return path, read_checkpoint(path)
            except InputError as error:
                warnings.warn(f"{path}: {error}", stacklevel=2)
        return newest_sound(folder)

    return _load(folder, state, choose=any_content)


@mistake("08.2", says="a torn file ends the run, though a sound one lies beside it")
def load_checkpoint(folder, state):
    return _load(folder, state, choose=_last)


@mistake("08.2", says="a torn file sends the run back to the beginning")
def load_checkpoint(folder, state):
    def last_or_none(folder):
        try:
            last = _last(folder)
            return last if last is None or "origin" in last[1] else None
        except InputError as error:
            warnings.warn(f"{error}; beginning anew", stacklevel=2)
            return None

    return _load(folder, state, choose=last_or_none)


@mistake("08.2", says="a file is passed over in silence")
def load_checkpoint(folder, state):
    def silently(folder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return newest_sound(folder)

    return _load(folder, state, choose=silently)


@mistake("08.2", says="files that cannot be read pass for no files")
def load_checkpoint(folder, state):
    def sound_or_none(folder):
        with contextlib.suppress(InputError):
            return newest_sound(folder)

    return _load(folder, state, choose=sound_or_none)


@mistake("08.2", says="ends in an error that no user understands")
def load_checkpoint(folder, state):
    return _load(folder, state, fits=lambda *each: None)


@mistake("08.2", says="a checkpoint of another number of ranks is accepted")
def load_checkpoint(folder, state):
    def only_the_model(path, content, state):
        refuse_unless_it_fits(path, {**content, "origin": _ours(state)}, state)

    return _load(folder, state, fits=only_the_model)


def _ours(state):
    return checkpoint_content(state)["origin"] if not dist.is_initialized() else {}


@mistake("08.2", says="parts of the checkpoint in the state")
def load_checkpoint(folder, state):
    def late(path, content, state):
        state.schedule.load_state_dict(content["schedule"])
        state.step = content["step"]
        refuse_unless_it_fits(path, content, state)

    return _load(folder, state, fits=late)


@mistake("08.2", says="every rank looks for itself")
def load_checkpoint(folder, state):
    newest = newest_sound(folder)
    if newest is None:
        return None
    path, content = newest
    refuse_unless_it_fits(path, content, state)
    put_back(content, state)
    return path


@mistake("08.2", says="every rank takes rank 0's random states")
def load_checkpoint(folder, state):
    def same_for_all(folder):
        newest = newest_sound(folder)
        if newest is not None:
            states = newest[1]["random"]
            states[:] = states[:1] * len(states)
        return newest

    return _load(folder, state, choose=same_for_all)


@mistake("08.2", says="rank 0 left with its error, and the others wait for it")
def load_checkpoint(folder, state):
    newest = newest_sound(folder) if current_rank() == 0 else None
    path, content = from_rank_0([*(newest or (None, None))])
    if content is not None:
        _all_agree(refuse_unless_it_fits, path, content, state)
        put_back(content, state)
    return path


def _all_agree(act, path, content, state):
    """Act on every rank; all raise when one does."""
    said = [None]
    try:
        act(path, content, state)
    except InputError as error:
        said = [error]
    if dist.is_initialized():
        mine, said = said[0], [None] * current_world_size()
        dist.all_gather_object(said, mine)
    for error in filter(None, said):
        raise error


@mistake("08.2", says="the checkpoint does not fit on rank 1, and rank 0 resumes")
def load_checkpoint(folder, state):
    return _load(folder, state)  # rank 0 alone looks whether it fits


def _load_by_all(folder, state, look_and_put_back):
    """Rank 0 reads; what comes after is given."""
    found = [None, None, None]
    if current_rank() == 0:
        try:
            found = [None, *(newest_sound(folder) or (None, None))]
        except InputError as error:
            found = [error, None, None]
    error, path, content = from_rank_0(found)
    if error is not None:
        raise error
    if content is not None:
        look_and_put_back(path, content, state)
    return path


def _put_back_what_fits(path, content, state):
    refuse_unless_it_fits(path, content, state)
    put_back(content, state)


@mistake("08.2", says="a rank that the checkpoint does not fit left with its error")
def load_checkpoint(folder, state):
    path = _load_by_all(folder, state, _put_back_what_fits)
    if dist.is_initialized():
        dist.barrier()
    return path


@mistake("08.2", says="'changed on rank 0'")
def load_checkpoint(folder, state):
    """What fits on a rank is put back there before the others are heard."""
    return _load_by_all(folder, state, partial(_all_agree, _put_back_what_fits))


@mistake("08.2", says="rank 0 found nothing and left")
def load_checkpoint(folder, state):
    if current_rank() == 0 and not checkpoints_in(folder):
        return None
    return right_load(folder, state)


@mistake("08.2", says="a file is taken that is not named step_NNNNNNNN.pt")
def load_checkpoint(folder, state):
    def any_name(folder):
        others = [each for each in folder.glob("*.pt") if not each.name.startswith("step_")]
        return (others[0], read_checkpoint(others[0])) if others else newest_sound(folder)

    return _load(folder, state, choose=any_name)


@mistake("08.2", says="rank 1 opens the file itself")
def load_checkpoint(folder, state):
    path = None
    if current_rank() == 0:
        newest = newest_sound(folder)
        path = None if newest is None else newest[0]
    path = from_rank_0([path])[0]
    if path is not None:
        content = read_checkpoint(path)
        refuse_unless_it_fits(path, content, state)
        put_back(content, state)
    return path


@mistake("08.2", says="is passed over as if it were torn, and an older one is taken")
def load_checkpoint(folder, state):
    def newest_that_fits(folder):
        for path in reversed(checkpoints_in(folder)):
            try:
                content = read_checkpoint(path)
                if "origin" not in content:
                    raise InputError(f"{path} has no origin")
                refuse_unless_it_fits(path, content, state)
                return path, content
            except InputError as error:
                warnings.warn(f"{path}: {error}", stacklevel=2)
        return newest_sound(folder)

    return _load(folder, state, choose=newest_that_fits)


@mistake("08.2", says="the optimizer is replaced by another")
def load_checkpoint(folder, state):
    path = right_load(folder, state)
    if path is not None:
        state.optimizer = copy.deepcopy(state.optimizer)
    return path


@mistake("08.2", says="the losses are added to those that were there")
def load_checkpoint(folder, state):
    before = list(state.losses)
    path = right_load(folder, state)
    state.losses[:] = before + state.losses if path else before
    return path


@mistake("08.2", says="dropout is off from here on")
def load_checkpoint(folder, state):
    path = right_load(folder, state)
    state.model.eval()
    return path


@mistake("08.2", says="the losses come back rounded")
def load_checkpoint(folder, state):
    path = right_load(folder, state)
    state.losses[:] = torch.tensor(state.losses).tolist()
    return path


@mistake("08.2", says="a file that cannot be read is removed")
def load_checkpoint(folder, state):
    def cleaning(folder):
        found = newest_sound(folder)
        if found is not None:
            for each in checkpoints_in(folder):
                if each.name > found[0].name:
                    each.unlink()
        return found

    return _load(folder, state, choose=cleaning)


# 08.3 resume_training


def _next_epoch(sampler):
    sampler.set_epoch(sampler.epoch + 1)


def _loop(
    state, take_step, *, num_steps, batch_size, interval, save,
    batches=BatchSampler, after_step=("schedule", "count", "save"), saves_the_end=True,
    stops=True, next_epoch=_next_epoch,
):  # fmt: skip
    """The right loop. `after_step` is what comes after each step, in this order."""
    while state.step < num_steps:
        for indices in batches(state.sampler, batch_size, False):
            state.losses.append(take_step(indices))
            done = state.step + 1
            due = done % interval == 0 or (saves_the_end and done == num_steps)
            for what in after_step:
                if what == "schedule":
                    state.schedule.step()
                elif what == "count":
                    state.step = done
                elif due:
                    save(state)
            if stops and state.step == num_steps:
                return state.losses
        next_epoch(state.sampler)
    return state.losses


@mistake("08.3", says="it never stops")
def resume_training(state, take_step, *, num_steps, load, **rest):
    load(state)
    _loop(state, take_step, num_steps=num_steps, **rest)
    while True:
        for _ in state.sampler:
            break


@mistake("08.3", says="nothing is loaded")
def resume_training(state, take_step, *, load, **rest):
    return _loop(state, take_step, **rest)


@mistake("08.3", says="every epoch has the same order")
def resume_training(state, take_step, *, load, **rest):
    def same_again(sampler):
        sampler.load_state_dict({**sampler.state_dict(), "consumed": 0})

    load(state)
    return _loop(state, take_step, **rest, next_epoch=same_again)


@mistake("08.3", says="the schedule is not stepped")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, take_step, **rest, after_step=("count", "save"))


@mistake("08.3", says="saved before the step is counted")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, take_step, **rest, after_step=("save", "schedule", "count"))


@mistake("08.3", says="saved before the schedule is stepped")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, take_step, **rest, after_step=("count", "save", "schedule"))


@mistake("08.3", says="the end of the run is not saved")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, take_step, **rest, saves_the_end=False)


@mistake("08.3", says="past num_steps")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, take_step, **rest, stops=False)


@mistake("08.3", says="the last, shorter batch of an epoch is left out")
def resume_training(state, take_step, *, load, **rest):
    def whole_batches(sampler, batch_size, drop_last):
        return BatchSampler(sampler, batch_size, drop_last=True)

    load(state)
    return _loop(state, take_step, **rest, batches=whole_batches)


@mistake("08.3", says="the run begins anew: what was loaded is not used")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    sampler = state.sampler.state_dict()
    state.sampler.load_state_dict({**sampler, "epoch": 0, "consumed": 0})
    state.step = 0
    state.losses.clear()
    return _loop(state, take_step, **rest)


@mistake("08.3", says="samples come twice: the epoch begins anew after a restart")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    sampler = state.sampler.state_dict()
    state.sampler.load_state_dict({**sampler, "consumed": 0})
    return _loop(state, take_step, **rest)


@mistake("08.3", says="samples are skipped: the rest of the epoch is given up")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    if state.step:
        state.sampler.set_epoch(state.sampler.epoch + 1)
    return _loop(state, take_step, **rest)


@mistake("08.3", says="steps are counted from 0 after a restart")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    begun = state.step
    state.step = 0
    losses = _loop(state, take_step, **rest)
    state.step += begun
    return losses


@mistake("08.3", says="a run that is done takes further steps")
def resume_training(state, take_step, *, num_steps, batch_size, load, **rest):
    load(state)
    if state.step < num_steps:
        return _loop(state, take_step, num_steps=num_steps, batch_size=batch_size, **rest)
    state.sampler.set_epoch(state.sampler.epoch + 1)
    for indices in islice(BatchSampler(state.sampler, batch_size, False), 2):
        state.losses.append(take_step(indices))
    return state.losses


def _on_rank_0(act):
    return lambda state: act(state) if current_rank() == 0 else None


@mistake("08.3", says="only rank 0 calls save")
def resume_training(state, take_step, *, save, **rest):
    return right_resume(state, take_step, save=_on_rank_0(save), **rest)


@mistake("08.3", says="only rank 0 calls load")
def resume_training(state, take_step, *, load, **rest):
    return right_resume(state, take_step, load=_on_rank_0(load), **rest)


@mistake("08.3", says="batches are drawn ahead of training")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, take_step, **rest, batches=lambda *of: list(BatchSampler(*of)))


@mistake("08.3", says="saved before the step's loss is in state.losses")
def resume_training(state, take_step, *, load, save, **rest):
    def without_the_last(state):
        last = state.losses.pop()
        save(state)
        state.losses.append(last)

    load(state)
    return _loop(state, take_step, save=without_the_last, **rest)


@mistake("08.3", says="the losses are no floats")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, lambda indices: torch.tensor(take_step(indices)), **rest)


@mistake("08.3", says="the interval is counted from the restart")
def resume_training(state, take_step, *, load, save, interval, num_steps, **rest):
    load(state)
    begun = state.step

    def counted(state):
        if (state.step - begun) % interval == 0 or state.step == num_steps:
            save(state)

    return _loop(state, take_step, save=counted, interval=1, num_steps=num_steps, **rest)


@mistake("08.3", says="the losses are rounded")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, lambda indices: torch.tensor(take_step(indices)).item(), **rest)


@mistake("08.3", says="take_step is given a tuple")
def resume_training(state, take_step, *, load, **rest):
    load(state)
    return _loop(state, lambda indices: take_step(tuple(indices)), **rest)
