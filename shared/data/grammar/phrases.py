"""Noun phrases and pronouns: declension in German, articles and possessives in English.

German marks case, gender and number once in every noun phrase: on the article where it has an
ending, otherwise on the adjective. That one sentence is `_adjective_ending`; the three tables of
school grammars (weak, mixed, strong) follow from it.
"""

from dataclasses import dataclass
from typing import Protocol, Self

from shared.data.grammar.numerals import english_number, german_number
from shared.data.grammar.words import Adjective, Case, Noun

CASES: tuple[Case, ...] = ("nom", "acc", "dat", "gen")
# The endings of dieser; "p" is the plural of every gender.
_MARKED = {"m": "er en em es", "f": "e e er er", "n": "es es em es", "p": "e e en er"}
_DEFINITE = {"m": "der den dem des", "f": "die die der der", "n": "das das dem des"}
_DEFINITE["p"] = "die die den der"
_EIN_WORDS = {
    "a": "ein",
    "no": "kein",
    "my": "mein",
    "your": "dein",
    "his": "sein",
    "her": "ihr",
    "our": "unser",
    "their": "ihr",
}
_DIES_WORDS = {"this": "dies", "which": "welch"}
_INDEFINITE = ("", "a", "no")


def _pick(row: str, case: Case) -> str:
    return row.split()[CASES.index(case)]


def _ein_ending(column: str, case: Case) -> str:
    """Ein-words have no ending in ein Mann, ein Kind, and the marked one everywhere else."""
    bare = (column, case) in {("m", "nom"), ("n", "nom"), ("n", "acc")}
    return "" if bare else _pick(_MARKED[column], case)


class Nominal(Protocol):
    """What can be the subject or an object of a clause."""

    @property
    def person(self) -> int: ...
    @property
    def plural(self) -> bool: ...
    @property
    def definite(self) -> bool: ...
    @property
    def pronoun(self) -> bool: ...
    def english(self, case: Case) -> str: ...
    def german(self, case: Case, negated: bool = False) -> str: ...


@dataclass(frozen=True)
class Phrase:
    """A noun with its determiner, number, adjective and owner (the old man's dog).

    `count` is a numeral before the noun; 1 reads `only one`, nur ein, to differ from `a`.
    """

    noun: Noun
    determiner: str = "the"
    plural: bool = False
    adjective: Adjective | None = None
    owner: Self | None = None
    count: int = 0

    person = 3
    pronoun = False

    @property
    def definite(self) -> bool:
        """Whether nicht and late adverbs stand after it: the, this and possessives."""
        return self.determiner not in _INDEFINITE and not self.count

    def english(self, case: Case) -> str:
        """The phrase in English; the genitive is the form before the thing that is owned."""
        head = self.noun.en_plural if self.plural else self.noun.en
        words = [self.adjective.en] if self.adjective else []
        words.append(head)
        if self.owner:
            words.insert(0, self.owner.english("gen"))
        elif self.count:
            words.insert(0, "only one" if self.count == 1 else english_number(self.count))
        elif self.determiner == "a":
            words.insert(0, "an" if words[0][0] in "aeiou" else "a")
        elif self.determiner == "this" and self.plural:
            words.insert(0, "these")
        elif self.determiner:
            words.insert(0, self.determiner)
        text = " ".join(words)
        if case == "gen":
            text += "'" if self.plural and head.endswith("s") else "'s"
        return text

    def german(self, case: Case, negated: bool = False) -> str:
        """The phrase in a German case; `negated` turns an indefinite article into kein."""
        column = "p" if self.plural else self.noun.gender
        determiner = "no" if negated and self.determiner in ("", "a") else self.determiner
        article, ending = self._article(determiner, column, case)
        words = [article] if article else []
        if self.adjective:
            words.append(self.adjective.stem + ending if ending else self.adjective.de)
        words.append(self._german_noun(case))
        if self.owner:
            words.append(self.owner.german("gen"))
        return " ".join(words)

    def _article(self, determiner: str, column: str, case: Case) -> tuple[str, str]:
        """The article (or "") and the ending that it leaves to the adjective."""
        marked = _pick(_MARKED[column], case)
        unmarked = "en" if case == "gen" and column in "mn" else marked
        if self.count > 1:
            return german_number(self.count), unmarked
        if self.count == 1 or determiner in _EIN_WORDS:
            ending = _ein_ending(column, case)
            article = ("nur ein" if self.count else _EIN_WORDS[determiner]) + ending
            return article, _weak_ending(column, case) if ending else marked
        if determiner in _DIES_WORDS:
            return _DIES_WORDS[determiner] + marked, _weak_ending(column, case)
        if determiner == "the":
            return _pick(_DEFINITE[column], case), _weak_ending(column, case)
        return "", unmarked

    def _german_noun(self, case: Case) -> str:
        noun = self.noun
        if self.plural:
            takes_n = case == "dat" and noun.de_plural[-1] not in "ns"
            return noun.de_plural + ("n" if takes_n else "")
        if noun.weak:
            return noun.de if case == "nom" else noun.genitive
        return noun.genitive if case == "gen" else noun.de


