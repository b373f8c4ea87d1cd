"""Text that came out of a submission, made fit for a table, a page and a terminal."""

import re
import unicodedata

ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
CELL_FILE = re.compile(r"(?:<home>/)?ipykernel_\d+/\d+\.py")
# A temporary folder's name ends with eight random characters.
TEMPORARY = re.compile(r"(<home>/(?:tmp|(?:[a-z0-9]+_)*))[a-z0-9_]{8}(?=[/'\"\s)]|$)")
MAX_TEXT = 100_000  # before anything else: what follows looks at each character
MAX_LINES, MAX_LINE, MAX_MESSAGE = 40, 400, 300


def clean(text: str, paths: dict[str, str] | None = None) -> str:
    """Drop what a terminal or a page would obey, and what differs from run to run.

    `paths` maps folders of the sandbox to what they are called in a message, also where a check's
    words broke the line within them. At most 40 lines of 400 characters stay.
    """
    text = text[:MAX_TEXT]
    for path, name in (paths or {}).items():
        broken = r"(?:\n\s*)?".join(map(re.escape, path))
        text = re.sub(rf"{broken}(?:\n\s*(?=/))?", lambda _, name=name: name, text)
    text = TEMPORARY.sub(r"\1...", text)
    text = ANSI.sub("", text)
    text = CELL_FILE.sub("<cell>", ADDRESS.sub("0x...", text))
    lines = ["".join(_harmless(c) for c in line) for line in text.split("\n")[: MAX_LINES + 1]]
    if len(lines) > MAX_LINES:
        lines = [*lines[:MAX_LINES], "..."]
    return "\n".join(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}..." for line in lines)


def one_line(text: str) -> str:
    """A row's message: everything in one line of at most 300 characters."""
    text = " ".join(clean(text).split())
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."


def _harmless(character: str) -> str:
    if character == "\t":
        return " "
    # Control, format (text direction, zero width), surrogate, private and unassigned characters.
    return "?" if unicodedata.category(character)[0] == "C" else character


def seconds(value: float) -> str:
    """A time in a message."""
    return f"{value:g} s"


def size(num_bytes: int) -> str:
    """A size in a message."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} bytes"
