"""The guard, in this process: what it notices, what it says, and what it does not mind."""

import copy
import hashlib
import hmac
import importlib.util
import io
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shared.exercises import expecting as checking
from shared.exercises import notebook as course
from solutions.grading import guard as guarding
from solutions.grading import printed as printing
from solutions.grading.assemble import PART, graded_notebook
from solutions.grading.results import Answers, Exercise, Lesson, Limits, Outcome
from solutions.grading.run import Grading
from solutions.grading.session import Report
from solutions.grading.verdicts import Findings, Reader, exit_words, make_verdict
from solutions.grading.words import clean, one_line, size

KEY = b"k" * 32


@pytest.fixture
def guard(monkeypatch, tmp_path):
    """A settled guard over lesson 02, whose messages are kept in `said`."""
    said = []
    shell = SimpleNamespace(display_pub=SimpleNamespace(publish=lambda **m: said.append(m)))
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shell)
    monkeypatch.setenv("TORCH_HANDLE_SEED", "5")
    monkeypatch.delenv("TORCH_HANDLE_IMPLEMENTATION", raising=False)  # the suite's own mode
    monkeypatch.setenv("TORCH_HANDLE_STRICT", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(course, "defined", {})
    options = guarding.Options("02", str(tmp_path), 1 << 20, 1 << 20, 100, alone=False)
    namespace = {"check": course.check, "exercise": course.exercise, "torch": torch}
    made = guarding.Guard(KEY, namespace, options, printing.Printed())
    made.settle()
    made.said, made.space = said, namespace
    return made


def record(guard):
    """The last verdict, its signature checked."""
    signed = guard.said[-1]["data"][guarding.MIME]
    want = hmac.new(KEY, signed["text"].encode(), hashlib.sha256).hexdigest()
    assert signed["signature"] == want
    return json.loads(signed["text"])


def define(guard, function, id="02.3"):
    guard.space[function.__name__] = course.exercise(id)(function)


def test_right_wrong_unsolved_and_undefined_answers(guard):
    def causal_mask(length, device=None):
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()

    define(guard, causal_mask)
    guard.judge("02.3", "causal_mask")
    assert (record(guard)["kind"], record(guard)["passed"]) == ("right", 2)

    def padding_mask(tokens, pad_id=0):
        return (tokens == pad_id)[:, None, None]

    define(guard, padding_mask, "02.2")
    guard.judge("02.2", "padding_mask")
    found = record(guard)
    assert found["kind"] == "wrong"
    assert found["mistake"] in found["words"]
    assert found["hint"]

    guard.judge("02.4a", "split_heads")
    assert record(guard)["kind"] == "undefined"


def test_an_untouched_stub_is_unsolved(guard):
    def causal_mask(length, device=None):
        raise NotImplementedError

    define(guard, causal_mask)
    guard.judge("02.3", "causal_mask")
    assert record(guard)["kind"] == "unsolved"
    assert record(guard)["hint"]


CHANGES = [
    ("torch.allclose was replaced", torch, "allclose"),
    ("torch.Tensor.equal", torch.Tensor, "equal"),
    ("torch.nn.functional.softmax was replaced", torch.nn.functional, "softmax"),
    ("shared.exercises.expecting.expect_close was replaced", checking, "expect_close"),
    ("shared.exercises.notebook.check was replaced", course, "check"),
    ("math.sqrt was replaced", math, "sqrt"),
    ("json.dumps was replaced", json, "dumps"),
    ("hmac.new was replaced", hmac, "new"),
    ("sys.settrace was replaced", sys, "settrace"),
]


@pytest.mark.parametrize(("words", "owner", "name"), CHANGES, ids=[c[0] for c in CHANGES])
def test_what_is_replaced_is_named(guard, monkeypatch, words, owner, name):
    assert guard.changes() == []
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: True)
    assert any(words in change for change in guard.changes())
    monkeypatch.undo()
    assert guard.changes() == []


def test_changed_code_and_defaults_are_seen(guard, monkeypatch):
    monkeypatch.setattr(checking.expect, "__code__", (lambda *a, **k: None).__code__)
    assert "shared.exercises.expecting.expect was replaced" in guard.changes()
    monkeypatch.undo()
    monkeypatch.setattr(checking.expect_close, "__kwdefaults__", {"atol": 1e9})
    assert "shared.exercises.expecting.expect_close was replaced" in guard.changes()


def test_an_added_name_that_hides_a_builtin_is_seen(guard, monkeypatch):
    monkeypatch.setattr(checking, "isinstance", lambda a, b: True, raising=False)
    assert guard.changes() == ["shared.exercises.expecting.isinstance was added"]


