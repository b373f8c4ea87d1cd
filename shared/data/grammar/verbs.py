"""The verbs: forms in both languages, what they govern, and what they sensibly go with."""

from shared.data.grammar.words import Aspect, Verb, tags

# English base, 3rd person, past, participle, -ing [particle] | [prefix|]infinitive, du, er, past,
# participle, [sein] | frame | subjects | objects | objects of a habit (or "yes");
# a mark instead: * state, ! event (nobody does it by habit or is at it), + perception.
_TABLE = """
see sees saw seen seeing | sehen siehst sieht sah gesehen | acc | person animal | person animal goods | +
hear hears heard heard hearing | hören hörst hört hörte gehört | acc | person animal | person animal | +
love loves loved loved loving | lieben liebst liebt liebte geliebt | acc | person | person pet | *
know knows knew known knowing | kennen kennst kennt kannte gekannt | acc | person | person sight | *
have has had had having | haben hast hat hatte gehabt | acc | person | goods small pet | *
need needs needed needed needing | brauchen brauchst braucht brauchte gebraucht | acc | person | goods small | *
buy buys bought bought buying | kaufen kaufst kauft kaufte gekauft | acc | person | goods food | food daily
sell sells sold sold selling | verkaufen verkaufst verkauft verkaufte verkauft | acc | person | goods food estate | food
read reads read read reading | lesen liest liest las gelesen | acc | person | readable | daily readable
write writes wrote written writing | schreiben schreibst schreibt schrieb geschrieben | acc | person | writable | writable
eat eats ate eaten eating | essen isst isst aß gegessen | acc | person | food | food
drink drinks drank drunk drinking | trinken trinkst trinkt trank getrunken | acc | person | drink | drink
find finds found found finding | finden findest findet fand gefunden | acc | person | goods small pet | !
look looks looked looked looking for | suchen suchst sucht suchte gesucht | acc | person | small pet portable |
carry carries carried carried carrying | tragen trägst trägt trug getragen | acc | person | portable toy |
visit visits visited visited visiting | besuchen besuchst besucht besuchte besucht | acc | person | person sight | person sight
meet meets met met meeting | treffen triffst trifft traf getroffen | acc | person | person | person
ask asks asked asked asking | fragen fragst fragt fragte gefragt | acc | person | person | person
repair repairs repaired repaired repairing | reparieren reparierst repariert reparierte repariert | acc | person | machine |
clean cleans cleaned cleaned cleaning | putzen putzt putzt putzte geputzt | acc | person | cleanable | cleanable
wash washes washed washed washing | waschen wäschst wäscht wusch gewaschen | acc | person | washable | washable
forget forgets forgot forgotten forgetting | vergessen vergisst vergisst vergaß vergessen | acc | person | small portable | !
lose loses lost lost losing | verlieren verlierst verliert verlor verloren | acc | person | small portable | !
draw draws drew drawn drawing | zeichnen zeichnest zeichnet zeichnete gezeichnet | acc | person | drawable | drawable
open opens opened opened opening | auf+machen machst macht machte gemacht | acc | person | openable | part
close closes closed closed closing | zu+machen machst macht machte gemacht | acc | person | part | part
pick picks picked picked picking up | ab+holen holst holt holte geholt | acc | person | person | person
invite invites invited invited inviting | ein+laden lädst lädt lud geladen | acc | person | person | person
call calls called called calling | an+rufen rufst ruft rief gerufen | acc | person | person | person
put puts put put putting on | an+ziehen ziehst zieht zog gezogen | acc | person | clothing |
tidy tidies tidied tidied tidying up | auf+räumen räumst räumt räumte geräumt | acc | person | tidy | tidy
switch switches switched switched switching on | ein+schalten schaltest schaltet schaltete geschaltet | acc | person | switchable | switchable
switch switches switched switched switching off | aus+schalten schaltest schaltet schaltete geschaltet | acc | person | switchable | switchable
help helps helped helped helping | helfen hilfst hilft half geholfen | dat | person | person | person
thank thanks thanked thanked thanking | danken dankst dankt dankte gedankt | dat | person | person |
answer answers answered answered answering | antworten antwortest antwortet antwortete geantwortet | dat | person | person | person
follow follows followed followed following | folgen folgst folgt folgte gefolgt sein | dat | person pet | person |
trust trusts trusted trusted trusting | vertrauen vertraust vertraut vertraute vertraut | dat | person | person | *
congratulate congratulates congratulated congratulated congratulating | gratulieren gratulierst gratuliert gratulierte gratuliert | dat | person | person |
listen listens listened listened listening to | zu+hören hörst hört hörte gehört | dat | person | person | person
belong belongs belonged belonged belonging to | gehören gehörst gehört gehörte gehört | dat | goods small estate | person | *
give gives gave given giving | geben gibst gibt gab gegeben | dat acc | person | goods food small | food
show shows showed shown showing | zeigen zeigst zeigt zeigte gezeigt | dat acc | person | goods mail |
send sends sent sent sending | schicken schickst schickt schickte geschickt | dat acc | person | mail writable | mail
lend lends lent lent lending | leihen leihst leiht lieh geliehen | dat acc | person | goods |
bring brings brought brought bringing | bringen bringst bringt brachte gebracht | dat acc | person | food portable | food daily
sleep sleeps slept slept sleeping | schlafen schläfst schläft schlief geschlafen | | person animal | | yes
work works worked worked working | arbeiten arbeitest arbeitet arbeitete gearbeitet | | person | | yes
sing sings sang sung singing | singen singst singt sang gesungen | | person | | yes
dance dances danced danced dancing | tanzen tanzt tanzt tanzte getanzt | | person | | yes
laugh laughs laughed laughed laughing | lachen lachst lacht lachte gelacht | | person | | yes
cry cries cried cried crying | weinen weinst weint weinte geweint | | person | | yes
swim swims swam swum swimming | schwimmen schwimmst schwimmt schwamm geschwommen sein | | person | | yes
wait waits waited waited waiting | warten wartest wartet wartete gewartet | | person | | yes
play plays played played playing | spielen spielst spielt spielte gespielt | | young pet | | yes
arrive arrives arrived arrived arriving | an+kommen kommst kommt kam gekommen sein | | person transport | | yes
depart departs departed departed departing | ab+fahren fährst fährt fuhr gefahren sein | | transport | | yes
get gets got got getting up | auf+stehen stehst steht stand gestanden sein | | person | | yes
fall falls fell fallen falling asleep | ein+schlafen schläfst schläft schlief geschlafen sein | | person pet | | yes
come comes came come coming back | zurück+kommen kommst kommt kam gekommen sein | | person pet | | yes
go goes went gone going | gehen gehst geht ging gegangen sein | into | person | | yes
run runs ran run running | rennen rennst rennt rannte gerannt sein | into | person animal | | yes
come comes came come coming | kommen kommst kommt kam gekommen sein | into | person pet | | yes
jump jumps jumped jumped jumping | springen springst springt sprang gesprungen sein | into | young pet | | yes
put puts put put putting | legen legst legt legte gelegt | acc into | person | lies |
place places placed placed placing | stellen stellst stellt stellte gestellt | acc into | person | stands |
hang hangs hung hung hanging | hängen hängst hängt hängte gehängt | acc into | person | hangs |
lie lies lay lain lying | liegen liegst liegt lag gelegen | at | lies | | *
stand stands stood stood standing | stehen stehst steht stand gestanden | at | stands | | *
sit sits sat sat sitting | sitzen sitzt sitzt saß gesessen | at | person | | yes
be is was been being | sein bist ist war gewesen sein | | person | |
cost costs cost cost costing | kosten kostest kostet kostete gekostet | | goods | |
"""


