"""Write the course as a class gets it: what git has at HEAD, without the answers.

    python -m solutions.student_edition DIR
    python -m solutions.student_edition DIR --through 10

DIR is made, or must be empty; .gitattributes says what is left out. What was written is then
searched for answers. With --through a class gets lessons 01 to 10 with what lessons 01 to 09 left
in shared/ and no answer of lesson 10; the next week's edition goes over it, and leaves notebooks.
"""

import argparse
import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from shared.errors import InputError
from shared.exercises.cells import EDITION, code_of
from solutions.answers_held import answers_held
from solutions.built import NEEDED_BEFORE
from solutions.grading.intake.class_edition import ClassEdition
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.lesson import read_exercises

ROOT = Path(__file__).resolve().parents[1]
NEEDS_ANSWERS = re.compile(r"^\s*(?:from|import) solutions\b", re.MULTILINE)
# After one of these, solutions stands for the learner's answers where it is missing.
GUARD = re.compile(r"^from shared(?: import script|\.script|\.exercises\.mine)\b", re.MULTILINE)
NOTEBOOK = re.compile(r"lessons/lesson\d\d_\w+/lesson\.ipynb")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
WHOLE = """
> **This is the student edition: without `solutions/`.** The answers of earlier lessons are in
> `shared/`, since later lessons are built on them, and so are most of the lesson's that you are in.
> `check` says so when an answer only takes, or derives from, the course's own. The first command
> below sets up, and then says which exercise lesson 01's script waits for: begin with its notebook.
"""
CLASS = """
> **This is the edition through lesson {week:02}: without `solutions/` and later lessons.** In
> `shared/` is what earlier lessons left, with their answers. Where the course has an answer of
> lesson {week:02}, a line stands that takes your own, from the notebook.{early} Take the next
> week's edition by a git merge, or unpack its archive elsewhere and there carry your answers over:
> `./run_all.sh answers THIS_FOLDER`. Over this folder an archive would replace your notebooks.
"""
EARLY = """ These answers can be read all the
> same, since what is here needs them: {}."""


def git(course: Path, *words: str, **env: str) -> bytes:
    """What git says in the course; raises InputError where it fails."""
    command = ["git", "-C", str(course), *words]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, **env})
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise InputError(f"the edition is made from a git checkout, and git says: {said}")
    return done.stdout


def write_edition(folder: Path, course: Path = ROOT, through: int | None = None) -> int:
    """Write the edition into an empty or new folder; return the number of files.

    With `through` the edition through that lesson, which may go over that of an earlier week:
    notebooks that are there stay. Raises InputError, and writes nothing, when the folder or the
    course cannot be used.
    """
    before = _earlier(folder, course, through)
    packed = git(course, "-c", "tar.umask=user", "archive", "--format=tar", "HEAD")
    with tempfile.TemporaryDirectory() as place:
        new = Path(place) / "edition"
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            if "solutions" in archive.getnames():
                raise InputError("at HEAD no .gitattributes leaves solutions/ out of the edition")
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(new)
        if through is None:
            say_first(new, WHOLE)
        else:
            whole = Path(place) / "course"
            index = {"GIT_INDEX_FILE": str(Path(place) / "index")}
            git(course, "read-tree", "HEAD", **index)
            git(course, "checkout-index", "--all", f"--prefix={whole}/", **index)
            cut_down(new, whole, through)
        return _copy(new, folder, before)


def _earlier(folder: Path, course: Path, through: int | None) -> list[str] | None:
    """The files of the earlier week's edition that lies in the folder; None if it is empty."""
    place = folder.resolve()
    if course in (place, *place.parents):
        raise InputError(f"{folder} lies inside the course ({course}): name a folder outside it")
    if place.exists() and not place.is_dir():
        raise InputError(f"{folder} is a file: name a folder")
    if not place.is_dir() or not any(place.iterdir()):
        return None
    if not (place / EDITION).exists():
        raise InputError(f"{folder} is not empty: name a new folder; nothing is overwritten")
    mark = json.loads((place / EDITION).read_bytes())
    if through is not None and through < mark["through"]:
        raise InputError(
            f"{folder} holds the edition through lesson {mark['through']:02}: --through"
            f" {through:02} would take lessons away; name a new folder"
        )
    return mark["files"]


def _copy(new: Path, folder: Path, before: list[str] | None) -> int:
    """Put an edition in its folder, over the earlier one's files; return how many were written."""
    names = [each.relative_to(new).as_posix() for each in new.rglob("*") if each.is_file()]
    for name in {EDITION, *(before or ())} - set(names):
        (folder / name).unlink(missing_ok=True)
    own = {name for name in names if NOTEBOOK.fullmatch(name) and (folder / name).exists()}
    for name in own:
        (new / name).unlink()
    shutil.copytree(new, folder, dirs_exist_ok=True)
    return len(names) - len(own)


