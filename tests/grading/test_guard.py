"""The guard, in this process: what it notices, what it says, and what it does not mind."""

import copy
import hashlib
import hmac
import importlib.util
import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from shared.exercises import checks, comparing, expecting, notebook, wrong
from shared.exercises.lessons import load_checks
from solutions.grading.results import Stop
from solutions.grading.sandbox.inside import guard as guarding
from solutions.grading.sandbox.inside import printed as printing

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
    monkeypatch.setattr(notebook, "defined", {})
    options = guarding.Options("02", str(tmp_path), 1 << 20, 1 << 20, 100, alone=False)
    namespace = {"check": notebook.check, "exercise": notebook.exercise, "torch": torch}
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
    guard.space[function.__name__] = notebook.exercise(id)(function)


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
    assert (found["passed"], found["total"]) == (0, 1)
    assert found["title"] == load_checks("02")["02.2"].checks[0][0]
    assert found["hint"]

    guard.judge("02.4a", "split_heads")
    assert record(guard)["kind"] == "undefined"


def test_a_wrong_answer_s_record_holds_what_the_check_said_text_by_text(guard):
    def causal_mask(length, device=None):
        return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu()

    define(guard, causal_mask)
    guard.judge("02.3", "causal_mask")
    found = record(guard)
    fault, *others = load_checks("02")["02.3"].faults(causal_mask)
    for name in ("title", "mistake", "expected", "seen"):
        assert found[name] == getattr(fault, name)
    assert found["also"] == [each.title for each in others if each is not None]


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
    ("shared.exercises.expecting.expect_close was replaced", expecting, "expect_close"),
    ("shared.exercises.notebook.check was replaced", notebook, "check"),
    ("shared.exercises.checks.run_check was replaced", checks, "run_check"),
    ("shared.exercises.wrong.Wrong was replaced", wrong, "Wrong"),
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
    monkeypatch.setattr(expecting.expect, "__code__", (lambda *a, **k: None).__code__)
    assert "shared.exercises.expecting.expect was replaced" in guard.changes()
    monkeypatch.undo()
    monkeypatch.setattr(expecting.expect_close, "__kwdefaults__", {"atol": 1e9})
    assert "shared.exercises.expecting.expect_close was replaced" in guard.changes()


def test_an_added_name_that_hides_a_builtin_is_seen(guard, monkeypatch):
    monkeypatch.setattr(expecting, "isinstance", lambda a, b: True, raising=False)
    assert guard.changes() == ["shared.exercises.expecting.isinstance was added"]


def test_checks_taken_away_and_changed_tolerances_are_seen(guard, monkeypatch):
    own = load_checks("02")["02.3"]
    kept = own.checks.pop()
    try:
        assert any("was removed" in change for change in guard.changes())
    finally:
        own.checks.append(kept)
    monkeypatch.setitem(comparing.TOLERANCES, torch.float32, (1e9, 1e9))
    assert guard.changes() == ["the table of tolerances was changed"]


def test_names_of_the_setup_are_put_back(guard):
    guard.space["check"] = print
    guard.judge("02.4a", "split_heads")
    assert guard.space["check"] is notebook.check


def test_a_spoilt_exercise_is_not_judged(guard, monkeypatch):
    monkeypatch.setattr(torch, "allclose", lambda *args, **kwargs: True)
    guard.judge("02.3", "causal_mask")
    assert record(guard)["kind"] == "tampered"
    assert record(guard)["tampered"] == ["torch.allclose was replaced"]


def test_canaries_find_comparisons_that_accept_anything(guard, monkeypatch):
    assert guard._canaries() == []
    monkeypatch.setattr(expecting, "close", lambda *args: True)
    assert guard._canaries() == ["close is true of 0 and 1"]
    monkeypatch.setattr(expecting, "recognise", lambda *args, **kwargs: None)
    assert guard._canaries()[1:] == ["recognise accepts a value that is known to be wrong"]


def test_canaries_find_a_runner_that_hears_nothing(guard, monkeypatch):
    monkeypatch.setattr(checks, "run_check", lambda *args: None)
    assert len(guard._canaries()) == 6


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
def new_kind(monkeypatch):
    """An optimizer class of the course, of which no optimizer has been made yet."""

    class Descent(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    Descent.__module__ = "shared.made"
    monkeypatch.setitem(sys.modules, "shared.made", ModuleType("shared.made"))
    sys.modules["shared.made"].Descent = Descent
    return Descent


def test_the_first_optimizer_of_a_kind_is_no_change(new_kind, guard):
    """torch then wraps the class's step: all of 09.1 was flagged."""
    new_kind([torch.nn.Parameter(torch.ones(2))]).step()
    assert guard.changes() == []
    new_kind.step = torch.optim.SGD.step
    assert guard.changes() == ["shared.made.Descent.step was replaced"]


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
    assert Stop(record(guard)["exceeded"]) is Stop.FOLDER
    guard._printed.count = guard._printed.limit + 1
    assert Stop(guard._exceeded()) is Stop.OUTPUT


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
    monkeypatch.setitem(sys.modules, "shared.first", expecting)
    guard.clear_up()
    monkeypatch.setitem(sys.modules, "shared.second", expecting)
    guard.judge("02.3", "causal_mask")
    assert record(guard)["imported"] == ["shared.second"]


def test_the_guard_stands_on_its_own():
    spec = importlib.util.spec_from_file_location("alone", Path(guarding.__file__))
    module = importlib.util.module_from_spec(spec)
    sys.modules["alone"] = module
    spec.loader.exec_module(module)
    assert module.MIME == guarding.MIME
    assert "solutions" not in Path(guarding.__file__).read_text().replace("solutions.grad", "")
