"""From cells to a notebook, and from what its run reported to verdicts."""

import hashlib
import hmac
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from solutions.grading.intake.audit import Flag
from solutions.grading.results import Answers, Exercise, Lesson, Limits, Outcome, Stop
from solutions.grading.sandbox.assemble import PART, graded_notebook
from solutions.grading.sandbox.reader import Findings, Reader, end_of_process
from solutions.grading.sandbox.run import Grading
from solutions.grading.sandbox.session import Report
from solutions.grading.verdicts import make_verdict

KEY = b"k" * 32
LESSON = Lesson(
    "02",
    "02_x",
    (Exercise("02.1", "f", 3), Exercise("02.2", "g", 1)),
    "import math",
    {"02.1": "stub1", "02.2": "stub2"},
    "",
)


def test_the_graded_notebook_holds_setup_cells_and_verdicts():
    answers = Answers("ada", "02", {"02.1": "mine", "02.2": "other"}, {})
    text = graded_notebook(
        LESSON, answers, wanted=["02.1"], stubbed=["02.2"], name="g1", guard={"number": "02"}
    )
    cells = json.loads(text)["cells"]
    parts = [(c["metadata"][PART]["part"], c["metadata"][PART]["exercise"]) for c in cells]
    assert parts == [
        ("start", ""),
        ("setup", ""),
        ("settle", ""),
        ("answer", "02.1"),
        ("verdict", "02.1"),
        ("answer", "02.2"),
    ]  # nothing is to be cleared up after a stub
    assert [c["source"] for c in cells][3:] == ["mine", "g1.judge('02.1', 'f')", "stub2"]
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells)


def test_an_answer_that_was_judged_before_is_cleared_up_after():
    answers = Answers("ada", "02", {"02.1": "mine", "02.2": "other"}, {})
    text = graded_notebook(LESSON, answers, wanted=["02.2"], stubbed=[], name="g1", guard={})
    sources = [cell["source"] for cell in json.loads(text)["cells"]]
    assert sources[3:] == ["mine", "g1.clear_up()", "other", "g1.judge('02.2', 'g')"]


def test_a_verdict_stays_when_its_answer_stops_a_later_run_and_the_runs_end(monkeypatch):
    """02.2 spoils the first run; in the second 02.1, right before, takes too long."""
    base = reader()

    right, stopped = Outcome.RIGHT, Outcome.STOPPED

    def says(**outcomes):
        found = {}
        for id, outcome in outcomes.items():
            stop = Stop.TIME if outcome is stopped else None
            found[id] = make_verdict(base.answers, base.exercises[id], outcome, "said", stop=stop)
        return Findings(found)

    runs = iter([says(**{"02.1": right, "02.2": stopped}), says(**{"02.1": stopped})])
    never = iter(lambda: says(**{"02.1": stopped}), None)
    three = (*LESSON.exercises, Exercise("02.3", "h", 1))
    answers = Answers("ada", "02", dict.fromkeys(("02.1", "02.2", "02.3"), "x = 1"), {})
    workspace = SimpleNamespace(check_open=lambda: None)
    grading = Grading(workspace, 0, answers, replace(LESSON, exercises=three), Limits())
    monkeypatch.setattr(grading, "_run", lambda wanted, stubbed: next(runs, None) or next(never))
    assert [each.outcome for each in grading.verdicts()] == [right, stopped, Outcome.UNREADABLE]


def reader(flags=()):
    exercises = {each.id: each for each in LESSON.exercises}
    answers = Answers("ada", "02", {"02.1": "mine"}, {})
    return Reader(answers, exercises, Limits(), KEY, {}, {"02.1": tuple(flags), "02.2": ()})


def done(text, key=KEY, **event):
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    base = {"event": "done", "part": "verdict", "exercise": "02.1", "passed": True}
    base |= {"stop": None, "status": None, "error": ""}
    return {**base, "verdicts": [{"text": text, "signature": signature}], **event}


RECORD = {"kind": "right", "exercise": "02.1", "passed": 2, "total": 2, "tampered": []}
RECORD |= {"imported": [], "left": False, "exceeded": ""}


@pytest.mark.parametrize(
    "event",
    [
        done(json.dumps(RECORD), key=b"guess"),
        done(json.dumps(RECORD), verdicts=[]),
        done(json.dumps(RECORD), verdicts=[{"text": 3}]),
        done(json.dumps({**RECORD, "exercise": "02.2"})),
        done(json.dumps(RECORD), verdicts=[done(json.dumps(RECORD))["verdicts"][0]] * 2),
    ],
    ids=["forged", "none", "broken", "of another exercise", "twice"],
)
def test_only_one_signed_verdict_of_this_exercise_counts(event):
    (verdict,) = reader().read(Report([event])).verdicts.values()
    assert (verdict.outcome, verdict.points) == (Outcome.STOPPED, 0.0)
    assert verdict.stop is Stop.NO_VERDICT
    assert "did not come to an end" in verdict.message


