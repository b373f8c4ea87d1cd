"""What a script under torchrun said last, and which rank went down first."""

import re

from shared.ranks.failures import Failure, kind_of

NUM_LINES = 25
_RANK = r"(?:\[rank\d+\]: ?)?"  # before each line of a rank that has joined a process group
# Where torch's C++ was, with and without TORCH_SHOW_CPP_STACKTRACES.
_FRAME = re.compile(
    _RANK + r"(?:frame #\d+: |#\d+ .* from \S+:\d+$|<omitting python frames>"
    r"|C\+\+ CapturedTraceback:|Exception raised from .* \(most recent call first\):)"
)
# What it remarks on a store or a peer that is gone or has not come yet, and torchrun on its ranks.
_REMARK = re.compile(
    _RANK + r"\[(?:[IW]\d{4} \S+ (?:TCPStore|socket|ProcessGroup\w*)\.cpp:\d+\]|Gloo\] Rank )"
    r"|[A-Z]\d{4} .*torch/distributed/(?:elastic/|run\.py)"
)
_STORE_GONE = re.compile(r" TCPStore\.cpp:\d+\] \[c10d\] \w+ failed on ")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("The above exception", "During handling of")
_AGENTS_FRAME = re.compile(r' .*torch/distributed/run\.py"')
_CTRL_C = re.compile(r".*torch/distributed/elastic/.*\] Received 2 death signal")
_ERROR = re.compile(
    r"(\[rank\d+\]:)? ?(?:[\w.]+\.)?(\w*(?:Error|Exception|Failed|Solved)|error): (.*)"
)
_END = r"^ +rank +: (\d+).*?^ +exitcode +: (-?\d+) +\(pid: \d+\)(?: +\((\w+)\))?"
_ENDED = re.compile(_END, re.DOTALL | re.MULTILINE)
_CAUSE = re.compile("Root Cause.*?" + _END, re.DOTALL | re.MULTILINE)
# Of a rank that nobody ended: an agent sends SIGTERM, and NCCL aborts where it has lost a peer.
_KILLED = re.compile(r"^ +exitcode +: -\d+ \(pid: \d+\) +\((?!SIGTERM|SIGABRT)", re.MULTILINE)


def last_words(log: str, num_lines: int = NUM_LINES) -> list[str]:
    """The last lines that the script itself printed, of a redrawn bar what stood there last.

    Not what torch's C++ adds, nor ranks that lost a peer where another says what its error is.
    Only where it printed nothing are they torchrun's.
    """
    lines = _shown(log)
    own = _own(lines)
    errors = _errors(own)
    lost = {rank for rank, kind in errors if kind is Failure.PEER_LOST}
    if failed := {rank for rank, kind in errors if kind is not Failure.PEER_LOST}:
        hidden = tuple(lost - failed - {""})
        own = [line for line in own if not line.startswith(hidden)]
    return (own or lines)[-num_lines:]


def without_frames(text: str) -> str:
    """A text without the frames of torch's C++, a page that says nothing to whom it reaches."""
    return "\n".join(line for line in text.split("\n") if not _FRAME.match(line))


def place_in_the_chain(log: str) -> int:
    """Order the logs of nodes that failed from cause to consequence.

    First a rank that failed by itself; last a node whose ranks lost a peer, or its agent the store.
    """
    if not _CAUSE.search(log):
        return 2 if _STORE_GONE.search(log) else 1
    return 2 if _only_lost_peers(log) and not _KILLED.search(log) else 0


def _only_lost_peers(log: str) -> bool:
    """Whether its ranks' own errors are all that a peer was gone."""
    return {kind for _, kind in _errors(_own(_shown(log)))} == {Failure.PEER_LOST}


def _shown(log: str) -> list[str]:
    """The lines as a terminal shows them, without empty ones and frames."""
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in log.split("\n")]
    return [line for line in lines if line and not _FRAME.match(line)]


def _own(lines: list[str]) -> list[str]:
    """What is neither torchrun's nor a remark of torch's C++."""
    return [line for line in lines[: _agents_end(lines)] if not _REMARK.match(line)]


def _agents_end(lines: list[str]) -> int:
    """How many lines come before the agent's end: the way that an error of its own took.

    That may have a cause, whose way stands first. What ranks say to Ctrl-C, as which `supervise`
    ends them, is left out with it. Line by line: the grader reads what answers have said.
    """
    begin, inside, before = 0, False, ""
    for number, line in enumerate(lines):
        if _CTRL_C.match(line):
            return number
        if line == _TRACEBACK:
            begin, inside = begin if before.startswith(_CHAINED) else number, True
        elif not line.startswith(" "):
            inside = False
        elif inside and _AGENTS_FRAME.match(line):
            return begin
        before = line
    return len(lines)


def _errors(lines: list[str]) -> list[tuple[str, Failure]]:
    """Each error's beginning ("[rank1]:" of a rank that had joined a group), and its kind."""
    found = [match for match in map(_ERROR.match, lines) if match]
    return [(match[1] or "", kind_of(match[2], match[3])) for match in found]


def first_failure(log: str) -> str:
    """Which rank failed first, and how, from torchrun's report; empty if there is none."""
    found = _first(log)
    if found is None or found[3]:
        return first_death(log)
    return f"rank {found[1]}: exit status {found[2]}"


def first_death(log: str) -> str:
    """Which rank failed first, and by which signal; empty if none did, or not by a signal."""
    found = _first(log)
    return f"rank {found[1]} was ended by {found[3]}" if found and found[3] else ""


def _first(log: str) -> re.Match[str] | None:
    """The end that torchrun calls the root, or, where that follows from another, the other.

    A rank that lost its peer notes the second; of one that died torchrun notes when it looked. NCCL
    aborts where it has lost a peer, so of two that died the one with another signal comes first.
    """
    root = _CAUSE.search(log)
    if root is None:
        return None
    ended = [end for end in _ENDED.finditer(log) if end[3] != "SIGTERM"]
    ended.sort(key=lambda end: (not end[3], end[3] == "SIGABRT"))
    if root[3] == "SIGTERM" and ended:  # its agent ended it
        return ended[0]
    died = ended and ended[0][3] and not root[3]
    return ended[0] if died and _only_lost_peers(log) else root
