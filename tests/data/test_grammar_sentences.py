"""Every rule of the grammar on sentences written out in full, English and German."""

from collections.abc import Callable

import pytest

from shared.data.grammar.adjectives import adjective
from shared.data.grammar.adverbials import ADVERBS, WHEN, WHY
from shared.data.grammar.clauses import Clause, Place, Where
from shared.data.grammar.nouns import noun
from shared.data.grammar.numerals import (
    english_number,
    english_time,
    german_number,
    german_time,
)
from shared.data.grammar.phrases import (
    HE,
    SHE,
    THEY,
    WE,
    WHAT,
    WHO,
    YOU,
    I,
    Nominal,
    Phrase,
    reference,
    relative,
)
from shared.data.grammar.sentences import (
    Sentence,
    ahead,
    contrasting,
    in_a_row,
    question,
    statement,
    then,
    with_measure,
    with_object_clause,
    with_relative_end,
)
from shared.data.grammar.verbs import BE, COST, verb
from shared.data.grammar.words import Adverb, Case
from shared.data.pairs import Pair

BECAUSE, ALTHOUGH, IF = ("because", "weil"), ("although", "obwohl"), ("if", "falls")
DETERMINERS = ("the", "a", "no", "my", "your", "his", "her", "our", "their", "this", "which")
# A name of several groups (never: nie, noch nie) means the habit here.
ADVERB = {adverb.en: adverb for group in reversed(ADVERBS.values()) for adverb in group}


def np(words: str, owner: Phrase | None = None, count: int = 0) -> Phrase:
    """A phrase by its English words; a plus marks the plural: "the old man", "our +dog"."""
    *front, head = words.split()
    determiner = front.pop(0) if front and front[0] in DETERMINERS else ""
    quality = adjective(front[0]) if front else None
    return Phrase(noun(head.strip("+")), determiner, head[0] == "+", quality, owner, count)


def do(
    subject: Nominal | str,
    english: str,
    tense: str,
    *objects: tuple[Case, Nominal | str],
    at: Place | Where | None = None,
    when: str | Adverb | None = None,
    no: bool = False,
    relative_clause: object = None,
) -> Clause:
    """A clause in one line."""
    nominals = tuple((case, np(o) if isinstance(o, str) else o) for case, o in objects)
    adverb = ADVERB[when] if isinstance(when, str) else when
    subject = np(subject) if isinstance(subject, str) else subject
    return Clause(subject, verb(english), tense, nominals, adverb, at, None, no, relative_clause)


def be(subject: Nominal | str, quality: str, tense: str = "present", **more: object) -> Clause:
    """A clause with a predicate adjective."""
    subject = np(subject) if isinstance(subject, str) else subject
    return Clause(subject, BE, tense, predicate=adjective(quality), **more)


def into(place: str, english: str = "into", german: str = "in") -> Place:
    return Place(english, german, "acc", np(place))


def inside(place: str, english: str = "in", german: str = "in") -> Place:
    return Place(english, german, "dat", np(place))


def say(clause: Clause, front: str = "subject") -> Sentence:
    return statement("test", clause, front)


def ask(clause: Clause, front: str = "none") -> Sentence:
    return question("test", clause, front)


def sees(phrase: str) -> Clause:
    """We see ...: the accusative."""
    return do(WE, "see", "present", ("acc", phrase))


def helps(phrase: str) -> Clause:
    """She helps ...: the dative."""
    return do(SHE, "help", "past", ("dat", phrase))


def owner(words: str) -> Phrase:
    return np("the house", np(words))


THE_MAN, THE_TABLE, THE_BOOK = np("the man"), np("the table"), np("the book")

