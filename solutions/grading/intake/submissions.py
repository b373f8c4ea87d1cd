"""Who handed in what: a folder or a zip per student, or single notebooks named by the student.

Nothing is unpacked and no link is followed. Notebooks are found by name and read one at a time when
their turn comes, so that a class takes no more memory than a student.
"""

import hashlib
import re
import stat
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shared.errors import InputError
from solutions.grading.intake.archives import IS_LINK, Entry, files_in_folder, files_in_zip
from solutions.grading.intake.notebook import Unreadable
from solutions.grading.texts import TURNING

LESSON_FOLDER = re.compile(r"(\d\d)_\w+")  # 02_attention
LESSON_NAME = re.compile(r"(?:lesson|lektion)?[ _.-]*(\d{1,2})(?:[ _.(-].*)?", re.IGNORECASE)
EXERCISE_IN_JSON = re.compile(rb"@exercise\(\\*[\"'](\d\d)\.")
OTHER_ARCHIVES = (".7z", ".rar", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")
MAX_NOTEBOOKS = 200
# Control characters, halves of characters, characters of no known kind, line and paragraph breaks.
HIDDEN = ("Cc", "Cs", "Cn", "Zl", "Zp")

# Letters of other scripts, and digits, that look like Latin ones.
LOOKS = str.maketrans(
    "АВЕКМНОРСТУХаеорсухіјѕΑΒΕΖΗΙΚΜΝΟΡΤΥΧο01lI|", "ABEKMHOPCTYXaeopcyxijsABEZHIKMNOPTYXooiiii"
)


@dataclass(frozen=True)
class Submission:
    """What one student handed in: a notebook for some lessons, a reason for others.

    `problems` has reasons by lesson number; under "" stands what concerns all of it.
    """

    student: str
    source: Path
    notebooks: Mapping[str, Entry]
    problems: Mapping[str, str]


def find_submissions(folder: Path) -> list[Submission]:
    """All submissions in a folder, by the students' names.

    Raises InputError when there is no such folder, nothing in it, or it is one student's itself.
    """
    sources = _sources(folder)
    by_student: dict[str, list[Path]] = {}
    for path in sources:
        by_student.setdefault(_student(path), []).append(path)
    if not by_student:
        raise InputError(
            f"{folder} holds no submission: give a folder with a folder or a zip per student"
        )
    return [_submission(student, paths) for student, paths in sorted(by_student.items())]


def left_out(folder: Path) -> list[str]:
    """Names of files beside the submissions that are none: a list of the class, a note."""
    taken = set(_sources(folder))
    return sorted(
        printable(path.name)
        for path in folder.iterdir()
        if path not in taken and not path.name.startswith((".", "__MACOSX"))
    )


def doubtful_names(folder: Path) -> list[str]:
    """What may be two students taken for one, or one for two: a line for each."""
    written: dict[str, set[str]] = {}
    for path in _sources(folder):
        written.setdefault(_student(path), set()).add(_name(path))
    lines = [
        f"taken for one student: {' and '.join(map(repr, sorted(names)))}"
        for names in written.values()
        if len(names) > 1
    ]
    alike: dict[str, list[str]] = {}
    for student in sorted(written):
        alike.setdefault(_outline(student), []).append(student)
    lines += [f"look alike: {' and '.join(each)}" for each in alike.values() if len(each) > 1]
    return [printable(line) for line in lines]


def _outline(name: str) -> str:
    """What is left of a name to a quick eye: no case, accents, spaces, marks or digits' twins."""
    plain = unicodedata.normalize("NFKD", name.translate(LOOKS)).casefold()
    return "".join(each for each in plain.translate(LOOKS) if each.isalnum())


def _sources(folder: Path) -> list[Path]:
    if folder.is_file():
        raise InputError(f"{folder} is a file: unpack the zip of a class, and give the folder")
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: give the folder that holds the submissions")
    if any((folder / "lessons").glob("[0-9][0-9]_*")):
        raise InputError(f"{folder} is one copy of the course: give the folder above it")
    paths = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX"))]
    endings = (".zip", ".ipynb", *OTHER_ARCHIVES)
    return sorted(
        path
        for path in paths
        if path.name.lower().endswith(endings) or path.is_dir() or path.is_symlink()
    )


def _student(path: Path) -> str:
    """A student's name by the name of the folder or file: "Jo.zip" and "Jo__02.ipynb" are Jo's."""
    return printable(_name(path)) or "(no name)"


def _name(path: Path) -> str:
    """The name as it is written, without what makes it a file's."""
    name = path.name
    if not path.is_dir():
        for ending in (".ipynb", ".zip", *OTHER_ARCHIVES, ".tar"):
            if name.lower().endswith(ending):
                name = name[: -len(ending)]
    if path.suffix.lower() == ".ipynb" and not path.is_dir():
        name = name.split("__")[0]
    return name


def printable(name: str) -> str:
    """A name in one line that any terminal and table can show, equal names written equally.

    Letters are composed (NFC); line breaks, control characters, bytes that are no text and marks
    that turn the direction of writing are shown as escapes.
    """
    return "".join(map(_visible, unicodedata.normalize("NFC", name).strip()))


def _visible(character: str) -> str:
    """The character, or an escape for one that is hidden or turns the direction of writing."""
    hidden = unicodedata.category(character) in HIDDEN or character in TURNING
    return f"\\x{ord(character):02x}" if hidden else character


def _submission(student: str, paths: list[Path]) -> Submission:
    """Bring together what is there of one student; twice the same notebook is once."""
    problems: dict[str, str] = {}
    entries: list[Entry] = []
    for path in paths:
        try:
            entries += _entries(path)
        except (Unreadable, OSError) as reason:
            problems[""] = f"{printable(path.name)[:60]}: {reason}"
    by_lesson: dict[str, list[Entry]] = {}
    unknown = []
    for entry in entries:
        if number := _lesson_number(entry):
            by_lesson.setdefault(number, []).append(entry)
        else:
            unknown.append(entry)
    notebooks: dict[str, Entry] = {}
    for number, candidates in sorted(by_lesson.items()):
        if problem := _conflict(candidates):
            problems[number] = problem
        else:
            notebooks[number] = candidates[0]
    if not by_lesson and "" not in problems:
        problems[""] = _nothing(unknown)
    return Submission(student, paths[0], notebooks, problems)


def _entries(path: Path) -> list[Entry]:
    """The notebooks in one folder, zip or file; Unreadable where it cannot be looked into."""
    files = _files(path)
    notebooks = _notebooks(files)
    archives = [each for each in files if each.name.lower().endswith((".zip", *OTHER_ARCHIVES))]
    if not notebooks and path.is_dir() and len(archives) == 1 and archives[0].name.endswith(".zip"):
        return _entries(archives[0].where)  # a folder per student with the zip that came
    if not notebooks and archives:
        shown = _shown(archives[0])
        raise Unreadable(f"no notebook, only another archive in it ({shown}): unpack it once")
    if not notebooks and (links := [each for each in files if each.problem == IS_LINK]):
        raise Unreadable(f"no notebook in it; {_shown(links[0])} is a link, and none is followed")
    if len(notebooks) > MAX_NOTEBOOKS:
        raise Unreadable(f"it holds {len(notebooks)} notebooks; at most {MAX_NOTEBOOKS} are read")
    return notebooks


def _files(path: Path) -> list[Entry]:
    mode = path.lstat().st_mode
    name = path.name.lower()
    if stat.S_ISLNK(mode):
        raise Unreadable(IS_LINK)
    if stat.S_ISDIR(mode):
        return files_in_folder(path)
    if not stat.S_ISREG(mode):
        raise Unreadable("it is no plain file")
    if name.endswith(".zip"):
        return files_in_zip(path)
    if name.endswith(".ipynb"):
        return [Entry(path.name, path)]
    raise Unreadable(f"it is a {path.suffix} archive: hand in a zip")


def _notebooks(files: Iterable[Entry]) -> list[Entry]:
    """The notebooks among files; what editors and systems keep in hidden folders is none."""
    found = []
    for each in files:
        parts = PurePosixPath(each.name).parts
        hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)
        if each.name.lower().endswith(".ipynb") and not hidden:
            found.append(each)
    return found


