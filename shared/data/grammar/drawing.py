"""Random phrases and clauses that make sense: people eat food, books lie, trains depart."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeVar

from shared.data.grammar.adjectives import adjectives_for, compatible
from shared.data.grammar.adverbials import ADVERBS, INSIDE, LOCATED, PLACES
from shared.data.grammar.clauses import Clause, Place
from shared.data.grammar.nouns import nouns_with
from shared.data.grammar.phrases import PERSONAL, THEY, YOU, I, Nominal, Phrase, possessive
from shared.data.grammar.verbs import BE, COST, VERBS
from shared.data.grammar.words import Adjective, Adverb, Case, Noun, Verb, tags

T = TypeVar("T")
PRESENT_MODALS = ("can", "must", "want", "may", "should")
PAST_MODALS = ("could", "had to", "wanted", "might")
_OWNED = tags("relative pet goods small mail tidy estate")
_HABITUAL = tags("food drink writable drawable mail daily")
_INDEFINITE = {"have": 1.0, "write": 1.0, "drink": 0.7, "know": 0.0, "love": 0.0}
_ONE_BY_ONE = ("put on", "open", "close", "tidy up", "switch on", "switch off", "clean", "wash")
_LEXICAL = tuple(entry for entry in VERBS if entry not in (BE, COST))


class Dice:
    """Draws that are the same on every machine and in every Python version.

    `random.Random` promises that for the sequence of random() alone, so all else is built on it.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random() < probability

    def pick(self, items: Sequence[T]) -> T:
        """One item, all equally likely."""
        return items[int(self._random() * len(items))]

    def weighted(self, items: Sequence[tuple[T, int]]) -> T:
        """One item, by weight."""
        left = self._random() * sum(weight for _, weight in items)
        for item, weight in items:
            left -= weight
            if left < 0:
                return item
        return items[-1][0]


@dataclass(frozen=True)
class Situation:
    """The tense of a clause, the list its adverb comes from, and how often it has one."""

    tense: str
    adverbs: str = ""
    share: float = 0.0


HABIT = Situation("present", "habit", 1.0)
STATE = Situation("present")
PROGRESSIVE = Situation("progressive", "progressive", 1.0)
PAST = Situation("past", "past", 0.6)
CAUSE = Situation("past", "cause", 1.0)
PERFECT = Situation("perfect", "perfect", 0.5)
FUTURE = Situation("future", "future", 0.7)
_PLAIN = ("state", "perception")


def suits(verb: Verb, situation: Situation) -> bool:
    """Whether the verb can be used so: states have no progressive, events no habit."""
    tense = situation.tense
    if tense == "present":
        return bool(verb.habit) if situation.adverbs == "habit" else verb.aspect in _PLAIN
    if tense == "past":
        return verb.aspect != "state" or not situation.adverbs
    if tense == "perfect":
        return verb.aspect != "state" and verb.frame != "at"
    if tense == "progressive":
        return verb.aspect == "activity"
    return verb.aspect == "activity" or (tense in ("can", "could") and verb.aspect == "perception")


def draw_situation(dice: Dice) -> Situation:
    """A situation for a statement."""
    kind = dice.weighted(
        (
            *(("plain", 3), ("habit", 4), ("now", 4), ("past", 6), ("cause", 1)),
            *(("perfect", 4), ("future", 2), ("modal", 4), ("past modal", 2)),
        )
    )
    if kind == "modal":
        return Situation(dice.pick(PRESENT_MODALS), "modal", 0.4)
    if kind == "past modal":
        return Situation(dice.pick(PAST_MODALS), "past", 0.8)
    named = {"plain": STATE, "habit": HABIT, "now": PROGRESSIVE, "past": PAST, "cause": CAUSE}
    return (named | {"perfect": PERFECT, "future": FUTURE})[kind]


@cache
def verbs_for(situation: Situation, frames: tuple[str, ...] = ()) -> tuple[Verb, ...]:
    """The verbs that suit a situation, of the given frames (any frame if none is given)."""
    return tuple(v for v in _LEXICAL if suits(v, situation) and (not frames or v.frame in frames))


