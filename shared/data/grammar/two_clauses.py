"""Sentences of two clauses: subordinate and relative clauses, pronouns, contrast."""

from dataclasses import replace

from shared.data.grammar.adjectives import ADJECTIVES, adjectives_for, compatible
from shared.data.grammar.clauses import Clause, two_readings
from shared.data.grammar.drawing import (
    FUTURE,
    PAST,
    PERFECT,
    PRESENT_MODALS,
    PROGRESSIVE,
    STATE,
    Dice,
    Situation,
    draw_clause,
    draw_definite,
    draw_situation,
    predicates_for,
    verbs_for,
)
from shared.data.grammar.feelings import COMES_FROM, DESPITE, HINDERS, LEADS_TO
from shared.data.grammar.nouns import nouns_with
from shared.data.grammar.phrases import PERSONAL, Phrase, reference, relative
from shared.data.grammar.sentences import (
    Sentence,
    ahead,
    contrasting,
    in_a_row,
    statement,
    then,
    with_object_clause,
    with_relative_end,
)
from shared.data.grammar.verbs import BE, verb
from shared.data.grammar.words import Adjective, Verb, tags

_FEELINGS = tuple(a for a in ADJECTIVES if a.en in ("tired", "happy", "sad", "sick", "hungry"))
_EVENT = Situation("past")


def _person(dice: Dice) -> Phrase:
    return draw_definite(dice, nouns_with(tags("named")), plural=0.15)


def _felt(dice: Dice) -> tuple[Phrase, Adjective]:
    """A person and a feeling; the person is not called tired before we say so."""
    subject, feeling = _person(dice), dice.pick(_FEELINGS)
    if subject.adjective in _FEELINGS:
        subject = replace(subject, adjective=None)
    return subject, feeling


def reason(dice: Dice) -> Sentence:
    """weil and obwohl: what a feeling leads to, and what leads to a feeling."""
    words = dice.pick((("because", "weil"), ("because", "weil"), ("although", "obwohl")))
    subject, feeling = _felt(dice)
    again = reference(subject)
    denied = dice.chance(0.3)
    expected = (words[0] == "because") != denied
    if dice.chance(0.6):
        modal = Situation(dice.pick(("want", "must") if expected != denied else ("can", "must")))
        situation = dice.pick((PROGRESSIVE, PAST, PAST, PERFECT, FUTURE, modal))
        tense = "past" if situation.tense == "past" else "present"
        act = verb(dice.pick((LEADS_TO if expected else HINDERS)[feeling.en]))
        if dice.chance(0.5):
            main = draw_clause(dice, situation, subject=again, verb=act, negated=denied)
            sub = Clause(subject, BE, tense, predicate=feeling)
            return ahead(words[0], words, sub, main)
        main = draw_clause(dice, situation, subject=subject, verb=act, negated=denied)
        return then(words[0], words, main, Clause(again, BE, tense, predicate=feeling))
    act = verb(dice.pick((COMES_FROM if expected else DESPITE)[feeling.en]))
    tense = dice.pick(("past", "perfect"))
    state = Clause(again, BE, "past" if tense == "past" else "present", predicate=feeling)
    if dice.chance(0.5):
        sub = draw_clause(dice, Situation(tense), subject=subject, verb=act, negated=denied)
        return ahead(words[0], words, sub, state)
    sub = draw_clause(dice, Situation(tense), subject=again, verb=act, negated=denied)
    return then(words[0], words, replace(state, subject=subject), sub)


_SPEAKERS = {
    "that": (
        ("I know", "ich weiß"),
        ("we know", "wir wissen"),
        ("everyone knows", "jeder weiß"),
        ("she says", "sie sagt"),
        ("he believes", "er glaubt"),
        ("the doctor says", "der Arzt sagt"),
    ),
    "hope": (("they hope", "sie hoffen"), ("I hope", "ich hoffe")),
    "whether": (
        ("I do not know", "ich weiß nicht"),
        ("we do not know", "wir wissen nicht"),
        ("nobody knows", "niemand weiß"),
        ("the teacher asks", "der Lehrer fragt"),
    ),
}


def content(dice: Dice) -> Sentence:
    """I know that ...: dass and ob."""
    kind = dice.weighted((("that", 6), ("hope", 2), ("whether", 4)))
    modal = Situation(dice.pick(PRESENT_MODALS), "modal", 0.4)
    situation = {
        "that": draw_situation(dice),
        "hope": dice.pick((PERFECT, FUTURE)),
        "whether": dice.pick((PERFECT, FUTURE, PROGRESSIVE, modal)),
    }[kind]
    sub = draw_clause(dice, situation, negated=kind == "that" and dice.chance(0.2))
    while kind == "hope" and sub.verb.en in ("cry", "lose", "forget"):
        sub = draw_clause(dice, situation)
    words = ("whether", "ob") if kind == "whether" else ("that", "dass")
    return with_object_clause(words[0], dice.pick(_SPEAKERS[kind]), words, sub)


def earlier(dice: Dice) -> Sentence:
    """When in the past is als; before is bevor."""
    words = dice.pick((("when", "als"), ("before", "bevor")))
    subject, other = _person(dice), _person(dice)
    if dice.chance(0.4) or other.noun == subject.noun:
        other = reference(subject)
    chosen = dice.pick(_human_acts("", "into", "acc into", "dat"))
    sub = draw_clause(dice, _EVENT, subject=subject, verb=chosen)
    main = draw_clause(dice, _EVENT, subject=other, verb=dice.pick(_human_acts()))
    return _either_order(dice, words, sub, main)


