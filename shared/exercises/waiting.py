"""While a check runs before a reader: prints that do not flood the page, and a way to stop it."""

import contextlib
import io
import sys
import threading
import time
import traceback
from collections.abc import Generator
from typing import Any, TextIO

from shared.errors import ShortError
from shared.ranks.failures import own_line

NUM_LINES = 20  # that an answer prints and a check shows
WIDTH = 300  # characters of such a line
SECONDS = 10.0  # until a check says that it is still running


class Stopped(ShortError):
    """A check was interrupted; the message says after how long, and in which line of the answer."""


class FirstLines(io.TextIOBase):
    """Hands on the first lines that are written, none wider than WIDTH, and counts the others."""

    encoding = "utf-8"

    def __init__(self, out: TextIO) -> None:
        self.out, self.num_lines, self._column = out, 0, 0
        self.over = False  # then it hands on all: a logger may have kept it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.out, name)  # buffer

    def fileno(self) -> int:
        """As the stream behind it."""
        return self.out.fileno()

    def isatty(self) -> bool:
        """As the stream behind it."""
        return self.out.isatty()

    def write(self, text: str, /) -> int:
        """Take any text; returns its length, as a stream does."""
        if self.over:
            return self.out.write(text)
        for line in text.splitlines(keepends=True):
            if self.num_lines < NUM_LINES:
                words, ends = line.rstrip("\n"), line.endswith("\n")
                self.out.write(words[: max(0, WIDTH - self._column)] + "\n" * ends)
            self._column = 0 if line.endswith("\n") else self._column + len(line)
            self.num_lines += line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """As the stream behind it."""
        self.out.flush()


@contextlib.contextmanager
def before_a_reader(title: str, *, says_how_to_stop: bool) -> Generator[None]:
    """Keep what is printed short. `Stopped` takes the place of an interrupt.

    With `says_how_to_stop` a line says after SECONDS that it is still running.
    """
    with can_be_stopped(title, says_how=says_how_to_stop), first_lines(" that the answer printed"):
        yield


@contextlib.contextmanager
def can_be_stopped(title: str, *, says_how: bool) -> Generator[None]:
    """Raise `Stopped` in place of an interrupt; `says_how` after SECONDS."""
    out, began = sys.stdout, time.monotonic()
    words = f"{title}: still running after {SECONDS:g} s; the square button (interrupt) stops it"
    timer = threading.Timer(SECONDS, print, (words,), {"file": out, "flush": True})
    timer.daemon = True
    if says_how:
        timer.start()
    try:
        yield
    except KeyboardInterrupt:
        seconds = time.monotonic() - began
        where = own_line(traceback.format_exc())
        raise Stopped(f"{title}, by you after {seconds:.0f} s{where}") from None
    finally:
        timer.cancel()


@contextlib.contextmanager
def first_lines(whose: str = "", out: TextIO | None = None) -> Generator[None]:
    """Show the first NUM_LINES that are printed, on `out`, and count those that are not shown."""
    printed = FirstLines(out or sys.stdout)
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        printed.over = True
        if (more := printed.num_lines - NUM_LINES) > 0:
            print(f"(and {more:,} more lines{whose})", file=printed.out)