CASES: dict[str, list[tuple[Callable[[], Sentence], str, str]]] = {
    "nominative: definite article, weak ending": [
        (
            lambda: say(be("the old man", "tired")),
            "The old man is tired.",
            "Der alte Mann ist müde.",
        ),
        (
            lambda: say(be("the small cat", "hungry")),
            "The small cat is hungry.",
            "Die kleine Katze ist hungrig.",
        ),
        (
            lambda: say(be("the new book", "expensive")),
            "The new book is expensive.",
            "Das neue Buch ist teuer.",
        ),
        (
            lambda: say(be("the small +child", "happy")),
            "The small children are happy.",
            "Die kleinen Kinder sind glücklich.",
        ),
    ],
    "nominative: ein and possessives, mixed ending": [
        (
            lambda: say(do("a young man", "sing", "progressive", when="now")),
            "A young man is singing now.",
            "Ein junger Mann singt jetzt.",
        ),
        (
            lambda: say(do("my small child", "sleep", "progressive", when="right now")),
            "My small child is sleeping right now.",
            "Mein kleines Kind schläft gerade.",
        ),
        (
            lambda: say(do("our old neighbour", "work", "present", when="often")),
            "Our old neighbour often works.",
            "Unser alter Nachbar arbeitet oft.",
        ),
        (
            lambda: say(be("your red +bag", "cheap")),
            "Your red bags are cheap.",
            "Deine roten Taschen sind billig.",
        ),
    ],
    "accusative": [
        (lambda: say(sees("the old man")), "We see the old man.", "Wir sehen den alten Mann."),
        (
            lambda: say(sees("a black dog")),
            "We see a black dog.",
            "Wir sehen einen schwarzen Hund.",
        ),
        (lambda: say(sees("a red bag")), "We see a red bag.", "Wir sehen eine rote Tasche."),
        (lambda: say(sees("a big horse")), "We see a big horse.", "Wir sehen ein großes Pferd."),
        (lambda: say(sees("white +flower")), "We see white flowers.", "Wir sehen weiße Blumen."),
        (lambda: say(sees("this new car")), "We see this new car.", "Wir sehen dieses neue Auto."),
        (
            lambda: say(sees("this big +house")),
            "We see these big houses.",
            "Wir sehen diese großen Häuser.",
        ),
    ],
    "dative, also plural -n": [
        (
            lambda: say(helps("the old man")),
            "She helped the old man.",
            "Sie half dem alten Mann.",
        ),
        (
            lambda: say(helps("a young woman")),
            "She helped a young woman.",
            "Sie half einer jungen Frau.",
        ),
        (
            lambda: say(helps("her small child")),
            "She helped her small child.",
            "Sie half ihrem kleinen Kind.",
        ),
        (
            lambda: say(helps("the small +child")),
            "She helped the small children.",
            "Sie half den kleinen Kindern.",
        ),
        (
            lambda: say(helps("our +brother")),
            "She helped our brothers.",
            "Sie half unseren Brüdern.",
        ),
        (
            lambda: say(helps("the +waitress")),
            "She helped the waitresses.",
            "Sie half den Kellnerinnen.",
        ),
    ],
    "genitive -s and -es": [
        (
            lambda: say(be(owner("the old man"), "big")),
            "The old man's house is big.",
            "Das Haus des alten Mannes ist groß.",
        ),
        (
            lambda: say(be(owner("my father"), "big")),
            "My father's house is big.",
            "Das Haus meines Vaters ist groß.",
        ),
        (
            lambda: say(be(owner("the rich queen"), "big")),
            "The rich queen's house is big.",
            "Das Haus der reichen Königin ist groß.",
        ),
        (
            lambda: say(be(owner("the young +student"), "big")),
            "The young students' house is big.",
            "Das Haus der jungen Studenten ist groß.",
        ),
        (
            lambda: say(be(owner("the +child"), "big")),
            "The children's house is big.",
            "Das Haus der Kinder ist groß.",
        ),
        (
            lambda: say(do(I, "sleep", "past", when="because of the rain", no=True), "adverb"),
            "Because of the rain, I did not sleep.",
            "Wegen des Regens schlief ich nicht.",
        ),
    ],
    "weak masculine nouns": [
        (lambda: say(sees("the boy")), "We see the boy.", "Wir sehen den Jungen."),
        (
            lambda: say(helps("the young student")),
            "She helped the young student.",
            "Sie half dem jungen Studenten.",
        ),
        (
            lambda: say(be(owner("our neighbour"), "big")),
            "Our neighbour's house is big.",
            "Das Haus unseres Nachbarn ist groß.",
        ),
        (lambda: say(sees("a lion")), "We see a lion.", "Wir sehen einen Löwen."),
        (lambda: say(be("the boy", "sad")), "The boy is sad.", "Der Junge ist traurig."),
    ],
    "strong endings without an article": [
        (
            lambda: say(do(HE, "drink", "present", ("acc", "cold milk"), when="every morning")),
            "He drinks cold milk every morning.",
            "Er trinkt jeden Morgen kalte Milch.",
        ),
        (
            lambda: say(do(HE, "drink", "past", ("acc", "cold coffee"))),
            "He drank cold coffee.",
            "Er trank kalten Kaffee.",
        ),
        (
            lambda: say(do(HE, "drink", "past", ("acc", "warm water"))),
            "He drank warm water.",
            "Er trank warmes Wasser.",
        ),
    ],
    "stems that change before an ending": [
        (
            lambda: say(sees("the expensive book")),
            "We see the expensive book.",
            "Wir sehen das teure Buch.",
        ),
        (
            lambda: say(be("the dark room", "warm")),
            "The dark room is warm.",
            "Das dunkle Zimmer ist warm.",
        ),
        (lambda: say(be("the room", "dark")), "The room is dark.", "Das Zimmer ist dunkel."),
    ],
    "verb second": [
        (
            lambda: say(
                do("the woman", "buy", "past", ("acc", "a red bag"), when="yesterday"), "adverb"
            ),
            "Yesterday the woman bought a red bag.",
            "Gestern kaufte die Frau eine rote Tasche.",
        ),
        (
            lambda: say(
                do("the woman", "buy", "progressive", ("acc", "a cake"), when="today"), "adverb"
            ),
            "Today the woman is buying a cake.",
            "Heute kauft die Frau einen Kuchen.",
        ),
        (
            lambda: say(
                do("the +child", "play", "progressive", at=inside("the garden"), when="now"),
                "place",
            ),
            "In the garden the children are playing now.",
            "Im Garten spielen die Kinder jetzt.",
        ),
        (
            lambda: say(
                do("the teacher", "help", "past", ("dat", HE), when="three days ago"), "adverb"
            ),
            "Three days ago the teacher helped him.",
            "Vor drei Tagen half ihm der Lehrer.",
        ),
        (
            lambda: say(do("the woman", "see", "past", ("acc", SHE), when="yesterday"), "adverb"),
            "Yesterday the woman saw her.",
            "Gestern sah die Frau sie.",
        ),
        (
            lambda: say(
                do("the king", "sleep", "past", when="in spite of the bad weather"), "adverb"
            ),
            "In spite of the bad weather, the king slept.",
            "Trotz des schlechten Wetters schlief der König.",
        ),
    ],
    "an adverb before a subject that is new": [
        (
            lambda: ask(do("a train", "depart", "progressive", when="right now")),
            "Is a train departing right now?",
            "Fährt gerade ein Zug ab?",
        ),
        (
            lambda: with_object_clause(
                "test",
                ("I know", "ich weiß"),
                ("that", "dass"),
                do("a tall man", "help", "past", ("dat", I), when="yesterday"),
            ),
            "I know that a tall man helped me yesterday.",
            "Ich weiß, dass mir gestern ein großer Mann half.",
        ),
        (
            lambda: ask(do("the train", "depart", "progressive", when="right now")),
            "Is the train departing right now?",
            "Fährt der Zug gerade ab?",
        ),
    ],
    "subordinate clauses": [
        (
            lambda: then(
                "test",
                BECAUSE,
                do("the man", "sleep", "progressive", when="today"),
                be(HE, "tired"),
            ),
            "The man is sleeping today because he is tired.",
            "Der Mann schläft heute, weil er müde ist.",
        ),
        (
            lambda: then(
                "test",
                BECAUSE,
                be("my sister", "happy"),
                do(SHE, "find", "perfect", ("acc", "her key")),
            ),
            "My sister is happy because she has found her key.",
            "Meine Schwester ist glücklich, weil sie ihren Schlüssel gefunden hat.",
        ),
        (
            lambda: ahead(
                "test",
                ALTHOUGH,
                be("the teacher", "sick", "past"),
                do(HE, "work", "past", when="yesterday"),
            ),
            "Although the teacher was sick, he worked yesterday.",
            "Obwohl der Lehrer krank war, arbeitete er gestern.",
        ),
        (
            lambda: ahead(
                "test",
                ("when", "als"),
                do("the teacher", "come", "past", at=into("the room")),
                do("the +child", "laugh", "past"),
            ),
            "When the teacher came into the room, the children laughed.",
            "Als der Lehrer ins Zimmer kam, lachten die Kinder.",
        ),
        (
            lambda: ahead(
                "test",
                ("when", "wenn"),
                do("the train", "arrive", "present"),
                do(I, "call", "future", ("acc", "my father")),
            ),
            "When the train arrives, I will call my father.",
            "Wenn der Zug ankommt, werde ich meinen Vater anrufen.",
        ),
        (
            lambda: then(
                "test",
                IF,
                do(WE, "buy", "future", ("acc", "the car")),
                do("our aunt", "help", "present", ("dat", WE)),
            ),
            "We will buy the car if our aunt helps us.",
            "Wir werden das Auto kaufen, falls uns unsere Tante hilft.",
        ),
        (
            lambda: with_object_clause(
                "test",
                ("I know", "ich weiß"),
                ("that", "dass"),
                do("the man", "sell", "past", ("acc", "his house"), when="last summer"),
            ),
            "I know that the man sold his house last summer.",
            "Ich weiß, dass der Mann letzten Sommer sein Haus verkaufte.",
        ),
        (
            lambda: with_object_clause(
                "test",
                ("nobody knows", "niemand weiß"),
                ("whether", "ob"),
                do("the bus", "depart", "perfect", when="already"),
            ),
            "Nobody knows whether the bus has already departed.",
            "Niemand weiß, ob der Bus schon abgefahren ist.",
        ),
        (
            lambda: with_object_clause(
                "test",
                ("she says", "sie sagt"),
                ("that", "dass"),
                do("the boy", "swim", "want", no=True),
            ),
            "She says that the boy does not want to swim.",
            "Sie sagt, dass der Junge nicht schwimmen will.",
        ),
    ],
    "relative clauses": [
        (
            lambda: say(
                be(
                    THE_MAN,
                    "old",
                    relative=(
                        do(relative(THE_MAN), "help", "past", ("dat", "the child")),
                        "subject",
                    ),
                )
            ),
            "The man who helped the child is old.",
            "Der Mann, der dem Kind half, ist alt.",
        ),
        (
            lambda: say(
                be(
                    THE_BOOK,
                    "new",
                    relative=(
                        do("the woman", "buy", "perfect", ("acc", relative(THE_BOOK))),
                        "object",
                    ),
                )
            ),
            "The book that the woman has bought is new.",
            "Das Buch, das die Frau gekauft hat, ist neu.",
        ),
        (
            lambda: say(
                be(
                    np("the +child"),
                    "happy",
                    relative=(do(I, "help", "past", ("dat", relative(np("the +child")))), "object"),
                )
            ),
            "The children whom I helped are happy.",
            "Die Kinder, denen ich half, sind glücklich.",
        ),
        (
            lambda: say(
                be(
                    np("the woman"),
                    "rich",
                    relative=(
                        do(WE, "thank", "perfect", ("dat", relative(np("the woman")))),
                        "object",
                    ),
                )
            ),
            "The woman whom we have thanked is rich.",
            "Die Frau, der wir gedankt haben, ist reich.",
        ),
        (
            lambda: say(
                be(
                    np("the dog"),
                    "old",
                    relative=(do(I, "see", "past", ("acc", relative(np("the dog")))), "object"),
                )
            ),
            "The dog that I saw is old.",
            "Der Hund, den ich sah, ist alt.",
        ),
        (
            lambda: with_relative_end(
                "test",
                do(I, "know", "past", ("acc", THE_MAN)),
                do(relative(THE_MAN), "get up", "past"),
            ),
            "I knew the man who got up.",
            "Ich kannte den Mann, der aufstand.",
        ),
        (
            lambda: with_relative_end(
                "test",
                do("the queen", "invite", "past", ("acc", np("the +tourist"))),
                do(relative(np("the +tourist")), "sing", "past"),
            ),
            "The queen invited the tourists who sang.",
            "Die Königin lud die Touristen ein, die sangen.",
        ),
    ],
    "separable verbs": [
        (
            lambda: say(do("the train", "arrive", "progressive", when="now")),
            "The train is arriving now.",
            "Der Zug kommt jetzt an.",
        ),
        (
            lambda: say(do("the train", "arrive", "perfect", when="already")),
            "The train has already arrived.",
            "Der Zug ist schon angekommen.",
        ),
        (
            lambda: say(do("the train", "arrive", "must", when="today")),
            "The train has to arrive today.",
            "Der Zug muss heute ankommen.",
        ),
        (
            lambda: say(do("the woman", "pick up", "past", ("acc", "the boy"))),
            "The woman picked up the boy.",
            "Die Frau holte den Jungen ab.",
        ),
        (
            lambda: with_object_clause(
                "test",
                ("we know", "wir wissen"),
                ("that", "dass"),
                do(HE, "get up", "present", when="never"),
            ),
            "We know that he never gets up.",
            "Wir wissen, dass er nie aufsteht.",
        ),
        (
            lambda: say(do("the student", "listen to", "past", ("dat", "the doctor"), no=True)),
            "The student did not listen to the doctor.",
            "Der Student hörte dem Arzt nicht zu.",
        ),
    ],
    "tenses and modal verbs": [
        (
            lambda: say(do("the +girl", "swim", "perfect", when="today")),
            "The girls have swum today.",
            "Die Mädchen sind heute geschwommen.",
        ),
        (
            lambda: say(do(I, "eat", "perfect", ("acc", "the cake"), when="already")),
            "I have already eaten the cake.",
            "Ich habe den Kuchen schon gegessen.",
        ),
        (
            lambda: say(do(I, "see", "perfect", ("acc", "a bear"), when=ADVERBS["perfect"][1])),
            "I have never seen a bear.",
            "Ich habe noch nie einen Bären gesehen.",
        ),
        (
            lambda: say(do(YOU, "read", "can", ("acc", "the letter"))),
            "You can read the letter.",
            "Du kannst den Brief lesen.",
        ),
        (
            lambda: say(do("the son", "sell", "want", ("acc", "his bicycle"))),
            "The son wants to sell his bicycle.",
            "Der Sohn will sein Fahrrad verkaufen.",
        ),
        (
            lambda: say(do("the girl", "dance", "may", when="tomorrow")),
            "The girl is allowed to dance tomorrow.",
            "Das Mädchen darf morgen tanzen.",
        ),
        (
            lambda: say(do(THEY, "work", "had to", when="yesterday")),
            "They had to work yesterday.",
            "Sie mussten gestern arbeiten.",
        ),
        (
            lambda: say(do("the horse", "run", "past", at=into("the forest"))),
            "The horse ran into the forest.",
            "Das Pferd rannte in den Wald.",
        ),
    ],
    "nicht and kein": [
        (
            lambda: say(do("the man", "buy", "past", ("acc", "the car"), no=True)),
            "The man did not buy the car.",
            "Der Mann kaufte das Auto nicht.",
        ),
        (
            lambda: say(do("the man", "buy", "past", ("acc", "a car"), no=True)),
            "The man did not buy a car.",
            "Der Mann kaufte kein Auto.",
        ),
        (
            lambda: say(do(WE, "drink", "progressive", ("acc", "tea"), no=True)),
            "We are not drinking tea.",
            "Wir trinken keinen Tee.",
        ),
        (
            lambda: say(do(SHE, "eat", "present", ("acc", "small +apple"), no=True)),
            "She does not eat small apples.",
            "Sie isst keine kleinen Äpfel.",
        ),
        (
            lambda: say(do(HE, "go", "past", at=into("the church"), no=True)),
            "He did not go into the church.",
            "Er ging nicht in die Kirche.",
        ),
        (
            lambda: say(be("the lamp", "new", negated=True)),
            "The lamp is not new.",
            "Die Lampe ist nicht neu.",
        ),
        (
            lambda: say(do(I, "sell", "perfect", ("acc", "my bicycle"), no=True)),
            "I have not sold my bicycle.",
            "Ich habe mein Fahrrad nicht verkauft.",
        ),
        (
            lambda: say(
                do("the mother", "give", "past", ("dat", "the boy"), ("acc", "a banana"), no=True)
            ),
            "The mother did not give the boy a banana.",
            "Die Mutter gab dem Jungen keine Banane.",
        ),
        (
            lambda: say(do("no child", "sleep", "progressive", when="now")),
            "No child is sleeping now.",
            "Kein Kind schläft jetzt.",
        ),
        (
            lambda: say(do("the boy", "swim", "can", no=True)),
            "The boy cannot swim.",
            "Der Junge kann nicht schwimmen.",
        ),
    ],
    "questions": [
        (
            lambda: ask(do("the woman", "buy", "perfect", ("acc", "the lamp"))),
            "Has the woman bought the lamp?",
            "Hat die Frau die Lampe gekauft?",
        ),
        (
            lambda: ask(do(YOU, "need", "present", ("acc", "a key"))),
            "Do you need a key?",
            "Brauchst du einen Schlüssel?",
        ),
        (
            lambda: ask(do("the bus", "depart", "progressive", when="now")),
            "Is the bus departing now?",
            "Fährt der Bus jetzt ab?",
        ),
        (
            lambda: ask(do(WHO, "repair", "can", ("acc", "the radio")), "subject"),
            "Who can repair the radio?",
            "Wer kann das Radio reparieren?",
        ),
        (
            lambda: ask(do("the man", "see", "present", ("acc", WHO)), "object"),
            "Whom does the man see?",
            "Wen sieht der Mann?",
        ),
        (
            lambda: ask(do("the man", "help", "progressive", ("dat", WHO), when="now"), "object"),
            "Whom is the man helping now?",
            "Wem hilft der Mann jetzt?",
        ),
        (
            lambda: ask(do(THEY, "eat", "present", ("acc", WHAT), when="every evening"), "object"),
            "What do they eat every evening?",
            "Was essen sie jeden Abend?",
        ),
        (
            lambda: ask(do(YOU, "know", "present", ("acc", "which doctor")), "object"),
            "Which doctor do you know?",
            "Welchen Arzt kennst du?",
        ),
        (
            lambda: ask(do("the child", "sleep", "progressive", at=Where("where", "wo")), "place"),
            "Where is the child sleeping?",
            "Wo schläft das Kind?",
        ),
        (
            lambda: ask(do("the child", "run", "past", at=Where("where", "wohin")), "place"),
            "Where did the child run?",
            "Wohin rannte das Kind?",
        ),
        (
            lambda: ask(do("the ship", "arrive", "future", when=WHEN), "adverb"),
            "When will the ship arrive?",
            "Wann wird das Schiff ankommen?",
        ),
        (
            lambda: ask(do("the boy", "sing", "want", when=WHY, no=True), "adverb"),
            "Why does the boy not want to sing?",
            "Warum will der Junge nicht singen?",
        ),
    ],
    "prepositions with two cases, contractions": [
        (
            lambda: say(do("the dog", "run", "past", at=into("the garden"))),
            "The dog ran into the garden.",
            "Der Hund rannte in den Garten.",
        ),
        (
            lambda: say(do("the dog", "sleep", "present", at=inside("the house"), when="often")),
            "The dog often sleeps in the house.",
            "Der Hund schläft oft im Haus.",
        ),
        (
            lambda: say(
                do(
                    "the girl",
                    "put",
                    "past",
                    ("acc", "the book"),
                    at=into("the table", "on", "auf"),
                )
            ),
            "The girl put the book on the table.",
            "Das Mädchen legte das Buch auf den Tisch.",
        ),
        (
            lambda: say(do("the book", "lie", "present", at=inside("the table", "on", "auf"))),
            "The book lies on the table.",
            "Das Buch liegt auf dem Tisch.",
        ),
        (
            lambda: say(
                do("the man", "hang", "past", ("acc", "a picture"), at=into("the wall", "on", "an"))
            ),
            "The man hung a picture on the wall.",
            "Der Mann hängte ein Bild an die Wand.",
        ),
        (
            lambda: say(
                do("the +tourist", "sit", "past", at=inside("the old church", "in front of", "vor"))
            ),
            "The tourists sat in front of the old church.",
            "Die Touristen saßen vor der alten Kirche.",
        ),
    ],
    "pronouns take the gender of their noun": [
        (
            lambda: contrasting(
                "test", be(THE_TABLE, "old"), be(reference(THE_TABLE), "beautiful")
            ),
            "The table is old, but it is beautiful.",
            "Der Tisch ist alt, aber er ist schön.",
        ),
        (
            lambda: contrasting(
                "test",
                be("the lamp", "new"),
                be(reference(np("the lamp")), "expensive", negated=True),
            ),
            "The lamp is new, but it is not expensive.",
            "Die Lampe ist neu, aber sie ist nicht teuer.",
        ),
        (
            lambda: contrasting("test", be(THE_BOOK, "old"), be(reference(THE_BOOK), "good")),
            "The book is old, but it is good.",
            "Das Buch ist alt, aber es ist gut.",
        ),
        (
            lambda: in_a_row(
                "test",
                do(HE, "find", "past", ("acc", "a key"), when="yesterday"),
                do(HE, "lose", "past", ("acc", reference(np("a key")))),
            ),
            "He found a key yesterday and lost it.",
            "Er fand gestern einen Schlüssel und verlor ihn.",
        ),
        (
            lambda: in_a_row(
                "test",
                do("the woman", "find", "past", ("acc", "a bag")),
                do("the woman", "sell", "past", ("acc", reference(np("a bag")))),
            ),
            "The woman found a bag and sold it.",
            "Die Frau fand eine Tasche und verkaufte sie.",
        ),
    ],
    "two objects": [
        (
            lambda: say(do("the aunt", "give", "past", ("dat", "the girl"), ("acc", "a book"))),
            "The aunt gave the girl a book.",
            "Die Tante gab dem Mädchen ein Buch.",
        ),
        (
            lambda: say(do("the boy", "show", "future", ("dat", I), ("acc", "his ball"))),
            "The boy will show me his ball.",
            "Der Junge wird mir seinen Ball zeigen.",
        ),
        (
            lambda: say(do("the key", "belong to", "present", ("dat", "our neighbour"))),
            "The key belongs to our neighbour.",
            "Der Schlüssel gehört unserem Nachbarn.",
        ),
    ],
    "numbers, prices, ages, times": [
        (
            lambda: say(do("the farmer", "have", "present", ("acc", np("black +cow", count=21)))),
            "The farmer has twenty-one black cows.",
            "Der Bauer hat einundzwanzig schwarze Kühe.",
        ),
        (
            lambda: say(do(SHE, "buy", "past", ("acc", np("big cake", count=1)))),
            "She bought only one big cake.",
            "Sie kaufte nur einen großen Kuchen.",
        ),
        (
            lambda: with_measure(
                "test",
                Clause(np("the red bicycle"), COST, "present"),
                (f"{english_number(231)} euros", f"{german_number(231)} Euro"),
            ),
            "The red bicycle costs two hundred and thirty-one euros.",
            "Das rote Fahrrad kostet zweihunderteinunddreißig Euro.",
        ),
        (
            lambda: with_measure(
                "test",
                Clause(np("my uncle"), BE, "present"),
                (f"{english_number(66)} years old", f"{german_number(66)} Jahre alt"),
            ),
            "My uncle is sixty-six years old.",
            "Mein Onkel ist sechsundsechzig Jahre alt.",
        ),
        (
            lambda: say(
                do(
                    "the train",
                    "depart",
                    "present",
                    when=Adverb(f"at {english_time(7, 2)}", f"um {german_time(7, 2)}"),
                )
            ),
            "The train departs at half past seven.",
            "Der Zug fährt um halb acht ab.",
        ),
        (
            lambda: say(
                do(
                    "the queen",
                    "get up",
                    "past",
                    when=Adverb(f"at {english_time(12, 3)}", f"um {german_time(12, 3)}"),
                ),
                "adverb",
            ),
            "At a quarter to one the queen got up.",
            "Um Viertel vor eins stand die Königin auf.",
        ),
    ],
}

