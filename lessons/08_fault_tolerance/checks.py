"""What tells a right answer of lesson 08 from a wrong one.

The oracle is a run that was not interrupted. Processes are really killed, disks really full (a
limit on file sizes), and ranks really wait: a rank that is alone for five seconds says so.
"""

import contextlib
import io
import itertools
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shared.data.sampling import ResumableSampler
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect, expect_equal, expect_raises, without_group, wrong
from shared.exercises.seeds import fresh_seed, seed_all
from shared.fault_tolerance.fitting import origin
from shared.fault_tolerance.state import TakeStep, TrainingState
from shared.ranks.failures import RankFailed
from shared.ranks.forked import run_ranks

MARK = "torch-handle checkpoint 1"  # shared.training.checkpoint_files.MARK

exercise_08_1a = checks_for(
    "08.1a",
    name="write_atomically",
    difficulty=2,
    minutes=20,
    hints=[
        "Another name in the same folder, such as path.with_name(f'.{path.name}.part'); open it, "
        "torch.save into the open file, flush(), os.fsync(file.fileno()), close, "
        "aside.replace(path). A folder is flushed by its descriptor: os.open(folder, os.O_RDONLY).",
        "try / except (OSError, RuntimeError) around all of it, InputError from it, and in "
        "finally: aside.unlink(missing_ok=True), where an OSError of its own is passed over: a "
        "folder that is a file has nothing to unlink.",
    ],
)
exercise_08_1b = checks_for(
    "08.1b",
    name="random_states",
    difficulty=1,
    minutes=10,
    hints=[
        "random.getstate(), np.random.get_state(), torch.get_rng_state(): a state is where a "
        "generator stands now; a seed is where it began.",
    ],
)
exercise_08_1c = checks_for(
    "08.1c",
    name="save_checkpoint",
    difficulty=3,
    minutes=30,
    hints=[
        "First what all ranks do (dist.all_gather_object of the random states), then what rank 0 "
        "does, then again what all do. No collective stands inside `if rank == 0`.",
        "What went wrong on rank 0 has to reach the others: catch it, "
        "dist.broadcast_object_list([error or None], src=0), and raise it on all ranks.",
    ],
)
exercise_08_2 = checks_for(
    "08.2",
    name="load_checkpoint",
    difficulty=4,
    minutes=35,
    hints=[
        "Rank 0: sorted(folder.glob('step_*.pt')), from the newest back, read_checkpoint in "
        "try / except InputError. Then broadcast one list [error, path, content] to all.",
        "refuse_unless_it_fits comes before the first load_state_dict; the random states come "
        "last, each rank its own: content['random'][dist.get_rank()].",
    ],
)
exercise_08_3 = checks_for(
    "08.3",
    name="resume_training",
    difficulty=3,
    minutes=25,
    hints=[
        "while state.step < num_steps: the rest of this epoch in batches, then "
        "sampler.set_epoch(sampler.epoch + 1). torch's BatchSampler cuts batches from a sampler.",
        "In the loop: loss, schedule, step + 1, and only then save: the file must say that the "
        "step is done.",
    ],
)


# What the checks train: small, but with every kind of state.


class Wrapper(nn.Module):
    """What DDP is to a state_dict: the model one level down, and "module." before its names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.module(x)


class Patient(ResumableSampler):
    """A sampler that notices a loop without an end: one that begins epochs and takes no step."""

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        if self.begun > 100:
            wrong(
                "it never stops: epochs are begun, and no step is taken in them",
                expected="an end at num_steps",
                seen="the 101st epoch",
                hint="`break` leaves the inner loop alone",
            )
        return super().__iter__()


def toy(
    seed: int, rank: int = 0, world_size: int = 1, width: int = 5, wrapped: bool = False
) -> TrainingState:
    """A model with parameters, buffers and dropout; AdamW; a schedule; 22 samples in an order."""
    generator_kept = torch.get_rng_state()
    torch.manual_seed(seed)
    layers = (nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.4), nn.Linear(width, 1))
    model: nn.Module = nn.Sequential(*layers)
    torch.set_rng_state(generator_kept)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = LambdaLR(optimizer, lambda n: 1.0 / (n + 2))
    sampler = Patient(22, world_size, rank, seed=11)
    return TrainingState(Wrapper(model) if wrapped else model, optimizer, schedule, sampler)


def toy_step(state: TrainingState, seen: list[int] | None = None) -> TakeStep:
    """A step that draws from all three generators and notes what it has seen."""
    data = torch.linspace(-1, 1, 66).view(22, 3)

    def take_step(indices: list[int]) -> float:
        if seen is not None:
            seen.extend(indices)
        rows = data[indices] * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        state.optimizer.zero_grad()
        loss = state.model(rows).square().mean()
        loss.backward()
        state.optimizer.step()
        return loss.item()

    return take_step


def train(state: TrainingState, take_step: TakeStep, steps: int, batch: int = 4) -> None:
    """The plain loop: so many steps more, epoch after epoch."""
    end = state.step + steps
    while state.step < end:
        order = iter(state.sampler)
        while state.step < end and (indices := list(itertools.islice(order, batch))):
            state.losses.append(take_step(indices))
            state.schedule.step()
            state.step += 1
        if state.step < end:
            state.sampler.set_epoch(state.sampler.epoch + 1)


def states_now() -> dict[str, Any]:
    """Where the three generators stand, as the contract of random_states writes it."""
    name, keys, *rest = np.random.get_state()
    numbers = (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    return {"python": random.getstate(), "numpy": numbers, "torch": torch.get_rng_state()}


def set_states(states: dict[str, Any]) -> None:
    """Put the generators back."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])


def content_of(state: TrainingState) -> dict[str, Any]:
    """What a checkpoint of one rank holds, written down without the exercises' help."""
    inner = getattr(state.model, "module", state.model)
    return {
        "mark": MARK,
        "origin": origin(state),
        "step": state.step,
        "losses": list(state.losses),
        "model": inner.state_dict(),
        "optimizer": state.optimizer.state_dict(),
        "schedule": state.schedule.state_dict(),
        "sampler": state.sampler.state_dict(),
        "random": [states_now()],
    }


