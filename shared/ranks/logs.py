"""What a script under torchrun said last, and which rank went down first."""

import re

NUM_LINES = 25
# After these torchrun reports about itself: a page that would push the script's own words away.
_TORCHRUN = "torch/distributed/elastic/"
_CAUSE = re.compile(
    r"Root Cause.*?^ +rank +: (\d+).*?^ +exitcode +: (-?\d+) +\(pid: \d+\)(?: +\((\w+)\))?",
    re.DOTALL | re.MULTILINE,
)


def last_words(log: str, num_lines: int = NUM_LINES) -> list[str]:
    """The last lines that the script itself printed, of a redrawn bar what stood there last.

    Only where it printed nothing are they torchrun's.
    """
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in log.split("\n")]
    lines = [line for line in lines if line]
    marks = [number for number, line in enumerate(lines) if _TORCHRUN in line]
    own = lines[: marks[0]] if marks else lines
    return (own or lines)[-num_lines:]


def first_failure(log: str) -> str:
    """Which rank failed first, and how, from torchrun's report; empty if there is none."""
    found = _CAUSE.search(log)
    if found is None or found[3]:
        return first_death(log)
    return f"rank {found[1]}: exit status {found[2]}"


def first_death(log: str) -> str:
    """Which rank failed first, and by which signal; empty if none did, or not by a signal."""
    found = _CAUSE.search(log)
    return f"rank {found[1]} was ended by {found[3]}" if found and found[3] else ""