def draw_adjective(dice: Dice, phrase: Phrase, share: float = 0.45) -> Phrase:
    """The phrase with an adjective that its noun can bear, in that share of the cases."""
    choices = adjectives_for(phrase.noun)
    if not choices or not dice.chance(share):
        return phrase
    return replace(phrase, adjective=dice.pick(choices))


def predicates_for(phrase: Phrase) -> tuple[Adjective, ...]:
    """The adjectives that can be said of the phrase without contradicting its own."""
    own = phrase.adjective
    return tuple(a for a in adjectives_for(phrase.noun) if not own or compatible(a, own))


def draw_definite(dice: Dice, nouns: Sequence[Noun], plural: float = 0.25) -> Phrase:
    """A definite phrase: the, this, my, your, our, or with an owner (the old man's dog)."""
    noun = dice.pick(nouns)
    determiner = "the" if "relative" in noun.tags or dice.chance(0.9) else "this"
    owner = None
    if noun.tags & _OWNED and dice.chance(0.6 if "relative" in noun.tags else 0.3):
        determiner = dice.pick(("my", "our", "your"))
        if "relative" not in noun.tags and dice.chance(0.4):
            determiner, owner = "the", draw_owner(dice)
    many = noun.en != noun.en_plural and dice.chance(plural) and "single" not in noun.tags
    phrase = Phrase(noun, determiner, many, owner=owner)
    return draw_adjective(dice, phrase, 0.25 if owner else 0.45)


def draw_owner(dice: Dice) -> Phrase:
    """A person to whom something belongs."""
    noun = dice.pick(nouns_with(tags("person")))
    phrase = Phrase(noun, "the", "single" not in noun.tags and dice.chance(0.25))
    if "relative" in noun.tags and dice.chance(0.6):
        phrase = replace(phrase, determiner=dice.pick(("my", "our", "your")))
    return draw_adjective(dice, phrase, 0.3)


def draw_indefinite(dice: Dice, nouns: Sequence[Noun]) -> Phrase:
    """An indefinite phrase: a dog, dogs, cold milk."""
    noun = dice.pick(tuple(n for n in nouns if "relative" not in n.tags))
    mass = noun.en == noun.en_plural
    many = not mass and "person" not in noun.tags and dice.chance(0.35)
    return draw_adjective(dice, Phrase(noun, "" if mass or many else "a", many), 0.55)


def draw_subject(dice: Dice, verb: Verb, situation: Situation, negated: bool) -> Nominal:
    """A subject that the verb can have; states and denials are about somebody definite."""
    if "person" in verb.subjects and dice.chance(0.2):
        pronoun = dice.pick(PERSONAL)
        if pronoun == YOU and situation.tense in ("past", *PAST_MODALS):
            return I
        return pronoun
    nouns = nouns_with(verb.subjects)
    if verb.aspect != "state" and not negated and dice.chance(0.15):
        return draw_indefinite(dice, nouns)
    return draw_definite(dice, nouns)


def draw_object(dice: Dice, verb: Verb, case: Case, subject: Nominal, habit: bool) -> Nominal:
    """An object that the verb governs in the case."""
    people = case == "dat" or verb.objects == tags("person")
    choices = tags("person") if case == "dat" else (verb.habit if habit else verb.objects)
    taken = subject.noun if isinstance(subject, Phrase) else None
    nouns = tuple(noun for noun in nouns_with(choices) if noun != taken)
    if people and not verb.en_particle and dice.chance(0.2):
        others = [p for p in PERSONAL if p.person != subject.person or _distinct(p, subject)]
        return dice.pick([p for p in others if case == "dat" or p != THEY])
    owner = possessive(subject)
    own = tuple(noun for noun in nouns if noun.tags & _OWNED)
    if owner and own and not habit and dice.chance(0.15):
        return _made(dice, verb, draw_adjective(dice, Phrase(dice.pick(own), owner), 0.4))
    usual = tuple(noun for noun in nouns if noun.tags & _HABITUAL) if habit else ()
    if usual and not people:
        return _made(dice, verb, draw_indefinite(dice, usual))
    indefinite = _INDEFINITE.get(verb.en, 0.4)
    if case == "dat" or people or habit:
        indefinite = 0.15 if verb.frame != "dat acc" and people and not habit else 0.0
    if not dice.chance(indefinite):
        return _made(dice, verb, draw_definite(dice, nouns))
    phrase = draw_indefinite(dice, nouns)
    if phrase.plural and verb.en in _ONE_BY_ONE:
        phrase = replace(phrase, determiner="a", plural=False)
    return _made(dice, verb, phrase)


