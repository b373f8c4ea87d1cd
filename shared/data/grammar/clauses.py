"""Clauses and their word order: German by topological fields, English by position.

A German clause is a frame of two verbal brackets. What stands before the left bracket (the front),
in the middle and in the right bracket decides its type:

    front         left bracket   middle field                        right bracket
    Gestern       kaufte         die Frau einen roten Apfel
    Die Frau      hat            heute einen roten Apfel             gekauft
                  Kommt          der Zug heute                       an           (question)
                  weil           die Frau heute einen roten Apfel    gekauft hat  (subordinate)
"""

from dataclasses import dataclass
from typing import Literal, Self

from shared.data.grammar.conjugation import english_verb, german_verb
from shared.data.grammar.phrases import Nominal, Phrase
from shared.data.grammar.words import Adjective, Adverb, Case, Verb

Front = Literal["subject", "object", "adverb", "place", "none"]
_CONTRACTIONS = {"in dem": "im", "in das": "ins", "an dem": "am", "an das": "ans"}


@dataclass(frozen=True)
class Place:
    """A prepositional phrase of place: dative where something is, accusative where it goes."""

    en: str
    de: str
    case: Case
    phrase: Phrase

    def english(self) -> str:
        """The English phrase, for instance `into the garden`."""
        return f"{self.en} {self.phrase.english('acc')}"

    def german(self) -> str:
        """The German phrase; in dem, in das and their like contract (im Garten, ins Haus)."""
        text = f"{self.de} {self.phrase.german(self.case)}"
        preposition, article, rest = text.split(" ", 2)
        short = _CONTRACTIONS.get(f"{preposition} {article}")
        return f"{short} {rest}" if short else text


@dataclass(frozen=True)
class Where:
    """Question words that stand for a place: wo and wohin."""

    en: str
    de: str

    def english(self) -> str:
        """The English question word."""
        return self.en

    def german(self) -> str:
        """The German question word."""
        return self.de


@dataclass(frozen=True)
class Clause:
    """A clause before word order: who does what, when, where, and whether it is denied."""

    subject: Nominal
    verb: Verb
    tense: str
    objects: tuple[tuple[Case, Nominal], ...] = ()
    adverb: Adverb | None = None
    place: Place | Where | None = None
    predicate: Adjective | None = None
    negated: bool = False
    relative: tuple[Self, Front] | None = None


def german(clause: Clause, front: Front = "subject", final: bool = False) -> str:
    """The German clause: verb second, first (front "none"), or final after a conjunction."""
    verb = german_verb(clause.verb, clause.subject, clause.tense)
    front = "none" if final and front == "subject" else front
    parts = [] if front == "none" else [_german_front(clause, front)]
    middle = _german_middle(clause, front)
    if final:
        closing = verb.prefix + verb.finite if verb.prefix else f"{verb.closing} {verb.finite}"
        parts += [*middle, closing.strip()]
    else:
        parts += [verb.finite, *middle, verb.closing]
    return " ".join(part for part in parts if part)


def two_readings(clause: Clause) -> bool:
    """Whether German could not tell subject from object once the object is in front.

    Die Frau, die die Königin besuchte: only der and den, or a plural verb, say who visited whom.
    """
    case, nominal = clause.objects[-1]
    subject = clause.subject
    if case != "acc" or nominal.plural != subject.plural:
        return False
    if not isinstance(nominal, Phrase) or not nominal.noun.tags & {"person", "animal"}:
        return False
    forms = [(n.german("nom"), n.german("acc")) for n in (nominal, subject)]
    return all(nominative == accusative for nominative, accusative in forms)


def _german_subject(clause: Clause) -> str:
    subject = clause.subject.german("nom")
    if clause.relative:
        inner, front = clause.relative
        return f"{subject}, {german(inner, front, final=True)},"
    return subject


