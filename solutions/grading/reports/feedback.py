"""A feedback page per student, and a page that lists the class for the instructor.

The pages need no other file and no network, follow the reader's dark or light setting, and print.
Jinja escapes everything on them: names and words come from submissions, and were put into one line
without control characters where they were read. What holds for a whole lesson is said once.
"""

import base64
import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

from solutions.grading.reports.summary import GROUPS
from solutions.grading.reports.table import by_lesson
from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import show_points

MAX_MISTAKES = 12
# The instructor's page, and names that Windows keeps for devices, whatever the ending.
TAKEN = re.compile(r"index|con|prn|aux|nul|(com|lpt)\d", re.IGNORECASE)


class Part(NamedTuple):
    """One lesson of a student on a page, or all of them; `title` is its heading."""

    number: str
    title: str
    verdicts: Sequence[Verdict]

    @property
    def points(self) -> str:
        """Such as "3.33 of 14"."""
        points = show_points(sum(each.points for each in self.verdicts))
        return f"{points} of {sum(each.max for each in self.verdicts)}"

    @property
    def right(self) -> str:
        """How many exercises are right, such as "1 of 5"."""
        num_right = sum(each.outcome is Outcome.RIGHT for each in self.verdicts)
        return f"{num_right} of {len(self.verdicts)}"

    @property
    def is_missing(self) -> bool:
        """Whether nothing of it was handed in."""
        return all(each.outcome is Outcome.MISSING for each in self.verdicts)

    @property
    def common(self) -> str:
        """The one reason why no exercise could be graded; "" if there is none, or several."""
        reasons = {(v.outcome, v.message, v.flags, v.by_hand) for v in self.verdicts}
        outcome, message, flags, by_hand = next(iter(reasons))
        lost = outcome in (Outcome.MISSING, Outcome.UNREADABLE) and not flags and not by_hand
        return message if lost and len(reasons) == 1 else ""


def write_feedback(
    folder: Path,
    students: Mapping[str, Sequence[Verdict]],
    *,
    titles: Mapping[str, str],
    picture: Path,
) -> dict[str, Path]:
    """Write NAME.html for each student, and index.html for the instructor.

    `titles` has the lessons' folders by number ("02": "lesson02_attention"), for the headings; the
    picture of the class is put into the index. Returns each student's page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["points"] = show_points
    pages = {student: folder / f"{name}.html" for student, name in page_names(students).items()}
    rows = []
    for student, verdicts in students.items():
        lessons = [
            Part(number, _heading(titles[number]), own)
            for number, own in by_lesson(verdicts).items()
        ]
        row = {"student": student, "all": Part("", "", verdicts), "lessons": lessons}
        rows.append({**row, "link": pages[student].name})
        _write(pages[student], environment.get_template("feedback.html.jinja").render(row))
    everything = [each for verdicts in students.values() for each in verdicts]
    index = environment.get_template("index.html.jinja").render(
        rows=rows,
        ungraded=GROUPS["not graded"],
        mistakes=most_frequent(everything),
        picture=base64.b64encode(picture.read_bytes()).decode(),
    )
    _write(folder / "index.html", index)
    return pages


def _write(path: Path, text: str) -> None:
    path.write_text(f"{text}\n", encoding="utf-8", newline="\n")


def most_frequent(verdicts: Sequence[Verdict]) -> list[tuple[tuple[str, str], int]]:
    """The mistakes most often recognised, as ((exercise, its words), students)."""
    said = Counter((each.exercise, each.mistake) for each in verdicts if each.mistake)
    return said.most_common(MAX_MISTAKES)


def page_names(students: Sequence[str] | Mapping[str, object]) -> dict[str, str]:
    """A file name for each student: safe on every system, unique where case does not count.

    A name that is not plain letters, digits and spaces, or that is taken, gets a piece of its
    digest, after a mark that no plain name has.
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    for student in students:
        letters = unicodedata.normalize("NFKD", student).encode("ascii", "ignore").decode()
        name = re.sub(r"[^A-Za-z0-9]+", "-", letters).strip("-")[:60] or "student"
        plain = name == student.replace(" ", "-") and not TAKEN.fullmatch(name)
        if not plain or name.casefold() in taken:
            digest = hashlib.sha256(student.encode("utf-8", "surrogatepass")).hexdigest()
            name = f"{name}_{digest[:8]}"
        taken.add(name.casefold())
        names[student] = name
    return names


def _heading(folder: str) -> str:
    """ "Lesson 02: attention" for lesson02_attention."""
    number, _, topic = folder.removeprefix("lesson").partition("_")
    return f"Lesson {number}: {topic.replace('_', ' ')}"
