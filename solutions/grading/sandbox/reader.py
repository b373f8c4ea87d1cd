"""From what a run reported to verdicts: which signatures hold, and which answer stopped it."""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

from solutions.grading.intake.audit import Flag
from solutions.grading.results import Answers, Exercise, Limits, Outcome, Stop, Verdict
from solutions.grading.sandbox.session import Report
from solutions.grading.sandbox.watch import MAX_FILES
from solutions.grading.texts import show_seconds, show_size
from solutions.grading.verdicts import make_verdict

ENDLESS = "A loop without an end, or a rank that waits for what no other rank sends."


@dataclass
class Findings:
    """What one run settled: verdicts by exercise; `broken` says why it settled nothing."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    broken: str = ""


@dataclass(frozen=True)
class Reader:
    """Reads the report of one run of one student's notebook."""

    answers: Answers
    exercises: Mapping[str, Exercise]
    limits: Limits
    key: bytes
    paths: Mapping[str, str]
    flags: Mapping[str, tuple[Flag, ...]]

    def read(self, report: Report) -> Findings:
        """Settle as many exercises as the run did, up to the first that stopped or spoilt it."""
        found = Findings()
        errors: dict[str, str] = {}
        running: dict[str, Any] = {}
        for event in report.events:
            if event["event"] == "begins":
                running = event
            elif event["event"] == "broken":
                found.broken = event["why"]
                return found
            else:
                running = {}
                if not self._goes_on(found, event, errors):
                    return found
        if report.stop is not None or running:
            self._stopped(found, running.get("exercise", ""), report.stop or Stop.DIED)
        return found

    def _goes_on(self, found: Findings, event: Mapping[str, Any], errors: dict[str, str]) -> bool:
        """Take what one cell reported; whether what comes after it can be judged."""
        id, error = event["exercise"], event["error"]
        if event["stop"] is not None:
            self._stopped(found, id, Stop(event["stop"]), event["status"])
            return False
        if not id:
            found.broken = "" if event["passed"] else error or "a cell of the grader failed"
            return not found.broken
        if event["part"] != "verdict":
            errors[id] = error
            return True
        records = [r for r in map(self._open, event["verdicts"]) if r and r["exercise"] == id]
        if len(records) != 1:
            self._stopped(found, id, Stop.NO_VERDICT, error=error)
        elif records[0]["exceeded"]:
            self._stopped(found, id, Stop(records[0]["exceeded"]))
        else:
            found.verdicts[id] = self._judged(id, records[0], errors.get(id, ""))
        return found.verdicts[id].stop is None

    def _open(self, signed: Mapping[str, Any]) -> dict[str, Any] | None:
        """The record, if the guard of this run signed it."""
        try:
            text, signature = str(signed["text"]), str(signed["signature"])
            want = hmac.new(self.key, text.encode(), hashlib.sha256).hexdigest()
            if not hmac.compare_digest(want.encode(), signature.encode()):
                return None
            return json.loads(text)
        except (KeyError, ValueError):
            return None

    def _judged(self, id: str, record: Mapping[str, Any], error: str) -> Verdict:
        """The verdict that a signed record comes to; `error` is how the answer's cell ended."""
        if record["tampered"]:
            flag = f"while this answer ran, {'; '.join(record['tampered'])}"
            why = "what judges it was changed, so it gets no points"
            return self._verdict(id, Outcome.WRONG, why, flags=(flag,), stop=Stop.CHANGED)
        flags = self._loaded(id, record["imported"])
        flags += ("it left processes running, which were ended",) if record["left"] else ()
        kind, passed, total = record["kind"], record["passed"], record["total"]
        if kind == "undefined":
            why = error or f"it defines no {self.exercises[id].name}"
            return self._verdict(id, Outcome.WRONG, f"the cell does not run: {why}", flags=flags)
        count: dict[str, Any] = {"passed": passed, "total": total, "flags": flags}
        if kind == "unsolved":
            hint = record["hint"]
            return self._verdict(id, Outcome.UNSOLVED, "not solved yet", hint=hint, **count)
        checks = f"{passed} of {total} checks passed"
        if kind == "right":
            return self._verdict(id, Outcome.RIGHT, f"right ({checks})", **count)
        reason = record["mistake"] or record["seen"]
        said = {name: record[name] for name in ("title", "mistake", "expected", "seen", "hint")}
        outcome = Outcome.PARTLY if passed else Outcome.WRONG
        message = f"not right at the check of {record['title']} ({checks}): {reason}"
        return self._verdict(id, outcome, message, **said, also=record["also"], **count)

    def _loaded(self, id: str, modules: Sequence[str]) -> tuple[str, ...]:
        """A flag for modules of the course that came with an answer, and that its source hid."""
        told = [f"{flag.imports}." for flag in self.flags[id]]  # "a.b.c." tells of a.b as well
        hidden = [name for name in modules if not any(t.startswith(f"{name}.") for t in told)]
        more = f" and {len(hidden) - 3} more" if len(hidden) > 3 else ""
        names = ", ".join(hidden[:3])
        return (f"it loads {names}{more}, which can hold answers",) if hidden else ()

    def _stopped(
        self, found: Findings, id: str, stop: Stop, status: int | None = None, error: str = ""
    ) -> None:
        """Note that the run ended in the cells of an exercise, or ("") in one of the grader."""
        why = self._why(stop, status, error)
        if not id:
            found.broken = why
        elif id not in found.verdicts:
            hint = ENDLESS if stop in (Stop.EXERCISE_TIME, Stop.TIME) else ""
            found.verdicts[id] = self._verdict(
                id, Outcome.STOPPED, f"stopped: {why}", hint=hint, stop=stop
            )

    def _why(self, stop: Stop, status: int | None, error: str) -> str:
        limits = self.limits
        return {
            Stop.EXERCISE_TIME: f"took longer than {show_seconds(limits.exercise_seconds)}",
            Stop.TIME: "took longer than all its exercises together may",
            Stop.MEMORY: f"used more than {show_size(limits.memory)} of memory",
            Stop.PROCESSES: f"started more than {limits.num_processes} processes",
            Stop.FOLDER: f"wrote more than {show_size(limits.folder_size)} or {MAX_FILES} files",
            Stop.OUTPUT: f"printed more than {show_size(limits.output)}",
            Stop.DIED: end_of_process(status),
            Stop.NO_VERDICT: f"its check did not come to an end ({error or 'no verdict'})",
            Stop.CHANGED: "what judges it was changed",
            Stop.CLOSING: "the grader was stopped",
        }[stop]

    def _verdict(
        self, id: str, outcome: Outcome, message: str, *, flags: Sequence[str] = (), **fields: Any
    ) -> Verdict:
        return make_verdict(
            self.answers,
            self.exercises[id],
            outcome,
            message,
            flags=(*map(str, self.flags[id]), *flags),
            paths=self.paths,
            **fields,
        )


def end_of_process(status: int | None) -> str:
    """How a process ended, in words; the launcher reports a signal as 128 plus its number."""
    if status is None:
        return "the process was ended"
    number = -status if status < 0 else status - 128
    if status < 0 or 128 < status < 160:
        try:
            return f"the process was ended by {Signals(number).name}"
        except ValueError:
            pass
    return f"it left the process with status {status}"