def _lesson_number(entry: Entry) -> str:
    """The lesson's number by folder, by name or, failing both, by the exercises in it; else ""."""
    path = PurePosixPath(entry.name)
    stem = path.name[: -len(".ipynb")]
    if "__" in stem and entry.where.name == entry.name:  # Jo__02.ipynb
        stem = stem.split("__", 1)[1]
    folder = LESSON_FOLDER.fullmatch(path.parent.name)
    if folder and stem.lower().startswith("lesson"):
        return folder.group(1)
    if match := LESSON_NAME.fullmatch(stem):
        return match.group(1).zfill(2)
    try:
        numbers = {number.decode() for number in EXERCISE_IN_JSON.findall(entry.read())}
    except Unreadable:
        return ""
    return numbers.pop() if len(numbers) == 1 else ""


def _conflict(candidates: list[Entry]) -> str:
    """Why none of several notebooks for one lesson can be taken; "" where one can."""
    if len(candidates) == 1:
        return ""
    names = " and ".join(_shown(each) for each in candidates[:3])
    try:
        same = len({hashlib.sha256(each.read()).digest() for each in candidates}) == 1
    except Unreadable:
        same = False
    zipped = ", or unpack the zip of a class" if candidates[0].member is not None else ""
    return "" if same else f"{len(candidates)} notebooks for one lesson ({names}): keep one{zipped}"


def _nothing(unknown: list[Entry]) -> str:
    if not unknown:
        return "no notebook in it"
    if unknown[0].problem:
        return f"{_shown(unknown[0])}: {unknown[0].problem}"
    names = ", ".join(map(_shown, unknown[:3]))
    return f"no notebook in it that belongs to a lesson (found {names}): name it like 02.ipynb"


def _shown(entry: Entry) -> str:
    name = printable(entry.name)
    inside = "" if entry.member is None else f" in {printable(entry.where.name)[:60]}"
    return (name if len(name) <= 60 else f"...{name[-57:]}") + inside
