"""When a run's events lie on an axis of time: their order was recorded, their lengths are given.

A rank of a laptop computes these small layers in microseconds and waits for a core in between, so
that measured lengths would show the machine. The unit is a layer's backward.
"""

from dataclasses import dataclass, field

from shared.book.film import kib
from shared.book.planned import State
from shared.plots import SKY, VERMILION

LINKS = {"fast": 0.1, "slow": 0.4}  # of a layer's backward, a KiB
LATENCY = 0.2  # of a message
LANES = ("computes", "link")


@dataclass
class Clock:
    """What the processor and the link do, one thing after the other each."""

    link: str
    now: float = 0.0
    free: float = 0.0  # when the link is
    bars: list[tuple[int, float, float, str, tuple[str, str]]] = field(default_factory=list)

    def compute(self, length: float, text: str, what: str) -> None:
        """Work, which is done when this returns."""
        self._lay(0, self.now, self.now + length, text, what)
        self.now += length

    def send(self, size: int, text: str, what: str) -> float:
        """A message: it waits for the one before, and is there at the moment returned."""
        begin = max(self.now, self.free)
        self.free = begin + LATENCY + LINKS[self.link] * size / 1024
        self._lay(1, begin, self.free, text, f"{what}, {kib(size)}")
        return self.free

    def _lay(self, lane: int, begin: float, end: float, text: str, what: str) -> None:
        cell = (what, (SKY, VERMILION)[lane])
        self.bars.append((lane, round(begin, 3), round(end, 3), text, cell))

    def lanes(self, times: list[float]) -> State:
        """For the drawing; `times`: where each frame of its film lies."""
        end = max(bar[2] for bar in self.bars)
        says = f"order recorded; in backwards of a layer, drawn for a {self.link} link"
        times = [round(time, 3) for time in times]
        return {"names": LANES, "bars": self.bars, "times": times, "end": end, "says": says}

    def hidden(self) -> float:
        """The share of the messages' time in which the processor computes."""
        work = [bar[1:3] for bar in self.bars if bar[0] == 0]
        sent = [bar[1:3] for bar in self.bars if bar[0] == 1]
        beside = sum(max(0.0, min(b, d) - max(a, c)) for a, b in work for c, d in sent)
        return beside / sum(end - begin for begin, end in sent)