def equal(one: Any, other: Any) -> bool:
    """Equal values in equal containers, tensors bit for bit."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@contextlib.contextmanager
def scratch() -> Generator[Path]:
    """An empty folder, and the generators as they were afterwards."""
    kept = states_now()
    try:
        with tempfile.TemporaryDirectory(prefix="check_08_") as folder:
            yield Path(folder)
    finally:
        set_states(kept)


def as_one_process(act: Callable[..., Any], *args: Any) -> Any:
    """Call an answer on the one rank that there is without a process group."""
    return without_group(
        act, *args,
        mistake="the process group is asked where there is none",
        expected="rank 0 of 1 without a process group, and nobody to talk to",
        hint="dist.is_initialized()",
    )  # fmt: skip


def read_back(path: Path) -> Any:
    """What a file of a candidate holds, read as `read_checkpoint` reads it."""
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        strange = re.search(r"GLOBAL (\S+)", str(error))
        wrong(
            "this file could be written and never read: it holds more than tensors and plain "
            "values, such as a whole model, or a method that was not called",
            expected="the state_dict() of each part",
            seen=strange[1] if strange else f"{type(error).__name__}",
        )


ALONE = "is alone after"


def together(rank: int, folder: Path, act: Callable[..., Any], *args: Any) -> Any:
    """Do something on this rank, then see whether the others come back as well.

    Returns ("done", what act returned) or ("refused", the words of a ValueError).
    """
    try:
        result = "done", act(rank, *args)
    except ValueError as error:
        result = "refused", str(error)
    (folder / f"back_{rank}").touch()
    deadline = time.monotonic() + 5
    while missing := [
        r for r in range(dist.get_world_size()) if not (folder / f"back_{r}").exists()
    ]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} {ALONE} {result[0]}: {missing}")
        time.sleep(0.005)
    return result


def on_two_ranks(act: Callable[..., Any], *args: Any, alone: str, hint: str = "") -> list[Any]:
    """Run `act(rank, *args)` on two ranks; `alone` names the mistake when one is left waiting."""
    with tempfile.TemporaryDirectory(prefix="back_") as folder:
        try:
            return run_ranks(together, 2, Path(folder), act, *args, timeout=30)
        except RankFailed as error:
            text = str(error)
    if ALONE in text:
        back, waiting = ("1", "0") if "rank 1 is alone" in text else ("0", "1")
        how = "with an error" if f"{ALONE} refused" in text else "without an error"
        wrong(
            alone,
            expected="both ranks come back",
            seen=f"rank {back} was back {how}; five seconds later rank {waiting} still waited",
            hint=hint,
        )
    if "NotImplementedError" in text:
        raise NotImplementedError
    wrong(
        "",
        expected="a result, or an InputError, from every rank",
        seen=text.splitlines()[0],
        hint="whatever goes wrong on rank 0 is caught, sent, and raised on all ranks",
    )
    raise AssertionError(text)  # wrong() has raised


def expect_done(told: list[Any]) -> None:
    """No rank of `on_two_ranks` ended in an error."""
    for rank, (how, result) in enumerate(told):
        expect(how == "done", expected="no error", seen=f"rank {rank}: {result}")


def expect_refused(told: list[Any], mistake: str) -> None:
    """Every rank of `on_two_ranks` ended in an error; `mistake` names it when one did not."""
    for rank, (how, result) in enumerate(told):
        expect(
            how == "refused",
            mistake=mistake,
            expected="an InputError on every rank",
            seen=f"rank {rank} returned {result}",
        )


# 08.1a write_atomically


class Deadly:
    """A value whose saving is the end of the process."""

    def __reduce__(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def in_one_process(act: Callable[..., Any], *args: Any) -> Any:
    """Run in a process of its own, which may die; None if it was killed."""
    try:
        return run_ranks(lambda rank: act(*args), 1, timeout=30)[0]
    except RankFailed as error:
        if "SIGKILL" in str(error):
            return None
        raise RuntimeError(str(error).splitlines()[0]) from None


def some_content(value: int) -> dict[str, Any]:
    """Enough bytes that they do not all wait in a buffer."""
    return {"value": value, "weights": torch.full((5000,), float(value))}


def old_file_in(folder: Path) -> Path:
    """A folder with a sound file in it, as an earlier save left it."""
    path = folder / "run" / "last.pt"
    path.parent.mkdir()
    torch.save({"mark": MARK, **some_content(1)}, path)
    return path


@exercise_08_1a.check("what is written can be read")
def atomic_content(write_atomically) -> None:
    with scratch() as folder:
        path = folder / "not" / "there" / "yet.pt"
        try:
            write_atomically(path, some_content(7))
        except FileNotFoundError as error:
            wrong(
                "the folder is not made",
                expected=f"a file {path.name}, in a folder that did not exist before",
                seen=f"FileNotFoundError: {error.strerror}",
                hint="path.parent.mkdir(parents=True, exist_ok=True)",
            )
        found = names_in(path.parent)
        expect(
            path.is_file(),
            mistake="the file aside never gets its final name" if found else "",
            expected=f"a file {path.name}, in a folder that did not exist before",
            seen=f"{found}" if found else "no such file",
        )
        content = read_back(path)
        expect(
            isinstance(content, dict) and content.get("mark") == MARK,
            mistake="the mark is missing: a reader could not tell this file from any other",
            expected="{'mark': MARK, **content}",
            seen=f"a dict with {sorted(content)}" if isinstance(content, dict) else "no dict",
        )
        expect(
            equal({**content, "mark": None}, {"mark": None, **some_content(7)}),
            expected="the content that was given",
            seen=f"a dict with {sorted(content)}",
        )


@exercise_08_1a.check("a process that dies in the middle")
def atomic_kill(write_atomically) -> None:
    with scratch() as folder:
        path = old_file_in(folder)
        in_one_process(write_atomically, path, {**some_content(2), "last": Deadly()})
        try:
            content = torch.load(path, weights_only=True)
        except Exception as error:
            size = f"{path.stat().st_size} bytes" if path.exists() else "no file"
            wrong(
                "the save is not atomic: a process that dies in it takes the old file with it",
                expected="the old file, whole",
                seen=f"{size} under its name ({type(error).__name__})",
                hint="write under another name, and rename when all of it is on the disk",
            )
        expect_equal(content["value"], 1, what="the value in the old file")


@exercise_08_1a.check("the order of writing, flushing and renaming")
def atomic_order(write_atomically) -> None:
    with scratch() as folder:
        path = old_file_in(folder)
        log = in_one_process(logged, path, partial(write_atomically, path, some_content(2)))
        expect_equal(torch.load(path, weights_only=True)["value"], 2, what="the value afterwards")
    names = [event[0] for event in log]
    expect(
        "opened" not in names,
        mistake="the final name itself is opened for writing: until all is written, it is torn",
        expected="writing under another name, then a rename",
        seen=f"{names}",
    )
    expect(
        "removed" not in names,
        mistake="the old file is removed before the new one has its name: in between there is none",
        expected="one rename, which replaces the old file",
        seen=f"{names}",
        hint="Path.replace and os.replace overwrite",
    )
    expect("renamed" in names, expected="a rename to the final name", seen=f"{names}")
    at = names.index("renamed")
    _, renamed_size, same_folder = log[at]
    expect(
        same_folder,
        mistake="the file aside lies in another folder, perhaps on another disk: moving it from "
        "there copies, which is not one step",
        expected="a name in the folder of the file",
        seen="a name elsewhere",
    )
    flushed = [size for name, size, _ in log[:at] if name == "flushed"]
    expect(
        bool(flushed),
        mistake="renamed without os.fsync: after a power cut the new name may hold nothing",
        expected="os.fsync before the rename",
        seen=f"{names}",
    )
    expect_equal(
        flushed[-1],
        renamed_size,
        what="the bytes that were in the file when os.fsync was called",
        mistake="os.fsync came before the file's own buffer was emptied: it knows nothing of that",
        hint="file.flush() first",
    )
    expect(
        "folder flushed" in names[at:],
        mistake="the folder is not flushed: the new name itself may be lost in a power cut",
        expected="os.fsync of the folder after the rename",
        seen=f"{names}",
        hint="descriptor = os.open(folder, os.O_RDONLY)",
    )


def logged(path: Path, act: Callable[[], Any]) -> list[tuple[str, int, bool]]:
    """What happens to a file and its folder, in order; for a process of its own."""
    log: list[tuple[str, int, bool]] = []
    fsync = os.fsync

    def note(event: str, args: tuple) -> None:
        if event == "open" and str(args[0]) == str(path) and args[2] & (os.O_WRONLY | os.O_RDWR):
            log.append(("opened", 0, True))
        if event == "os.remove" and Path(str(args[0])).name == path.name:
            log.append(("removed", 0, True))
        if event == "os.rename" and str(args[1]) == str(path):
            source = Path(str(args[0]))
            log.append(("renamed", source.stat().st_size, source.parent == path.parent))

    def noted_fsync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        status = os.fstat(number)
        folder = (status.st_ino, status.st_dev) == (path.parent.stat().st_ino, status.st_dev)
        log.append(("folder flushed" if folder else "flushed", status.st_size, True))
        fsync(number)

    os.fsync = noted_fsync
    sys.addaudithook(note)
    act()
    return list(log)


@exercise_08_1a.check("a full disk and a folder that cannot be")
def atomic_failure(write_atomically) -> None:
    with scratch() as folder:
        path = old_file_in(folder)
        told = in_one_process(on_a_full_disk, partial(write_atomically, path, some_content(2)))
        expect(
            told is not None and told[0] == "refused",
            mistake="a full disk is not told as an InputError",
            expected="an InputError that names the file",
            seen=f"{told[1] if told else 'the process died'}",
        )
        expect(str(path) in told[1], expected=f"a message that names {path.name}", seen=told[1])
        try:
            value = torch.load(path, weights_only=True)["value"]
        except Exception:
            value = "nothing that can be read"
        expect_equal(value, 1, what="the value in the old file after a save on a full disk")
        left = sorted(each.name for each in path.parent.iterdir() if each != path)
        expect(
            not left,
            mistake="half a file is left beside the old one: a full disk stays full",
            expected="the old file alone",
            seen=f"{left} beside it",
            hint="finally: aside.unlink(missing_ok=True)",
        )
        expect_raises(
            ValueError,
            write_atomically,
            path / "below" / "a_file.pt",
            some_content(2),
            what="a folder that is a file",
            mentions=["a_file.pt"],
            hint="unlink(missing_ok=True) raises as well where the folder is a file",
        )


def on_a_full_disk(act: Callable[[], Any]) -> tuple[str, str]:
    """Act where no file may grow beyond 4 KiB, as on a disk with so much left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        act()
    except ValueError as error:
        return "refused", str(error)
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "done", "no error"


