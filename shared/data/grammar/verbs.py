"""The verbs: forms in both languages, what they govern, and what they sensibly go with."""

from shared.data.grammar.regular import (
    english_ing,
    english_past,
    english_third,
    german_participle,
    german_past,
    german_present,
)
from shared.data.grammar.words import Aspect, Verb, tags

# English: base [past participle] [+particle] | German: [prefix+]infinitive [du er] [past
# participle] [sein] | frame | subjects | objects | objects of a habit ("yes" for verbs without an
# object) or a mark: * state, ! event (nobody does it by habit or is at it), + perception.
# Regular forms are left out.
_TABLE = """
see saw seen | sehen siehst sieht sah gesehen | acc | person animal | person animal goods | +
hear heard heard | hören | acc | person animal | person animal | +
love | lieben | acc | person | person pet | *
know knew known | kennen kannte gekannt | acc | person | person sight | *
have had had | haben hast hat hatte gehabt | acc | person | goods small pet | *
need | brauchen | acc | person | goods small | *
buy bought bought | kaufen | acc | person | goods food daily | food daily
sell sold sold | verkaufen | acc | person | goods food estate | food
read read read | lesen liest liest las gelesen | acc | person | readable | readable
write wrote written | schreiben schrieb geschrieben | acc | person | writable | writable
eat ate eaten | essen isst isst aß gegessen | acc | person | food | food
drink drank drunk | trinken trank getrunken | acc | person | drink | drink
find found found | finden fand gefunden | acc | person | goods small pet | !
look +for | suchen | acc | person | small pet portable |
carry | tragen trägst trägt trug getragen | acc | person | portable toy |
visit | besuchen | acc | person | person sight | person sight
meet met met | treffen triffst trifft traf getroffen | acc | person | person | person
ask | fragen | acc | person | person | person
repair | reparieren | acc | person | machine |
clean | putzen | acc | person | cleanable | cleanable
wash | waschen wäschst wäscht wusch gewaschen | acc | person | washable | washable
forget forgot forgotten | vergessen vergisst vergisst vergaß vergessen | acc | person | portable | !
lose lost lost | verlieren verlor verloren | acc | person | portable | !
draw drew drawn | zeichnen | acc | person | drawable | drawable
open | auf+machen | acc | person | openable | part
close | zu+machen | acc | person | part | part
pick +up | ab+holen | acc | person | person | person
invite | ein+laden lädst lädt lud geladen | acc | person | person | person
call | an+rufen rief gerufen | acc | person | person | person
put put put +on | an+ziehen zog gezogen | acc | person | clothing |
tidy +up | auf+räumen | acc | person | tidy | tidy
switch +on | ein+schalten | acc | person | switchable | switchable
switch +off | aus+schalten | acc | person | switchable | switchable
help | helfen hilfst hilft half geholfen | dat | person | person | person
thank | danken | dat | person | person |
answer | antworten | dat | person | person | person
follow | folgen sein | dat | person pet | person |
trust | vertrauen | dat | person | person | *
congratulate | gratulieren | dat | person | person |
listen +to | zu+hören | dat | person | person | person
belong +to | gehören | dat | goods small estate | person | *
give gave given | geben gibst gibt gab gegeben | dat acc | person | goods food small | food
show showed shown | zeigen | dat acc | person | goods mail |
send sent sent | schicken | dat acc | person | mail writable | mail
lend lent lent | leihen lieh geliehen | dat acc | person | goods |
bring brought brought | bringen brachte gebracht | dat acc | person | food portable | food daily
sleep slept slept | schlafen schläfst schläft schlief geschlafen | | person animal | | yes
work | arbeiten | | person | | yes
sing sang sung | singen sang gesungen | | person | | yes
dance | tanzen | | person | | yes
laugh | lachen | | person | | yes
cry | weinen | | person | | yes
swim swam swum | schwimmen schwamm geschwommen sein | | person | | yes
wait | warten | | person | | yes
play | spielen | | young pet | | yes
arrive | an+kommen kam gekommen sein | | person transport | | yes
depart | ab+fahren fährst fährt fuhr gefahren sein | | transport | | yes
get got got +up | auf+stehen stand gestanden sein | | person | | yes
fall fell fallen +asleep | ein+schlafen schläfst schläft schlief geschlafen sein | | person | | yes
come came come +back | zurück+kommen kam gekommen sein | | person pet | | yes
go went gone | gehen ging gegangen sein | into | person | | yes
run ran run | rennen rannte gerannt sein | into | person animal | | yes
come came come | kommen kam gekommen sein | into | person pet | | yes
jump | springen sprang gesprungen sein | into | young pet | | yes
put put put | legen | acc into | person | lies |
place | stellen | acc into | person | stands |
hang hung hung | hängen | acc into | person | hangs |
lie lay lain | liegen lag gelegen | at | lies | | *
stand stood stood | stehen stand gestanden | at | stands | | *
sit sat sat | sitzen saß gesessen | at | person | | yes
be was been | sein bist ist war gewesen sein | | person | |
cost cost cost | kosten | | goods | |
"""


_ASPECTS: dict[str, Aspect] = {"*": "state", "!": "event", "+": "perception"}


def _verb(line: str) -> Verb:
    english, german, frame, subjects, objects, habit = (part.strip() for part in line.split("|"))
    forms, _, particle = english.partition(" +")
    base, *irregular = forms.split()
    past, participle = irregular or (english_past(base), english_past(base))
    head, *rest = german.split()
    auxiliary = "sein" if rest and rest[-1] == "sein" else "haben"
    prefix, _, infinitive = head.rpartition("+")
    du, er, de_past, de_participle = _german_forms(infinitive, [f for f in rest if f != "sein"])
    return Verb(
        base=base,
        third=english_third(base),
        past=past,
        participle=participle,
        ing=english_ing(base),
        en_particle=particle,
        prefix=prefix,
        infinitive=infinitive,
        du=du,
        er=er,
        de_past=de_past,
        de_participle=prefix + de_participle,
        auxiliary=auxiliary,
        frame=frame,
        subjects=tags(subjects),
        objects=tags(objects),
        habit=tags("" if habit in _ASPECTS else habit),
        aspect=_ASPECTS.get(habit, "activity"),
    )


def _german_forms(infinitive: str, given: list[str]) -> tuple[str, str, str, str]:
    """The forms for du and er, the past and the participle; two, four or none are given."""
    du, er = given[:2] if len(given) == 4 else german_present(infinitive)
    past, participle = given[-2:] or (german_past(infinitive), german_participle(infinitive))
    return du, er, past, participle


VERBS: tuple[Verb, ...] = tuple(_verb(line) for line in _TABLE.strip().splitlines())


def verb(english: str) -> Verb:
    """The verb that the English infinitive names, particle included; KeyError if there is none."""
    for entry in VERBS:
        if entry.en == english:
            return entry
    raise KeyError(english)


BE, COST = verb("be"), verb("cost")
"""Verbs with sentence patterns of their own; every other verb is drawn by its frame."""
