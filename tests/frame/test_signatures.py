"""Parameters of an answer beside the contract's: names, places, defaults."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from shared.exercises import contracts, signatures
from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect


@pytest.fixture
def contract(monkeypatch):
    """Make a table of one exercise, 99.1, and return what an answer to it hears."""

    def hear(parameters: str | dict[str, str], answer, name: str = "answer") -> str:
        methods = {name: parameters} if isinstance(parameters, str) else parameters
        monkeypatch.setattr(signatures, "contracts", lambda: {"99.1": methods})
        wrong = signatures.signature_fault("99.1", name, answer)
        return "" if wrong is None else f"{wrong.mistake}: {wrong.expected} not {wrong.seen}"

    return hear


def test_the_table_is_that_of_the_references():
    found = contracts.table()
    assert found == signatures.contracts(), "run python -m shared.exercises.contracts"
    assert found["05.4"] == {"tree_broadcast": "tensor, src=0, group=None"}
    assert found["09.2"]["MasterWeightAdamW.step"] == "closure=None"
    assert "*, " in found["08.3"]["resume_training"]


@pytest.mark.parametrize(
    ("answer", "heard"),
    [
        (lambda x, size=5, *, eps=1e-6: 0, ""),
        (lambda x, size=5.0, *, eps=0.000001: 0, ""),
        (lambda x, size=None, eps=1e-6, own=3: 0, ""),
        (lambda *args, **settings: 0, ""),
        (lambda x, **settings: 0, ""),
        (lambda x=None, size=5, *, eps=1e-6: 0, ""),
        (functools.partial(lambda kept, x, size=5, *, eps=1e-6: 0, 1), ""),
        (
            lambda x, size=4, *, eps=1e-6: 0,
            "the parameter size has a different default: size=5 not size=4",
        ),
        (
            lambda x, size=5, *, eps=1e-5: 0,
            "the parameter eps has a different default: eps=1e-06 not eps=1e-05",
        ),
        (
            lambda x, size=True, *, eps=1e-6: 0,
            "the parameter size has a different default: size=5 not size=True",
        ),
        (
            lambda x, size, *, eps=1e-6: 0,
            "the parameter size has a different default: size=5 not size",
        ),
        (
            lambda x, *, eps=1e-6: 0,
            "the parameter size is missing: (x, size=5, *, eps=1e-06) not (x, *, eps=1e-06)",
        ),
        (
            lambda x, width=5, *, eps=1e-6: 0,
            "the parameter size is called width: (x, size=5, *, eps=1e-06) not "
            "(x, width=5, *, eps=1e-06)",
        ),
        (
            lambda size=5, x=0, *, eps=1e-6: 0,
            "the parameter x stands in another place: (x, size=5, *, eps=1e-06) not "
            "(size=5, x=0, *, eps=1e-06)",
        ),
        (
            lambda x, size=5, *, group, eps=1e-6: 0,
            "the parameter group is not in the contract, and has no default: "
            "(x, size=5, *, eps=1e-06) not (x, size=5, *, group, eps=1e-06)",
        ),
    ],
)
def test_what_differs_is_said_in_words(contract, answer, heard):
    assert contract("x, size=5, *, eps=1e-06", answer) == heard


def test_names_stand_for_what_a_contracts_args_is_given(contract):
    assert contract("ctx, *gradients", lambda ctx, grad_output: 0) == ""
    assert contract("ctx, *gradients", lambda ctx, *, group: 0).startswith("the parameter group")


def test_methods_are_looked_at_without_self_and_torchs_own_are_let_alone(contract):
    class Right(nn.Linear):
        def __init__(self, size, bias=False):
            super().__init__(size, size, bias=bias)

        @staticmethod
        def made(size=3):
            return size

        @classmethod
        def read(cls, path):
            return path

        @contextlib.contextmanager
        def quiet(self, deep=True):
            yield

        @torch.no_grad()
        def step(self, closure=None):
            return closure

    class Renamed(Right):
        def forward(self, input):  # as nn.Linear has it
            return super().forward(input)

    class Wrong(Right):
        def step(self, closure=0):
            return closure

    methods = {
        "answer.__init__": "size, bias=False",
        "answer.forward": "x",  # nn.Linear calls it input
        "answer.made": "size=3",
        "answer.read": "path",
        "answer.quiet": "deep=True",
        "answer.step": "closure=None",
        "answer.absent": "at_all",
    }
    assert contract(methods, Right) == contract(methods, Renamed) == ""
    said = "the parameter closure of step has a different default: closure=None not closure=0"
    assert contract(methods, Wrong) == said
    assert contract(methods, lambda size, bias=False: Right(size, bias)) == ""  # makes the objects
    assert contract(methods, lambda size, bias=True: 0).startswith("the parameter bias of __init__")


def test_defaults_that_are_no_literals_and_names_of_other_courses(contract):
    assert contract("dtype=torch.float32", lambda dtype=torch.float32: 0) == ""
    assert contract("dtype=torch.float32", lambda dtype=torch.float64: 0) != ""
    assert contract({"another.__init__": "x"}, lambda: 0) == ""


def test_an_answer_hears_of_its_parameters_first_and_no_check_is_counted_for_it(monkeypatch):
    checks = checks_for("99.1", name="answer", difficulty=1, minutes=1, hint="none")
    monkeypatch.setattr(signatures, "contracts", lambda: {"99.1": {"answer": "x=1"}})

    @checks.check("its value")
    def value(answer):
        expect(answer() == 1, expected="1", seen="something else")

    assert checks.first_fault(lambda x=1: x) is None
    fault = checks.first_fault(lambda x=2: x)
    assert fault is not None and (fault.title, fault.passed, fault.total) == (
        "the parameters",
        0,
        1,
    )
    assert [each and each.title for each in checks.faults(lambda x=2: x)] == ["the parameters"]
