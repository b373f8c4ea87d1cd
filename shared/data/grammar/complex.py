"""Sentences of two clauses: subordinate and relative clauses, pronouns, contrast."""

from dataclasses import replace

from shared.data.grammar.adjectives import ADJECTIVES, adjectives_for
from shared.data.grammar.clauses import Clause, english, german
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
    verbs_for,
)
from shared.data.grammar.nouns import nouns_with
from shared.data.grammar.phrases import Nominal, Phrase, reference, relative
from shared.data.grammar.sentences import Sentence, sentence
from shared.data.grammar.verbs import BE, verb
from shared.data.grammar.words import tags

_FEELINGS = tuple(a for a in ADJECTIVES if a.en in ("tired", "happy", "sad", "sick", "hungry"))
_EVENT = Situation("past")


def _join(construction: str, words: tuple[str, str], main: Clause, sub: Clause) -> Sentence:
    """The main clause, a comma in German, the conjunction and the subordinate clause."""
    texts = (
        f"{english(main)} {words[0]} {english(sub)}",
        f"{german(main)}, {words[1]} {german(sub, final=True)}",
    )
    return sentence(construction, *texts, main, sub)


def _ahead(construction: str, words: tuple[str, str], sub: Clause, main: Clause) -> Sentence:
    """The subordinate clause first: it fills the front, so the German main clause begins with
    its verb."""
    texts = (
        f"{words[0]} {english(sub)}, {english(main)}",
        f"{words[1]} {german(sub, final=True)}, {german(main, 'none')}",
    )
    return sentence(f"{construction} first", *texts, main, sub)


def _person(dice: Dice) -> Phrase:
    return draw_definite(dice, nouns_with(tags("named")), plural=0.15)


def _taken_up(dice: Dice, subject: Nominal) -> Nominal:
    """The pronoun for a person already named."""
    return reference(subject) if isinstance(subject, Phrase) else subject


def _feeling(dice: Dice, subject: Nominal, tense: str) -> Clause:
    return Clause(subject, BE, tense, predicate=dice.pick(_FEELINGS))


def reason(dice: Dice) -> Sentence:
    """weil and obwohl; the subject returns as a pronoun."""
    words = dice.pick((("because", "weil"), ("because", "weil"), ("although", "obwohl")))
    situation = dice.pick((PROGRESSIVE, PAST, PAST, PERFECT, Situation(dice.pick(PRESENT_MODALS))))
    tense = "past" if situation.tense == "past" else "present"
    subject = _person(dice)
    again = _taken_up(dice, subject)
    denied = dice.chance(0.25)
    if dice.chance(0.5):
        if dice.chance(0.5):
            main = draw_clause(dice, situation, subject=again, negated=denied)
            return _ahead(words[0], words, _feeling(dice, subject, tense), main)
        main = draw_clause(dice, situation, subject=subject, negated=denied)
        return _join(words[0], words, main, _feeling(dice, again, tense))
    sub = draw_clause(
        dice, dice.pick((PAST, PERFECT)) if tense == "past" else PERFECT, subject=subject
    )
    sub = sub if tense == "present" else replace(sub, tense="past", adverb=None)
    if dice.chance(0.5):
        return _ahead(words[0], words, sub, _feeling(dice, again, tense))
    sub = replace(
        draw_clause(dice, _EVENT if tense == "past" else PERFECT, subject=again), adverb=None
    )
    return _join(words[0], words, _feeling(dice, subject, tense), sub)


def content(dice: Dice) -> Sentence:
    """I know that ...: dass and ob."""
    speaker = dice.pick((("I know", "ich weiß"), ("we know", "wir wissen")))
    kind = dice.weighted((("that", 6), ("whether", 3)))
    if kind == "whether":
        speaker = dice.pick(
            (
                ("I do not know", "ich weiß nicht"),
                ("we do not know", "wir wissen nicht"),
                ("nobody knows", "niemand weiß"),
                ("the teacher asks", "der Lehrer fragt"),
            )
        )
        situation = dice.pick((PERFECT, FUTURE, PROGRESSIVE, Situation(dice.pick(PRESENT_MODALS))))
    else:
        speaker = dice.pick(
            (
                speaker,
                ("she says", "sie sagt"),
                ("he believes", "er glaubt"),
                ("everyone sees", "jeder sieht"),
                ("they hope", "sie hoffen"),
                ("the doctor says", "der Arzt sagt"),
            )
        )
        situation = draw_situation(dice)
    sub = draw_clause(dice, situation, negated=kind == "that" and dice.chance(0.2))
    conjunction = "dass" if kind == "that" else "ob"
    texts = (
        f"{speaker[0]} {kind} {english(sub)}",
        f"{speaker[1]}, {conjunction} {german(sub, final=True)}",
    )
    return sentence(kind, *texts, sub)