def _made(dice: Dice, verb: Verb, phrase: Phrase) -> Phrase:
    """What somebody writes is new, what somebody buys was not his, and one wears one coat."""
    if verb.en == "buy" and not phrase.owner and phrase.determiner not in ("the", "a", "this", ""):
        return replace(phrase, determiner="the")
    if verb.en == "put on" and phrase.plural:
        return replace(phrase, plural=False, determiner=phrase.determiner or "a")
    if verb.en != "write":
        return phrase
    fitting = [a for a in adjectives_for(phrase.noun) if a.en in ("new", "long", "beautiful")]
    adjective = dice.pick(fitting) if phrase.adjective else None
    return replace(phrase, adjective=adjective, owner=None)


def _distinct(pronoun: Nominal, subject: Nominal) -> bool:
    """Whether a third-person pronoun surely means somebody else than the subject."""
    return pronoun.person == 3 and isinstance(subject, Phrase) and not subject.pronoun


def draw_place(dice: Dice, verb: Verb) -> Place | None:
    """The place that the verb's frame asks for, or now and then one that it allows."""
    direction = verb.frame.endswith("into")
    if not direction and verb.frame != "at":
        if verb.en not in LOCATED or not dice.chance(0.35):
            return None
        choice = INSIDE
    else:
        choice = dice.pick(PLACES[verb.en])
    at, to, german, nouns = choice
    phrase = draw_adjective(dice, Phrase(dice.pick(nouns_with(tags(nouns))), "the"), 0.3)
    if dice.chance(0.12):
        phrase = replace(phrase, determiner=dice.pick(("a", "this", "our")))
    return Place(to if direction else at, german, "acc" if direction else "dat", phrase)


def draw_adverb(dice: Dice, situation: Situation, negated: bool = False) -> Adverb | None:
    """An adverb that goes with the situation, in denials one that can stand before nicht."""
    if not situation.adverbs or not dice.chance(situation.share):
        return None
    choices = ADVERBS[situation.adverbs]
    if negated:
        unfit = ("every", "soon")
        choices = tuple(a for a in choices if a.en_slot == "end" and not a.en.startswith(unfit))
    return dice.pick(choices)


def draw_clause(
    dice: Dice,
    situation: Situation,
    frames: tuple[str, ...] = (),
    subject: Nominal | None = None,
    negated: bool = False,
    verb: Verb | None = None,
) -> Clause:
    """A clause in the situation; a subject that is given must be a person."""
    choices = verbs_for(situation, frames)
    if subject:
        choices = tuple(entry for entry in choices if "person" in entry.subjects)
    verb = verb or dice.pick(choices)
    subject = subject or draw_subject(dice, verb, situation, negated)
    if isinstance(subject, Phrase) and "transport" in subject.noun.tags:
        modal = situation.tense in (*PRESENT_MODALS, *PAST_MODALS)
        situation = FUTURE if modal else situation
    habit = situation == HABIT
    cases: list[Case] = [case for case in ("dat", "acc") if case in verb.frame.split()]
    objects = [(case, draw_object(dice, verb, case, subject, habit)) for case in cases]
    adverb = draw_adverb(dice, situation, negated)
    place = draw_place(dice, verb) if not (negated and verb.frame == "acc") else None
    if place and negated and place.phrase.determiner == "a":
        place = replace(place, phrase=replace(place.phrase, determiner="the"))
    return Clause(subject, verb, situation.tense, tuple(objects), adverb, place, negated=negated)
