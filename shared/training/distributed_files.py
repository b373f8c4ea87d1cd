"""Folders of torch.distributed.checkpoint, read without running what somebody put in them.

torch reads its own format with pickle: the list of what is there (`.metadata`), and every value
that is no tensor. Pickle calls whatever a file names. Here it finds the classes of such a list
and nothing else, sets attributes of their instances alone, and values are read by `weights_only`.
"""

import dataclasses
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem

from shared.ranks.group import current_rank, current_world_size
from shared.training.checkpoint_files import checksums_hold

CLASSES = {
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,  # where it was written, on whatever system
    ("pathlib", "WindowsPath"): PureWindowsPath,
    ("torch", "Size"): torch.Size,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    # By a name it finds one of torch's layouts, and nothing else.
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in ("_MEM_FORMAT_ENCODING", *metadata.__all__)
    },
}
BUILD = pickle.BUILD[0]


class _Unpickler(pickle._Unpickler):  # in Python: in C's nobody can change what BUILD does
    """Finds the classes of a checkpoint's list, and torch's dtypes."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _build(self: Any) -> None:
        """Set attributes; UnpicklingError where they are a class's, or of another shared object."""
        kind = type(self.stack[-2])
        if not dataclasses.is_dataclass(kind) or kind not in CLASSES.values():
            raise pickle.UnpicklingError(f"it sets attributes of a {kind.__name__}")
        pickle._Unpickler.dispatch[BUILD](self)

    dispatch[BUILD] = _build

    def find_class(self, module: str, name: str) -> Any:
        """Raises UnpicklingError for everything else, which could run code."""
        module = "pathlib" if module == "pathlib._local" else module  # from Python 3.13 on
        dtype = vars(torch).get(name) if module == "torch" else None
        found = dtype if isinstance(dtype, torch.dtype) else CLASSES.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is not read: it could run code"
            )
        return found


class Reader(dcp.FileSystemReader):
    """torch's reader, but for what it unpickles."""

    def read_metadata(self, *_args: Any, **_of_rank: Any) -> metadata.Metadata:
        """What the folder holds; raises UnpicklingError where that is no list of tensors.

        torch asks for a list of each rank's own where there is a parameter called `kwargs`.
        """
        with Path(self._get_metadata_path()).open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, metadata.Metadata) or not _is_whole(found):
            raise pickle.UnpicklingError("its .metadata is no list of what the folder holds")
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


class _Planner(dcp.DefaultLoadPlanner):
    """torch's planner, but for how values are read that are no tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place: what is left of it once only plain values were read."""
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_distributed(state: dict[str, Any], folder: Path) -> None:
    """Fill `state` from a folder that torch.distributed.checkpoint wrote; a collective.

    Raises CheckpointException where it cannot be read, or holds more than tensors and plain values.
    """
    dcp.load(state, storage_reader=Reader(folder), planner=_Planner())


def damage_of(folder: Path) -> str:
    """Why this rank's share of a folder's values cannot be trusted; "" where it can.

    Each lies in its file as torch.save wrote it.
    """
    try:
        places = dict[Any, Any](Reader(folder).read_metadata().storage_data)
    except Exception as error:  # whatever torch raises for what is no checkpoint
        return f"cannot be read ({type(error).__name__}: {error})"
    for index, place in sorted(places.items(), key=str)[current_rank() :: current_world_size()]:
        try:
            with (folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                value = file.read(place.length)
        except OSError as error:
            return f"cannot be read: {place.relative_path}: {error.strerror}"
        if len(value) < place.length:
            return f"is cut short: {index.fqn} is not whole in {place.relative_path}"
        if not place.transform_descriptors and not checksums_hold(io.BytesIO(value)):
            return f"is damaged: {index.fqn} in {place.relative_path} is not what was saved"
    return ""


def _is_whole(found: metadata.Metadata) -> bool:
    """Whether a list has what torch looks for in it, in files of the folder alone."""
    held, places = found.state_dict_metadata, found.storage_data
    kinds = metadata.TensorStorageMetadata | metadata.BytesStorageMetadata
    return (
        isinstance(held, Mapping)
        and isinstance(places, Mapping)
        and all(isinstance(entry, kinds) for entry in held.values())
        and all(isinstance(place, _StorageInfo) for place in places.values())
        and all(Path(place.relative_path).name == place.relative_path for place in places.values())
    )
