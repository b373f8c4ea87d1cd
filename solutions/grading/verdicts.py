"""How a verdict is made: its points from the checks that passed, its texts cleaned one by one.

A `Reader` makes them of what a run said; whatever is in it, reading it never fails.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Any

from solutions.grading.results import Answers, Exercise, Limits, Outcome, Stop, Verdict
from solutions.grading.texts import brief, clean

ENDLESS = "A loop without an end, or a rank that waits for what no other rank sends."
SPOILT = "it changes what judges it"
CHANGES = "changes "  # how a flag begins that says what an answer has left changed
MOST_CHECKS = 1000  # of one exercise: a verdict that counts more is forged
TEXTS = ("title", "mistake", "expected", "seen", "hint")


def spoils(verdict: Verdict) -> bool:
    """Whether other exercises must not meet this answer."""
    return any(flag == SPOILT or flag.startswith(CHANGES) for flag in verdict.flags)


def make_verdict(
    answers: Answers,
    exercise: Exercise,
    outcome: Outcome,
    message: str,
    *,
    also: Iterable[str] = (),
    passed: int = 0,
    total: int = 0,
    for_nothing: int = 0,
    stop: Stop | None = None,
    flags: Iterable[str] = (),
    paths: Mapping[str, str] | None = None,
    **texts: str,
) -> Verdict:
    """A verdict on one exercise; `texts` are TEXTS, `paths` names for folders as in `clean`.

    Points are the share of checks that passed, without those that pass `for_nothing`. What is
    flagged has none until an instructor says otherwise.
    """
    flags = tuple(brief(flag, paths) for flag in flags)
    counted = 1.0 if outcome is Outcome.RIGHT else 0.0
    if outcome is Outcome.PARTLY and total > for_nothing:
        counted = max(0, min(passed, total) - for_nothing) / (total - for_nothing)
    said: dict[str, Any] = {name: clean(text, paths) for name, text in texts.items()}
    return Verdict(
        student=answers.student,
        lesson=answers.lesson,
        exercise=exercise.id,
        name=exercise.name,
        points=0.0 if flags else round(exercise.points * counted, 2),
        max=exercise.points,
        outcome=outcome,
        message=brief(message, paths),
        also=tuple(clean(each, paths) for each in also),
        passed=passed,
        total=total,
        stop=stop,
        flags=flags,
        **said,
    )


@dataclass
class Reader:
    """Reads what one run of one student's notebook said; `broken` is why it settled nothing."""

    answers: Answers
    exercises: Mapping[str, Exercise]
    limits: Limits
    paths: Mapping[str, str]
    broken: str = ""

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
            known = record["stop"] in list(Stop)
            return self._stopped(id, Stop(record["stop"]) if known else Stop.DIED, record)
        kind, why, error = (str(record.get(name, "")) for name in ("kind", "why", "error"))
        text = {name: str(record.get(name, "")) for name in TEXTS}
        also = record.get("also")
        passed, total, for_nothing = (
            value if isinstance(value, int) and 0 <= value < MOST_CHECKS else 0
            for value in map(record.get, ("passed", "total", "for_nothing"))
        )
        checks = f"{passed} of {total} checks passed"
        watched = list(_watched(record, total))
        count: dict[str, Any] = {"passed": passed, "total": total, "watched": watched}
        if kind == "spoilt":
            why = f"it makes a known wrong answer pass ({why}), so it gets no points"
            return self._verdict(id, Outcome.WRONG, why, flag=SPOILT, watched=watched)
        if kind == "undefined":
            why = error or f"it defines no {self.exercises[id].name}"
            return self._verdict(
                id, Outcome.WRONG, f"the cell does not run: {why}", watched=watched
            )
        if kind == "unsolved":
            return self._verdict(id, Outcome.UNSOLVED, "not solved yet", hint=text["hint"], **count)
        if kind == "right" and passed == total > 0:
            return self._verdict(id, Outcome.RIGHT, f"right ({checks})", **count)
        said = text["mistake"] or text["seen"]
        return self._verdict(
            id,
            Outcome.PARTLY if passed else Outcome.WRONG,
            f"not right at the check of {text['title']} ({checks}): {said}",
            also=map(str, also) if isinstance(also, list) else (),
            for_nothing=for_nothing,
            **text,
            **count,
        )

    def _stopped(self, id: str, stop: Stop, record: Mapping[str, Any] | None) -> Verdict:
        why = {
            Stop.EXERCISE_TIME: f"took longer than {self.limits.exercise_seconds:g} s",
            Stop.TIME: "took longer than anybody waits, and its judge fell silent",
            Stop.MEMORY: f"used more than {self.limits.memory / 2**30:.4g} GiB of memory",
            Stop.FOLDER: "wrote more files than anybody reads",
            Stop.OUTPUT: "said more than anybody reads",
            Stop.DIED: end_of_process((record or {}).get("status")),
            Stop.CLOSING: "the grader was stopped",
        }[stop]
        hint = ENDLESS if stop in (Stop.EXERCISE_TIME, Stop.TIME) else ""
        return self._verdict(id, Outcome.STOPPED, f"stopped: {why}", hint=hint, stop=stop)

    def _verdict(
        self,
        id: str,
        outcome: Outcome,
        message: str,
        *,
        flag: str = "",
        watched: Iterable[str] = (),
        **fields: Any,
    ) -> Verdict:
        """A verdict with what the audit flagged, and flags of the run's own."""
        flags = [*map(str, self.answers.flags.get(id, ())), *filter(None, [flag]), *watched]
        paths, exercise = self.paths, self.exercises[id]
        return make_verdict(
            self.answers, exercise, outcome, message, flags=flags, paths=paths, **fields
        )


def _watched(record: Mapping[str, Any], total: int) -> Iterator[str]:
    """What the judge saw an answer do, and a count that is not the course's own."""
    for name in ("heard", "flags", "changes"):
        said = record.get(name)
        yield from map(str, said[:3] if isinstance(said, list) else ())
    if record.get("checks", total) != total:
        yield "its verdict counts other checks than there are"
    if not _is_written_by_the_judge(record):
        yield "its verdict is none that the judge writes"


def _is_written_by_the_judge(record: Mapping[str, Any]) -> bool:
    """Whether what a record holds has the types, and the numbers, that the judge gives it."""
    kind = record.get("kind")
    numbers: list[Any] = [record.get("passed"), record.get("total"), record.get("for_nothing", 0)]
    if any(type(each) is not int for each in numbers):  # a bool is an int as well, and no count
        return False
    passed, total, for_nothing = numbers
    lists = (record.get(name, []) for name in ("flags", "changes", "also"))
    texts = (record.get(name, "") for name in (*TEXTS, "why", "error"))
    return (
        kind in ("right", "wrong", "spoilt", "undefined", "unsolved")
        and 0 <= passed <= total < MOST_CHECKS
        and 0 <= for_nothing <= passed
        and (passed == total > 0 if kind == "right" else kind == "spoilt" or passed < total)
        and all(isinstance(x, list) and all(isinstance(y, str) for y in x) for x in lists)
        and all(isinstance(each, str) for each in texts)
    )


def end_of_process(status: object) -> str:
    """How a process ended, in words."""
    if not isinstance(status, int):
        return "the process was ended"
    if -status in set(Signals):
        return f"the process was ended by {Signals(-status).name}"
    return f"it left the process with status {status}"
