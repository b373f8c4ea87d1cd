"""What the pages say to a class that has no solutions/: passages taken out or put differently."""

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import InputError

CONTRIBUTING = """\
# When something in the course is wrong

This is the student edition: it holds no answers, and only the tests that need none. Whoever gave it
to you has the whole course. Tell them what you did, what you expected and what you saw; a failing
cell and the output of `./run_all.sh doctor` say most of it.
"""
# Sentences about what is not there; what is left of a bullet or paragraph stays.
_POINTS_THERE = r"\bsolutions(?:/|\.\w)|tests/grading|\bthe grader\b"
_SENTENCE = re.compile(r"(?:[^.!?]|[.!?](?=\S))+[.!?:]*\s*")
# Fenced blocks, table rows, bullets and paragraphs, each with the blank lines after it.
_PARAGRAPH = re.compile(
    r"```.*?```\n*|\|[^\n]*\n*|.+?(?:\n(?=[-*] |\||```|\s*\n)\n*|\Z)|\n+", re.DOTALL
)
# What no page of the edition may say; a new lesson's own way to say it is found here.
TELLTALE = re.compile(
    r"\bsolutions?(?:/|\.\w| mode\b)|one import away"
    r"|(?:replaced by|taken from) the reference\b"
)


@dataclass(frozen=True)
class Passage:
    """Text that must stand in a page once, however its lines break, and what takes its place."""

    old: str
    new: str = ""

    def replace_in(self, text: str, page: str) -> str:
        """Raises InputError when the passage is not there, or twice."""
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        if self.old.endswith("\n"):
            pattern += r"[ \t]*\n"
        changed, count = re.subn(pattern, lambda _: self.new, text)
        if count != 1:
            raise InputError(
                f"{page} holds {self.old[:60]!r}... {count} times, not once: it was changed, and"
                " solutions/edition/pages.toml does not know what a class should read instead"
            )
        return changed


def read_passages() -> dict[str, list[Passage]]:
    """The passages of pages.toml, by page."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {page: [Passage(**each) for each in rows] for page, rows in tomllib.loads(text).items()}


def change_page(text: str, page: str, gone: Iterable[str] = ()) -> str:
    """What a class reads in place of a Markdown page; `gone` are files that it does not get.

    Raises InputError where a passage is gone.
    """
    for passage in read_passages().get(page, []):
        text = passage.replace_in(text, page)
    points = re.compile("|".join([_POINTS_THERE, *map(re.escape, gone)]))
    return "".join(_without_pointers(each, points) for each in _PARAGRAPH.findall(text))


def change_prose(sources: Sequence[str], page: str, gone: Iterable[str] = ()) -> list[str]:
    """What a class reads in place of a notebook's Markdown cells, in the same order."""
    mark = "\n\n\0\n\n"
    changed = change_page(mark.join(sources), page, gone)
    return [cell.strip("\n") for cell in changed.split("\0")]


def _without_pointers(paragraph: str, points: re.Pattern[str]) -> str:
    """Leave out table rows and sentences that point there; of a bullet nothing may be left."""
    if not points.search(paragraph) or paragraph.startswith("```"):
        return paragraph
    if paragraph.startswith("|"):
        return ""
    body = paragraph.rstrip("\n")
    gap = paragraph[len(body) :]
    kept = [each for each in _SENTENCE.findall(body) if not points.search(each)]
    text = "".join(kept).rstrip()
    return text + gap if re.search(r"\w", text) else gap[1:]


def change_pyproject(text: str) -> str:
    """The text of pyproject.toml without the packages of solutions/ and the settings for them."""
    lines = [
        line
        for line in text.splitlines(keepends=True)
        if not re.match(r'\s*"solutions[^"]*"(?:\s*=.*)?,?\s*$', line)
    ]
    return re.sub(r',\s*"solutions\*?"', "", "".join(lines))
