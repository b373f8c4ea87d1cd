"""The files of one submission, in a folder or a zip, read in place and within bounds."""

import os
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from solutions.grading.intake.notebook import MAX_BYTES, Unreadable

MAX_ENTRIES = 20_000
MAX_DEPTH = 12
MAX_ZIP = 200_000_000
MAX_UNPACKED = 4_000_000_000
DIRECTORY_ENTRY = b"PK\x01\x02"  # each file of a zip has one in the directory at its end
ENCRYPTED = 0x1
IS_LINK = "it is a link; links are not followed"
WITHIN = ("site-packages", "node_modules", "__pycache__", "__MACOSX")  # no hand-written file


@dataclass(frozen=True)
class Entry:
    """One file: its name within the submission, where it lies, and why it cannot be read.

    `member` is the place in the directory of the zip `where`; None for a file of its own.
    """

    name: str
    where: Path
    member: int | None = None
    problem: str = ""

    def read(self) -> bytes:
        """The whole file. Raises Unreadable with the reason."""
        if self.problem:
            raise Unreadable(self.problem)
        try:
            content = self._read_file() if self.member is None else self._read_member()
        except Unreadable:
            raise
        except Exception as error:  # zipfile lets zlib's, struct's and its own errors through
            raise Unreadable(f"it cannot be read ({type(error).__name__}: {error})") from None
        if len(content) > MAX_BYTES:
            raise Unreadable(f"it is larger than {MAX_BYTES // 10**6} MB")
        return content

    def _read_file(self) -> bytes:
        # Opened without following a link and without waiting for a pipe's other end.
        with open(os.open(self.where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Unreadable("it is no plain file")
            return file.read(MAX_BYTES + 1)

    def _read_member(self) -> bytes:
        assert self.member is not None, f"{self.name} is in no zip"
        with zipfile.ZipFile(self.where) as archive:
            member = archive.infolist()[self.member]
            with archive.open(member) as file:
                return file.read(MAX_BYTES + 1)


def files_in_folder(folder: Path) -> list[Entry]:
    """The files below a folder in order of their names; hidden folders and links are not entered.

    A link is an entry with a problem. Raises Unreadable for a folder of too many files.
    """
    return sorted(_walk(folder, folder, 0, [0]), key=lambda entry: entry.name)


def _walk(top: Path, folder: Path, depth: int, seen: list[int]) -> Iterator[Entry]:
    try:
        children = list(os.scandir(folder))
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from None
    seen[0] += len(children)
    if seen[0] > MAX_ENTRIES:
        raise Unreadable(f"it holds more than {MAX_ENTRIES} files: hand in the notebooks alone")
    for child in children:
        path = Path(child.path)
        name = path.relative_to(top).as_posix()
        if child.is_symlink():
            yield Entry(name, path, problem=IS_LINK)
        elif child.is_dir(follow_symlinks=False):
            hidden = child.name.startswith(".") or child.name in WITHIN
            if not hidden and depth < MAX_DEPTH:
                yield from _walk(top, path, depth + 1, seen)
        else:
            yield Entry(name, path)


def files_in_zip(path: Path) -> list[Entry]:
    """The files in a zip in order of their names; nothing is unpacked.

    Raises Unreadable when it is no zip, is too large, or has a name that leads out of it.
    """
    if path.stat().st_size > MAX_ZIP:
        size = path.stat().st_size / 1e6
        raise Unreadable(f"the zip has {size:.0f} MB; at most {MAX_ZIP // 10**6} are read")
    if _num_entries(path) > MAX_ENTRIES:
        raise Unreadable(f"the zip holds more than {MAX_ENTRIES} files: hand in notebooks alone")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # whatever a damaged directory makes zipfile raise
        raise Unreadable(f"no zip, or a damaged one ({type(error).__name__}: {error})") from None
    total = sum(member.file_size for member in members)
    if total > MAX_UNPACKED:
        raise Unreadable(f"the zip would unpack to {total / 1e9:.0f} GB")
    for member in members:
        name = member.filename
        if name.startswith(("/", "\\")) or ".." in PurePosixPath(name.replace("\\", "/")).parts:
            raise Unreadable(f"the zip holds the path {name[:60]!r}, which leads out of its folder")
    entries = [
        Entry(member.filename, path, place, _member_problem(member))
        for place, member in enumerate(members)
        if not member.is_dir()
    ]
    return sorted(entries, key=lambda entry: entry.name)


def _num_entries(path: Path) -> int:
    """At least the number of files in a zip, counted without reading its directory into memory."""
    count, tail = 0, b""
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            count += (tail + chunk).count(DIRECTORY_ENTRY)
            tail = chunk[-3:]
    return count


def _member_problem(member: zipfile.ZipInfo) -> str:
    if stat.S_ISLNK(member.external_attr >> 16):
        return IS_LINK
    if member.flag_bits & ENCRYPTED:
        return "it is encrypted: hand in a zip without a password"
    if member.file_size > MAX_BYTES:
        size = member.file_size / 1e6
        return f"it would unpack to {size:.0f} MB; at most {MAX_BYTES // 10**6} are read"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "it is packed in another way than deflate: hand in an ordinary zip"  # no bound there
    return ""