def _german_front(clause: Clause, front: Front) -> str:
    if front == "object":
        case, nominal = clause.objects[-1]
        return nominal.german(case)
    if front == "adverb":
        assert clause.adverb is not None, "the clause has no adverb to front"
        return clause.adverb.de
    if front == "place":
        assert clause.place is not None, "the clause has no place to front"
        return clause.place.german()
    return _german_subject(clause)


def _german_middle(clause: Clause, front: Front) -> list[str]:
    """Subject, pronouns, early adverb, definite objects, nicht or late adverb, the rest."""
    objects = clause.objects[:-1] if front == "object" else clause.objects
    adverb = None if front == "adverb" else clause.adverb
    pronouns = [nominal.german(case) for case, nominal in objects if nominal.pronoun]
    definite = [n.german(case) for case, n in objects if n.definite and not n.pronoun]
    others = [(case, n) for case, n in objects if not n.definite]
    late = [adverb.de] if adverb and adverb.de_slot == "late" else []
    if clause.negated and not others:
        late.append("nicht")
    indefinite = [n.german(case, negated=clause.negated) for case, n in others]
    early = [adverb.de] if adverb and adverb.de_slot == "early" else []
    subject = [] if front == "subject" else [_german_subject(clause)]
    if clause.subject.pronoun:
        words = [*subject, *pronouns, *early]
    else:
        # A pronoun goes before a noun as subject, but sie and es would be taken for the subject;
        # an adverb goes before a subject that is new: Fährt gerade ein Zug ab?
        first = [p for p in pronouns if p not in ("sie", "es")]
        rest = [p for p in pronouns if p not in first]
        new = not clause.subject.definite and not rest and front != "subject"
        words = [*first, *early, *subject] if new else [*first, *subject, *rest, *early]
    words += [*definite, *late, *indefinite]
    words += [clause.place.german()] if clause.place and front != "place" else []
    words += [clause.predicate.de] if clause.predicate else []
    return words


def english(clause: Clause, front: Front = "subject", invert: bool = False) -> str:
    """The English clause; `invert` puts the auxiliary before the subject, as questions do."""
    support = clause.negated or (invert and front != "subject")
    verb = english_verb(clause.verb, clause.subject, clause.tense, support)
    auxiliary = f"{verb.auxiliary} not" if clause.negated else verb.auxiliary
    auxiliary = auxiliary.replace("can not", "cannot")
    subject = _english_subject(clause)
    mid = clause.adverb.en if clause.adverb and clause.adverb.en_slot == "mid" else ""
    if invert and front != "subject":
        bare, _, negation = (
            auxiliary.partition(" ") if auxiliary != "cannot" else ("can", "", "not")
        )
        core = [bare, subject, negation, mid, verb.main]
    else:
        core = [subject, auxiliary, mid, verb.main]
    parts = [_english_front(clause, front), *core, *_english_rest(clause, front)]
    return " ".join(part for part in parts if part)


def _english_subject(clause: Clause) -> str:
    subject = clause.subject.english("nom")
    if clause.relative:
        inner, front = clause.relative
        return f"{subject} {english(inner, front)}"
    return subject


def _english_front(clause: Clause, front: Front) -> str:
    if front == "object":
        case, nominal = clause.objects[-1]
        return nominal.english(case)
    if front == "adverb":
        assert clause.adverb is not None, "the clause has no adverb to front"
        return clause.adverb.en + ("," if clause.adverb.comma else "")
    if front == "place":
        assert clause.place is not None, "the clause has no place to front"
        return clause.place.english()
    return ""


def _english_rest(clause: Clause, front: Front) -> list[str]:
    """What follows the verb: objects, predicate, place, time."""
    objects = clause.objects[:-1] if front == "object" else clause.objects
    words = [nominal.english("acc" if case == "dat" else case) for case, nominal in objects]
    words += [clause.predicate.en] if clause.predicate else []
    words += [clause.place.english()] if clause.place and front != "place" else []
    if clause.adverb and clause.adverb.en_slot == "end" and front != "adverb":
        words.append(clause.adverb.en)
    return words
