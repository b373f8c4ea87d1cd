"""How a rank failed, as data: in what way, which rank, with what error, at which line.

This is the one place that reads gloo's words: it raises RuntimeError for nearly everything, and
the text alone tells a lost peer from an error in somebody's own code.
"""

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

# A peer is gone, or is in the middle of another collective.
_LOST = ("onnection", "Broken pipe", "recvCompletion", "preamble", "Read error", "Socket closed")
_TO_ITSELF = "Pair is not connected"


class Failure(StrEnum):
    """The ways in which ranks fail."""

    RAISED = "raised an error of its own"
    DIED = "was ended by a signal, or left"
    LATE = "was not back in time"
    PEER_LOST = "lost a peer that was gone, or in another collective"
    TO_ITSELF = "sent to itself, or received from itself"


@dataclass(frozen=True)
class Late:
    """A rank that was not back: its number, and its Python stack, innermost frame first."""

    rank: int
    stack: str

    @property
    def place(self) -> str:
        """The innermost line of the learner's ("rank 0 in line 7 of f"); "" where there is none."""
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', self.stack)
        own = [(line, name) for file, line, name in frames if is_own_file(file)]
        return f"rank {self.rank} in line {own[0][0]} of {own[0][1]}" if own else ""

    def is_in(self, function: str) -> bool:
        """Whether a function of that name is among those that the rank is in."""
        return f" in {function}\n" in f"{self.stack}\n"


class RankFailed(RuntimeError):
    """A rank raised, died or never came back; the message says which one, and where it was.

    `kind` is the way, `rank` the rank to blame (the first that is late). `error` is what it raised
    where that can travel between processes, `error_name` and `error_text` its type and words,
    `at` the learner's own line (", in f at: x = ..."), "" if there is none. `signal` names what
    ended a rank. `late` lists the ranks that were not back after `seconds`, and `quiet` says that
    they were idle and were not waited for any longer. `back` lists those that were, without error.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: Failure,
        rank: int,
        error: BaseException | None = None,
        error_name: str = "",
        error_text: str = "",
        at: str = "",
        signal: str = "",
        late: tuple[Late, ...] = (),
        seconds: float = 0.0,
        quiet: bool = False,
        back: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.kind, self.rank, self.error = kind, rank, error
        self.error_name, self.error_text, self.at = error_name, error_text, at
        self.signal, self.late, self.seconds, self.quiet = signal, late, seconds, quiet
        self.back = back

    @property
    def headline(self) -> str:
        """The first line of the message, of at most 200 characters."""
        line = " ".join(str(self).splitlines()[0].split())
        return line if len(line) <= 200 else f"{line[:197]}..."


def kind_of(error_name: str, text: str) -> Failure:
    """Whether a rank's error is its own, or what another rank's absence did to it."""
    if error_name not in ("RuntimeError", "DistBackendError", "DistNetworkError"):
        return Failure.RAISED
    if _TO_ITSELF in text:
        return Failure.TO_ITSELF
    return Failure.PEER_LOST if any(words in text for words in _LOST) else Failure.RAISED


def own_line(text: str) -> str:
    """The last line of the learner's in a traceback; "" where none is seen."""
    frames = re.findall(r'File "([^"]+)", line \d+, in (\S+)\n +(.+)\n', text)
    own = [(name, code) for file, name, code in frames if is_own_file(file)]
    return f", in {own[-1][0]} at: {own[-1][1].strip()}" if own else ""


def is_own_file(file: str) -> bool:
    """Whether a frame's file is the learner's: not python's, torch's or the course's.

    Of a lesson's folder the checks and what they observe an answer in are the course's; its script
    is whose who launches it, and the notebook is the learner's.
    """
    import torch  # here: run_all.sh reads logs without an engine

    shared = Path(__file__).resolve().parent.parent
    folders = (Path(os.__file__).parent, Path(torch.__file__).parent, shared)
    path, lessons = Path(file), shared.parent / "lessons"
    apparatus = path.suffix == ".py" and path.name != "train.py" and path.is_relative_to(lessons)
    return not apparatus and not any(path.is_relative_to(folder) for folder in folders)
