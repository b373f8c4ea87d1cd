"""Write the course as a class gets it: what git has at HEAD, without the answers.

    python -m solutions.student_edition DIR

DIR is made, or must be empty; .gitattributes says what is left out. What was written is then
searched for answers.
"""

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.errors import InputError
from solutions.grading.intake.known import KnownAnswers
from solutions.grading.intake.lesson import read_lessons

ROOT = Path(__file__).resolve().parents[1]
NEEDS_ANSWERS = re.compile(r"^\s*(?:from|import) solutions\b", re.MULTILINE)
# After one of these, solutions stands for the learner's answers where it is missing.
GUARD = re.compile(r"^from shared(?: import script|\.script|\.exercises\.mine)\b", re.MULTILINE)


def git(course: Path, *words: str) -> bytes:
    """What git says in the course; raises InputError where it fails."""
    done = subprocess.run(["git", "-C", str(course), *words], capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise InputError(f"the edition is made from a git checkout, and git says: {said}")
    return done.stdout


def write_edition(folder: Path, course: Path = ROOT) -> int:
    """Write the edition into an empty or new folder; return the number of files.

    Raises InputError, and writes nothing, when the folder or the course cannot be used.
    """
    place = folder.resolve()
    if course in (place, *place.parents):
        raise InputError(f"{folder} lies inside the course ({course}): name a folder outside it")
    if place.exists() and not place.is_dir():
        raise InputError(f"{folder} is a file: name a folder")
    if place.is_dir() and any(place.iterdir()):
        raise InputError(f"{folder} is not empty: name a new folder; nothing is overwritten")
    packed = git(course, "-c", "tar.umask=user", "archive", "--format=tar", "HEAD")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        if "solutions" in archive.getnames():
            raise InputError("at HEAD no .gitattributes leaves solutions/ out of the edition")
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
        return sum(member.isfile() for member in archive.getmembers())


def not_committed(course: Path) -> str:
    """A line about changes that are not in the edition; "" where there are none."""
    names = [line[3:] for line in git(course, "status", "--porcelain").decode().splitlines()]
    first = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    return f"not committed, so not in the edition: {first} ({len(names)})\n" if names else ""


def read_over(edition: Path, course: Path = ROOT) -> Iterator[tuple[str, str]]:
    """Look for answers in the files of the edition; (what was looked at, what is wrong or "")."""
    notebooks = [path.relative_to(edition) for path in edition.glob("lessons/*/lesson.ipynb")]
    ours = {each: git(course, "show", f"HEAD:./{each.as_posix()}") for each in notebooks}
    changed = [str(each) for each in notebooks if (edition / each).read_bytes() != ours[each]]
    yield "notebooks and their stored outputs are as they were", "\n".join(changed)
    unguarded = []
    for path in sorted([*edition.rglob("*.py"), *edition.glob("lessons/*/lesson.ipynb")]):
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            code = [cell for cell in json.loads(source)["cells"] if cell["cell_type"] == "code"]
            source = "\n".join("".join(cell["source"]) for cell in code)
        if NEEDS_ANSWERS.search(source) and not GUARD.search(source):
            unguarded.append(str(path.relative_to(edition)))
    yield "nothing imports solutions unguarded", "\n".join(unguarded)
    lessons = read_lessons(edition).values()
    typed = [id for each in lessons for id, stub in each.stubs.items() if not _is_empty(stub)]
    yield "every exercise cell is an empty stub", ", ".join(typed)
    known = [each for lesson in lessons for each in KnownAnswers(course, lesson).references()]
    stay = " ".join(each.exercise for each in known if each.module.startswith("shared."))
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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 when the edition is written and holds, 1 when not, 2 for bad input."""
    args = make_parser().parse_args(arguments)
    try:
        count, note = write_edition(args.folder), not_committed(ROOT)
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} files written to {args.folder}\n{note}", end="", flush=True)
    findings = list(read_over(args.folder))
    for what, problem in findings:
        lines = [f"{'WRONG' if problem else 'ok   '}  {what}", *problem.splitlines()]
        print("\n       ".join(lines))
    good = not any(problem for _, problem in findings)
    print("the edition holds no answers but these" if good else "do not give it to a class")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