# 08.1b random_states


@exercise_08_1b.check("the generators go on from where they stood")
def random_continue(random_states) -> None:
    with scratch():
        seed_all(fresh_seed())
        draw_numbers()
        states = asked_without_cuda(random_states)
        expect(states is not None, mistake="nothing is returned", expected="a dict", seen="None")
        expect(
            isinstance(states, dict) and states.keys() >= {"python", "numpy", "torch"},
            mistake=f"a generator is left out: {missing_of(states)}",
            expected="python, numpy and torch",
            seen=f"{sorted(states) if isinstance(states, dict) else states!r}",
        )
        after = draw_numbers()
        expect(
            isinstance(states["python"], tuple)
            and isinstance(states["numpy"], tuple | list)
            and isinstance(states["torch"], Tensor),
            mistake="a seed says where a generator began, not where it stands",
            expected="random.getstate(), the parts of np.random.get_state(), torch.get_rng_state()",
            seen=", ".join(f"{name}: {type(value).__name__}" for name, value in states.items()),
        )
        keys = states["numpy"][1] if len(states["numpy"]) == 5 else None
        kind = str(keys.dtype) if isinstance(keys, Tensor) else type(keys).__name__
        expect(
            isinstance(states["numpy"], tuple) and kind in ("torch.int64", "ndarray"),
            mistake="numpy's state is not in the form that set_random_states takes",
            expected="a tuple of 5 like np.random.get_state(), its array as an int64 tensor",
            seen=f"a {type(states['numpy']).__name__} of {len(states['numpy'])}, keys: {kind}",
            hint="name, keys, *rest = np.random.get_state()",
        )
        set_states(states)
        again = draw_numbers()
        for name in ("python", "numpy", "torch"):
            expect(
                after[name] == again[name],
                mistake=f"{name}'s generator does not go on from there",
                expected="the numbers that came next",
                seen="others",
                hint="was a number drawn, or a seed set, before the state was taken?",
            )