def moment(dice: Dice) -> Sentence:
    """When in the past is als; if is falls; before is bevor."""
    kind = dice.pick((("when", "als"), ("if", "falls"), ("before", "bevor")))
    if kind[0] == "if":
        chosen = dice.pick(verbs_for(_EVENT, ("", "into", "dat")))
        subject = _person(dice)
        denied = dice.chance(0.3)
        sub = draw_clause(
            dice, Situation("present"), subject=subject, verb=_human(chosen), negated=denied
        )
        if dice.chance(0.4):
            sub = _feeling(dice, subject, "present")
        main = draw_clause(dice, Situation("future"), subject=_taken_up(dice, subject))
    else:
        chosen = _human(dice.pick(verbs_for(_EVENT, ("", "into", "acc into", "dat"))))
        sub = draw_clause(dice, _EVENT, subject=_person(dice), verb=chosen)
        other = _person(dice)
        if dice.chance(0.4) or other.noun == sub.subject.noun:
            other = _taken_up(dice, sub.subject)
        main = draw_clause(dice, _EVENT, ("", "acc", "dat", "into"), subject=other)
    if dice.chance(0.6):
        return _ahead(kind[0], kind, sub, main)
    if not isinstance(main.subject, Phrase):
        main, sub = replace(main, subject=sub.subject), replace(sub, subject=main.subject)
    return _join(kind[0], kind, main, sub)


def _human(entry):
    return entry if "person" in entry.subjects else verb("sleep")


def relative_subject(dice: Dice) -> Sentence:
    """The man who helps the child is old: the relative clause inside the main clause."""
    head = replace(draw_definite(dice, nouns_with(tags("person"))), owner=None)
    situation = dice.pick((STATE, PROGRESSIVE, _EVENT, PERFECT))
    inner = draw_clause(dice, situation, subject=relative(head))
    choices = [a for a in adjectives_for(head.noun) if a != head.adjective]
    main = Clause(head, BE, "present", predicate=dice.pick(choices), relative=(inner, "subject"))
    return _with_relative("relative subject", main)


def relative_object(dice: Dice) -> Sentence:
    """The book that the woman is reading is new: accusative and dative relative pronouns."""
    situation = dice.pick((STATE, _EVENT, PERFECT, Situation("past")))
    while True:
        inner = draw_clause(dice, situation, ("acc", "dat"))
        case, nominal = inner.objects[-1]
        if isinstance(nominal, Phrase) and not inner.verb.en_particle:
            head = replace(nominal, determiner="the", owner=None)
            choices = [a for a in adjectives_for(head.noun) if a != head.adjective]
            if choices and "drink" not in head.noun.tags:
                break
    inner = replace(inner, objects=((case, relative(head)),), adverb=None)
    main = Clause(head, BE, "present", predicate=dice.pick(choices), relative=(inner, "object"))
    return _with_relative(f"relative {case}", main)


def _with_relative(construction: str, main: Clause) -> Sentence:
    return sentence(construction, english(main), german(main), main)


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
    closing = german(main).split(" ")
    last = f" {closing.pop()}" if main.verb.prefix else ""
    texts = (
        f"{english(main)} {english(inner)}",
        f"{' '.join(closing)}{last}, {german(inner, final=True)}",
    )
    return sentence("relative end", *texts, main, inner)


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
        if judged and fair != other_fair and compatible(first.en, second.en) and not subject.owner:
            break
    tense = dice.pick(("present", "present", "past"))
    main = Clause(subject, BE, tense, predicate=first)
    other = Clause(reference(subject), BE, tense, predicate=second, negated=denied)
    texts = (
        f"{english(main)}, but {english(other)}",
        f"{german(main)}, aber {german(other)}",
    )
    held = replace(other, subject=replace(subject, adjective=None))
    return sentence("contrast", *texts, main, held)


_GOOD = tags("new beautiful cheap clean good warm")
_BAD = tags("old expensive dirty bad heavy dark cold")
_GROUPS = (
    tags("old new young"),
    tags("big small tall"),
    tags("expensive cheap"),
    tags("clean dirty"),
    tags("warm cold"),
    tags("good bad"),
    tags("red blue green black white yellow"),
)


def compatible(first: str, second: str) -> bool:
    """Whether one thing can be both: not new and old, not red and blue, not twice the same."""
    return first != second and not any({first, second} <= group for group in _GROUPS)


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
            ("draw", "sell"),
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
    subject_english, subject_german = main.subject.english("nom"), main.subject.german("nom")
    texts = (
        f"{english(main)} and {english(other).removeprefix(subject_english + ' ')}",
        f"{german(main)} und {german(other).removeprefix(subject_german + ' ')}",
    )
    held = replace(other, objects=(("acc", replace(thing, adjective=None, owner=None)),))
    return sentence("two acts", *texts, main, held)