def test_points_follow_the_share_of_checks_and_each_text_arrives_as_it_was_said():
    record = {**RECORD, "kind": "wrong", "passed": 1, "total": 3, "title": "t", "also": ["u"]}
    record |= {"mistake": "seen: 3", "expected": "a\nb", "seen": "/tmp/x/f", "hint": "hint: h"}
    base = replace(reader([Flag(1, "imports os", "os")]), paths={"/tmp/x": "<home>"})
    (verdict,) = base.read(Report([done(json.dumps(record))])).verdicts.values()
    assert (verdict.outcome, verdict.points) == (Outcome.PARTLY, 1.0)
    assert verdict.message == "not right at the check of t (1 of 3 checks passed): seen: 3"
    assert (verdict.title, verdict.mistake, verdict.expected) == ("t", "seen: 3", "a b")
    assert (verdict.seen, verdict.hint, verdict.also) == ("<home>/f", "hint: h", ("u",))
    assert verdict.flags == ("line 1 imports os",)


def test_an_answer_that_changed_what_judges_is_known_however_long_its_flags():
    """Its cell must be out of the way of the others: so this is no matter of a text's end."""
    changes = [f"torch.{'name' * 30}{n} was replaced" for n in range(4)]
    event = done(json.dumps({**RECORD, "tampered": changes}))
    found = reader([Flag(n, "imports " + "os" * 50) for n in range(6)]).read(Report([event]))
    (verdict,) = found.verdicts.values()
    assert (verdict.outcome, verdict.points, verdict.stop) == (Outcome.WRONG, 0.0, Stop.CHANGED)


def test_words_of_an_answer_do_not_tell_why_it_stopped():
    """They are the student's: one run too late is one, whatever the error says."""
    late = done("{}", verdicts=[], stop="exercise time", error="ValueError: output")
    (verdict,) = reader().read(Report([late])).verdicts.values()
    assert verdict.stop is Stop.EXERCISE_TIME
    assert verdict.message == "stopped: took longer than 60 s"
    assert "loop" in verdict.hint
    event = done("{}", verdicts=[], error="took longer than 60 s")
    (verdict,) = reader().read(Report([event])).verdicts.values()
    assert verdict.stop is Stop.NO_VERDICT
    assert not verdict.hint


@pytest.mark.parametrize(
    ("seen", "imported", "flags"),
    [
        (
            (),
            ["shared.model", "shared.x"],
            ["it loads shared.model, shared.x, which can hold answers"],
        ),
        (
            (Flag(1, "imports shared.model.attention", "shared.model.attention"),),
            ["shared.model", "shared.model.attention"],
            [],
        ),
        (
            (Flag(1, "imports shared.models", "shared.models"),),
            ["shared.model"],
            ["it loads shared.model, which can hold answers"],
        ),
        ((), ["a", "b", "c", "d", "e"], ["it loads a, b, c and 2 more, which can hold answers"]),
    ],
    ids=["hidden", "named by the audit", "a name that begins alike", "many"],
)
def test_an_import_is_told_once(seen, imported, flags):
    event = done(json.dumps({**RECORD, "imported": imported}))
    (verdict,) = reader(seen).read(Report([event])).verdicts.values()
    assert verdict.flags == (*map(str, seen), *flags)


def test_a_run_that_was_stopped_blames_the_cell_that_ran():
    events = [done(json.dumps(RECORD)), {"event": "begins", "part": "answer", "exercise": "02.2"}]
    found = reader().read(Report(events, stop=Stop.MEMORY))
    assert found.verdicts["02.1"].outcome is Outcome.RIGHT
    assert found.verdicts["02.2"].message == "stopped: used more than 4 GiB of memory"
    assert found.verdicts["02.2"].stop is Stop.MEMORY


def test_a_run_that_ended_without_a_word_blames_the_cell_that_ran():
    events = [{"event": "begins", "part": "answer", "exercise": "02.1"}]
    assert reader().read(Report(events)).verdicts["02.1"].stop is Stop.DIED


def test_a_failing_setup_is_nobody_s_fault():
    event = done("{}", part="setup", exercise="", passed=False, error="ImportError: no torch")
    found = reader().read(Report([event]))
    assert (found.verdicts, found.broken) == ({}, "ImportError: no torch")


def test_a_kernel_that_could_not_be_started_is_nobody_s_fault():
    events = [{"event": "begins", "part": "start", "exercise": ""}]
    events += [{"event": "broken", "why": "no kernel"}]
    found = reader().read(Report(events))
    assert (found.verdicts, found.broken) == ({}, "no kernel")


def test_the_end_of_a_process_in_words():
    assert end_of_process(139) == "the process was ended by SIGSEGV"
    assert end_of_process(-9) == "the process was ended by SIGKILL"
    assert end_of_process(3) == "it left the process with status 3"