def asked_without_cuda(random_states: Callable[[], Any]) -> Any:
    """The states; CUDA must be as unused afterwards as it was before."""
    unused, states, seen = not torch.cuda.is_initialized(), None, ""
    try:
        states = random_states()
    except (AssertionError, RuntimeError) as error:
        if not unused or "CUDA" not in str(error):
            raise
        seen = f"{type(error).__name__}: {error}"
    if unused and torch.cuda.is_initialized():
        seen = "CUDA started by asking, after which no process can fork"
    expect(
        not seen,
        mistake="CUDA is asked where it is not in use",
        expected="'cuda' once CUDA is in use, and no call before",
        seen=seen,
        hint="torch.cuda.is_initialized()",
    )
    return states


def missing_of(states: Any) -> str:
    """The names that are not there."""
    known = states.keys() if isinstance(states, dict) else ()
    return ", ".join(name for name in ("python", "numpy", "torch") if name not in known)


def draw_numbers() -> dict[str, float]:
    """One number of each generator."""
    return {
        "python": random.random(),
        "numpy": float(np.random.rand()),
        "torch": torch.rand(()).item(),
    }


@exercise_08_1b.check("a file with it can be read back, and taking it changes nothing")
def random_plain(random_states) -> None:
    with scratch() as folder:
        seed_all(fresh_seed())
        before = states_now()
        states = random_states()
        expect(
            equal(before, states_now()),
            mistake="taking the states moves a generator",
            expected="the same states as before",
            seen="others",
        )
        torch.save(states, folder / "states.pt")
        try:
            torch.load(folder / "states.pt", weights_only=True)
        except Exception as error:
            wrong(
                "a checkpoint with this in it could be written and never read: numpy's array is "
                "no plain value",
                expected="tensors, numbers, strings and tuples of them",
                seen=" ".join(str(error).split())[:120],
                hint="torch.from_numpy(keys.astype(np.int64))",
            )


# 08.1c save_checkpoint

PARTS = {
    "model": "the weights are left out",
    "optimizer": "the optimizer is left out: its moments begin at zero again",
    "schedule": "the schedule is left out: the learning rate begins its warm-up again",
    "sampler": "the position in the data is left out: samples come again, others never",
    "random": "the random states are left out: dropout and noise come out otherwise",
    "step": "the number of the step is left out",
    "losses": "the losses are left out",
    "origin": "the origin is left out: nobody can tell whose checkpoint this is",
}


@exercise_08_1c.check("all that decides the next step is in the file")
def save_parts(save_checkpoint) -> None:
    with scratch() as folder:
        seed_all(fresh_seed())
        state = toy(1, wrapped=True)
        train(state, toy_step(state), 3)
        path = as_one_process(save_checkpoint, folder, state)
        named = folder / "step_00000003.pt"
        expect(named.is_file(), expected=f"a file {named.name}", seen=f"{names_in(folder)}")
        expect_equal(path, named, what="the path that is returned")
        content, want = read_back(named), content_of(state)
        for part, mistake in PARTS.items():
            expect(part in content, mistake=mistake, expected=f"{part!r}", seen=f"{list(content)}")
        prefixed = [name for name in content["model"] if name.startswith("module.")]
        expect(
            not prefixed,
            mistake="the weights bear DDP's prefix: 'module.' stands before every name, and the "
            "bare model will not take them",
            expected="'0.weight', ...",
            seen=f"{prefixed[:1]}",
            hint="getattr(state.model, 'module', state.model)",
        )
        expect(
            isinstance(content["random"], list),
            mistake="'random' is no list: each rank has an entry in it, and one rank has one",
            expected="[random_states()] on one rank",
            seen=f"a {type(content['random']).__name__}",
        )
        for part in want:
            expect(
                equal(content.get(part), want[part]),
                expected=f"{part!r} as it was after 3 steps",
                seen=told_shortly(content.get(part)),
            )


def told_shortly(value: Any) -> str:
    """A few characters of any value."""
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:77]}..."


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; empty where there is none."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def save_after_steps(rank: int, folder: Path, save: Callable[..., Any], seed: int) -> Any:
    """Two steps, then a save into a folder of this rank's own, whose writing takes a while."""
    seed_all(seed + 1000 * rank)
    state = toy(1, rank, 2)
    train(state, toy_step(state), 2)
    mine, whole = folder / f"seen_by_rank_{rank}", torch.save
    if rank == 0:

        def slow(content: Any, file: Any, *args: Any, **options: Any) -> None:
            time.sleep(0.0 if isinstance(file, io.BytesIO) else 0.15)
            whole(content, file, *args, **options)

        torch.save = slow
    path = save(mine, state)
    there = (folder / "seen_by_rank_0" / "step_00000002.pt").is_file()
    return there, names_in(mine), states_now(), str(path)


INSIDE = (
    "a collective stands inside `if rank == 0` (a barrier, a gather, a broadcast): the other ranks "
    "never get there"
)