def test_checks_taken_away_and_changed_tolerances_are_seen(guard, monkeypatch):
    checks = course.load_checks("02")["02.3"]
    kept = checks.checks.pop()
    try:
        assert any("was removed" in change for change in guard.changes())
    finally:
        checks.checks.append(kept)
    from shared.exercises import comparing

    monkeypatch.setitem(comparing.TOLERANCES, torch.float32, (1e9, 1e9))
    assert guard.changes() == ["the table of tolerances was changed"]


def test_names_of_the_setup_are_put_back(guard):
    guard.space["check"] = print
    guard.judge("02.4a", "split_heads")
    assert guard.space["check"] is course.check


def test_a_spoilt_exercise_is_not_judged(guard, monkeypatch):
    monkeypatch.setattr(torch, "allclose", lambda *args, **kwargs: True)
    guard.judge("02.3", "causal_mask")
    assert record(guard)["kind"] == "tampered"
    assert record(guard)["tampered"] == ["torch.allclose was replaced"]


def test_canaries_find_comparisons_that_accept_anything(guard, monkeypatch):
    assert guard._canaries() == []
    monkeypatch.setattr(checking, "close", lambda *args: True)
    assert guard._canaries() == ["close is true of 0 and 1"]


def test_what_torch_itself_does_later_is_no_change(guard):
    import torch._dynamo
    import torch.distributed.tensor
    import torch.utils.checkpoint  # noqa: F401

    assert guard.changes() == []


def test_use_of_the_course_leaves_no_change(guard):
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).step()
    torch.manual_seed(3)
    assert guard.changes() == []


@pytest.fixture
def never_saved(monkeypatch):
    """As in a process that has pickled no tensor yet."""
    monkeypatch.delattr(torch.Tensor, "__slotnames__", raising=False)


def test_saving_and_copying_tensors_is_no_change(never_saved, guard):
    """torch then notes the names of Tensor's slots in the class: all of lesson 08 was flagged."""
    torch.save({"weight": torch.ones(2)}, io.BytesIO())
    copy.deepcopy(torch.nn.Linear(2, 2))
    assert guard.changes() == []


def test_files_over_the_limit_are_reported(guard, tmp_path):
    (tmp_path / "f").write_bytes(bytes(2 << 20))
    guard.judge("02.3", "causal_mask")
    assert record(guard)["exceeded"] == "folder"


def test_printing_is_counted_and_ended():
    class Stream:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

    printed = printing.Printed()
    printed.limit = 10
    printed.count_on(Stream)
    stream = Stream()
    print("123456789", file=stream)
    with pytest.raises(printing.PrintedTooMuch):
        print("1", file=stream)
    assert stream.text == "123456789\n"


def test_the_key_is_gone_once_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "printed", printing)
    file = tmp_path / "key"
    file.write_text(KEY.hex())
    options = {"number": "02", "home": ".", "output": 1, "folder_size": 1, "num_files": 1}
    guarding.start({}, key_file=str(file), alone=False, **options)
    assert not file.exists()


def test_what_an_answer_of_an_earlier_run_imported_is_not_the_next_ones(guard, monkeypatch):
    """In a repeated run its cell is there, and is not judged."""

    def causal_mask(length, device=None):
        raise NotImplementedError

    define(guard, causal_mask)
    monkeypatch.setitem(sys.modules, "shared.first", checking)
    guard.clear_up()
    monkeypatch.setitem(sys.modules, "shared.second", checking)
    guard.judge("02.3", "causal_mask")
    assert record(guard)["imported"] == ["shared.second"]


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

    def says(**outcomes):
        return Findings(
            {
                id: make_verdict(base.answers, base.exercises[id], outcome, "said")
                for id, outcome in outcomes.items()
            }
        )

    right, stopped = Outcome.RIGHT, Outcome.STOPPED
    runs = iter([says(**{"02.1": right, "02.2": stopped}), says(**{"02.1": stopped})])
    never = iter(lambda: says(**{"02.1": stopped}), None)
    three = (*LESSON.exercises, Exercise("02.3", "h", 1))
    answers = Answers("ada", "02", dict.fromkeys(("02.1", "02.2", "02.3"), "x = 1"), {})
    shop = SimpleNamespace(check_open=lambda: None)
    grading = Grading(shop, 0, answers, replace(LESSON, exercises=three), Limits())
    monkeypatch.setattr(grading, "_run", lambda wanted, stubbed: next(runs, None) or next(never))
    assert [each.outcome for each in grading.verdicts()] == [right, stopped, Outcome.UNREADABLE]


