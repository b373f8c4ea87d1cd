"""From what a run said to verdicts; whatever is in it, reading it never fails."""

from collections.abc import Iterable, Mapping, Sequence
from signal import Signals
from typing import Any

from solutions.grading.intake.audit import Flag
from solutions.grading.results import Answers, Exercise, Limits, Outcome, Stop, Verdict
from solutions.grading.texts import show_seconds, show_size
from solutions.grading.verdicts import make_verdict

ENDLESS = "A loop without an end, or a rank that waits for what no other rank sends."
TEXTS = ("title", "mistake", "expected", "seen", "hint")


class Reader:
    """Reads what one run of one student's notebook said; `broken` is why it settled nothing."""

    def __init__(
        self,
        answers: Answers,
        exercises: Mapping[str, Exercise],
        limits: Limits,
        flags: Mapping[str, tuple[Flag, ...]],
        paths: Mapping[str, str],
    ) -> None:
        self.answers, self.exercises, self.limits, self.flags = answers, exercises, limits, flags
        self.paths = paths
        self.broken = ""

    def read(self, events: Iterable[Mapping[str, Any]], stop: Stop | None) -> dict[str, Verdict]:
        """The verdicts by exercise, as far as the run came."""
        found: dict[str, Verdict] = {}
        running = ""
        for event in events:
            id = str(event.get("exercise", ""))
            if event["event"] == "broken":
                self.broken = str(event.get("why"))
            elif id in self.exercises and event["event"] == "begins":
                running = id
            elif id in self.exercises and id == running:
                found[id], running = self._judged(id, event), ""
        if running:
            found[running] = self._stopped(running, stop or Stop.DIED, None)
        return found

    def _judged(self, id: str, record: Mapping[str, Any]) -> Verdict:
        """The verdict that a record comes to."""
        if "stop" in record:
            known = str(record["stop"])
            known = known if known in set(Stop) else Stop.DIED
            return self._stopped(id, Stop(known), record.get("status"))
        text = {name: str(record.get(name, "")) for name in (*TEXTS, "kind", "error", "why")}
        passed, total = _count(record.get("passed")), _count(record.get("total"))
        checks = f"{passed} of {total} checks passed"
        count: dict[str, Any] = {"passed": passed, "total": total}
        kind = text["kind"]
        if kind == "spoilt":
            why = f"it makes a known wrong answer pass ({text['why']}), so it gets no points"
            return self._verdict(id, Outcome.WRONG, why, flags=("it changes what judges it",))
        if kind == "undefined":
            why = text["error"] or f"it defines no {self.exercises[id].name}"
            return self._verdict(id, Outcome.WRONG, f"the cell does not run: {why}")
        if kind == "unsolved":
            return self._verdict(id, Outcome.UNSOLVED, "not solved yet", hint=text["hint"], **count)
        if kind == "right" and passed == total > 0:
            return self._verdict(id, Outcome.RIGHT, f"right ({checks})", **count)
        also = [str(each) for each in record["also"]] if type(record.get("also")) is list else []
        return self._verdict(
            id,
            Outcome.PARTLY if passed else Outcome.WRONG,
            f"not right at the check of {text['title']} ({checks}): "
            f"{text['mistake'] or text['seen']}",
            **{name: text[name] for name in TEXTS},
            also=also,
            for_nothing=_count(record.get("for_nothing")),
            **count,
        )

    def _stopped(self, id: str, stop: Stop, status: object) -> Verdict:
        hint = ENDLESS if stop in (Stop.EXERCISE_TIME, Stop.TIME) else ""
        why = f"stopped: {self._why(stop, status)}"
        return self._verdict(id, Outcome.STOPPED, why, hint=hint, stop=stop)

    def _why(self, stop: Stop, status: object) -> str:
        limits = self.limits
        return {
            Stop.EXERCISE_TIME: f"took longer than {show_seconds(limits.exercise_seconds)}",
            Stop.TIME: "took longer than all its exercises together may",
            Stop.MEMORY: f"used more than {show_size(limits.memory)} of memory",
            Stop.FOLDER: "wrote more files than anybody reads",
            Stop.OUTPUT: "said more than anybody reads",
            Stop.DIED: end_of_process(status),
            Stop.CLOSING: "the grader was stopped",
        }[stop]

    def _verdict(
        self, id: str, outcome: Outcome, message: str, *, flags: Sequence[str] = (), **fields: Any
    ) -> Verdict:
        """A verdict with what the audit flagged; what is flagged has no points until looked at."""
        flags = (*map(str, self.flags[id]), *flags)
        return make_verdict(
            self.answers,
            self.exercises[id],
            outcome,
            message,
            flags=flags,
            paths=self.paths,
            **fields,
        )


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1000 else 0


def end_of_process(status: object) -> str:
    """How a process ended, in words."""
    if not isinstance(status, int):
        return "the process was ended"
    if -status in set(Signals):
        return f"the process was ended by {Signals(-status).name}"
    return f"it left the process with status {status}"
