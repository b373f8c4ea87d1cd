"""The pages of the explorables, each with a still picture for where no JavaScript runs."""

from html import escape
from typing import Any

from shared.book.explorables import EXPLORABLES, Explorable

HOW = (
    "Choose, and the picture and its numbers follow; the arrow keys step through time. All of it"
    " was computed by the course's own code when this page was built."
)


def explore_pages(lessons: list[str]) -> dict[str, str]:
    """File name to Markdown: one page for each picture, and one that lists them."""
    pages = {name.removeprefix("lesson")[:2]: f"../lessons/{name}/lesson.ipynb" for name in lessons}
    found = {f"{each.name}.md": _page(each, pages) for each in EXPLORABLES if each.lesson in pages}
    names = "\n".join(name.removesuffix(".md") for name in found)
    index = f"# Pictures that answer\n\n{HOW}\n\n```{{toctree}}\n\n{names}\n```\n"
    return {"index.md": index, **found}


def _page(each: Explorable, pages: dict[str, str]) -> str:
    states = each.states()
    first = next(iter(states.values()))
    body = each.as_json().replace("</", "<\\/")
    return (
        f"# {each.title}\n\n{HOW} The lesson that builds it: [{each.lesson}]({pages[each.lesson]})."
        f"\n\n```{{raw}} html\n<div data-explorable='{each.name}'>{_still(first)}"
        f"<script type='application/json'>{body}</script></div>\n"
        f"<script type='module' src='../_static/explorable.js'></script>\n```\n"
    )


def _still(state: dict[str, Any]) -> str:
    """The state as plain HTML, which the script replaces."""
    rows = ""
    if "bars" in state:
        rows = "".join(
            f"<tr><th>{escape(bar['label'])}</th><td>{bar['value']} {state['unit']}</td></tr>"
            for bar in state["bars"]
        )
    elif "rows" in state:
        cells = state["frames"][-1] if "frames" in state else state["grid"]
        for name, row in zip(state["rows"], cells, strict=True):
            texts = (cell if isinstance(cell, str) else str(cell[0]) for cell in row)
            inner = "".join(f"<td>{escape(text)}</td>" for text in texts)
            rows += f"<tr><th>{escape(name)}</th>{inner}</tr>"
    says = state["says"] if isinstance(state["says"], str) else state["says"][-1]
    return f"<table>{rows}</table><p>{escape(says)}</p>"