ROWS = [
    pytest.param(build, english, german, id=f"{rule}-{number}")
    for rule, rows in CASES.items()
    for number, (build, english, german) in enumerate(rows)
]


@pytest.mark.parametrize(("build", "english", "german"), ROWS)
def test_sentence(build: Callable[[], Sentence], english: str, german: str) -> None:
    """The grammar builds exactly the pair that was written by hand."""
    assert build().pair == Pair(english, german)


def test_there_are_enough_written_out() -> None:
    assert len(ROWS) >= 60
    assert all(len(rows) >= 3 for rows in CASES.values())


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (1, "one", "eins"),
        (12, "twelve", "zwölf"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (21, "twenty-one", "einundzwanzig"),
        (30, "thirty", "dreißig"),
        (77, "seventy-seven", "siebenundsiebzig"),
        (100, "one hundred", "hundert"),
        (101, "one hundred and one", "hunderteins"),
        (516, "five hundred and sixteen", "fünfhundertsechzehn"),
        (999, "nine hundred and ninety-nine", "neunhundertneunundneunzig"),
    ],
)
def test_numbers(number: int, english: str, german: str) -> None:
    assert (english_number(number), german_number(number)) == (english, german)


@pytest.mark.parametrize("number", [0, -1, 1000])
def test_a_number_without_words_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 999.*{number}"):
        german_number(number)
    with pytest.raises(ValueError, match=f"1 to 999.*{number}"):
        english_number(number)


