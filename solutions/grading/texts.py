"""Text that came out of a submission, made fit for a table, a page and a terminal."""

import re
import unicodedata
from collections.abc import Mapping

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
# A temporary folder's name ends with eight random characters.
TEMPORARY = re.compile(r"(<home>/(?:tmp|(?:[a-z0-9]+_)*))[a-z0-9_]{8}(?=[/'\"\s)]|$)")
# Characters that turn the direction of writing, for what follows them.
TURNING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
MAX_TEXT = 100_000  # before anything else: what follows looks at each character
MAX_LINE, MAX_MESSAGE = 1000, 300


def clean(text: str, paths: Mapping[str, str] | None = None) -> str:
    """The text in one line of at most 1,000 characters.

    What a terminal or a page would obey is dropped, and so is what differs from run to run;
    `paths` maps folders of the sandbox to what they are called in a message.
    """
    text = text[:MAX_TEXT]
    for path, name in (paths or {}).items():
        text = text.replace(path, name)
    text = ANSI.sub("", TEMPORARY.sub(r"\1...", text))
    text = ADDRESS.sub("0x...", text)
    return shortened(" ".join("".join(map(_harmless, text)).split()), MAX_LINE)


def brief(text: str, paths: Mapping[str, str] | None = None) -> str:
    """The same, for a row's message: at most 300 characters."""
    return shortened(clean(text, paths), MAX_MESSAGE)


def shortened(text: str, most: int) -> str:
    """The text with at most so many characters; dots stand for an end that was cut off."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _harmless(character: str) -> str:
    if character in "\t\n":
        return " "
    # Control, format (text direction, zero width), surrogate, private and unassigned characters.
    return "?" if unicodedata.category(character)[0] == "C" else character


def show_points(points: float) -> str:
    """Points with at most two decimals: 3, 2.5, 0.67."""
    return f"{points:.2f}".rstrip("0").rstrip(".")


def show_seconds(value: float) -> str:
    """A time as messages have it: 60 s."""
    return f"{value:g} s"


def show_size(num_bytes: int) -> str:
    """A size as messages have it: 4 GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} bytes"


def plain(text: str) -> str:
    """Text without what a page, a terminal or a file name could stumble over.

    Line breaks stay. Control characters, lone surrogates and marks that turn the direction of
    writing become a replacement character.
    """
    text = text.replace("\r\n", "\n").replace("\t", " ")
    return "".join(
        "\ufffd" if c in TURNING or (c != "\n" and unicodedata.category(c) in ("Cc", "Cs")) else c
        for c in text
    )


def as_sentence(text: str) -> str:
    """The text with a capital first and a full stop last, unless that would change code."""
    text = text.strip()
    if re.match(r"[a-z]{2,}[,:]? [a-z0-9(]", text):
        text = text[0].upper() + text[1:]
    return f"{text}." if " " in text and text[-1].isalnum() else text