@exercise_08_1c.check("two ranks, one writer")
def save_two_ranks(save_checkpoint) -> None:
    with scratch() as folder:
        told = on_two_ranks(
            save_after_steps, folder, save_checkpoint, fresh_seed(), alone=INSIDE,
            hint="every rank calls the same collectives in the same order",
        )  # fmt: skip
        expect_done(told)
        (_, (there_0, _, states_0, _)), (_, (there_1, names_1, states_1, _)) = told
        expect(
            not names_1,
            mistake="every rank writes: one file each, or one file several times at once",
            expected="rank 0 writes",
            seen=f"rank 1 wrote {names_1}",
        )
        expect(
            there_0 and there_1,
            mistake="rank 1 goes on before the file is there: nobody waits for rank 0",
            expected="a barrier, or a broadcast of how it went, before any rank returns",
            seen="no file yet when rank 1 returned",
        )
        path = folder / "seen_by_rank_0" / "step_00000002.pt"
        states = torch.load(path, weights_only=True)["random"]
        expect(
            isinstance(states, list) and len(states) == 2,
            mistake="the random states of one rank alone are in the file",
            expected="a list with one entry a rank",
            seen=f"{type(states).__name__} of {len(states)}",
            hint="dist.all_gather_object",
        )
        expect(
            not equal(states[0], states[1]),
            mistake="both ranks get the random states of one: their dropout would be the same",
            expected="states of their own",
            seen="equal ones",
        )
        for rank, want in enumerate((states_0, states_1)):
            expect(
                equal({name: states[rank][name] for name in want}, want),
                expected=f"entry {rank} of 'random' is rank {rank}'s",
                seen="another rank's, or of another time",
            )


def save_into_a_file(rank: int, folder: Path, save: Callable[..., Any]) -> Any:
    """A save whose folder is a file on rank 0's machine."""
    state = toy(1, rank, 2)
    return save(folder / ("file" if rank == 0 else "fine"), state)


@exercise_08_1c.check("what rank 0 cannot do, all ranks hear of")
def save_failure(save_checkpoint) -> None:
    with scratch() as folder:
        (folder / "file").write_text("in the way")
        told = on_two_ranks(
            save_into_a_file, folder, save_checkpoint,
            alone="rank 0 left with its error, and the others wait for it in the barrier",
            hint="catch it, tell the others, raise it everywhere",
        )  # fmt: skip
        expect_refused(told, "the error of rank 0 is lost: training goes on without checkpoints")


@exercise_08_1c.check("old checkpoints go, but never too early")
def save_keep(save_checkpoint) -> None:
    with scratch() as folder:
        state = toy(1)
        take_step = toy_step(state)
        for count, want in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (4, [3, 4])):
            train(state, take_step, 1)
            save_checkpoint(folder, state)
            have = [int(name[5:13]) for name in names_in(folder) if name.endswith(".pt")]
            expect_equal(have, want, what=f"the steps in the folder after {count} saves, keep=2")
        train(state, take_step, 1)
        save_checkpoint(folder, state, keep=3)
        have = [int(name[5:13]) for name in names_in(folder)]
        expect_equal(have, [3, 4, 5], what="the steps in the folder with keep=3")
        train(state, take_step, 1)
        told = in_one_process(on_a_full_disk, partial(save_checkpoint, folder, state))
        expect(told is not None and told[0] == "refused", expected="an InputError", seen=f"{told}")
        have = [int(name[5:13]) for name in names_in(folder) if name.endswith(".pt")]
        expect_equal(
            have,
            [3, 4, 5],
            what="the steps in the folder after a save on a full disk",
            mistake="an old checkpoint is removed before the new one is written",
        )


def torn_save(folder: Path, state: TrainingState, save: Callable[..., Any]) -> None:
    """A save in which the process is killed after half of the bytes."""
    whole = torch.save

    def torn(content: Any, file: Any, *args: Any, **options: Any) -> None:
        if isinstance(file, io.BytesIO):  # a tensor that is pickled on its way to other ranks
            return whole(content, file, *args, **options)
        if isinstance(file, str | Path):
            Path(file).write_bytes(b"half of a checkpoint")
        else:
            file.write(b"half of a checkpoint")
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = torn
    save(folder, state)


@exercise_08_1c.check("a process that dies while it saves")
def save_atomic(save_checkpoint) -> None:
    with scratch() as folder:
        state = toy(1)
        save_checkpoint(folder, state)
        state.step = 9
        in_one_process(torn_save, folder, state, save_checkpoint)
        expect(
            not (folder / "step_00000009.pt").exists(),
            mistake="the save is not atomic: half a file bears a checkpoint's name",
            expected="step_00000000.pt alone",
            seen=f"{[name for name in names_in(folder) if name.startswith('step')]}",
            hint="write_atomically",
        )


# 08.2 load_checkpoint


def write_checkpoint(folder: Path, state: TrainingState, **changes: Any) -> Path:
    """A checkpoint as the contract has it."""
    path = folder / f"step_{state.step:08d}.pt"
    torch.save({**content_of(state), **changes}, path)
    return path


