"""One finding of the doctor."""

from dataclasses import dataclass

GOOD, NOTE, MISSING = "ok", "note", "MISSING"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked for, how it stands, what was found, and what to do."""

    name: str
    state: str
    found: str
    advice: str = ""