def later(dice: Dice) -> Sentence:
    """When in the future is wenn; if is falls. The subordinate clause is in the present."""
    words = dice.pick((("when", "wenn"), ("if", "falls")))
    subject, feeling = _felt(dice)
    if dice.chance(0.35):
        sub = Clause(subject, BE, "present", predicate=feeling)
        act = verb(dice.pick(LEADS_TO[feeling.en]))
        main = draw_clause(dice, Situation("future"), subject=reference(subject), verb=act)
        return _either_order(dice, words, sub, main)
    denied = words[0] == "if" and dice.chance(0.3)
    names = ("arrive", "come back", "help", "ask", "answer", "call", "invite", "come", "thank")
    chosen = verb(dice.pick((*names, "get up", "fall asleep", "cry", "laugh", "go", "visit")))
    sub = draw_clause(dice, Situation("present"), subject=subject, verb=chosen, negated=denied)
    main = draw_clause(dice, Situation("future"), subject=dice.pick(PERSONAL))
    return _either_order(dice, words, sub, main)


def _human_acts(*frames: str) -> tuple[Verb, ...]:
    """What people did at some moment: no states, no trains."""
    acts = verbs_for(_EVENT, frames)
    return tuple(v for v in acts if "person" in v.subjects and v.aspect != "state")


def _either_order(dice: Dice, words: tuple[str, str], sub: Clause, main: Clause) -> Sentence:
    """The subordinate clause first or last; a pronoun comes after the noun that it stands for."""
    name = f"{words[0]} ({words[1]})"
    if dice.chance(0.6):
        return ahead(name, words, sub, main)
    if isinstance(sub.subject, Phrase) and main.subject == reference(sub.subject):
        named = sub.subject
        main, sub = replace(main, subject=named), replace(sub, subject=reference(named))
    return then(name, words, main, sub)


def relative_subject(dice: Dice) -> Sentence:
    """The man who helps the child is old: the relative clause inside the main clause."""
    head = replace(draw_definite(dice, nouns_with(tags("person"))), determiner="the")
    situation = dice.pick((STATE, PROGRESSIVE, _EVENT, PERFECT))
    inner = draw_clause(dice, situation, subject=relative(head))
    quality = dice.pick(predicates_for(head))
    main = Clause(head, BE, "present", predicate=quality, relative=(inner, "subject"))
    return statement("relative subject", main)


def relative_object(dice: Dice) -> Sentence:
    """The book that the woman is reading is new: accusative and dative relative pronouns."""
    situation = dice.pick((STATE, _EVENT, PERFECT, Situation("past")))
    while True:
        inner = draw_clause(dice, situation, ("acc", "dat"))
        case, nominal = inner.objects[-1]
        if isinstance(nominal, Phrase) and not inner.verb.en_particle and not two_readings(inner):
            head = replace(nominal, determiner="the", owner=None)
            choices = predicates_for(head)
            if choices and "drink" not in head.noun.tags:
                break
    inner = replace(inner, objects=((case, relative(head)),), adverb=None)
    main = Clause(head, BE, "present", predicate=dice.pick(choices), relative=(inner, "object"))
    return statement(f"relative {case}", main)


def relative_end(dice: Dice) -> Sentence:
    """I know the man who ...: the relative clause after the object."""
    subject = draw_definite(dice, nouns_with(tags("named")))
    chosen = verb(dice.pick(("know", "help", "see", "invite", "look for", "meet", "thank")))
    main = draw_clause(dice, _EVENT, verb=chosen, subject=subject)
    case = main.objects[-1][0]
    nouns = tuple(noun for noun in nouns_with(tags("person")) if noun != subject.noun)
    head = replace(draw_definite(dice, nouns), determiner="the", owner=None)
    inner = draw_clause(dice, _EVENT, subject=relative(head))
    main = replace(main, objects=((case, head),))
    return with_relative_end("relative end", main, inner)


def contrast(dice: Dice) -> Sentence:
    """The table is old, but it is beautiful: er, sie or es by the noun's gender."""
    nouns = nouns_with(tags("goods mail place small part"))
    while True:
        subject = replace(draw_definite(dice, nouns, plural=0.2), adjective=None)
        choices = adjectives_for(subject.noun)
        first, second = dice.pick(choices), dice.pick(choices)
        denied = dice.chance(0.4)
        fair, other_fair = first.en in _GOOD, (second.en in _GOOD) != denied
        judged = {first.en, second.en} <= _GOOD | _BAD
        if judged and fair != other_fair and compatible(first, second) and not subject.owner:
            break
    tense = dice.pick(("present", "present", "past"))
    main = Clause(subject, BE, tense, predicate=first)
    other = Clause(reference(subject), BE, tense, predicate=second, negated=denied)
    held = replace(other, subject=subject)
    return contrasting("contrast", main, other, held)


_GOOD = tags("new beautiful cheap clean good warm")
_BAD = tags("old expensive dirty bad heavy dark cold")


def two_acts(dice: Dice) -> Sentence:
    """The man buys the bicycle and repairs it: es, ihn or sie by the noun's gender."""
    first_verb, second_verb = dice.pick(
        (
            ("buy", "repair"),
            ("buy", "lose"),
            ("find", "repair"),
            ("find", "sell"),
            ("find", "wash"),
            ("wash", "sell"),
            ("write", "lose"),
            ("buy", "forget"),
            ("look for", "find"),
        )
    )
    second = verb(second_verb)
    while True:
        main = draw_clause(dice, PAST, verb=verb(first_verb))
        thing = main.objects[-1][1]
        if not isinstance(thing, Phrase) or thing.plural or thing.noun.tags & tags("person animal"):
            continue
        if thing.noun.tags & second.objects:
            break
    other = Clause(main.subject, second, "past", (("acc", reference(thing)),))
    held = replace(other, objects=(("acc", replace(thing, adjective=None, owner=None)),))
    return in_a_row("two acts", main, other, held)
