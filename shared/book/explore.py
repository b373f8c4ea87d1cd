"""The pages of the explorables, each with a still picture for where no JavaScript runs."""

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from shared.book.explorables import EXPLORABLES, Explorable
from shared.book.labels import Translate, translated_state
from shared.book.planned import State, short
from shared.exercises.lessons import ROOT

HERE = Path(__file__).resolve().parent
HOW = (
    "Choose, and the picture and its numbers follow. All of it was computed by the course's own"
    " code when this page was built."
)
KEYS = " The arrow keys step through time."
# Where a picture in a notebook has its controls, for who reads the notebook.
CONTROLS = r"(?:\(It has its controls .*?\)|In Jupyter .*?\)\.) "
LEADS = (  # what stands before a question in the lesson and is said by the page's title
    r"\*\*[^*]*\*\*(?:[^(.]*\.)? ",
    CONTROLS,
    r"And (?:[^.:]*\. )?",
)
SHOWN = re.compile(r"^show_explorable\(\"(\w+)\"\)$", re.MULTILINE)


def explore_pages(lessons: list[str]) -> dict[str, str]:
    """File name to Markdown: one page for each picture, and one that lists them."""
    folders = {name.removeprefix("lesson")[:2]: name for name in lessons}
    there = [each for each in EXPLORABLES if each.lesson in folders]
    asked = {each.name: question(each.name, folders[each.lesson]) for each in there}
    found = {
        f"{each.name}.md": _page(each, folders[each.lesson], asked[each.name]) for each in there
    }
    rows = "\n".join(
        f"- [{e.title}]({e.name}.md). {asked[e.name].split('<details>')[0].strip()}" for e in there
    )
    names = "\n".join(each.name for each in there)
    index = (
        f"# Pictures that answer\n\n{HOW}\n\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    )
    return {"index.md": index, **found}


def asked_above(picture: str, lesson: str) -> str:
    """The cell above a picture in its lesson."""
    cells = json.loads((ROOT / "lessons" / lesson / "lesson.ipynb").read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    (place,) = (n for n, text in enumerate(texts) if picture in SHOWN.findall(text))
    return texts[place - 1]


def question(picture: str, lesson: str) -> str:
    """What the lesson asks above its picture, and the folded answer."""
    asked = asked_above(picture, lesson)
    for lead in LEADS:
        asked = re.sub(f"^{lead}", "", asked)
    return asked[0].upper() + asked[1:]


def _page(each: Explorable, lesson: str, asked: str) -> str:
    built = f"The lesson that builds it: [{each.lesson}](../lessons/{lesson}/lesson.ipynb)."
    beneath = f"{HOW}{KEYS if timed(each) else ''} {built}"
    return picture_page(each.title, asked, as_element(each), beneath)


def picture_page(title: str, asked: str, picture: str, beneath: str) -> str:
    """The question, the picture, the folded answer, and what stands beneath."""
    ask, _, fold = asked.partition("<details>")
    return (
        f"# {title}\n\n{ask}\n\n```{{raw}} html\n{picture}\n{script('..')}\n```\n\n"
        f"{fold and '<details>'}{fold}\n\n{beneath}\n"
    )


def timed(each: Explorable) -> bool:
    """Whether a choice of the picture has more than one moment."""
    return any(
        "grid" in state or len(state.get("frames", ())) > 1 for state in each.states.values()
    )


def viewer() -> str:
    """The script that brings pictures to life, of its files."""
    names = ("drawings.js", "board.js", "lanes.js", "nodes.js", "explorable.js", "beside.js")
    return "".join((HERE / name).read_text("utf-8") for name in names)


def script(root: str) -> str:
    """What brings a page's pictures to life; `root` leads to the site's first folder."""
    return f"<script type='module' src='{root}/_static/explorable.js'></script>"


def as_element(each: Explorable, translate: Translate | None = None) -> str:
    """The picture as `explorable.js` finds it in a page: its still, and all its states as data."""
    body = each.as_json(translate).replace("</", "<\\/")
    return (
        f"<div data-explorable='{each.name}'>{still_picture(each, translate)}"
        f"<script type='application/json'>{body}</script></div>"
    )


def still_picture(each: Explorable, translate: Translate | None = None) -> str:
    """Its first choice, where its film begins, as plain HTML, which the script replaces."""
    state = each.state(*each.first_choice)
    state = translated_state(state, translate) if translate else state
    mark = translate("the mark") if translate else "the mark"
    tables = [_still_panel(panel, mark) for panel in state.get("panels", ())]
    begins = state.get("begins", -1)
    if "rows" in state:
        rows = _row("", state["columns"], "th") if "columns" in state else ""
        cells = state["frames"][begins] if "frames" in state else state["grid"]
        for name, row in zip(state["rows"], cells, strict=True):
            rows += _row(name, [_coloured(state, cell) for cell in row])
        tables.append(rows)
    tables.append("".join(_row(name, [value]) for name, value in state["numbers"].items()))
    says = state["says"] if isinstance(state["says"], str) else state["says"][begins]
    apart = "<table style='margin-top: 1em'>"
    return "".join(f"{apart}{each}</table>" for each in tables if each) + f"<p>{escape(says)}</p>"


def _still_panel(panel: State, mark: str) -> str:
    """A row for each of a panel's bars: its parts, the mark as a bar of its own, its sum."""
    unit, (kinds, colours) = panel["unit"], zip(*panel["kinds"], strict=True)
    bars = [(label, parts, colours) for label, parts in panel["rows"]]
    if len(bars) == 1:
        kinds = [f"{k} {short(part)} {unit}" for k, part in zip(kinds, bars[0][1], strict=True)]
    legend = ", ".join(_bar(1, *kind) for kind in zip(kinds, colours, strict=True))
    if panel["line"]:
        bars.append((mark, [panel["line"]], ("#cccccc",)))
    most = max(sum(parts) for _, parts, _ in bars if not isinstance(parts, str)) or 1
    rows = _row(panel["title"], [""], beside=legend)
    for label, parts, pieces in bars:
        if isinstance(parts, str):
            rows += _row(label, [""], beside=escape(parts))
            continue
        drawn = zip(parts, pieces, strict=True)
        body = "".join(_bar(12 * size / most, "", colour) for size, colour in drawn)
        rows += _row(label, [f"{short(sum(parts))} {unit}"], beside=body)
    return rows


def _bar(width: float, text: str, colour: str) -> str:
    """A piece of a bar as HTML, `width` in letters, and a text after it."""
    style = f"display: inline-block; height: 1em; width: {width:.1f}em; background: {colour}"
    return f"<span style='{style}'></span>{escape(text)}"


def _coloured(state: State, cell: Any) -> tuple[str, str]:
    """A cell's text and colour; in a grid the text's first letter stands for the colour."""
    return (cell, state["colours"][cell[:1]]) if isinstance(cell, str) else tuple(cell)


def _row(name: str, cells: Sequence[Any], tag: str = "td", beside: str = "") -> str:
    """A row of a table, with HTML `beside` its cells; a cell may come with its colour."""
    row = f"<tr><th>{escape(name)}</th>"
    for cell in cells:
        text, colour = cell if isinstance(cell, tuple) else (cell, "")
        style = f" style='background: {colour}; color: #000; padding: 0 0.3em'" if colour else ""
        row += f"<{tag}{style}>{escape(str(text))}</{tag}>"
    return row + (f"<td style='text-align: left'>{beside}</td></tr>" if beside else "</tr>")
