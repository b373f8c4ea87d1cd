"""Who handed in what: a folder or a zip per student, or single notebooks named by the student.

Nothing is unpacked and no link is followed. Notebooks are found by name and read one at a time when
their turn comes: what stays in memory of a class is its exercise cells.
"""

import re
import stat
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shared.errors import InputError
from solutions.grading.intake.archives import (
    IS_LINK,
    NOT_PLAIN,
    Entry,
    files_in_folder,
    files_in_zip,
)
from solutions.grading.intake.notebook import Unreadable

LESSON_FOLDER = re.compile(r"(?:lesson)?(\d\d)_\w+")  # lesson02_attention
LESSON_NAME = re.compile(r"(?:lesson|lektion)?[ _.-]*(\d{1,2})(?:[ _.(-].*)?", re.IGNORECASE)
EXERCISE_IN_JSON = re.compile(rb"@exercise\(\\*[\"'](\d\d)\.")
ENDING = re.compile(
    r"(?:(?:__.*)?\.(ipynb)|\.(zip)|(?:\.tar)?\.(7z|rar|tar|tgz|gz|bz2|xz|zst))\Z", re.I | re.S
)
# How Moodle calls the folders of a download, and Canvas the files: user, LATE, the user's and the
# submission's number, file. (A date that somebody wrote in has fewer digits.)
MOODLE = re.compile(r"(.+)_(\d+)_assignsubmission_(?:file|onlinetext)_?")
CANVAS = re.compile(r"([^_]+)_(?:LATE_)?(\d{3,})_\d{5,}_.+\.\w+", re.DOTALL)
LATE = re.compile(r"[^_]+_LATE_")
JOINERS = "\u200c\u200d"  # within words of Persian or Hindi, and within emoji
NEVER_ONE = (".", "__MACOSX")  # how the names of what systems leave behind begin
MAX_NOTEBOOKS = 200
NOTHING = "no notebook in it"

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
    by_student = _by_student(folder)
    if not by_student:
        raise InputError(
            f"{folder} holds no submission: give a folder with a folder or a zip per student"
        )
    return [_submission(student, paths) for student, paths in sorted(by_student.items())]


def left_out(folder: Path) -> list[str]:
    """Names of files beside the submissions that are none: a list of the class, a note."""
    others = set(_visible(folder)) - set(_sources(folder))
    return sorted(printable(path.name) for path in others)


def late(folder: Path) -> list[str]:
    """What Canvas marks as handed in after the date: a line each."""
    return [
        f"late: {student} ({printable(path.name)})"
        for student, paths in sorted(_by_student(folder).items())
        for path in paths
        if CANVAS.fullmatch(path.name) and LATE.match(path.name)
    ]


def users(folder: Path) -> dict[str, str]:
    """By the number that Canvas has of a user and writes into a file's name: the student."""
    return {
        printable(_name(path)[1]): student
        for student, paths in _by_student(folder).items()
        for path in paths
        if not path.is_dir() and _name(path)[1]
    }


def doubtful_names(folder: Path) -> list[str]:
    """What may be two students taken for one, or one for two: a line for each."""
    lines, alike = [], dict[str, list[str]]()
    for name, numbers in sorted(_numbers(folder).items()):
        if numbers[1:]:
            called = " and ".join(f"{name} {number}" for number in numbers)
            lines.append(f"one name with several numbers: {called}")
    for student, paths in sorted(_by_student(folder).items()):
        alike.setdefault(_outline(student), []).append(student)
        if len(names := {_name(path)[0] for path in paths}) > 1:
            lines.append(f"taken for one student: {' and '.join(map(repr, sorted(names)))}")
    groups = [map(_with_foreign_letters, names) for names in alike.values() if names[1:]]
    return lines + [f"look alike: {' and '.join(names)}" for names in groups]


def _with_foreign_letters(name: str) -> str:
    """The name, and what the letters are called that look like Latin ones and are none."""
    looks_latin = [c for c in dict.fromkeys(name) if not c.isascii() and _outline(c).isascii()]
    names = [unicodedata.name(c, "") for c in looks_latin if _outline(c)]
    called = ", ".join(each for each in names if not each.startswith("LATIN"))
    return f"{name} ({called})" if called else name


def _outline(name: str) -> str:
    """What is left of a name to a quick eye: no case, accents, spaces, marks or digits' twins."""
    plain = unicodedata.normalize("NFKD", name.translate(LOOKS)).casefold()
    return "".join(each for each in plain.translate(LOOKS) if each.isalnum())


def _by_student(folder: Path) -> dict[str, list[Path]]:
    """What is there of each student: "Jo.zip" and "Jo__02.ipynb" are Jo's."""
    found, numbers = dict[str, list[Path]](), _numbers(folder)
    for path in _sources(folder):
        name, number = map(printable, _name(path))
        student = f"{name} {number}" if number and numbers[name][1:] else name
        found.setdefault(student or "(no name)", []).append(path)
    return found


def _numbers(folder: Path) -> dict[str, list[str]]:
    """The numbers that a platform's download gives to who has a name."""
    found: dict[str, set[str]] = {}
    for name, number in (map(printable, _name(path)) for path in _sources(folder)):
        found.setdefault(name, set()).update({number} - {""})
    return {name: sorted(numbers) for name, numbers in found.items()}


