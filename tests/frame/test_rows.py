"""Values that a check recognises: in the answer's place, each hears its own words."""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from shared.cli.proven import VALUES
from shared.exercises import expecting
from shared.exercises.lessons import ROOT, lesson_folder, load_checks
from shared.exercises.mistakes import hear_references, known_mistakes
from shared.exercises.wrong import Wrong

NUMBERS = sorted(path.parent.name[6:8] for path in (ROOT / "lessons").glob("*/checks.py"))


@pytest.fixture
def heard(monkeypatch) -> Callable[[str], dict[str, Counter[str]]]:
    """What each recognised value of a lesson's checks has heard so far, by its words.

    While the reference is checked, the value is asked about where the answer's was.
    """

    told = defaultdict[str, Counter[str]](Counter)
    alike = expecting.alike

    def asking_rows(got: Any, looks_like: dict[str, Any], *same: Any) -> dict[str, bool]:
        rows = alike(got, looks_like, *same)
        for words, value in looks_like.items():
            if words and value is not None:
                others = alike(value, looks_like, *same)
                heard = "right" if rows[words] else next(w for w in others if others[w])
                told[words][heard] += 1
        return rows

    def asking(ask: Callable[..., None]) -> Callable[..., None]:
        def asked(got: Any, want: Any, **given: Any) -> None:
            for words, value in (given.get("looks_like") or {}).items():
                told[words][_hears(ask, value, want, given)] += 1
            ask(got, want, **given)

        return asked

    def listen(number: str) -> dict[str, Counter[str]]:
        load_checks(number)
        for module in _written_with(number):
            for ask in (expecting.expect_close, expecting.expect_equal, alike):
                if vars(module).get(ask.__name__) is ask:
                    own = asking_rows if ask is alike else asking(ask)
                    monkeypatch.setattr(module, ask.__name__, own)
        refused = [each.exercise for each in hear_references(number) if not each.as_expected]
        assert not refused, f"references that are refused: {refused}"
        return told

    return listen


def _written_with(number: str) -> list[ModuleType]:
    """Modules whose checks are the lesson's: its own, and the course's that ask in their name."""
    names = (f"lessons.{lesson_folder(number).name}.", "shared.exercises.")
    found = [module for name, module in sys.modules.items() if name.startswith(names)]
    return [module for module in found if module is not expecting]


def _hears(ask: Callable[..., None], value: Any, want: Any, given: dict[str, Any]) -> str:
    made = value() if callable(value) else value
    if isinstance(made, Tensor) and isinstance(want, Tensor):
        made = made.to(want.dtype)
    try:
        ask(made, want, **given)
    except Wrong as wrong:
        return wrong.mistake or f"nothing: {wrong}"
    return "right"


@pytest.mark.full
@pytest.mark.parametrize("number", NUMBERS)
def test_a_recognised_value_hears_its_own_words(number, heard, record_property):
    said = [each.says for each in known_mistakes(number)]
    for _ in range(3):  # in one draw of many a mistake gives what another gives
        told = heard(number)
        # What is made of the answer itself is right where that is: a known mistake says it.
        silent = [words for words, others in told.items() if words not in others]
        silent = [words for words in silent if not any(says in words for says in said)]
        if not silent:
            break
    record_property(VALUES, len(told))
    assert told or "looks_like" not in (lesson_folder(number) / "checks.py").read_text("utf-8")
    assert not silent, "\n".join(f"{words!r} heard {set(told[words])}" for words in silent)
