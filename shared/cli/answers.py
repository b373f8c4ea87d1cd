"""Carry your answers from older notebooks into this course's, by exercise id.

python -m shared.cli.answers FROM [--dry-run]

FROM is a notebook, a folder that has some (another clone, last week's edition), or a revision of
git: after `git stash` and `git pull` it is `stash@{0}`. What is right is not asked: `todo` says it.
What you changed in the course's own cells, but for exercises, does not come along.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shared.cli.changed import git
from shared.cli.command import ROOT
from shared.errors import InputError
from shared.exercises.carrying import Notebook, carry
from shared.exercises.cells import parse, read_notebook

KEPT = Path("runs") / "answers_kept.py"
PATTERN = "lessons/lesson[0-9][0-9]_*/lesson.ipynb"


def notebooks_of(place: str, root: Path = ROOT) -> list[Notebook]:
    """Return the notebooks that a file, a folder or a revision has; InputError if it has none."""
    path = Path(place)
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        shown = [
            p
            for p in path.rglob("*.ipynb")
            if not any(part.startswith(".") for part in p.relative_to(path).parts)
        ]
        clone = sorted(path.glob(PATTERN))  # of two notebooks the first one's answers are taken
        paths = clone or sorted(shown, key=lambda p: (p.name != "lesson.ipynb", p))
    else:
        found = list(_of_revision(place, root))
        if not found:
            raise InputError(f"{place} is no notebook, no folder, and no revision of git with some")
        return found
    if not paths:
        raise InputError(f"no notebook (.ipynb) in {place}")
    own = {each.resolve() for each in root.glob(PATTERN)}
    for each in paths:
        if each.resolve() in own:
            raise InputError(f"{each} is this course's own: name the older one")
    return [Notebook(str(each), read_notebook(each)) for each in paths]


def _of_revision(revision: str, root: Path) -> Iterator[Notebook]:
    listed = "ls-tree", "-r", "--name-only", revision, "--", "lessons"
    for name in (git(root, *listed, errors="strict") or "").splitlines():
        if Path(name).match(PATTERN):
            place = f"{revision}:{name}"
            text = git(root, "show", f"{revision}:./{name}", errors="strict") or ""
            yield Notebook(place, parse(text, place))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Carry, and say what came of each answer; return 2 where that cannot be, else 0."""
    parser = argparse.ArgumentParser(prog="run_all.sh answers", description=__doc__)
    parser.add_argument("place", metavar="FROM")
    parser.add_argument("--dry-run", action="store_true", help="say it, and write nothing")
    args = parser.parse_args(arguments)
    try:
        older = notebooks_of(args.place, root)
        course = [Notebook(str(each), read_notebook(each)) for each in sorted(root.glob(PATTERN))]
        done = [(each, carry(each, course)) for each in older]
        changed = [each for each in course if each.changed]
        kept = list(dict.fromkeys(text for _, carried in done for text in carried.kept))
        if not args.dry_run:
            _keep(kept, root / KEPT)  # before anything is replaced
            for each in changed:
                _write(Path(each.place), _as_jupyter(each))
    except (InputError, OSError) as error:
        what = "cannot write: " if isinstance(error, OSError) else ""
        print(f"run_all.sh: {what}{error}", file=sys.stderr)
        return 2
    for old, carried in done:
        if carried.lines:
            print(f"{old.place}:", *carried.lines, sep="\n  ")
    number = sum(carried.count for _, carried in done)
    would = "would be " if args.dry_run else ""
    words = f"{_counted(number, 'cell')} {would}carried into {_counted(len(changed), 'notebook')}"
    print(words + (f", {_counted(len(kept), 'text')} {would}kept in {KEPT}" if kept else ""))
    return 0


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _keep(texts: list[str], path: Path) -> None:
    """Add texts to a file, but for those that it has."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    new = [each for each in texts if each not in before]
    if new:
        path.parent.mkdir(exist_ok=True)
        _write(path, "\n\n".join([before.rstrip()] * bool(before) + new))


def _as_jupyter(notebook: Notebook) -> str:
    text = json.dumps(notebook.content, ensure_ascii=False, indent=1, sort_keys=True)
    return f"{text}\n"


def _write(path: Path, text: str) -> None:
    aside = path.with_suffix(".part")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main())
