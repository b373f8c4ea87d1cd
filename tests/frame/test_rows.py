"""Every row of a check speaks: values in the answer's place, and what was seen, changed."""

import secrets
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import FunctionType, ModuleType
from typing import Any

import pytest
from torch import Tensor

from shared.cli.proven import CHANGED, SIGNS, UNHEARD, VALUES
from shared.exercises import expecting
from shared.exercises.checks import Check, run_check
from shared.exercises.lessons import ROOT, lesson_folder, load_checks, solution_module
from shared.exercises.mistakes import known_mistakes
from shared.exercises.on_ranks import on_one_rank, on_ranks
from shared.exercises.wrong import Wrong
from tests.frame.sights import Sights

NUMBERS = sorted(path.parent.name[6:8] for path in (ROOT / "lessons").glob("*/checks.py"))

MOST_CHANGES = 2000  # of what a check has seen
MOST_IDLE = 1000  # one after the other, in which no further row has spoken


class Listening:
    """What each recognised value has heard in the answer's place, by exercise and words.

    While a reference is checked, a value is asked about where the answer's was. A check goes by its
    rows of `alike`: for each it runs once more, as if the answer gave that value. Where it asks for
    them only when an answer is wrong, a known mistake must hear one of them.

    Other rows of exercises in CHANGED are heard as well: the check runs on what it has seen with
    one thing changed, until each has spoken or a known mistake of the lesson says it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
        self.number, self.checks = number, load_checks(number)
        self.told = defaultdict[tuple[str, str], Counter[str]](Counter)
        self.rows, self.exercise, self.instead = dict[str, tuple[str, list[str]]](), "", ""
        self.signs, self.silent = set[str](), dict[str, str]()
        self.heard, self.sights, self.listens = set[str](), Sights(monkeypatch), True
        self.mistakes = known_mistakes(number)
        own: dict[Any, Any] = {expecting.alike: self._alike}
        own |= {ask: self._asking(ask) for ask in (expecting.expect_close, expecting.expect_equal)}
        own |= {expecting.recognise: self._recognise, expecting.expect: self._expect}
        own |= {expecting.expect_raises: self._raises}
        own |= {look: self.sights.watched(look, once=True) for look in (on_one_rank, on_ranks)}
        for module in _written_with(number):
            for ask, instead in own.items():
                if vars(module).get(ask.__name__) is ask:
                    monkeypatch.setattr(module, ask.__name__, instead)

    def _alike(self, got: Any, looks_like: Mapping[str, Any], *same: Any) -> dict[str, bool]:
        if self.instead in looks_like:
            return expecting.alike(looks_like[self.instead], looks_like, *same)
        for words, value in looks_like.items() if self.listens else ():
            if words and value is not None:
                alone = expecting.alike(value, looks_like, *same)
                self.rows[words] = next(each for each in alone if alone[each]), [*looks_like]
        return expecting.alike(got, looks_like, *same)

    def _asking(self, ask: Callable[..., None]) -> Callable[..., None]:
        def asked(got: Any, want: Any, **given: Any) -> None:
            for words, value in (given.get("looks_like") or {}).items() if self.listens else ():
                self.told[self.exercise, words][_hears(ask, value, want, given)] += 1
            self._note(given.get("mistake", ""))
            ask(got, want, **given)

        return asked

    def _recognise(self, mistakes: Mapping[str, Any], **given: Any) -> None:
        self._note(*mistakes)
        expecting.recognise(mistakes, **given)

    def _expect(self, condition: bool, **given: Any) -> None:
        self._note(given.get("mistake", ""))
        expecting.expect(condition, **given)

    def _raises(self, *asked: Any, what: str, **given: Any) -> None:
        self._note(f"{what} is accepted", f"{what} raises the wrong kind of error")
        if given.get("mentions"):
            self._note(f"the error for {what} does not say which value was seen")
        expecting.expect_raises(*asked, what=what, **given)

    def _note(self, *rows: str) -> None:
        if self.listens:
            self.signs |= {*filter(None, rows)}

    def says(self, words: str) -> bool:
        """Whether a known mistake of the lesson hears these words."""
        return any(each.says in words for each in self.mistakes)

    def hear(self, exercise: str) -> None:
        """Put the reference before an exercise's checks."""
        said = [each.says for each in self.mistakes if each.id == exercise]
        checks, self.exercise = self.checks[exercise], exercise
        answer = checks._begin(getattr(solution_module(self.number), checks.name))
        if isinstance(answer, FunctionType) and exercise in CHANGED:
            answer = self.sights.watched(answer)
        for title, check in checks.checks:
            self.rows.clear()
            self.signs.clear()
            self.sights.begin()
            self.listens = True
            wrong = run_check(check, answer)
            self.listens = False
            assert wrong is None, f"the reference is refused by {exercise}, {title}: {wrong}"
            self._hear_alike(exercise, check, answer, said)
            refused = self._hear_changes(exercise, check, answer)
            assert refused or exercise not in CHANGED, f"{exercise}: no change fails {title}"

    def _hear_alike(self, exercise: str, check: Check, answer: Any, said: Sequence[str]) -> None:
        for words, (alone, rows) in [*self.rows.items()]:
            told = self.told[exercise, words]
            if words not in told and not any(each in words for each in said):
                self.instead = words
                wrong = self.sights.ask(check, answer, {})
                asked = any(each in row for each in said for row in rows)
                heard = wrong.mistake or f"nothing: {wrong}" if wrong else asked * alone
                told[heard or "right"] += 1
        self.instead = ""

    def _hear_changes(self, exercise: str, check: Check, answer: Any) -> bool:
        """Change what the check saw until each of its rows has spoken; whether anything has."""
        values = {words for each, words in self.told if each == exercise} | {*self.rows}
        rows = {*self.signs, *self.sights.failing} - values
        self.silent |= dict.fromkeys(rows - self.heard, exercise)
        left, refused = rows - self.heard, False
        most, idle = MOST_CHANGES if exercise in CHANGED else 0, 0
        for instead in islice(self.sights.changed(), most):
            if refused and (idle > MOST_IDLE or all(map(self.says, left))):
                break
            wrong = self.sights.ask(check, answer, instead)
            words = wrong.mistake if wrong else ""
            idle = 0 if words in left else idle + 1
            left.discard(words)
            refused = refused or bool(wrong and wrong.expected)  # and not an error
        self.heard |= rows - left
        return refused


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
def test_a_recognised_value_hears_its_own_words(number, monkeypatch, record_property):
    listening = Listening(monkeypatch, number)
    for _ in range(3):  # in one draw of many a mistake gives what another gives
        monkeypatch.setenv("TORCH_HANDLE_SEED", str(secrets.randbelow(2**31)))  # and replays alike
        for exercise in listening.checks:
            listening.hear(exercise)
        # Exercises of a lesson share rows, which one of them makes heard. What is made of the
        # answer itself is right where that is: a known mistake says it.
        heard = {words for (_, words), by in listening.told.items() if words in by}
        silent = [
            f"{exercise}: {words!r} heard {set(by)}"
            for (exercise, words), by in listening.told.items()
            if words not in heard and not listening.says(words)
        ]
        unheard = [
            (exercise, words)
            for words, exercise in listening.silent.items()
            if words not in heard | listening.heard and not listening.says(words)
        ]
        proven = [f"{exercise}: {words!r}" for exercise, words in unheard if exercise in CHANGED]
        if not silent and not proven:
            break
    record_property(VALUES, len(listening.told))
    record_property(SIGNS, len(listening.heard))
    record_property(UNHEARD, len(unheard))
    text = (lesson_folder(number) / "checks.py").read_text("utf-8")
    assert listening.told or "looks_like" not in text
    assert not silent, "\n".join(silent)
    assert not proven, "\n".join(proven)