def loaded(load_checkpoint, folder: Path, state: TrainingState) -> tuple[Any, list[str]]:
    """What load_checkpoint returns, and the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = load_checkpoint(folder, state)
    return path, [str(each.message) for each in caught]


@exercise_08_2.check("nothing to load")
def load_nothing(load_checkpoint) -> None:
    with scratch() as folder:
        state, want = toy(1), toy(1)
        for where in (folder, folder / "not_there"):
            try:
                path, _ = as_one_process(loaded, load_checkpoint, where, state)
            except FileNotFoundError as error:
                wrong(
                    "a folder that is not there is an error: a run that begins has none yet",
                    expected="None",
                    seen=f"FileNotFoundError: {error.strerror}",
                    hint="folder.glob of a folder that is not there finds nothing",
                )
            expect_equal(path, None, what="load_checkpoint of a folder without checkpoints")
        untouched = equal(content_of(state)["model"], content_of(want)["model"])
        expect(untouched, expected="the first weights", seen="others")


LOST = {
    "model": "the weights are not put back",
    "optimizer": "the optimizer's moments are not put back",
    "schedule": "the schedule is not put back",
    "sampler": "the position in the data is not put back",
    "step": "the number of the step is not put back",
    "losses": "the losses are not put back",
}


@exercise_08_2.check("the run goes on as if nothing had happened")
def load_everything(load_checkpoint) -> None:
    with scratch() as folder:
        for wrapped in (False, True):
            seed_all(fresh_seed())
            state = toy(1, wrapped=wrapped)
            train(state, toy_step(state), 8)
            path = write_checkpoint(folder, state)
            then, where = content_of(state), draw_numbers()
            again = toy(2, wrapped=wrapped)
            seed_all(fresh_seed())
            try:
                got, _ = loaded(load_checkpoint, folder, again)
            except RuntimeError as error:
                if "module." not in str(error):
                    raise
                wrong(
                    "the weights are loaded into the wrapper, whose names begin with 'module.'",
                    expected="names as the bare model has them, loaded into the bare model",
                    seen=told_shortly(str(error)),
                    hint="getattr(state.model, 'module', state.model)",
                )
            expect_equal(got, path, what="the path that is returned")
            expect_put_back(again, then)
            here = draw_numbers()
            for name, number in where.items():
                expect(
                    here[name] == number,
                    mistake=f"the state of {name}'s generator is not put back",
                    expected="the numbers that came next",
                    seen="others",
                )
            path.unlink()


def expect_put_back(state: TrainingState, then: dict[str, Any]) -> None:
    """Every part of the state is what it was."""
    now = content_of(state)
    for part, mistake in LOST.items():
        expect(
            equal(now[part], then[part]),
            mistake=mistake,
            expected=f"{part!r} as it was when it was saved",
            seen=told_shortly(now[part]),
        )


@exercise_08_2.check("the newest, whatever the clock says")
def load_newest(load_checkpoint) -> None:
    with scratch() as folder:
        state = toy(1)
        take_step = toy_step(state)
        paths = []
        for _ in range(3):
            train(state, take_step, 4)
            paths.append(write_checkpoint(folder, state))
        for path, seconds in zip(paths, (1000, 2000, 1), strict=True):
            os.utime(path, (seconds, seconds))
        got, _ = loaded(load_checkpoint, folder, toy(2))
        expect_equal(
            got,
            paths[2],
            what="the newest checkpoint",
            mistake={
                paths[0]: "the oldest is taken",
                paths[1]: "the newest is chosen by the file's time, which copying changes",
            }.get(got, ""),
            hint="the step stands in the name",
        )


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class Intruder:
    """A value that runs code when it is unpickled: here it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@exercise_08_2.check("torn and foreign files")
def load_torn(load_checkpoint) -> None:
    with scratch() as folder:
        state = toy(1)
        train(state, toy_step(state), 4)
        good = write_checkpoint(folder, state)
        then = content_of(state)
        (folder / "step_00000007.pt").write_text("my notes\n")
        torch.save({"weights": torch.zeros(3)}, folder / "step_00000008.pt")
        state.step = 9
        cut(write_checkpoint(folder, state))
        torch.save({"mark": MARK, "more": Intruder(folder / "ran")}, folder / "step_00000010.pt")
        state.step = 4
        again = toy(2)
        try:
            got, said = loaded(load_checkpoint, folder, again)
        except Exception as error:
            expect_no_code_ran(folder)
            wrong(
                "a torn file ends the run, though a sound one lies beside it",
                expected=f"a warning, and {good.name}",
                seen=f"{type(error).__name__}: {told_shortly(str(error))}",
                hint="read_checkpoint in try / except InputError",
            )
        expect_no_code_ran(folder)
        expect_equal(
            got,
            good,
            what="the checkpoint that is used",
            mistake="a torn file sends the run back to the beginning" if got is None else "",
        )
        expect_put_back(again, then)
        for name in ("step_00000009.pt", "step_00000008.pt", "step_00000007.pt"):
            expect(
                any(name in each for each in said),
                mistake="a file is passed over in silence: nobody looks why work was lost",
                expected=f"a warning that names {name}",
                seen=f"{len(said)} warnings",
                hint="warnings.warn with the words of read_checkpoint's InputError",
            )
        good.unlink()
        try:
            got, _ = loaded(load_checkpoint, folder, toy(2))
        except ValueError:
            return
        wrong(
            "files that cannot be read pass for no files: the run begins anew and overwrites them",
            expected="an InputError when there are files and none is sound",
            seen=f"{got}",
        )


def expect_no_code_ran(folder: Path) -> None:
    """The intruder must have been refused before it was unpickled."""
    expect(
        not (folder / "ran").exists(),
        mistake="code that stood in a file was run: a checkpoint from elsewhere could do anything",
        expected="tensors and plain values are read, and nothing else",
        seen="a folder that unpickling the file has made",
        hint="read_checkpoint, or torch.load(path, weights_only=True)",
    )


@exercise_08_2.check("a checkpoint of another run")
def load_foreign(load_checkpoint) -> None:
    with scratch() as folder:
        state = toy(1)
        train(state, toy_step(state), 4)
        four_ranks = {**origin(state), "world_size": 4}
        cases = {
            "another model": (toy(1, width=6), {}),
            "another number of ranks": (toy(1), {"origin": four_ranks}),
            "another format": (toy(1), {"origin": {**origin(state), "format": 0}}),
        }
        for what, (other, changes) in cases.items():
            path = write_checkpoint(folder, state, **changes)
            before = content_of(other)
            try:
                loaded(load_checkpoint, folder, other)
            except ValueError:
                pass
            except Exception as error:
                wrong(
                    f"a checkpoint of {what} ends in an error that no user understands",
                    expected="an InputError that says what differs",
                    seen=f"{type(error).__name__}: {told_shortly(str(error))}",
                    hint="refuse_unless_it_fits",
                )
            else:
                wrong(
                    f"a checkpoint of {what} is accepted",
                    expected="an InputError",
                    seen="no error",
                    hint="refuse_unless_it_fits",
                )
            expect(
                equal(before, content_of(other)),
                mistake="it is refused after half of it was loaded",
                expected="the state as it was",
                seen="parts of the checkpoint in it",
                hint="refuse_unless_it_fits before the first load_state_dict",
            )
            path.unlink()