def reader(flags=()):
    exercises = {each.id: each for each in LESSON.exercises}
    answers = Answers("ada", "02", {"02.1": "mine"}, {})
    return Reader(answers, exercises, Limits(), KEY, {}, {"02.1": tuple(flags), "02.2": ()})


def done(text, key=KEY, **event):
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    base = {"event": "done", "part": "verdict", "exercise": "02.1", "passed": True}
    base |= {"timed_out": False, "alive": True, "status": None, "error": ""}
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
    assert "did not come to an end" in verdict.message


def test_points_follow_the_share_of_checks_and_flags_stand_first():
    record = {**RECORD, "kind": "wrong", "passed": 1, "total": 3, "title": "t"}
    record |= {"mistake": "m", "seen": "", "words": "w", "hint": "h"}
    (verdict,) = (
        reader(["line 1 imports os"]).read(Report([done(json.dumps(record))])).verdicts.values()
    )
    assert (verdict.outcome, verdict.points) == (Outcome.PARTLY, 1.0)
    assert verdict.message.startswith(
        "needs a look: line 1 imports os; not right at the check of t"
    )


@pytest.mark.parametrize(
    ("seen", "imported", "flags"),
    [
        (
            (),
            ["shared.model", "shared.x"],
            ["it loads shared.model, shared.x, which can hold answers"],
        ),
        (
            ("line 1 imports shared.model.attention",),
            ["shared.model", "shared.model.attention"],
            [],
        ),
        ((), ["a", "b", "c", "d", "e"], ["it loads a, b, c and 2 more, which can hold answers"]),
    ],
    ids=["hidden", "named by the audit", "many"],
)
def test_an_import_is_told_once(seen, imported, flags):
    event = done(json.dumps({**RECORD, "imported": imported}))
    (verdict,) = reader(seen).read(Report([event])).verdicts.values()
    assert verdict.flags == (*seen, *flags)


def test_a_run_that_was_stopped_blames_the_cell_that_ran():
    events = [done(json.dumps(RECORD)), {"event": "begins", "part": "answer", "exercise": "02.2"}]
    found = reader().read(Report(events, stopped="memory"))
    assert found.verdicts["02.1"].outcome is Outcome.RIGHT
    assert found.verdicts["02.2"].message == "stopped: used more than 4 GiB of memory"


def test_a_failing_setup_is_nobody_s_fault():
    event = done("{}", part="setup", exercise="", passed=False, error="ImportError: no torch")
    found = reader().read(Report([event]))
    assert (found.verdicts, found.broken) == ({}, "ImportError: no torch")


def test_words_are_made_harmless():
    assert clean("\x1b[31mred\x1b[0m\x1b]0;title\x07 \x00\u202e") == "red ??"
    assert clean("at 0x7f12345678") == "at 0x..."
    paths = {"/tmp/a/b": "<home>"}
    assert clean("in /tmp/a/b/f.py", paths) == "in <home>/f.py"
    assert clean("in '/tmp/a\n    /b\n    /f.py'", paths) == "in '<home>/f.py'"
    random = ["check_08_0_4b6tpk/step_00000004.pt", "tmpab3_xy9z/f", "ranks_a_bcdefg'"]
    assert [clean(f"/tmp/a/b/{name}", paths) for name in random] == [
        "<home>/check_08_.../step_00000004.pt",
        "<home>/tmp.../f",
        "<home>/ranks_...'",
    ]
    assert len(one_line("x" * 10**6)) == 300
    assert len(clean("a\n" * 1000).split("\n")) == 41
    assert one_line("a\r\nb") == "a? b"


def test_sizes_and_ends_in_words():
    assert [size(n) for n in (12, 1 << 20, 3 << 29)] == ["12 bytes", "1 MiB", "1.5 GiB"]
    assert exit_words(139) == "the process was ended by SIGSEGV"
    assert exit_words(-9) == "the process was ended by SIGKILL"
    assert exit_words(3) == "it left the process with status 3"


def test_the_guard_stands_on_its_own():
    spec = importlib.util.spec_from_file_location("alone", Path(guarding.__file__))
    module = importlib.util.module_from_spec(spec)
    sys.modules["alone"] = module
    spec.loader.exec_module(module)
    assert module.MIME == guarding.MIME
    assert "solutions" not in Path(guarding.__file__).read_text().replace("solutions.grad", "")
