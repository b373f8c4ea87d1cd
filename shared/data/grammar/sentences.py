"""A finished sentence pair, and the combinations of words in it that a test can hold out."""

from collections.abc import Iterator
from typing import NamedTuple

from shared.data.grammar.clauses import Clause, Front, english, german
from shared.data.grammar.phrases import Phrase
from shared.data.grammar.verbs import BE, COST
from shared.data.pairs import Pair


class Sentence(NamedTuple):
    """A pair with the construction it was built by and the combinations it contains."""

    pair: Pair
    construction: str
    combinations: frozenset[str]


def finish(text: str, end: str) -> str:
    """Capital letter and closing mark; a comma never stands before the mark."""
    return text[0].upper() + text[1:].removesuffix(",") + end


def sentence(
    construction: str, english_text: str, german_text: str, *clauses: Clause, end: str = "."
) -> Sentence:
    """The sentence pair of two running texts and the clauses they were made of."""
    pair = Pair(finish(english_text, end), finish(german_text, end))
    found = frozenset(item for clause in clauses for item in _combinations(construction, clause))
    return Sentence(pair, construction, found)


def statement(construction: str, clause: Clause, front: Front = "subject") -> Sentence:
    """A main clause as a sentence of its own."""
    return sentence(construction, english(clause, front), german(clause, front), clause)


def question(construction: str, clause: Clause, front: Front = "none") -> Sentence:
    """A question: verb first, or second after the question word in front."""
    texts = english(clause, front, invert=True), german(clause, front)
    return sentence(construction, *texts, clause, end="?")


def then(construction: str, words: tuple[str, str], main: Clause, sub: Clause) -> Sentence:
    """A main clause and a subordinate clause after it: `..., weil ...` with the verb at the end."""
    texts = (
        f"{english(main)} {words[0]} {english(sub)}",
        f"{german(main)}, {words[1]} {german(sub, final=True)}",
    )
    return sentence(construction, *texts, main, sub)


def ahead(construction: str, words: tuple[str, str], sub: Clause, main: Clause) -> Sentence:
    """The subordinate clause first: it fills the front, so the German main clause starts with
    its verb."""
    texts = (
        f"{words[0]} {english(sub)}, {english(main)}",
        f"{words[1]} {german(sub, final=True)}, {german(main, 'none')}",
    )
    return sentence(f"{construction} first", *texts, main, sub)


def with_object_clause(
    construction: str, speaker: tuple[str, str], words: tuple[str, str], sub: Clause
) -> Sentence:
    """What somebody knows, says or asks: `Ich weiß, dass ...`."""
    texts = (
        f"{speaker[0]} {words[0]} {english(sub)}",
        f"{speaker[1]}, {words[1]} {german(sub, final=True)}",
    )
    return sentence(construction, *texts, sub)


def with_relative_end(construction: str, main: Clause, inner: Clause) -> Sentence:
    """A main clause that ends in an object and a relative clause about that object."""
    texts = f"{english(main)} {english(inner)}", f"{german(main)}, {german(inner, final=True)}"
    return sentence(construction, *texts, main, inner)


def contrasting(construction: str, main: Clause, other: Clause, *held: Clause) -> Sentence:
    """Two main clauses with but; aber stands before the second and takes no place in it."""
    texts = f"{english(main)}, but {english(other)}", f"{german(main)}, aber {german(other)}"
    return sentence(construction, *texts, main, *held)


def in_a_row(construction: str, main: Clause, other: Clause, *held: Clause) -> Sentence:
    """Two main clauses of one subject, which the second does not repeat; no comma."""
    named = main.subject.english("nom"), main.subject.german("nom")
    texts = (
        f"{english(main)} and {english(other).removeprefix(named[0] + ' ')}",
        f"{german(main)} und {german(other).removeprefix(named[1] + ' ')}",
    )
    return sentence(construction, *texts, main, *held)


def with_measure(construction: str, clause: Clause, measure: tuple[str, str]) -> Sentence:
    """A clause that ends in a price or an age: `Das Buch kostet zwei Euro`."""
    texts = f"{english(clause)} {measure[0]}", f"{german(clause)} {measure[1]}"
    made = sentence(construction, *texts, clause)
    if not isinstance(clause.subject, Phrase):
        return made
    number = f"number:{measure[0]}+{clause.subject.noun.en}"
    return made._replace(combinations=made.combinations | {number})


def _combinations(construction: str, clause: Clause) -> Iterator[str]:
    phrases = [clause.subject, *(nominal for _, nominal in clause.objects)]
    if clause.verb not in (BE, COST):
        yield f"construction:{clause.verb.en}+{construction}/{clause.tense}"
        if isinstance(clause.subject, Phrase):
            yield f"subject:{clause.verb.en}+{clause.subject.noun.en}"
        for _, nominal in clause.objects:
            if isinstance(nominal, Phrase):
                yield f"object:{clause.verb.en}+{nominal.noun.en}"
    if clause.predicate and isinstance(clause.subject, Phrase):
        yield f"adjective:{clause.predicate.en}+{clause.subject.noun.en}"
    place = getattr(clause.place, "phrase", None)
    for phrase in [*phrases, *([place] if place else [])]:
        yield from _adjectives(phrase)
    if clause.relative:
        yield from _combinations(f"{construction} inside", clause.relative[0])


def _adjectives(phrase: object) -> Iterator[str]:
    if not isinstance(phrase, Phrase):
        return
    if phrase.adjective:
        yield f"adjective:{phrase.adjective.en}+{phrase.noun.en}"
    if phrase.count:
        yield f"number:{phrase.count}+{phrase.noun.en}"
    if phrase.owner:
        yield from _adjectives(phrase.owner)
