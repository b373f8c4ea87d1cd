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
    states = each.states
    first = next(iter(states.values()))
    body = each.as_json().replace("</", "<\\/")
    timed = any("grid" in state or "frames" in state for state in states.values())
    built = f"The lesson that builds it: [{each.lesson}]({pages[each.lesson]})."
    return (
        f"# {each.title}\n\n{HOW}{KEYS if timed else ''} {built}"
        f"\n\n```{{raw}} html\n<div data-explorable='{each.name}'>{_still(first)}"
        f"<script type='application/json'>{body}</script></div>\n"
        f"<script type='module' src='../_static/explorable.js'></script>\n```\n"
    )


def _still(state: State) -> str:
    """The state, at its last moment, as plain HTML, which the script replaces."""
    rows = ""
    for bar in state.get("bars", ()):
        rows += _row(bar["label"], [f"{bar['value']} {state['unit']}"])
    if "rows" in state:
        rows += _row("", state["columns"], "th") if "columns" in state else ""
        cells = state["frames"][-1] if "frames" in state else state["grid"]
        for name, row in zip(state["rows"], cells, strict=True):
            rows += _row(name, [cell if isinstance(cell, str) else cell[0] for cell in row])
    for name, value in state.get("numbers", {}).items():
        rows += _row(name, [value])
    says = state["says"] if isinstance(state["says"], str) else state["says"][-1]
    return f"<table>{rows}</table><p>{escape(says)}</p>"


def _row(name: str, cells: Sequence[Any], tag: str = "td") -> str:
    inner = "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr><th>{escape(name)}</th>{inner}</tr>"