def _weak_ending(column: str, case: Case) -> str:
    """After an article that shows case and gender: -e in the five basic forms, else -en."""
    basic = case == "nom" or (case == "acc" and column in "fn")
    return "e" if basic and column != "p" else "en"


@dataclass(frozen=True)
class Pronoun:
    """A pronoun with its forms; `en` holds subject and object form, `de` nom, acc and dat."""

    en: tuple[str, str]
    de: tuple[str, str, str]
    person: int = 3
    plural: bool = False
    definite: bool = True
    pronoun: bool = True

    def english(self, case: Case) -> str:
        """The subject form in the nominative, else the object form."""
        return self.en[0 if case == "nom" else 1]

    def german(self, case: Case, negated: bool = False) -> str:
        """The form of the case; pronouns have no genitive here (IndexError)."""
        return self.de[CASES.index(case)]


I = Pronoun(("I", "me"), ("ich", "mich", "mir"), person=1)  # noqa: E741
YOU = Pronoun(("you", "you"), ("du", "dich", "dir"), person=2)
HE = Pronoun(("he", "him"), ("er", "ihn", "ihm"))
SHE = Pronoun(("she", "her"), ("sie", "sie", "ihr"))
WE = Pronoun(("we", "us"), ("wir", "uns", "uns"), person=1, plural=True)
THEY = Pronoun(("they", "them"), ("sie", "sie", "ihnen"), plural=True)
WHO = Pronoun(("who", "whom"), ("wer", "wen", "wem"), pronoun=False)
WHAT = Pronoun(("what", "what"), ("was", "was", "was"), pronoun=False)
PERSONAL = (I, YOU, HE, SHE, WE, THEY)
_IT = {
    "m": Pronoun(("it", "it"), ("er", "ihn", "ihm")),
    "f": Pronoun(("it", "it"), ("sie", "sie", "ihr")),
    "n": Pronoun(("it", "it"), ("es", "es", "ihm")),
}
_RELATIVE = {"m": "der den dem", "f": "die die der", "n": "das das dem", "p": "die die denen"}


def reference(phrase: Phrase) -> Pronoun:
    """The pronoun that takes up a phrase: German goes by gender, English by sex or it."""
    if phrase.plural:
        return THEY
    if "named" in phrase.noun.tags:
        return HE if phrase.noun.gender == "m" else SHE
    return _IT[phrase.noun.gender]


def relative(phrase: Phrase) -> Pronoun:
    """The relative pronoun for a phrase: who and whom for people, that for the rest."""
    nom, acc, dat = _RELATIVE["p" if phrase.plural else phrase.noun.gender].split()
    english = ("who", "whom") if "person" in phrase.noun.tags else ("that", "that")
    return Pronoun(english, (nom, acc, dat), plural=phrase.plural)


def possessive(subject: Nominal) -> str:
    """The possessive that points back to the subject: she -> her. "" where none is clear."""
    if isinstance(subject, Phrase):
        if "person" not in subject.noun.tags or not (
            subject.plural or "named" in subject.noun.tags
        ):
            return ""
        subject = reference(subject)
    for pronoun, word in ((I, "my"), (YOU, "your"), (HE, "his"), (SHE, "her"), (WE, "our")):
        if subject == pronoun:
            return word
    return "their" if subject == THEY else ""