def cut_down(edition: Path, course: Path, through: int) -> None:
    """Take out of an edition what belongs to later lessons, and the answers of `through`."""
    known = [int(each.name[6:8]) for each in (course / "lessons").glob("lesson[0-9][0-9]_*")]
    if through not in known:
        there = f"{min(known):02} to {max(known):02}" if known else "none"
        raise InputError(f"--through {through}: there is no such lesson (lessons: {there})")
    later = re.compile("lesson(" + "|".join(f"{n:02}" for n in known if n > through) + ")_")
    parts = ClassEdition(course, through)
    for path in (edition / "lessons").iterdir():
        if path.is_dir() and int(path.name[6:8]) > through:
            shutil.rmtree(path)
    for name, text in parts.files():
        if (edition / name).exists():  # not what .gitattributes leaves out
            (edition / name).unlink() if text is None else (edition / name).write_text(text)
    for path in [*(edition / "tests").rglob("*.py"), *edition.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            path.write_text(LINK.sub(partial(_without_dead, path.parent), text))
        elif path.name == "test_links.py" or later.search(text) or not parts.can_use(text):
            path.unlink()  # pages and notebooks name what comes in later weeks
    early = EARLY.format(" ".join(parts.early)) if parts.early else ""
    say_first(edition, CLASS.format(week=through, early=early))
    files = [each.relative_to(edition).as_posix() for each in edition.rglob("*") if each.is_file()]
    mark = {"through": through, "early": parts.early, "files": sorted(files)}
    mark["answers"] = parts.earlier
    (edition / EDITION).write_text(json.dumps(mark, indent=1))


def _without_dead(folder: Path, link: re.Match[str]) -> str:
    """A link of a page, or its words alone where it leads to what comes in a later week."""
    place = link[2].partition("#")[0]
    dead = place and not re.match(r"[a-z]+:", place) and not (folder / place).exists()
    return link[1] if dead else link[0]


def say_first(edition: Path, words: str) -> None:
    """Put a paragraph below the title of README."""
    page = edition / "README.md"
    title, _, rest = page.read_text(encoding="utf-8").partition("\n")
    page.write_text(f"{title}\n\n{words.strip()}\n{rest}", encoding="utf-8")


def not_committed(course: Path) -> str:
    """A line about changes that are not in the edition; "" where there are none."""
    names = [line[3:] for line in git(course, "status", "--porcelain").decode().splitlines()]
    first = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return f"not committed, so not in the edition: {first} ({len(names)})\n" if names else ""


def read_over(
    edition: Path,
    course: Path = ROOT,
    through: int | None = None,
    left: Collection[str] = (),
) -> Iterator[tuple[str, str]]:
    """Look for answers in the files of the edition; (what was looked at, what is wrong or "").

    `left` are notebooks that were there before and are a learner's own by now.
    """
    places = (path.relative_to(edition) for path in edition.glob("lessons/*/lesson.ipynb"))
    notebooks = [each for each in places if each.as_posix() not in left]
    ours = {each: git(course, "show", f"HEAD:./{each.as_posix()}") for each in notebooks}
    changed = [str(each) for each in notebooks if (edition / each).read_bytes() != ours[each]]
    yield "notebooks and their stored outputs are as they were", "\n".join(changed)
    unguarded = []
    for path in sorted([*edition.rglob("*.py"), *(edition / each for each in notebooks)]):
        source = code_of(path)
        if NEEDS_ANSWERS.search(source) and not GUARD.search(source):
            unguarded.append(str(path.relative_to(edition)))
    yield "nothing imports solutions unguarded", "\n".join(unguarded)
    lessons = read_exercises(edition, [each.parent.name[6:8] for each in notebooks])
    stubs = [pair for each in lessons.values() for pair in each.stubs.items()]
    typed = [id for id, stub in stubs if not _is_empty(stub)]
    yield "every exercise cell is an empty stub", ", ".join(typed)
    answers = [
        each
        for number, lesson in read_exercises(course).items()
        if through is None or int(number) <= through
        for each in KnownAnswers(course, lesson).references()
    ]
    if through is not None:
        week = [
            each
            for each in answers
            if each.exercise.startswith(f"{through:02}.") and each.exercise not in NEEDED_BEFORE
        ]
        held = [f"{name}: {id}" for name, id in answers_held(edition, week)]
        yield f"no file holds the source of an answer of lesson {through:02}", "\n".join(held)
        early = " ".join(json.loads((edition / EDITION).read_bytes())["early"]) or "none"
        yield f"answers that are there before their week, since something needs them: {early}", ""
        answers = [each for each in answers if each not in week]
    stay = " ".join(each.exercise for each in answers if each.module.startswith("shared."))
    yield f"answers that stay, since later lessons import them: {stay}", ""


def _is_empty(stub: str) -> bool:
    """Whether each function of a cell has a docstring at most, and raises NotImplementedError."""
    functions = [node for node in ast.walk(ast.parse(stub)) if isinstance(node, ast.FunctionDef)]
    bodies = [each.body[ast.get_docstring(each) is not None :] for each in functions]
    return {ast.unparse(line) for body in bodies for line in body} == {"raise NotImplementedError"}


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m solutions.student_edition",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    what = "lessons up to this one, without its answers; DIR may hold an earlier week's edition"
    parser.add_argument("--through", type=int, metavar="NN", help=what)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when the edition is written and holds, 1 when not, 2 for bad input."""
    args = make_parser().parse_args(arguments)
    there = args.folder.glob("lessons/*/lesson.ipynb")
    left = [path.relative_to(args.folder).as_posix() for path in there]
    try:
        count = write_edition(args.folder, through=args.through)
        note = not_committed(ROOT)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} files written to {args.folder}\n{note}", end="", flush=True)
    if left:
        print(f"{len(left)} notebooks were there, and are left as they were")
    findings = list(read_over(args.folder, through=args.through, left=left))
    for what, problem in findings:
        lines = [f"{'WRONG' if problem else 'ok   '}  {what}", *problem.splitlines()]
        print("\n       ".join(lines))
    good = not any(problem for _, problem in findings)
    print("the edition holds no answers but these" if good else "do not give it to a class")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
