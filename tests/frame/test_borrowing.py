"""An answer that is the course's own gets a note beside its verdict, and no other does."""

import pytest

import shared.model.attention as attention
from shared.exercises import notebook
from shared.exercises.borrowing import borrowed
from shared.model.attention import MultiHeadAttention, padding_mask
from shared.model.attention import padding_mask as theirs
from shared.training.precision import DynamicLossScaler as Scaler

MASK = "the course's own function (shared.model.attention.padding_mask)"


class Derived(Scaler):
    """As found in a class: nothing in it."""


class Holds:
    """The course's class, held."""

    def __init__(self):
        self.own = Scaler()


def calls(tokens, pad_id=0):
    return theirs(tokens, pad_id)


def calls_in_module(tokens, pad_id=0):
    return attention.padding_mask(tokens, pad_id)


def own_mask(tokens, pad_id=0):
    return (tokens != pad_id)[:, None, None, :]


class OtherHeads(MultiHeadAttention):
    """Of a different exercise: that is what shared/ is for."""


@pytest.mark.parametrize(
    ("answer", "name", "said"),
    [
        (theirs, "padding_mask", f"this answer is {MASK}"),
        (calls, "padding_mask", f"this answer uses {MASK}"),
        (calls_in_module, "padding_mask", f"this answer uses {MASK}"),
        (
            Derived,
            "DynamicLossScaler",
            "this answer derives from the course's own class"
            " (shared.training.precision.DynamicLossScaler)",
        ),
        (
            Holds,
            "DynamicLossScaler",
            "this answer uses the course's own class (shared.training.precision.DynamicLossScaler)",
        ),
        (own_mask, "padding_mask", ""),
        (OtherHeads, "EncoderLayer", ""),
        (3, "padding_mask", ""),
    ],
)
def test_what_is_the_course_s_own_is_named(answer, name, said):
    assert borrowed(answer, name) == said


def test_inside_a_function_the_import_is_seen_too():
    def inner(tokens, pad_id=0):
        return padding_mask(tokens, pad_id)

    def late(tokens, pad_id=0):
        from shared.model.attention import padding_mask as later

        return later(tokens, pad_id)

    assert borrowed(inner, "padding_mask") == f"this answer uses {MASK}"
    assert borrowed(late, "padding_mask") == f"this answer uses {MASK}"


def test_the_note_stands_beside_the_verdict(monkeypatch, capsys):
    monkeypatch.delenv("TORCH_HANDLE_IMPLEMENTATION", raising=False)
    notebook.check("02.2", own_mask)
    assert "note:" not in capsys.readouterr().out
    notebook.check("02.2", calls)
    verdict, note = capsys.readouterr().out.splitlines()
    assert verdict.startswith("02.2 padding_mask: right (")
    assert note == f"note: this answer uses {MASK}"


def test_the_references_themselves_hear_nothing_in_solution_mode(monkeypatch, capsys):
    monkeypatch.setenv("TORCH_HANDLE_IMPLEMENTATION", "solution")
    notebook.check("02.2", padding_mask)
    assert "note:" not in capsys.readouterr().out
