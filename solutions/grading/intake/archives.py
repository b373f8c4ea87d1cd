"""The files of one submission, in a folder or a zip, read in place and within bounds."""

import os
import stat
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from solutions.grading.intake.notebook import Unreadable

MAX_BYTES = 20_000_000
MAX_ENTRIES = 20_000
MAX_DEPTH = 12
MAX_ZIP = 200_000_000
DIRECTORY_ENTRY = b"PK\x01\x02"  # each file of a zip has one in the directory at its end
ENCRYPTED = 0x1
IS_LINK = "it is a link; links are not followed"
NOT_PLAIN = "it is no plain file"
NOT_ENTERED = (".", "site-packages", "node_modules", "__pycache__", "__MACOSX")  # how names begin


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
            content = self._read_file() if self.member is None else self._read_member(self.member)
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
                raise Unreadable(NOT_PLAIN)
            return file.read(MAX_BYTES + 1)

    def _read_member(self, member: int) -> bytes:
        with (
            zipfile.ZipFile(self.where) as archive,
            archive.open(archive.infolist()[member]) as file,
        ):
            return file.read(MAX_BYTES + 1)


def files_in_folder(folder: Path) -> list[Entry]:
    """The files below a folder in order of their names; hidden folders and links are not entered.

    A link is an entry with a problem. Raises Unreadable for a folder of too many files.
    """
    entries, num_seen = [], 0
    for here, folders, files in os.walk(folder, onerror=_refuse):
        num_seen += len(folders) + len(files)
        if num_seen > MAX_ENTRIES:
            raise Unreadable(f"it holds more than {MAX_ENTRIES} files: hand in notebooks alone")
        links = [name for name in (*folders, *files) if Path(here, name).is_symlink()]
        for name in {*links, *files}:
            path, problem = Path(here, name), IS_LINK if name in links else ""
            entries.append(Entry(path.relative_to(folder).as_posix(), path, problem=problem))
        deep = len(Path(here).relative_to(folder).parts) == MAX_DEPTH
        folders[:] = [each for each in folders if not deep and not each.startswith(NOT_ENTERED)]
    return sorted(entries, key=lambda entry: entry.name)


def _refuse(error: OSError) -> None:
    raise Unreadable(f"it cannot be read: {error.strerror}")


def files_in_zip(path: Path) -> list[Entry]:
    """The files in a zip in order of their names; nothing is unpacked.

    Raises Unreadable when it is no zip, is too large, or has a name that leads out of it.
    """
    if (size := path.stat().st_size) > MAX_ZIP:
        raise Unreadable(f"the zip has {size // 10**6} MB; at most {MAX_ZIP // 10**6} are read")
    with open(path, "rb") as file:  # counted before zipfile makes an object of each
        parts = iter(partial(file.read, 1 << 20), b"")
        num_files = sum(part.count(DIRECTORY_ENTRY) for part in parts)
    if num_files > MAX_ENTRIES:
        raise Unreadable(f"the zip holds more than {MAX_ENTRIES} files: hand in notebooks alone")
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except Exception as error:  # whatever a damaged directory makes zipfile raise
        raise Unreadable(f"no zip, or a damaged one ({type(error).__name__}: {error})") from None
    for name in (member.filename for member in members):
        if name.startswith(("/", "\\")) or ".." in PurePosixPath(name.replace("\\", "/")).parts:
            raise Unreadable(f"the zip holds the path {name[:60]!r}, which leads out of its folder")
    entries = [
        Entry(member.filename, path, place, _member_problem(member))
        for place, member in enumerate(members)
        if not member.is_dir()
    ]
    return sorted(entries, key=lambda entry: entry.name)


def _member_problem(member: zipfile.ZipInfo) -> str:
    if stat.S_ISLNK(member.external_attr >> 16):
        return IS_LINK
    if member.flag_bits & ENCRYPTED:
        return "it is encrypted: hand in a zip without a password"
    if member.file_size > MAX_BYTES:
        size = member.file_size // 10**6
        return f"it would unpack to {size} MB; at most {MAX_BYTES // 10**6} are read"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "it is packed in another way than deflate: hand in an ordinary zip"  # no bound there
    return ""
