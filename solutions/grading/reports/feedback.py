"""A feedback page per student, as HTML and as Markdown, and a page that lists the class.

The pages need no other file and no network, follow the reader's dark or light setting, and print.
Everything on them is escaped: names and words come from submissions.
"""

import base64
import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from solutions.grading.reports.pages import Card, LessonPart, Page, make_page
from solutions.grading.results import Outcome, Verdict
from solutions.grading.texts import show_points

TEMPLATES = Path(__file__).with_name("templates")
# The instructor's page, and names that Windows keeps for devices, whatever the ending.
TAKEN = {
    "index",
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{n}{i}" for n in ("com", "lpt") for i in range(10)),
}


def write_feedback(
    folder: Path,
    students: Mapping[str, Sequence[Verdict]],
    *,
    titles: Mapping[str, str] | None = None,
    picture: Path | None = None,
) -> dict[str, Path]:
    """Write NAME.html and NAME.md for each student, and index.html for the instructor.

    `titles` has the lessons' folders by number ("02": "02_attention"), for the headings; the
    picture of the class is put into the index. Returns each student's HTML page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = page_names(students)
    pages = {who: make_page(who, verdicts, titles or {}) for who, verdicts in students.items()}
    template = _environment().get_template("feedback.html.jinja")
    for who, page in pages.items():
        _write(folder / f"{names[who]}.html", template.render(page=page))
        _write(folder / f"{names[who]}.md", markdown_page(page))
    links = {who: f"{name}.html" for who, name in names.items()}
    _write(folder / "index.html", _index(pages, links, picture))
    return {who: folder / link for who, link in links.items()}


def page_names(students: Mapping[str, Sequence[Verdict]] | Sequence[str]) -> dict[str, str]:
    """A file name for each student: safe on every system, unique where case does not count.

    Letters lose their accents, everything else becomes "-". A name that lost more than spaces by
    that, or that meets another one, gets a piece of its digest.
    """
    names = {who: _safe(who) for who in students}
    folded = [name.casefold() for name in names.values()]
    return {
        who: f"{name}-{hashlib.sha256(who.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
        if not _is_plain(who) or folded.count(name.casefold()) > 1
        else name
        for who, name in names.items()
    }


def _safe(student: str) -> str:
    letters = unicodedata.normalize("NFKD", student).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9]+", "-", letters).strip("-")[:60]
    return name or "student"


def _is_plain(student: str) -> bool:
    """Whether the file name says the student's name in full."""
    ordinary = re.fullmatch(r"[A-Za-z0-9]+([ _.-][A-Za-z0-9]+)*", student) is not None
    return ordinary and len(student) <= 60 and student.casefold() not in TAKEN


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["points"] = show_points
    return environment


def _write(path: Path, text: str) -> None:
    """UTF-8 and \\n everywhere, so that the bytes are the same on every system."""
    path.write_bytes(text.encode("utf-8", "replace"))


def _index(pages: Mapping[str, Page], links: Mapping[str, str], picture: Path | None) -> str:
    lessons = {part.number: part.title for page in pages.values() for part in page.lessons}
    rows = [
        {
            "page": page,
            "link": links[who],
            "by_lesson": {part.number: part for part in page.lessons},
            "notes": _notes(page),
        }
        for who, page in pages.items()
    ]
    named = ", ".join(sorted(lessons))
    return (
        _environment()
        .get_template("index.html.jinja")
        .render(
            headline=f"Students: {len(pages)}. Lessons: {named}.",
            lessons=sorted(lessons.items()),
            rows=rows,
            picture=_embedded(picture) if picture else "",
        )
    )


def _embedded(picture: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode('ascii')}"


def _notes(page: Page) -> list[str]:
    """What an instructor should see of a student: flags, and what could not be graded."""
    notes = []
    for part in page.lessons:
        notes += [f"lesson {part.number}: {part.common}"] if part.common else []
        for card in part.cards if not part.common else []:
            if card.looks:
                notes.append(f"{card.exercise}: {card.looks}")
            elif card.label in (Outcome.STOPPED, Outcome.UNREADABLE):
                notes.append(f"{card.exercise}: {card.text}")
    return notes


def markdown_page(page: Page) -> str:
    """The same page as Markdown: text escaped, what the check said in code blocks."""
    blocks = [f"# {escaped(page.student)}", f"{page.headline}."]
    for lesson in page.lessons:
        points = f"{show_points(lesson.points)} of {lesson.max} points"
        blocks.append(f"## {escaped(lesson.title)}: {points}")
        blocks += _markdown_lesson(lesson)
    return "\n\n".join([*blocks, *([page.footer] if page.footer else [])]) + "\n"


def _markdown_lesson(lesson: LessonPart) -> list[str]:
    if lesson.common:
        titles = ", ".join(escaped(card.title) for card in lesson.cards)
        return [escaped(lesson.common), f"Exercises: {titles}."]
    return [block for card in lesson.cards for block in _markdown_card(card)]


def _markdown_card(card: Card) -> list[str]:
    points = f"{show_points(card.points)} of {card.max}"
    blocks = [f"### {escaped(card.title)}: {card.label}, {points}"]
    if card.text:
        blocks.append(escaped(card.text))
    if card.rows:
        blocks.append(_fenced("\n".join(f"{label + ':':<16}{text}" for label, text in card.rows)))
    if card.hint:
        blocks.append(f"**Hint.** {escaped(card.hint)}")
    if card.looks:
        blocks.append(f"**Your instructor will look at this answer.** {escaped(card.looks)}")
    return blocks


def escaped(text: str) -> str:
    """Text in one line in which no character means anything to Markdown or HTML."""
    line = " ".join(text.split())
    line = re.sub(r"[\\`*\[\]<>&|~$]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)
    # What would begin a heading, a list or an underline.
    return re.sub(r"^(\d*)([#+=-]|[.)](?=\s|$))", r"\1\\\2", line)


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
