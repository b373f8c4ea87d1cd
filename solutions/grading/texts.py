"""Text that came out of a submission, made fit for a table, a page and a terminal."""

import re
from collections.abc import Mapping
from contextlib import suppress

from shared.errors import InputError

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
# A temporary folder's name ends with eight random characters.
TEMPORARY = re.compile(r"(<home>/(?:tmp|(?:[a-z0-9]+_)*))[a-z0-9_]{8}(?=[/'\"\s)]|$)")
MAX_TEXT = 100_000  # before anything else: what follows looks at each character
MAX_LINE, MAX_MESSAGE = 1000, 300
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute, or worse, run
LATER = re.compile(r"([;|]\s*)(?=[=+\-@])")  # where another separator begins a cell


def clean(text: str, paths: Mapping[str, str] | None = None) -> str:
    """The text in one line of at most 1,000 characters.

    What a terminal or a page would obey is dropped, and so is what differs from run to run;
    `paths` maps folders of the sandbox to what they are called in a message.
    """
    text = text[:MAX_TEXT]
    for path, name in (paths or {}).items():
        text = text.replace(path, name)
    text = ANSI.sub("", TEMPORARY.sub(r"\1...", text))
    text = ADDRESS.sub("0x...", " ".join(text.split()))
    # Control characters, marks of direction or of no width, and surrogates are no text.
    return shortened("".join(c if c.isprintable() else "?" for c in text), MAX_LINE)


def brief(text: str, paths: Mapping[str, str] | None = None) -> str:
    """The same, for a row's message: at most 300 characters."""
    return shortened(clean(text, paths), MAX_MESSAGE)


def shortened(text: str, most: int) -> str:
    """The text with at most so many characters; dots stand for an end that was cut off."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def as_cell(text: str) -> str:
    """The text as a table has it, where no spreadsheet computes it."""
    text = LATER.sub(r"\1'", text)
    return f"'{text}" if text.startswith(FORMULA) else text


def decoded(content: bytes) -> str:
    """A table's text as spreadsheets save it: UTF-8 with or without a mark, or Windows' letters.

    Raises InputError, in words, for another kind of text.
    """
    wide = b"\0" in content or content[:2] in (b"\xff\xfe", b"\xfe\xff")
    for letters in ("utf-8-sig",) if wide else ("utf-8-sig", "cp1252"):
        with suppress(UnicodeDecodeError):
            return content.decode(letters)
    raise InputError("cannot be read: save it as CSV in UTF-8")


def show_points(points: float) -> str:
    """Points with at most two decimals: 3, 2.5, 0.67."""
    return f"{points:.2f}".rstrip("0").rstrip(".")
