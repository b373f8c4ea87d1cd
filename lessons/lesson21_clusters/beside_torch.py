"""What torch itself says: its analyzer `torchfrtrace` of dumps, and its check before each call."""

import contextlib
import logging
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from shared.clusters.recordings import Call, Recording
from shared.clusters.watchdog import UNNAMED

STARTS = ("missing ranks", "error msg", "collective:")
_MADE = re.compile(  # without spaces, and without a comma after the number in some versions
    r"Rank(\d+)isrunningcollective:CollectiveFingerPrint\((?:SequenceNumber=(\d+),?)?"
    r"OpType=([A-Z_]+)(?:,TensorShape=\[([\d,]*)\],TensorDtypes=(\w+))?"
)


def mismatches(text: str) -> list[Recording]:
    """The calls in "Detected mismatch between collectives on ranks", a recording a rank.

    TORCH_DISTRIBUTED_DEBUG=DETAIL lets every rank compare its call with the others' before it is
    made. Of two that differ the first has the number: the other's is not always sent whole.
    """
    calls: dict[int, Call] = {}
    for words in "".join(text.split()).split("Detectedmismatch"):
        made = [*_MADE.finditer(words)][:2]  # one, where the line is cut
        for each in made:
            shape = (each[4] or "").replace(",", " x ")
            numbers = f" of {shape} {each[5].lower()}" if each[5] else ""
            what, number = each[3].strip("_").lower() + numbers, int(made[0][2] or 0)
            calls.setdefault(int(each[1]), Call(UNNAMED, number, what, "?"))
    return [Recording(r, {call.group: tuple(sorted(calls))}, (call,)) for r, call in calls.items()]


def torchs_words(
    dumps: Mapping[int, Mapping[str, Any]], order: Sequence[int], *, partial: bool = False
) -> list[str]:
    """The lines of torch's analyzer that say who is missing, or who is to blame.

    It expects of everybody the call of the rank that comes first in `order`; `torchfrtrace` itself
    takes the order in which the folder lists its files, and reads them by pickle, which runs what a
    file says. `partial`: some ranks left no dump. What stops it is its last line.
    """
    # Not at the head: torch 2.9 comes without its analyzer.
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    args: Any = JobConfig().parse_args(["--allow-incomplete-ranks"] if partial else [])
    version = str(dumps[order[0]].get("version", ""))
    details = {
        f"rank_{rank}": {"host_name": f"host_rank{rank}", "rank": rank, **dumps[rank]}
        for rank in order
    }
    with _said() as said:
        try:
            build_db(details, args, version)
        except (AssertionError, KeyError, ValueError, TypeError, IndexError) as error:
            said.append(f"error msg: it stops with {error!r:.200}")
    return [line for line in said if line.startswith(STARTS)]


@contextlib.contextmanager
def _said() -> Generator[list[str]]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log = logging.getLogger("Flight Recorder")
    keep, before = Keep(), [*log.handlers]
    log.propagate = False
    log.addHandler(keep)
    for handler in before:
        log.removeHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(keep)
        for handler in before:
            log.addHandler(handler)
