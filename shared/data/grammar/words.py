"""What the lexicon is made of: nouns, adjectives, verbs and adverbials with their forms.

A form is written out wherever a rule would have exceptions (plural, past, participle) and is
computed wherever German and English are regular (case endings, the ich-form, the -ing clause).
"""

from dataclasses import dataclass
from typing import Literal

Gender = Literal["m", "f", "n"]
Case = Literal["nom", "acc", "dat", "gen"]
Aspect = Literal["activity", "state", "event", "perception"]


@dataclass(frozen=True)
class Noun:
    """A noun with its plural, gender, genitive singular and the tags that say what it can be."""

    en: str
    en_plural: str
    de: str
    de_plural: str
    gender: Gender
    genitive: str
    tags: frozenset[str]

    @property
    def weak(self) -> bool:
        """Weak masculine nouns take -n in every case but the nominative: der Junge, dem Jungen."""
        return self.gender == "m" and self.genitive == self.de_plural and self.genitive[-1] == "n"


@dataclass(frozen=True)
class Adjective:
    """An adjective; `stem` is what endings attach to (teuer, but ein teures Buch)."""

    en: str
    de: str
    stem: str
    tags: frozenset[str]


@dataclass(frozen=True)
class Verb:
    """A verb of both languages, what it governs and which nouns it goes with.

    `frame` says what follows the verb: nothing (""), objects by case ("acc", "dat", "dat acc"),
    or a place ("into": two-way preposition with accusative, "at": with dative,
    "acc into": an object that is put somewhere). `habit` names the objects of everyday doing.
    """

    base: str
    third: str
    past: str
    participle: str
    ing: str
    en_particle: str
    prefix: str
    infinitive: str
    du: str
    er: str
    de_past: str
    de_participle: str
    auxiliary: Literal["haben", "sein"]
    frame: str
    subjects: frozenset[str]
    objects: frozenset[str]
    habit: frozenset[str]
    aspect: Aspect

    @property
    def en(self) -> str:
        """The English verb as the lexicon names it, for instance `get up`."""
        return f"{self.base} {self.en_particle}".strip()

    @property
    def de(self) -> str:
        """The German infinitive as one word, for instance `aufstehen`."""
        return self.prefix + self.infinitive


@dataclass(frozen=True)
class Adverb:
    """An adverbial of time or cause and where it stands.

    English: "end" of the clause or "mid", before the main verb (often, already). German: "early",
    right after the subject, or "late", where nicht stands. Fronting a long one takes an English
    comma.
    """

    en: str
    de: str
    en_slot: Literal["end", "mid"] = "end"
    de_slot: Literal["early", "late"] = "early"
    fronts: bool = True
    comma: bool = False


def tags(text: str) -> frozenset[str]:
    """The set of tags in a string of words."""
    return frozenset(text.split())
