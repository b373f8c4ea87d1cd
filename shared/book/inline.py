"""A picture that answers, inside a notebook: `show_explorable("pipeline")` in a cell.

Where the cell runs in Jupyter or in VS Code, the picture has its controls, in a frame of its own.
Everywhere else (in what is stored, on GitHub, in the book) it is the still of its first choice.
"""

import json
import os
from html import escape
from pathlib import Path

from shared.book.explorables import EXPLORABLES, Explorable
from shared.book.explore import as_element, still_picture, viewer
from shared.errors import InputError

HERE = Path(__file__).resolve().parent
COLOURS = """
:root { --pst-color-border: #c9c9c9; --pst-color-surface: #eeeeee; --pst-color-background: #ffffff;
  --pst-color-text-base: #222222; --pst-color-text-muted: #666666; }
body { margin: 0; background: #ffffff; color: #222222; font: 14px/1.5 sans-serif; }
"""
# The frame's script grows it with its picture; without scripts the still stays where it is.
FRAME = """
<div id="{id}">{still}</div>
<script>
(() => {{
  const frame = document.createElement("iframe");
  frame.title = {title};
  frame.style.cssText = "width: 100%; height: 30rem; border: 0";
  frame.srcdoc = {page};
  document.getElementById("{id}").replaceChildren(frame);
}})();
</script>
"""
GROW = """
const grow = () => { frameElement.style.height = `${document.body.scrollHeight + 4}px`; };
const drawn = { attributes: true, characterData: true, childList: true, subtree: true };
new MutationObserver(grow).observe(document.body, drawn);
for (const event of ["load", "resize"]) addEventListener(event, grow);
"""


class Shown:
    """What a notebook shows for a picture: the object that its cell ends with."""

    def __init__(self, explorable: Explorable, live: bool) -> None:
        self.explorable, self.live = explorable, live

    def __repr__(self) -> str:
        return f"{self.explorable.title}: a picture, which this program does not show"

    def _repr_html_(self) -> str:
        title = f"<p><b>{escape(self.explorable.title)}</b></p>"
        still = still_picture(self.explorable)
        return title + (_with_controls(self.explorable, still) if self.live else still)


def show_explorable(name: str, live: bool | None = None) -> Shown:
    """Return one of the course's pictures for the end of a cell; `live` is found out where None.

    Raises InputError for a name that no picture has.
    """
    named = {each.name: each for each in EXPLORABLES}
    if name not in named:
        raise InputError(f"there is no picture {name!r}: take one of {', '.join(named)}")
    return Shown(named[name], runs_in_a_front_end() if live is None else live)


def runs_in_a_front_end() -> bool:
    """Whether somebody looks on: Jupyter's server and VS Code tell a kernel; nbval does neither."""
    import __main__

    return "JPY_SESSION_NAME" in os.environ or hasattr(__main__, "__vsc_ipynb_file__")


def _with_controls(explorable: Explorable, still: str) -> str:
    style = COLOURS + (HERE / "book.css").read_text("utf-8")
    script = viewer() + GROW
    page = f"<!doctype html><meta charset='utf-8'><style>{style}</style><body>"
    page += f"{as_element(explorable)}<script type='module'>{script}</script></body>"
    return FRAME.format(
        id=f"explorable-{explorable.name}-{os.urandom(4).hex()}",
        still=still,
        title=json.dumps(explorable.title),
        page=json.dumps(page).replace("</", "<\\/"),
    )
