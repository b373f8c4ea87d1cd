"""From what a run reported to verdicts: which signatures hold, and who stopped it."""

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

from solutions.grading.results import Answers, Exercise, Limits, Outcome, Verdict
from solutions.grading.session import Report
from solutions.grading.watch import MAX_FILES
from solutions.grading.words import clean, one_line, seconds, size


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
    flags: Mapping[str, tuple[str, ...]]

    def read(self, report: Report) -> Findings:
        """Settle as many exercises as the run did, up to the first that stopped or spoilt it."""
        found = Findings()
        errors: dict[str, str] = {}
        running: dict[str, Any] = {}
        for event in report.events:
            if event["event"] == "begins":
                running = event
                continue
            if event["event"] != "done":
                continue
            running = {}
            id = event["exercise"]
            ended = self._end_of(event)
            if not id:
                if ended or not event["passed"]:
                    found.broken = ended or event["error"] or "a cell of the grader failed"
                    return found
                continue
            if event["part"] != "verdict":
                errors[id] = event["error"]
            elif not ended:
                ended = self._settle(found, id, event, errors.get(id, ""))
            if ended:
                self._stop(found, id, ended)
                return found
        if report.stopped or running:
            why = LIMIT_WORDS.get(report.stopped, report.stopped) or "the run ended early"
            if not running.get("exercise"):
                found.broken = why
            else:
                self._stop(found, running["exercise"], self._limit(report.stopped) or why)
        return found

    def _end_of(self, event: Mapping[str, Any]) -> str:
        if event["timed_out"]:
            if "output" in event["error"] and "Timeout" not in event["error"]:
                return "printed more than is read"
            return f"took longer than {seconds(self.limits.exercise_seconds)}"
        if not event["alive"]:
            return exit_words(event["status"])
        return ""

    def _limit(self, name: str) -> str:
        limits = self.limits
        return {
            "time": "took longer than all its exercises together may",
            "memory": f"used more than {size(limits.memory)} of memory",
            "processes": f"started more than {limits.num_processes} processes",
            "folder": f"wrote more than {size(limits.folder_size)} or {MAX_FILES} files",
            "output": f"printed more than {size(limits.output)}",
        }.get(name, "")

    def _settle(self, found: Findings, id: str, event: Mapping[str, Any], error: str) -> str:
        """Take the one verdict that is signed; return why the run cannot go on, else ""."""
        records = [r for r in map(self._open, event["verdicts"]) if r and r["exercise"] == id]
        if len(records) != 1:
            return f"its check did not come to an end ({event['error'] or 'no verdict'})"
        record = records[0]
        if record["exceeded"]:
            return self._limit(record["exceeded"])
        if record["tampered"]:
            flag = f"while this answer ran, {'; '.join(record['tampered'])}"
            found.verdicts[id] = self._verdict(id, Outcome.WRONG, SPOILT, flags=(flag,))
            return "tampered"
        found.verdicts[id] = self._judged(id, record, error)
        return ""

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
        kind, passed, total = record["kind"], record["passed"], record["total"]
        flags = self._loaded(id, record["imported"])
        flags += ("it left processes running, which were ended",) if record["left"] else ()
        if kind == "undefined":
            why = error or f"it defines no {self.exercises[id].name}"
            return self._verdict(id, Outcome.WRONG, f"the cell does not run: {why}", flags=flags)
        if kind == "unsolved":
            return self._verdict(
                id,
                Outcome.UNSOLVED,
                "not solved yet",
                total=total,
                hint=record["hint"],
                flags=flags,
            )
        checks = f"{passed} of {total} checks passed"
        if kind == "right":
            return self._verdict(
                id, Outcome.RIGHT, f"right ({checks})", passed=passed, total=total, flags=flags
            )
        reason = record["mistake"] or record["seen"]
        return self._verdict(
            id,
            Outcome.PARTLY if passed else Outcome.WRONG,
            f"not right at the check of {record['title']} ({checks}): {reason}",
            words=record["words"],
            mistake=record["mistake"],
            hint=record["hint"],
            passed=passed,
            total=total,
            flags=flags,
        )

    def _loaded(self, id: str, modules: Sequence[str]) -> tuple[str, ...]:
        """A flag for modules of the course that came with an answer, and that its source hid."""
        told = " ".join(self.flags[id])
        hidden = [name for name in modules if f"imports {name}" not in told]
        more = f" and {len(hidden) - 3} more" if len(hidden) > 3 else ""
        names = ", ".join(hidden[:3])
        return (f"it loads {names}{more}, which can hold answers",) if hidden else ()

    def _stop(self, found: Findings, id: str, why: str) -> None:
        if id not in found.verdicts:
            hint = ENDLESS if why.startswith("took longer") else ""
            found.verdicts[id] = self._verdict(id, Outcome.STOPPED, f"stopped: {why}", hint=hint)

    def _verdict(self, id: str, outcome: Outcome, message: str, **fields: Any) -> Verdict:
        return make_verdict(
            self.answers, self.exercises[id], outcome, message, self.flags[id], self.paths, **fields
        )


ENDLESS = "A loop without an end, or a rank that waits for what no other rank sends."
SPOILT = "what judges it was changed, so it gets no points"
LIMIT_WORDS = {"time": "no time is left", "memory": "no memory is left"}


def make_verdict(
    answers: Answers,
    exercise: Exercise,
    outcome: Outcome,
    message: str,
    seen: tuple[str, ...] = (),
    paths: Mapping[str, str] | None = None,
    **fields: Any,
) -> Verdict:
    """A verdict with cleaned texts, its points, and its flags in front of the message."""
    flags = tuple(one_line(flag) for flag in (*seen, *fields.pop("flags", ())))
    passed, total = fields.get("passed", 0), fields.get("total", 0)
    for name in ("words", "mistake", "hint"):
        fields[name] = clean(fields.get(name, ""), dict(paths or {}))
    message = clean(message, dict(paths or {}))
    if flags:
        message = f"needs a look: {'; '.join(flags)}; {message}"
    return Verdict(
        student=answers.student,
        lesson=answers.lesson,
        exercise=exercise.id,
        name=exercise.name,
        points=round(exercise.points * passed / total, 2) if total else 0.0,
        max=exercise.points,
        outcome=outcome,
        message=one_line(message),
        flags=flags,
        **fields,
    )


def exit_words(status: int | None) -> str:
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
