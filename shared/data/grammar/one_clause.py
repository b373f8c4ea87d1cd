"""Sentences of one clause: statements, denials, questions, descriptions, numbers."""

from dataclasses import replace

from shared.data.grammar.adverbials import ADVERBS, WHEN, WHY
from shared.data.grammar.clauses import Clause, Front, Where, two_readings
from shared.data.grammar.drawing import (
    FUTURE,
    HABIT,
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
from shared.data.grammar.nouns import nouns_with
from shared.data.grammar.numerals import (
    english_number,
    english_time,
    german_number,
    german_time,
)
from shared.data.grammar.phrases import WHAT, WHO, Phrase
from shared.data.grammar.sentences import Sentence, question, statement, with_measure
from shared.data.grammar.verbs import BE, COST, VERBS, verb
from shared.data.grammar.words import Adverb, tags

_PASSING = ("tired", "happy", "sad", "sick", "hungry", "dirty", "clean", "cold", "warm")
# With no, these leave open what is denied: nobody has to, or everybody has to not.
_SCOPED = ("must", "had to")
HUNDREDS = (*range(100, 1000, 100), 101, 112, 125, 150, 199, 231, 250, 365, 480, 516, 777, 999)


def plain(dice: Dice) -> Sentence:
    """The woman buys ...; in front stands the subject."""
    return statement("plain", draw_clause(dice, draw_situation(dice)))


def fronted(dice: Dice) -> Sentence:
    """Yesterday the woman bought ...: the German verb stays second."""
    while True:
        clause = draw_clause(dice, draw_situation(dice))
        if clause.adverb and clause.adverb.fronts:
            return statement("fronted", clause, "adverb")
        if clause.place and clause.verb.frame in ("", "acc"):
            return statement("fronted", clause, "place")


def negated(dice: Dice) -> Sentence:
    """The woman does not buy ...: nicht or kein."""
    while True:
        situation = draw_situation(dice)
        if situation == HABIT and not dice.chance(0.3):
            continue
        return statement("negated", draw_clause(dice, situation, negated=True))


def nobody(dice: Dice) -> Sentence:
    """No child sleeps: kein as the subject's article."""
    while True:
        clause = draw_clause(dice, draw_situation(dice))
        subject, adverb = clause.subject, clause.adverb
        if not isinstance(subject, Phrase) or subject.owner or subject.plural:
            continue
        one_denial = not (adverb and adverb.en_slot == "mid") and clause.tense not in _SCOPED
        if one_denial and "relative" not in subject.noun.tags:
            denied = replace(subject, determiner="no")
            return statement("nobody", replace(clause, subject=denied))


def _question_situation(dice: Dice) -> Situation:
    modal = Situation(dice.pick(PRESENT_MODALS), "modal", 0.4)
    return dice.pick((HABIT, STATE, PROGRESSIVE, PERFECT, PERFECT, FUTURE, modal))


def yes_no(dice: Dice) -> Sentence:
    """Has the woman bought ...? The verb comes first."""
    return question("yes-no", draw_clause(dice, _question_situation(dice)))


def who(dice: Dice) -> Sentence:
    """Who is buying ...? wer, wen and wem."""
    if dice.chance(0.5):
        while True:
            clause = draw_clause(dice, _question_situation(dice))
            if "person" in clause.verb.subjects and not clause.place:
                break
        clause = draw_clause(dice, _situation_of(clause), subject=WHO, verb=clause.verb)
        return question("who", clause, "subject")
    while True:
        clause = draw_clause(dice, _question_situation(dice), ("acc", "dat"))
        case, nominal = clause.objects[-1]
        if not isinstance(nominal, Phrase) or clause.verb.en_particle:
            continue
        if "person" in nominal.noun.tags:
            return question("whom", replace(clause, objects=((case, WHO),)), "object")


def _situation_of(clause: Clause) -> Situation:
    for situation in (HABIT, PROGRESSIVE, PERFECT, FUTURE):
        if clause.tense == situation.tense and (clause.adverb or situation != HABIT):
            return situation
    return Situation(clause.tense, "" if clause.tense == "present" else "modal", 0.4)


def what(dice: Dice) -> Sentence:
    """What is the woman buying? was."""
    while True:
        clause = draw_clause(dice, _question_situation(dice), ("acc", "dat acc"))
        nominal = clause.objects[-1][1]
        if isinstance(nominal, Phrase) and not nominal.noun.tags & tags("person animal sight"):
            asked = (*clause.objects[:-1], ("acc", WHAT))
            return question("what", replace(clause, objects=asked), "object")


def which(dice: Dice) -> Sentence:
    """Which dog does the man see? welcher agrees in gender and case."""
    while True:
        clause = draw_clause(dice, _question_situation(dice), ("acc", "dat"))
        case, nominal = clause.objects[-1]
        if not isinstance(nominal, Phrase) or nominal.owner or two_readings(clause):
            continue
        if "drink" not in nominal.noun.tags:
            asked = replace(nominal, determiner="which")
            return question("which", replace(clause, objects=((case, asked),)), "object")


def where(dice: Dice) -> Sentence:
    """Where does the book lie? wo asks for a place, wohin for a direction."""
    frames = ("into",) if dice.chance(0.5) else ("at", "acc", "")
    while True:
        situation = _question_situation(dice)
        if not verbs_for(situation, frames):
            continue
        clause = draw_clause(dice, situation, frames)
        if clause.place and clause.verb.en != "come":
            word = Where("where", "wohin" if clause.verb.frame == "into" else "wo")
            return question("where", replace(clause, place=word), "place")


def when_why(dice: Dice) -> Sentence:
    """When will the train arrive? Why does the child not sleep?"""
    if dice.chance(0.5):
        modal = Situation(dice.pick(("must", "should", "can")))
        clause = draw_clause(dice, dice.pick((Situation("future"), modal)))
        return question("when", replace(clause, adverb=WHEN), "adverb")
    situation = dice.pick(
        (STATE, Situation("perfect"), Situation("progressive"), Situation("want"))
    )
    denied = dice.chance(0.5) and situation.tense != "progressive"
    clause = draw_clause(dice, situation, negated=denied)
    return question("why", replace(clause, adverb=WHY), "adverb")


def describe(dice: Dice) -> Sentence:
    """The old table is heavy: a predicate adjective has no ending."""
    nouns = nouns_with(tags("person animal goods mail place transport small part"))
    while True:
        subject = draw_definite(dice, nouns)
        choices = predicates_for(subject)
        if choices:
            break
    tense, predicate = dice.pick(("present", "present", "past")), dice.pick(choices)
    passing = tense == "past" and predicate.en in _PASSING
    adverb = dice.pick(ADVERBS["past"]) if passing else None
    clause = Clause(subject, BE, tense, (), adverb, None, predicate, negated=dice.chance(0.3))
    if dice.chance(0.2) and not adverb:
        return question("description asked", replace(clause, negated=False))
    return statement("description", clause)


def price(dice: Dice) -> Sentence:
    """The book costs twenty-one euros: Euro has no plural after numbers."""
    nouns = tuple(n for n in nouns_with(COST.subjects) if n.en != "car")
    subject = draw_definite(dice, nouns)
    dear = bool(subject.noun.tags & tags("machine surface"))
    number = dice.pick(HUNDREDS) if dear and dice.chance(0.6) else 2 + dice.pick(range(98))
    number = max(number, 20) if dear else number
    if dice.chance(0.1):
        amount = Adverb("how much", "wie viel")
        return question("price asked", Clause(subject, COST, "present", (), amount), "adverb")
    clause = Clause(subject, COST, "present")
    words = f"{english_number(number)} euros", f"{german_number(number)} Euro"
    return with_measure("price", clause, words)


def age(dice: Dice) -> Sentence:
    """My brother is twenty-one years old."""
    subject = replace(draw_definite(dice, nouns_with(tags("person")), plural=0.0), adjective=None)
    clause = Clause(subject, BE, "present")
    if dice.chance(0.1):
        asked = Clause(subject, BE, "present", (), Adverb("how old", "wie alt"))
        return question("age asked", asked, "adverb")
    years = range(2, 15) if "young" in subject.noun.tags else range(18, 100)
    number = dice.pick(years)
    text = f"{english_number(number)} years old", f"{german_number(number)} Jahre alt"
    return with_measure("age", clause, text)


def count(dice: Dice) -> Sentence:
    """The farmer has twenty-one black cows; one is `only one`, to differ from `a`."""
    number = dice.weighted(((1, 2), (2 + dice.pick(range(11)), 6), (2 + dice.pick(range(98)), 6)))
    names = ("buy", "sell", "have", "see", "need", "carry", "eat", "give", "show", "bring")
    chosen = verb(dice.pick(names))
    situation = STATE if chosen.aspect in ("state", "perception") else PAST
    if chosen.aspect != "state" and dice.chance(0.3):
        situation = Situation("perfect")
    limit = 12 if chosen.en in ("eat", "carry", "have", "give", "show", "bring") else 99
    number = number if number <= limit else 2 + number % 11
    while True:
        clause = draw_clause(dice, situation, verb=chosen)
        case, nominal = clause.objects[-1]
        if isinstance(nominal, Phrase) and not nominal.noun.tags & tags("drink single"):
            counted = replace(nominal, determiner="", owner=None, count=number, plural=number > 1)
            objects = (*clause.objects[:-1], (case, counted))
            return statement("count", replace(clause, objects=objects))


def clock(dice: Dice) -> Sentence:
    """The train arrives at half past seven: halb acht."""
    hour, quarter = 1 + dice.pick(range(12)), dice.pick(range(4))
    time = Adverb(f"at {english_time(hour, quarter)}", f"um {german_time(hour, quarter)}")
    names = ("arrive", "depart", "get up", "come back", "fall asleep", "pick up", "call")
    chosen = dice.pick([entry for entry in VERBS if entry.en in names])
    tense = dice.pick(("present", "past", "future", "must"))
    clause = replace(draw_clause(dice, Situation(tense), verb=chosen), adverb=time)
    front: Front = "adverb" if dice.chance(0.3) else "subject"
    return statement("clock", clause, front)


def belongings(dice: Dice) -> Sentence:
    """The old man's dog is ...: genitive, with the noun's -s or -es."""
    nouns = nouns_with(tags("pet goods small estate"))
    while True:
        subject = draw_definite(dice, nouns)
        if subject.owner:
            break
    quality = dice.pick(predicates_for(subject))
    clause = Clause(subject, BE, dice.pick(("present", "past")), predicate=quality)
    return statement("belongings", clause)