def load_on_rank(rank: int, folder: Path, load: Callable[..., Any]) -> Any:
    """Load where only rank 0 has the folder, as on two machines without a common disk."""
    seed_all(5)
    state = toy(1, rank, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(folder if rank == 0 else folder / "elsewhere", state)
    return state.step, draw_numbers()


@exercise_08_2.check("two ranks, one disk")
def load_two_ranks(load_checkpoint) -> None:
    with scratch() as folder:
        state = toy(1)
        train(state, toy_step(state), 4)
        numbers, states = [], []
        for seed in (fresh_seed(), fresh_seed()):
            seed_all(seed)
            states.append(states_now())
            numbers.append(draw_numbers())
        begun = {**origin(state), "world_size": 2}
        sampler = ResumableSampler(22, 2, 0, seed=11).state_dict(16)
        path = write_checkpoint(folder, state, random=states, origin=begun, sampler=sampler)
        told = on_two_ranks(
            load_on_rank, folder, load_checkpoint,
            alone="one rank alone takes part in a collective",
        )  # fmt: skip
        expect_done(told)
        steps = [result[0] for _, result in told]
        expect_equal(
            steps,
            [4, 4],
            what="the step on rank 0 and on rank 1",
            mistake="every rank looks for itself: rank 1, whose machine has no such folder, "
            "begins anew while rank 0 goes on",
            hint="rank 0 reads, and sends: dist.broadcast_object_list",
        )
        expect(
            told[1][1][1] != numbers[0],
            mistake="every rank takes rank 0's random states",
            expected="each its own: content['random'][rank]",
            seen="equal numbers on both ranks",
        )
        for rank in (0, 1):
            expect_equal(told[rank][1][1], numbers[rank], what=f"rank {rank}'s next numbers")
        begun = on_two_ranks(
            load_on_rank, folder / "empty", load_checkpoint,
            alone="rank 0 found nothing and left, and the others wait to hear of it",
            hint="no return before the broadcast: send that there is nothing",
        )  # fmt: skip
        expect_done(begun)
        path.write_text("torn")
        told = on_two_ranks(
            load_on_rank, folder, load_checkpoint,
            alone="rank 0 left with its error, and the others wait for it",
            hint="send the error as well, and raise it on all ranks",
        )  # fmt: skip
        expect_refused(told, "the error of rank 0 does not reach the others")


# 08.3 resume_training


class Recorder:
    """Stands for save and load: notes when it is called, and can put a state in."""

    def __init__(self, state: TrainingState, snapshot: dict[str, Any] | None = None) -> None:
        self.state, self.snapshot = state, snapshot
        self.loads, self.saves = 0, []
        self.rates: list[int] = []
        self.stepped: list[int] = []  # how far the schedule was at each step

    def load(self, state: TrainingState) -> None:
        """Put the snapshot in, if there is one."""
        self.loads += 1
        if self.snapshot is not None:
            state.model.load_state_dict(self.snapshot["model"])
            state.optimizer.load_state_dict(self.snapshot["optimizer"])
            state.schedule.load_state_dict(self.snapshot["schedule"])
            state.sampler.load_state_dict(self.snapshot["sampler"])
            state.step, state.losses[:] = self.snapshot["step"], self.snapshot["losses"]
            set_states(self.snapshot["random"][0])

    def save(self, state: TrainingState) -> None:
        """Note the step, and where the schedule stands."""
        self.saves.append(state.step)
        self.rates.append(state.schedule.state_dict()["last_epoch"])


STEPS, BATCH, EVERY = 14, 4, 3  # 6 steps an epoch, the last of 2 samples


def run(
    resume_training, recorder: Recorder, seen: list[int], num_steps: int = STEPS
) -> list[float]:
    """Call the candidate; a loop without an end is a finding."""

    def take_step(indices: list[int]) -> float:
        if len(seen) > 400:
            wrong("it never stops", expected=f"{num_steps} steps", seen="over 100 steps")
        recorder.stepped.append(recorder.state.schedule.state_dict()["last_epoch"])
        return step(list(indices))

    step = toy_step(recorder.state, seen)
    losses = resume_training(
        recorder.state, take_step, num_steps=num_steps, batch_size=BATCH, interval=EVERY,
        save=recorder.save, load=recorder.load,
    )  # fmt: skip
    expect(losses is not None, mistake="nothing is returned", expected="the losses", seen="None")
    return losses


def uninterrupted(seed: int, steps: int = STEPS) -> tuple[TrainingState, list[int]]:
    """The oracle: the plain loop, from the beginning."""
    seed_all(seed)
    state, seen = toy(1), []
    train(state, toy_step(state, seen), steps)
    return state, seen


@exercise_08_3.check("a run from the beginning")
def resume_plain(resume_training) -> None:
    with scratch():
        seed = fresh_seed()
        want, order = uninterrupted(seed)
        seed_all(seed)
        recorder, seen = Recorder(toy(1)), []
        losses = run(resume_training, recorder, seen)
        expect(
            recorder.loads > 0,
            mistake="nothing is loaded: after a restart the run would begin anew",
            expected="load(state) before the first step",
            seen="no call",
        )
        expect(
            seen[22:44] != seen[:22],
            mistake="every epoch has the same order: set_epoch is not called",
            expected="another order in epoch 1",
            seen="that of epoch 0",
        )
        expect(
            len(seen) == 22 + 22 + 8,
            mistake="the last, shorter batch of an epoch is left out"
            if len(seen) == STEPS * BATCH
            else "training goes on to the end of the epoch, past num_steps",
            expected=f"52 samples in {STEPS} steps: 22 + 22 + 8",
            seen=f"{len(seen)}",
        )
        expect_equal(seen, order, what="the samples in their order")
        state = recorder.state
        expect_equal(state.step, STEPS, what="state.step afterwards")
        last = state.schedule.state_dict()["last_epoch"]
        expect(
            last == STEPS,
            mistake="the schedule is not stepped" if last == 0 else "",
            expected=f"a schedule that was stepped {STEPS} times",
            seen=f"{last} times",
        )
        expect(
            recorder.stepped[:1] != [1],
            mistake="the schedule is stepped before the step: the first rate is never used",
            expected="loss, then schedule",
            seen="a schedule that was stepped once before the first step",
        )
        expect_losses(state.losses, want.losses, "state.losses")
        expect_losses(losses, want.losses, "what is returned")


def expect_losses(got: Any, want: list[float], what: str) -> None:
    """One loss for each step of the whole run, as the oracle has them."""
    if type(got) is list and len(got) < len(want):
        wrong(
            "losses are missing: those of before the interruption belong to them",
            expected=f"{len(want)} losses in {what}",
            seen=f"{len(got)}",
        )
    expect_equal(got, want, what=what, hint="those of the run that was not interrupted")


@exercise_08_3.check("when it saves, and what the file will say")
def resume_saves(resume_training) -> None:
    with scratch():
        recorder = Recorder(toy(1))
        run(resume_training, recorder, [])
        early = [step + 1 for step in recorder.saves]
        expect(
            early != [*range(EVERY, STEPS, EVERY), STEPS] and early[:1] != [EVERY],
            mistake="saved before the step is counted: resumed from that file, it is done twice",
            expected=f"saves at {[*range(EVERY, STEPS, EVERY), STEPS]}",
            seen=f"{recorder.saves}",
        )
        expect(
            recorder.saves[-1:] == [STEPS],
            mistake="the end of the run is not saved",
            expected=f"saves at {[*range(EVERY, STEPS, EVERY), STEPS]}",
            seen=f"{recorder.saves}",
        )
        expect_equal(
            recorder.saves, [*range(EVERY, STEPS, EVERY), STEPS], what="the steps of the saves"
        )
        expect_equal(
            recorder.rates,
            recorder.saves,
            what="steps of the schedule at each save",
            mistake="saved before the schedule is stepped: resumed from that file, every learning "
            "rate comes a step late",
        )
        recorder = Recorder(toy(1))
        run(resume_training, recorder, [], num_steps=2 * EVERY)
        expect_equal(
            recorder.saves,
            [EVERY, 2 * EVERY],
            what=f"the steps of the saves of a run of {2 * EVERY} steps",
            mistake="the last step is saved twice" if len(recorder.saves) == 3 else "",
        )


@exercise_08_3.check("going on in the middle of an epoch")
def resume_middle(resume_training) -> None:
    with scratch():
        for done in (4, 6, 9):
            seed = fresh_seed()
            want, order = uninterrupted(seed)
            seed_all(seed)
            first, before = toy(1), []
            train(first, toy_step(first, before), done)
            snapshot = {**content_of(first), "model": copies(first.model.state_dict())}
            snapshot["optimizer"] = copies(snapshot["optimizer"])
            seed_all(seed + 1)
            recorder, seen = Recorder(toy(2), snapshot), []
            losses = run(resume_training, recorder, seen)
            expect_goes_on(seen, order, before, done)
            expect_equal(recorder.state.step, STEPS, what="state.step afterwards")
            expect(
                equal(recorder.state.model.state_dict(), want.model.state_dict()),
                expected="the weights of the run that was not interrupted, bit for bit",
                seen="others",
            )
            expect_losses(recorder.state.losses, want.losses, "state.losses")
            expect_losses(losses, want.losses, "what is returned")


def expect_goes_on(seen: list[int], order: list[int], before: list[int], done: int) -> None:
    """The samples after a restart are those that had not been seen."""
    rest = order[len(before) :]
    epoch = order[22 * (len(before) // 22) :][: len(seen[:8])]
    following = order[22 * -(-len(before) // 22) :][:4]
    mistake = ""
    if seen == order:
        mistake = "the run begins anew: what was loaded is not used"
    elif len(before) > 22 and seen[:4] in (order[:4], order[len(before) % 22 :][:4]):
        mistake = "the run goes back to epoch 0 after a restart: sampler.epoch says where it is"
    elif len(before) % 22 and seen[:4] == epoch[:4]:
        mistake = "samples come twice: the epoch begins anew after a restart"
    elif seen[:4] == following and len(before) % 22:
        mistake = "samples are skipped: the rest of the epoch is given up after a restart"
    elif len(seen) > len(rest):
        mistake = "steps are counted from 0 after a restart: it trains for too long"
    expect(
        seen == rest,
        mistake=mistake,
        expected=f"after {done} steps {rest[:4]} and so on, {len(rest)} samples",
        seen=f"{seen[:4]} and so on, {len(seen)} samples",
        hint="iterating over the sampler goes on from where its state says",
    )


def copies(value: Any) -> Any:
    """The same containers with copies of the tensors."""
    if isinstance(value, dict):
        return {name: copies(each) for name, each in value.items()}
    if isinstance(value, list):
        return [copies(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value


@exercise_08_3.check("a run that is done")
def resume_done(resume_training) -> None:
    with scratch():
        seed_all(fresh_seed())
        first = toy(1)
        train(first, toy_step(first), STEPS)
        recorder, seen = Recorder(toy(2), content_of(first)), []
        losses = run(resume_training, recorder, seen)
        expect(
            not seen,
            mistake="a run that is done takes further steps",
            expected="none: it is at num_steps",
            seen=f"{len(seen)} samples more",
        )
        expect_losses(losses, first.losses, "what is returned")
        expect(
            not recorder.saves,
            mistake="a run that is done saves once more",
            expected="no call of save",
            seen=f"{recorder.saves}",
        )


def resume_on_rank(rank: int, resume_training) -> Any:
    """A run on this rank whose save and load only count."""
    recorder: Recorder = Recorder(toy(1, rank, 2))
    run(resume_training, recorder, [], num_steps=6)
    return recorder.loads, recorder.saves


@exercise_08_3.check("both ranks save and load")
def resume_two_ranks(resume_training) -> None:
    told = on_two_ranks(
        resume_on_rank, resume_training, alone="one rank alone takes part in a collective"
    )
    for what, number in (("load", 0), ("save", 1)):
        calls: list[Iterator[Any] | Any] = [result[number] for _, result in told]
        expect(
            calls[0] == calls[1],
            mistake=f"only rank 0 calls {what}: it will wait there for the others",
            expected=f"{what} on every rank; who writes is decided inside",
            seen=f"rank 0: {calls[0]}, rank 1: {calls[1]}",
        )