def _sources(folder: Path) -> list[Path]:
    if folder.is_file():
        raise InputError(f"{folder} is a file: unpack the zip of a class, and give the folder")
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: give the folder that holds the submissions")
    if any((folder / "lessons").glob("lesson[0-9][0-9]_*")):
        raise InputError(f"{folder} is one copy of the course: give the folder above it")
    return [p for p in _visible(folder) if _kind(p.name) or p.is_dir() or p.is_symlink()]


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith(NEVER_ONE))


def _kind(name: str) -> str:
    """What a file is by its name: "ipynb", "zip", another archive, or ""."""
    found = ENDING.search(name[-9:])  # in a zip a name may have 65,535 characters
    return next(filter(None, found.groups())).lower() if found else ""


def _name(path: Path) -> tuple[str, str]:
    """The name as it is written, without what makes it a file's, and a platform's number or ""."""
    is_folder = path.is_dir()
    download = MOODLE.fullmatch(path.name) or (not is_folder and CANVAS.fullmatch(path.name))
    if download:
        return download[1], download[2]
    return path.name if is_folder else ENDING.sub("", path.name), ""


def printable(name: str) -> str:
    """A name in one line that any terminal and table can show, equal names written equally.

    Letters are composed (NFC), any blank is a space; control characters, bytes that are no text and
    marks that turn the direction of writing are shown as escapes.
    """
    composed = re.sub(r"\s", " ", unicodedata.normalize("NFC", name).strip())
    return "".join(c if c.isprintable() or c in JOINERS else f"\\x{ord(c):02x}" for c in composed)


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
    for entry in entries:
        by_lesson.setdefault(_lesson_number(entry), []).append(entry)
    unknown = by_lesson.pop("", [])
    if not by_lesson and not problems:
        problems[""] = _nothing(unknown)
    notebooks: dict[str, Entry] = {}
    for number, candidates in sorted(by_lesson.items()):
        if problem := _conflict(candidates):
            problems[number] = problem
        else:
            notebooks[number] = candidates[0]
    return Submission(student, paths[0], notebooks, problems)


def _entries(path: Path) -> list[Entry]:
    """The notebooks in one folder, zip or file; Unreadable where it cannot be looked into."""
    files = _files(path)
    # What editors and systems keep in hidden folders is no notebook.
    notebooks = [
        each
        for each in files
        if _kind(each.name) == "ipynb"
        and not any(part.startswith(NEVER_ONE) for part in PurePosixPath(each.name).parts)
    ]
    if len(notebooks) > MAX_NOTEBOOKS:
        raise Unreadable(f"it holds {len(notebooks)} notebooks; at most {MAX_NOTEBOOKS} are read")
    archives = [each for each in files if _kind(each.name) not in ("", "ipynb")]
    if notebooks or not (others := archives or [each for each in files if each.problem == IS_LINK]):
        return notebooks
    if path.is_dir() and len(archives) == 1 and _kind(archives[0].name) == "zip":
        return _entries(archives[0].where)  # a folder per student with the zip that came
    what = "another archive: unpack it once" if archives else "a link, and none is followed"
    raise Unreadable(f"no notebook in it, and {_shown(others[0])} is {what}")


def _files(path: Path) -> list[Entry]:
    mode, kind = path.lstat().st_mode, _kind(path.name)
    if stat.S_ISDIR(mode):
        return files_in_folder(path)
    if not stat.S_ISREG(mode):
        raise Unreadable(IS_LINK if stat.S_ISLNK(mode) else NOT_PLAIN)
    if kind == "zip":
        return files_in_zip(path)
    if kind == "ipynb":
        return [Entry(path.name, path)]
    raise Unreadable(f"it is a {kind} archive: hand in a zip")


def _lesson_number(entry: Entry) -> str:
    """The lesson's number by folder, by name or, failing both, by the exercises in it; else ""."""
    path = PurePosixPath(entry.name)
    stem = path.stem
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
    first, *others = candidates
    try:
        content = first.read() if others else b""
        if all(each.read() == content for each in others):
            return ""
    except Unreadable:
        pass  # then nobody knows whether they are equal
    names = " and ".join(_shown(each) for each in candidates[:3])
    zipped = ", or unpack the zip of a class" if first.member is not None else ""
    return f"{len(candidates)} notebooks for one lesson ({names}): keep one{zipped}"


def _nothing(unknown: list[Entry]) -> str:
    """Why there is no notebook for any lesson."""
    if not unknown:
        return NOTHING
    if unknown[0].problem:
        return f"{_shown(unknown[0])}: {unknown[0].problem}"
    names = ", ".join(map(_shown, unknown[:3]))
    return f"no notebook in it that belongs to a lesson (found {names}): name it like 02.ipynb"


def _shown(entry: Entry) -> str:
    name = printable(entry.name)
    inside = "" if entry.member is None else f" in {printable(entry.where.name)[:60]}"
    return (name if len(name) <= 60 else f"...{name[-57:]}") + inside
