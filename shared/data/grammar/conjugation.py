"""Tenses and modal verbs: which words a clause's verb turns into, before word order.

English simple past is rendered by the German simple past, present perfect by the perfect,
progressive by the present (an adverb such as jetzt goes with it): one tense, one rendering.
"""

from typing import NamedTuple

from shared.data.grammar.phrases import Nominal
from shared.data.grammar.words import Verb

_BE = {"first": "am", "third": "is", "plural": "are"}
# Tense -> English finite words by agreement, what stands before the main verb, German forms.
_MODALS: dict[str, tuple[str, str, str]] = {
    "can": ("can", "", "kann kannst kann können"),
    "could": ("could", "", "konnte konntest konnte konnten"),
    "must": ("", "have to", "muss musst muss müssen"),
    "had to": ("", "had to", "musste musstest musste mussten"),
    "want": ("", "want to", "will willst will wollen"),
    "wanted": ("", "wanted to", "wollte wolltest wollte wollten"),
    "may": ("be", "allowed to", "darf darfst darf dürfen"),
    "might": ("was", "allowed to", "durfte durftest durfte durften"),
    "should": ("should", "", "sollte solltest sollte sollten"),
    "future": ("will", "", "werde wirst wird werden"),
}
MODALS: tuple[str, ...] = tuple(tense for tense in _MODALS if tense != "future")
TENSES: tuple[str, ...] = ("present", "progressive", "past", "perfect", *_MODALS)
_HAVE = "habe hast hat haben"
_SEIN = "bin bist ist sind"
_THIRD = {"have": "has", "want": "wants"}


class EnglishVerb(NamedTuple):
    """An auxiliary ("" if none is needed) and the words that follow it."""

    auxiliary: str
    main: str


class GermanVerb(NamedTuple):
    """The finite verb and the words of the right bracket (prefix, participle, infinitive)."""

    finite: str
    closing: str
    prefix: str


def _agreement(subject: Nominal) -> str:
    if subject.plural or subject.person == 2:
        return "plural"
    return "first" if subject.person == 1 else "third"


def english_verb(verb: Verb, subject: Nominal, tense: str, support: bool) -> EnglishVerb:
    """The English verb group; with `support` a lone verb gets do, does or did to lean on."""
    agreement = _agreement(subject)
    third = agreement == "third"
    was = "were" if agreement == "plural" else "was"
    if tense in _MODALS:
        return _english_modal(verb, agreement, tense, support)
    if tense == "perfect":
        return EnglishVerb("has" if third else "have", _with_particle(verb, verb.participle))
    if verb.base == "be":
        return EnglishVerb(was if tense == "past" else _BE[agreement], "")
    if tense == "progressive":
        return EnglishVerb(_BE[agreement], _with_particle(verb, verb.ing))
    if support:
        auxiliary = "did" if tense == "past" else ("does" if third else "do")
        return EnglishVerb(auxiliary, _with_particle(verb, verb.base))
    form = verb.past if tense == "past" else (verb.third if third else verb.base)
    return EnglishVerb("", _with_particle(verb, form))


def _english_modal(verb: Verb, agreement: str, tense: str, support: bool) -> EnglishVerb:
    auxiliary, before, _ = _MODALS[tense]
    base = _with_particle(verb, verb.base)
    if auxiliary in ("be", "was"):
        past = "were" if agreement == "plural" else "was"
        return EnglishVerb(past if auxiliary == "was" else _BE[agreement], f"{before} {base}")
    if auxiliary:
        return EnglishVerb(auxiliary, base)
    head, to = before.split()
    past = head in ("had", "wanted")
    if support:
        bare = {"had": "have", "wanted": "want"}.get(head, head)
        helper = "did" if past else ("does" if agreement == "third" else "do")
        return EnglishVerb(helper, f"{bare} {to} {base}")
    if agreement == "third" and not past:
        head = _THIRD[head]
    return EnglishVerb("", f"{head} {to} {base}")


def _with_particle(verb: Verb, form: str) -> str:
    return f"{form} {verb.en_particle}" if verb.en_particle else form


def german_verb(verb: Verb, subject: Nominal, tense: str) -> GermanVerb:
    """The German finite verb and what closes the clause."""
    if tense in _MODALS:
        return GermanVerb(_by_person(_MODALS[tense][2], subject), verb.de, "")
    if tense == "perfect":
        forms = _SEIN if verb.auxiliary == "sein" else _HAVE
        return GermanVerb(_by_person(forms, subject), verb.de_participle, "")
    if tense == "past":
        return GermanVerb(_past(verb, subject), verb.prefix, verb.prefix)
    return GermanVerb(_present(verb, subject), verb.prefix, verb.prefix)


def _by_person(forms: str, subject: Nominal) -> str:
    first, second, third, plural = forms.split()
    if subject.plural:
        return plural
    return {1: first, 2: second, 3: third}[subject.person]


def _present(verb: Verb, subject: Nominal) -> str:
    if verb.infinitive == "sein":
        return _by_person(_SEIN, subject)
    return _by_person(f"{verb.infinitive[:-1]} {verb.du} {verb.er} {verb.infinitive}", subject)


def _past(verb: Verb, subject: Nominal) -> str:
    if subject.person == 2:
        raise ValueError(f"the corpus has no du-form of the simple past ({verb.de})")
    if not subject.plural:
        return verb.de_past
    return verb.de_past + ("n" if verb.de_past.endswith("e") else "en")
