"""What a picture says on a Chinese page, by its English with a # for each number.

The table is `labels.toml`.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.book.planned import State

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
Translate = Callable[[str], str]

TABLE = tomllib.loads((Path(__file__).resolve().parent / "labels.toml").read_text("utf-8"))
VIEWER: dict[str, str] = TABLE["viewer"]
CHINESE: dict[str, str] = VIEWER | TABLE["pictures"]


def chinese(text: str) -> str:
    """The text in Chinese, its numbers as they are; itself where the table lacks it."""
    if text in CHINESE:
        return CHINESE[text]
    numbers = NUMBER.findall(text)
    made = CHINESE.get(NUMBER.sub("#", text))
    return re.sub("#", lambda _: numbers.pop(0), made) if made else text


def translated_guess(guess: dict[str, Any], translate: Translate) -> dict[str, Any]:
    """What a guess asks, translated."""
    made = {**guess, "asks": translate(guess["asks"])}
    if "options" in guess:
        made["options"] = {translate(each): size for each, size in guess["options"].items()}
        made["is"] = translate(guess["is"])
    return made


def translated_state(state: State, translate: Translate) -> State:
    """A state with all its words translated; numbers, colours and places stay."""

    def bars(panel: State) -> State:
        rows = [
            (translate(row), translate(parts) if isinstance(parts, str) else parts)
            for row, parts in panel["rows"]
        ]
        kinds = [(translate(kind), colour) for kind, colour in panel["kinds"]]
        return {**panel, "title": translate(panel["title"]), "kinds": kinds, "rows": rows}

    def cell(text: Any, colour: str) -> list[str]:
        return [translate(str(text)), colour]

    def said(says: str | list[str]) -> str | list[str]:
        return translate(says) if isinstance(says, str) else [translate(each) for each in says]

    parts: dict[str, Callable[[Any], Any]] = {
        "panels": lambda panels: [bars(panel) for panel in panels],
        "frames": lambda films: [[[cell(*each) for each in row] for row in f] for f in films],
        "rows": said,
        "columns": said,
        "numbers": lambda found: {translate(k): translate(str(v)) for k, v in found.items()},
        "says": said,
        "legend": said,
        "lanes": lambda lanes: (
            lanes
            | {
                "names": said(lanes["names"]),
                "says": said(lanes["says"]),
                "bars": [(*bar, translate(text), cell(*of)) for *bar, text, of in lanes["bars"]],
            }
        ),
        "fills": lambda found: (
            found
            | {
                "title": said(found["title"]),
                "kinds": [(translate(kind), colour) for kind, colour in found["kinds"]],
                "labels": said(found["labels"]),
            }
        ),
    }
    return {name: parts[name](part) if name in parts else part for name, part in state.items()}
