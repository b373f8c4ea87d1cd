"""A trained translator on disk: written whole or not at all, refused with a reason when unsound."""

import contextlib
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from shared.errors import InputError

PLAIN = (int, float, bool, str, bytes, type(None), torch.Size, torch.dtype)
PART = ".part"  # the end of a name that says: being written
MARK = "torch-handle checkpoint 1"  # the number changes when older files can no longer be read


def write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Save tensors, numbers and strings so that `path` is at every moment either old or new.

    {"mark": MARK, **content} is written by torch.save aside in the same folder (which is made if
    it is not there), flushed to the disk and then renamed: a rename within one file system
    replaces the name in one step (POSIX rename), and the flush comes first because a rename may
    otherwise reach the disk before the data. The folder, which holds the name, is flushed last.
    Call it on one rank only.

    Raises InputError naming `path`, with the old file as it was and nothing left beside it, when
    the disk is full or the folder cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}{PART}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            torch.save({"mark": MARK, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        _flush_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        raise InputError(f"checkpoint {path} cannot be written: {cause_of(error)}") from error
    finally:
        with contextlib.suppress(OSError):  # the reason is in the error that is on its way
            aside.unlink(missing_ok=True)


def cause_of(error: BaseException) -> str:
    """Return what the operating system said, which torch's own errors hide."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return next(iter(str(error).splitlines()), type(error).__name__)


def _flush_folder(folder: Path) -> None:
    """Flush the folder: the new name is an entry of it, and has to reach the disk as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `write_atomically` wrote, with all tensors on the CPU.

    Only tensors and plain values are unpickled (`weights_only`): a checkpoint from elsewhere can
    be wrong, but it cannot run code. Raises InputError when the file is missing, is a folder,
    cannot be opened, is cut short or damaged (checksums are compared), or is some other file.
    """
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the checkpoint file inside it")
    try:
        if zipfile.is_zipfile(path) and not checksums_hold(path):
            raise zipfile.BadZipFile("wrong checksum")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(
            f"there is no checkpoint at {path}: train first, or check the name"
        ) from None
    except Exception as error:  # a few foreign bytes can make an unpickler raise anything
        try:
            why = _why_unreadable(path, error)
        except OSError as refused:  # no permission, or a disk that fails
            why = f"checkpoint {path} cannot be read: {cause_of(refused)}"
        raise InputError(why) from error
    if not isinstance(content, dict) or content.get("mark") != MARK:
        raise InputError(
            f"{path} is a file of PyTorch's, but not one of this course's checkpoints "
            f"({MARK!r} expected in it): give a file that the course's train.py wrote"
        )
    return content


def checksums_hold(file: Path | IO[bytes]) -> bool:
    """Whether a file of torch.save's is whole. Raises OSError where it cannot be opened.

    torch.load does not look at the checksums that torch.save writes: changed bytes in the middle of
    a file would pass as weights.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError):
        return False


def refuse_what_cannot_be_read(content: Any, where: str = "checkpoint") -> None:
    """Raise InputError where `content` holds more than tensors and plain values.

    torch.save would write it, and `read_checkpoint` refuse it: on the day when it is needed.
    A numpy number is a float to most code, and not to the reader.
    """
    if type(content) in (dict, OrderedDict, Counter):
        for name, part in content.items():
            refuse_what_cannot_be_read(name, f"a key of {where}")
            refuse_what_cannot_be_read(part, f"{where}[{name!r}]")
    elif type(content) in (list, tuple):
        for number, part in enumerate(content):
            if type(part) not in (int, float):
                refuse_what_cannot_be_read(part, f"{where}[{number}]")
    elif type(content) not in (Tensor, nn.Parameter, *PLAIN):
        raise InputError(
            f"{where} is a {type(content).__name__}, which could not be read back: save tensors, "
            "numbers, strings, and lists and dicts of these"
        )


def _why_unreadable(path: Path, error: Exception) -> str:
    """Return why, in one line; a zip archive's directory is at its end, so a cut file has none."""
    size = path.stat().st_size
    with path.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    if is_archive and not zipfile.is_zipfile(path):
        return f"{path} is cut short ({size:,} bytes): use an older checkpoint or train again"
    if isinstance(error, pickle.UnpicklingError) and is_archive:
        return (
            f"{path} holds more than tensors and plain values, which is not read: it could run code"
        )
    if is_archive:
        return f"{path} is damaged ({size:,} bytes): use an older checkpoint or train again"
    return f"{path} ({size:,} bytes) is not a checkpoint: give a file that train.py wrote"


def copy_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of the weights on the CPU, which further training does not change."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