_ASPECTS: dict[str, Aspect] = {"*": "state", "!": "event", "+": "perception"}


def _verb(line: str) -> Verb:
    english, german, frame, subjects, objects, habit = (part.strip() for part in line.split("|"))
    base, third, past, participle, ing, *particle = english.split()
    infinitive, du, er, de_past, de_participle, *auxiliary = german.split()
    prefix, _, stem = infinitive.rpartition("+")
    return Verb(
        base=base,
        third=third,
        past=past,
        participle=participle,
        ing=ing,
        en_particle=" ".join(particle),
        prefix=prefix,
        infinitive=stem,
        du=du,
        er=er,
        de_past=de_past,
        de_participle=prefix + de_participle,
        auxiliary="sein" if auxiliary else "haben",
        frame=frame,
        subjects=tags(subjects),
        objects=tags(objects),
        habit=tags("" if habit in _ASPECTS else habit),
        aspect=_ASPECTS.get(habit, "activity"),
    )


VERBS: tuple[Verb, ...] = tuple(_verb(line) for line in _TABLE.strip().splitlines())


def verb(english: str) -> Verb:
    """The verb that the English infinitive names, particle included; KeyError if there is none."""
    for entry in VERBS:
        if entry.en == english:
            return entry
    raise KeyError(english)


BE, COST = verb("be"), verb("cost")
"""Verbs with sentence patterns of their own; every other verb is drawn by its frame."""
