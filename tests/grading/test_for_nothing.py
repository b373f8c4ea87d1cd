"""Checks that ask for no work give no points alone, and beside others take none."""

import pytest
import torch

from shared.exercises.checks import checks_for
from shared.exercises.expecting import expect_close, expect_equal, expect_raises, recognise
from shared.exercises.lessons import load_checks
from shared.exercises.properties import functions_called

half_checks = checks_for("99.1", name="half", difficulty=3, minutes=5, hint="x / 2")
NUMBERS = torch.tensor([2.0, 4.0])


@half_checks.check("values")
def values(half):
    expect_close(half(NUMBERS), NUMBERS / 2, what="the half")


@half_checks.check("a refusal")
def refusal(half):
    expect_raises(ValueError, half, 3, what="an odd number", mentions=[3])


@half_checks.check("a dtype")
def dtype(half):
    expect_equal(half(NUMBERS).dtype, torch.float32, what="the dtype")


@half_checks.check("a cost")
def cost(half):
    sorts = "sort" in functions_called(lambda: half(NUMBERS))
    recognise({"it sorts": sorts}, expected="no sort", seen="one")


@half_checks.check("a sum")
def total(half):
    expect_close(half(NUMBERS).sum(), torch.tensor(3.0), what="the sum")


def refused(x):
    if x == 3:
        raise ValueError("3 is odd")


def not_a_number(x):
    return refused(x) if isinstance(x, int) else x * float("nan")


def refuses_all(x):
    raise ValueError(f"{x} is refused")


def the_mean(x):
    return x.sum() / 2 if isinstance(x, torch.Tensor) else refused(x)


def no_refusal(x):
    return x / 2


@pytest.mark.parametrize(
    ("answer", "passed", "for_nothing"),
    [
        (not_a_number, {"a refusal", "a dtype", "a cost"}, 3),
        (refuses_all, {"a refusal"}, 1),
        (lambda x: None, {"a cost"}, 1),
        (the_mean, {"a refusal", "a dtype", "a cost", "a sum"}, 0),
        (no_refusal, {"values", "a dtype", "a cost", "a sum"}, 0),
    ],
)
def test_what_asks_for_no_work_counts_beside_work_alone(answer, passed, for_nothing):
    faults = [each for each in half_checks.faults(answer) if each is not None]
    assert {title for title, _ in half_checks.checks} - {each.title for each in faults} == passed
    assert half_checks.passed_for_nothing(faults) == for_nothing


def no_shift(offset, d_model):
    if d_model % 2 or d_model < 2:
        raise ValueError(f"d_model is {d_model}")
    return torch.full((d_model, d_model), torch.nan)


def zeroed(x, positions):
    if x.shape[-1] % 2:
        raise ValueError(f"head_dim is {x.shape[-1]}")
    return x.zero_()


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        *(("01.3", no_shift), ("01.4", zeroed), ("01.4", lambda x, positions: x * 0)),
        ("01.4", lambda x, positions: torch.ones_like(x)),
        ("08.1b", lambda: 1 / 0),
        ("08.1b", lambda: torch.load("nothing")),
        ("08.1b", lambda: None),
        ("04.5", lambda model, src, *args, **kwargs: src),
        ("04.5", lambda model, src, *args, **kwargs: src * 0),
        ("08.3", lambda state, *args, **kwargs: state),
        ("19.2b", lambda model: model),
        ("19.2b", lambda model: (model, model)),
    ],
)
def test_answers_without_the_work_have_no_points(id, answer):
    checks = load_checks(id[:2])[id]
    answer.__name__ = checks.name
    faults = [each for each in checks.faults(answer) if each is not None]
    assert checks.passed_for_nothing(faults) == len(checks.checks) - len(faults)
