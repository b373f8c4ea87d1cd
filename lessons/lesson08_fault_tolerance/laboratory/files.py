"""Files under observation, full disks, and processes that die while they write."""

import functools
import io
import os
import re
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from lessons.lesson08_fault_tolerance.laboratory.small_runs import MARK, content_of
from shared.exercises.on_ranks import on_one_rank
from shared.fault_tolerance.state import TrainingState
from shared.ranks.failures import RankFailed


def in_a_folder(check: Callable[[Any, Path], None]) -> Callable[[Any], None]:
    """Give a check an empty folder of its own as its second argument."""

    @functools.wraps(check)
    def with_folder(answer: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="check_08_") as folder:
            check(answer, Path(folder))

    return with_folder


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; empty where there is none."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the files step_NNNNNNNN.pt in a folder."""
    found = (re.fullmatch(r"step_(\d{8})\.pt", name) for name in names_in(folder))
    return [int(each[1]) for each in found if each]


def some_content(value: int) -> dict[str, Any]:
    """Return enough bytes that they do not all wait in a buffer."""
    return {"value": value, "weights": torch.full((5000,), float(value))}


def old_file_in(folder: Path) -> Path:
    """Return the path of a sound file, which holds the value 1, in a folder of its own."""
    path = folder / "run" / "last.pt"
    path.parent.mkdir()
    torch.save({"mark": MARK, **some_content(1)}, path)
    return path


def value_in(path: Path) -> str:
    """Return, in words, which value the file of a name holds."""
    if not path.exists():
        return "no file"
    try:
        return f"the value {torch.load(path, weights_only=True)['value']}"
    except Exception as error:  # whatever half a file makes the reader raise
        return f"{path.stat().st_size} bytes that cannot be read ({type(error).__name__})"


def read(path: Path) -> tuple[Any, str]:
    """Return what a file holds, read as `read_checkpoint` reads it, or what makes it unreadable."""
    try:
        return torch.load(path, weights_only=True), ""
    except Exception as error:
        strange = re.search(r"GLOBAL (\S+)", str(error))
        return None, strange[1] if strange else type(error).__name__


def raised(kind: type[OSError], act: Callable[..., Any], *args: Any) -> str:
    """Act, and return an error of that kind, or one made from it, in short; "" for none."""
    try:
        act(*args)
    except kind as error:
        return f"{type(error).__name__}: {error.strerror}"
    except ValueError as error:
        if not isinstance(error.__context__, kind):
            raise
        return f"{type(error).__name__} from {type(error.__context__).__name__}"
    return ""


# Processes that die