@pytest.mark.parametrize(
    ("name", "third", "ing", "du", "participle"),
    [
        ("carry", "carries", "carrying", "trägst", "getragen"),
        ("go", "goes", "going", "gehst", "gegangen"),
        ("wash", "washes", "washing", "wäschst", "gewaschen"),
        ("run", "runs", "running", "rennst", "gerannt"),
        ("lie", "lies", "lying", "liegst", "gelegen"),
        ("dance", "dances", "dancing", "tanzt", "getanzt"),
        ("work", "works", "working", "arbeitest", "gearbeitet"),
        ("draw", "draws", "drawing", "zeichnest", "gezeichnet"),
        ("visit", "visits", "visiting", "besuchst", "besucht"),
        ("repair", "repairs", "repairing", "reparierst", "repariert"),
        ("listen to", "listens", "listening", "hörst", "zugehört"),
        ("arrive", "arrives", "arriving", "kommst", "angekommen"),
    ],
)
def test_verb_forms(name: str, third: str, ing: str, du: str, participle: str) -> None:
    entry = verb(name)
    assert (entry.third, entry.ing, entry.du, entry.de_participle) == (third, ing, du, participle)


def test_there_is_no_du_in_the_simple_past() -> None:
    with pytest.raises(ValueError, match="kaufen"):
        say(do(YOU, "buy", "past", ("acc", "a car")))
