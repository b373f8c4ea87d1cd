"""The one type that every source of parallel text hands out."""

from typing import NamedTuple


class Pair(NamedTuple):
    """A source sentence and its translation, both as plain text without a newline."""

    src: str
    tgt: str