class Deadly:
    """A value whose saving is the end of the process."""

    def __reduce__(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def let_die(act: Callable[..., Any], *args: Any) -> None:
    """Act in a process of its own, which may be killed."""
    try:
        on_one_rank(lambda: act(*args), timeout=30)
    except RankFailed as failed:
        if failed.signal != "SIGKILL":
            raise


def save_and_die(save: Callable[..., Any], folder: Path, state: TrainingState) -> None:
    """Save; the process is killed after half of the bytes."""
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

    with mock.patch.object(torch, "save", torn):
        save(folder, state)


def on_a_full_disk(act: Callable[..., Any], *args: Any) -> tuple[bool, str]:
    """Return whether a ValueError was raised where no file may grow beyond 4 KiB, and its words.

    It happens in a process of its own, whose limit on file sizes stands for the end of the disk.
    """

    def limited() -> tuple[bool, str]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            act(*args)
        except ValueError as error:
            return True, str(error)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return False, "no error"

    return on_one_rank(limited, timeout=30)


@dataclass(frozen=True)
class Order:
    """What happened to a file and its folder, in order, and the sizes at the rename."""

    events: list[
        str
    ]  # "opened", "removed", "moved away": the final name; "flushed", "renamed", "folder flushed"
    flushed: int | None = None  # bytes that the file aside had at its last os.fsync
    size: int = 0  # bytes that it had when it was renamed
    same_folder: bool = True  # whether it lay in the folder of the final name

    @property
    def afterwards(self) -> list[str]:
        """What came after the rename."""
        at = self.events.index("renamed") if "renamed" in self.events else len(self.events)
        return self.events[at:]

    @property
    def in_words(self) -> str:
        """The events; the folder and the bytes where they are not as they should be."""
        words = f"{', '.join(self.events)}"
        if not self.same_folder:
            words += "; renamed from another folder"
        if "renamed" in self.events and self.flushed not in (None, self.size):
            words += f"; {self.flushed} of {self.size} bytes in the file at os.fsync"
        return words


def order_of(path: Path, act: Callable[[], Any]) -> Order:
    """Return what an act does to a file, observed in a process of its own."""
    return on_one_rank(lambda: _observed(path, act), timeout=30)


def _observed(path: Path, act: Callable[[], Any]) -> Order:
    events: list[str] = []
    sizes: dict[str, Any] = {}
    fsync, writing = os.fsync, os.O_WRONLY | os.O_RDWR

    def lies_beside(name: Any, at: int | None) -> bool:
        """Whether a name, absolute or relative to the descriptor `at`, lies in path's folder."""
        folder = os.stat(os.path.dirname(os.fsdecode(name)) or ".", dir_fd=at)
        return os.path.samestat(folder, path.parent.stat())

    def is_final(name: Any, at: int | None) -> bool:
        return Path(os.fsdecode(name)).name == path.name and lies_beside(name, at)

    def note(event: str, args: tuple) -> None:
        if event == "open" and str(args[0]) == str(path) and args[2] & writing:
            events.append("opened")
        if event == "os.remove" and Path(str(args[0])).name == path.name:
            events.append("removed")
        if event == "os.rename":
            source, target, *descriptors = args
            here, there = (None if each == -1 else each for each in descriptors)
            if is_final(target, there):
                size = os.stat(source, dir_fd=here).st_size
                events.append("renamed")
                sizes.update(size=size, same_folder=lies_beside(source, here))
            if is_final(source, here):
                events.append("moved away")

    def noted_fsync(descriptor: Any) -> None:
        status = os.fstat(descriptor if isinstance(descriptor, int) else descriptor.fileno())
        is_folder = os.path.samestat(status, path.parent.stat())
        events.append("folder flushed" if is_folder else "flushed")
        if not is_folder and "renamed" not in events:
            sizes.update(flushed=status.st_size)
        fsync(descriptor)

    sys.addaudithook(note)
    with mock.patch.object(os, "fsync", noted_fsync):
        act()
    return Order(list(events), **sizes)


# Checkpoints, sound and otherwise


def write_checkpoint(folder: Path, state: TrainingState, **changes: Any) -> Path:
    """Return the path of a checkpoint as the contract has it, but for the changes."""
    path = folder / f"step_{state.step:08d}.pt"
    torch.save({**content_of(state), **changes}, path)
    return path


class Intruder:
    """A value that runs code when it is unpickled: here it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def add_unsound(folder: Path, state: TrainingState) -> list[str]:
    """Put newer files beside a checkpoint, each unsound in its own way; return their names."""
    (folder / "step_00000007.pt").write_text("my notes\n")
    torch.save({"weights": torch.zeros(3)}, folder / "step_00000008.pt")
    cut = folder / "step_00000009.pt"
    torch.save({**content_of(state), "step": 9}, cut)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    torch.save({"mark": MARK, "more": Intruder(folder / "ran")}, folder / "step_00000010.pt")
    torch.save({"mark": MARK, "model": {}, "step": 11}, folder / "step_00000011.pt")  # no origin
    damaged = folder / "step_00000012.pt"
    torch.save({**content_of(state), "step": 12}, damaged)
    whole = damaged.read_bytes()
    weights = next(state.model.parameters()).detach().numpy().tobytes()
    place = whole.index(weights)  # tensors lie in the file as they are
    damaged.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    return [f"step_{step:08d}.pt" for step in (7, 8, 9, 10, 11, 12)]


@dataclass(frozen=True)
class Loaded:
    """How a load ended: what it returned, its warnings, and the error that it raised."""

    path: Any
    warnings: list[str]
    error: Exception | None

    @property
    def refused(self) -> bool:
        """Whether it raised a ValueError, as an InputError is."""
        return isinstance(self.error, ValueError)

    @property
    def said(self) -> str:
        """The error in short; "" for none."""
        return f"{type(self.error).__name__}: {in_short(str(self.error))}" if self.error else ""

    def returned(self) -> Any:
        """Return the path; raise the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.path


def load(load_checkpoint: Callable[..., Any], folder: Path, state: TrainingState) -> Loaded:
    """Return how an answer's load ended."""
    path, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            path = load_checkpoint(folder, state)
        except NotImplementedError:
            raise
        except Exception as raised:
            error = raised
    return Loaded(path, [str(each.message) for each in caught], error)


def in_short(value: Any) -> str:
    """Return a few characters of any value."""
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:77]}..."
