"""The pages of the explorables, each with a still picture for where no JavaScript runs."""

from collections.abc import Sequence
from html import escape
from typing import Any

from shared.book.explorables import EXPLORABLES, Explorable
from shared.book.planned import State

HOW = (
    "Choose, and the picture and its numbers follow. All of it was computed by the course's own"
    " code when this page was built."
)
KEYS = " The arrow keys step through time."


def explore_pages(lessons: list[str]) -> dict[str, str]:
    """File name to Markdown: one page for each picture, and one that lists them."""
    pages = {name.removeprefix("lesson")[:2]: f"../lessons/{name}/lesson.ipynb" for name in lessons}
    found = {f"{each.name}.md": _page(each, pages) for each in EXPLORABLES if each.lesson in pages}
    names = "\n".join(name.removesuffix(".md") for name in found)
    index = f"# Pictures that answer\n\n{HOW}\n\n```{{toctree}}\n\n{names}\n```\n"
    return {"index.md": index, **found}


def _page(each: Explorable, pages: dict[str, str]) -> str:
    timed = any("grid" in state or "frames" in state for state in each.states.values())
    built = f"The lesson that builds it: [{each.lesson}]({pages[each.lesson]})."
    return (
        f"# {each.title}\n\n{HOW}{KEYS if timed else ''} {built}"
        f"\n\n```{{raw}} html\n{as_element(each)}\n"
        f"<script type='module' src='../_static/explorable.js'></script>\n```\n"
    )


def as_element(each: Explorable) -> str:
    """The picture as `explorable.js` finds it in a page: its still, and all its states as data."""
    body = each.as_json().replace("</", "<\\/")
    return (
        f"<div data-explorable='{each.name}'>{still_picture(each)}"
        f"<script type='application/json'>{body}</script></div>"
    )


def still_picture(each: Explorable) -> str:
    """Its first choice, at its last moment, as plain HTML, which the script replaces."""
    state, rows = each.state(*each.first_choice), ""
    bars = state.get("bars", ())
    most = max((bar["value"] for bar in bars), default=0) or 1
    for bar in bars:
        wide = f"display: inline-block; width: {8 * bar['value'] / most:.1f}em; height: 1em"
        body = f"<span style='{wide}; background: {bar['colour']}'></span>"
        rows += _row(bar["label"], [f"{bar['value']:,} {state['unit']}"], beside=body)
    if "rows" in state:
        rows += _row("", state["columns"], "th") if "columns" in state else ""
        cells = state["frames"][-1] if "frames" in state else state["grid"]
        for name, row in zip(state["rows"], cells, strict=True):
            rows += _row(name, [_coloured(state, cell) for cell in row])
    numbers = "".join(_row(name, [value]) for name, value in state.get("numbers", {}).items())
    says = state["says"] if isinstance(state["says"], str) else state["says"][-1]
    apart = "<table style='margin-top: 1em'>"
    tables = "".join(f"{apart}{each}</table>" for each in (rows, numbers) if each)
    return f"{tables}<p>{escape(says)}</p>"


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
    return row + (f"<td>{beside}</td></tr>" if beside else "</tr>")
