"""The nouns. Each line: English singular and plural, German singular and plural, gender, genitive.

English nouns for people have one German rendering each (student: der Student). The tag `named`
marks people to whom he/she, er/sie and his/her, sein/ihr may refer; das Kind and das Mädchen have
it not, because German speakers waver between es and sie.
"""

from functools import cache

from shared.data.grammar.words import Gender, Noun, tags

_TABLE: tuple[tuple[str, str, str, str], ...] = (
    # People
    ("man men", "Mann Männer", "m Mannes", "person named"),
    ("boy boys", "Junge Jungen", "m Jungen", "person named young"),
    ("teacher teachers", "Lehrer Lehrer", "m Lehrers", "person named"),
    ("doctor doctors", "Arzt Ärzte", "m Arztes", "person named"),
    ("student students", "Student Studenten", "m Studenten", "person named"),
    ("neighbour neighbours", "Nachbar Nachbarn", "m Nachbarn", "person named relative"),
    ("farmer farmers", "Bauer Bauern", "m Bauern", "person named"),
    ("king kings", "König Könige", "m Königs", "person named royal"),
    ("tourist tourists", "Tourist Touristen", "m Touristen", "person named"),
    ("father fathers", "Vater Väter", "m Vaters", "person named relative single"),
    ("brother brothers", "Bruder Brüder", "m Bruders", "person named relative"),
    ("son sons", "Sohn Söhne", "m Sohnes", "person named relative"),
    ("uncle uncles", "Onkel Onkel", "m Onkels", "person named relative"),
    ("woman women", "Frau Frauen", "f Frau", "person named"),
    ("queen queens", "Königin Königinnen", "f Königin", "person named royal"),
    ("waitress waitresses", "Kellnerin Kellnerinnen", "f Kellnerin", "person named"),
    ("mother mothers", "Mutter Mütter", "f Mutter", "person named relative single"),
    ("sister sisters", "Schwester Schwestern", "f Schwester", "person named relative"),
    ("daughter daughters", "Tochter Töchter", "f Tochter", "person named relative"),
    ("aunt aunts", "Tante Tanten", "f Tante", "person named relative"),
    ("child children", "Kind Kinder", "n Kindes", "person young"),
    ("girl girls", "Mädchen Mädchen", "n Mädchens", "person young"),
    # Animals
    ("dog dogs", "Hund Hunde", "m Hundes", "animal pet drawable washable"),
    ("bird birds", "Vogel Vögel", "m Vogels", "animal drawable"),
    ("bear bears", "Bär Bären", "m Bären", "animal wild drawable"),
    ("lion lions", "Löwe Löwen", "m Löwen", "animal wild drawable"),
    ("cat cats", "Katze Katzen", "f Katze", "animal pet drawable"),
    ("cow cows", "Kuh Kühe", "f Kuh", "animal drawable washable"),
    ("horse horses", "Pferd Pferde", "n Pferdes", "animal drawable washable"),
    # Food
    ("apple apples", "Apfel Äpfel", "m Apfels", "food fruit"),
    ("cake cakes", "Kuchen Kuchen", "m Kuchens", "food baked"),
    ("pear pears", "Birne Birnen", "f Birne", "food fruit"),
    ("banana bananas", "Banane Bananen", "f Banane", "food fruit"),
    ("carrot carrots", "Karotte Karotten", "f Karotte", "food"),
    ("egg eggs", "Ei Eier", "n Eies", "food"),
    ("roll rolls", "Brötchen Brötchen", "n Brötchens", "food baked"),
    # Drinks are mass nouns: no article, no plural
    ("coffee coffee", "Kaffee Kaffee", "m Kaffees", "drink hot"),
    ("tea tea", "Tee Tee", "m Tees", "drink hot"),
    ("juice juice", "Saft Saft", "m Saftes", "drink"),
    ("milk milk", "Milch Milch", "f Milch", "drink hot"),
    ("lemonade lemonade", "Limonade Limonade", "f Limonade", "drink"),
    ("water water", "Wasser Wasser", "n Wassers", "drink hot"),
    # Things
    ("book books", "Buch Bücher", "n Buches", "goods portable readable writable lies heavy"),
    (
        "letter letters",
        "Brief Briefe",
        "m Briefes",
        "portable readable writable lies openable mail",
    ),
    (
        "newspaper newspapers",
        "Zeitung Zeitungen",
        "f Zeitung",
        "portable readable lies daily",
    ),
    ("picture pictures", "Bild Bilder", "n Bildes", "goods portable drawable hangs mail"),
    ("flower flowers", "Blume Blumen", "f Blume", "goods portable drawable daily"),
    ("table tables", "Tisch Tische", "m Tisches", "goods surface heavy cleanable top legs"),
    ("chair chairs", "Stuhl Stühle", "m Stuhles", "goods heavy surface seat legs cleanable"),
    ("shelf shelves", "Regal Regale", "n Regals", "goods surface heavy top"),
    ("lamp lamps", "Lampe Lampen", "f Lampe", "goods stands machine switchable"),
    ("bag bags", "Tasche Taschen", "f Tasche", "goods portable openable heavy"),
    ("cup cups", "Tasse Tassen", "f Tasse", "goods portable stands"),
    ("bottle bottles", "Flasche Flaschen", "f Flasche", "goods portable stands openable"),
    ("ball balls", "Ball Bälle", "m Balles", "goods portable toy"),
    ("key keys", "Schlüssel Schlüssel", "m Schlüssels", "portable lies small"),
    ("knife knives", "Messer Messer", "n Messers", "goods portable lies"),
    ("umbrella umbrellas", "Regenschirm Regenschirme", "m Regenschirms", "goods portable small"),
    ("shirt shirts", "Hemd Hemden", "n Hemdes", "goods portable clothing washable lies"),
    ("coat coats", "Mantel Mäntel", "m Mantels", "goods portable clothing washable"),
    ("jacket jackets", "Jacke Jacken", "f Jacke", "goods portable clothing washable"),
    ("sweater sweaters", "Pullover Pullover", "m Pullovers", "goods portable clothing washable"),
    ("car cars", "Auto Autos", "n Autos", "goods vehicle machine washable heavy"),
    ("bicycle bicycles", "Fahrrad Fahrräder", "n Fahrrads", "goods vehicle machine washable"),
    ("radio radios", "Radio Radios", "n Radios", "goods machine switchable stands"),
    ("computer computers", "Computer Computer", "m Computers", "goods machine switchable"),
    ("window windows", "Fenster Fenster", "n Fensters", "openable cleanable part"),
    ("door doors", "Tür Türen", "f Tür", "openable cleanable part"),
    ("train trains", "Zug Züge", "m Zuges", "transport"),
    ("bus buses", "Bus Busse", "m Busses", "transport"),
    ("ship ships", "Schiff Schiffe", "n Schiffes", "transport"),
    # Places
    ("garden gardens", "Garten Gärten", "m Gartens", "place outdoors"),
    ("park parks", "Park Parks", "m Parks", "place outdoors"),
    ("forest forests", "Wald Wälder", "m Waldes", "place outdoors"),
    ("kitchen kitchens", "Küche Küchen", "f Küche", "place indoors cleanable tidy"),
    ("school schools", "Schule Schulen", "f Schule", "place indoors building"),
    ("church churches", "Kirche Kirchen", "f Kirche", "place indoors building sight"),
    ("library libraries", "Bibliothek Bibliotheken", "f Bibliothek", "place indoors building"),
    ("house houses", "Haus Häuser", "n Hauses", "place indoors building estate drawable"),
    ("room rooms", "Zimmer Zimmer", "n Zimmers", "place indoors cleanable tidy"),
    ("museum museums", "Museum Museen", "n Museums", "place indoors building sight"),
    ("restaurant restaurants", "Restaurant Restaurants", "n Restaurants", "place indoors building"),
    ("hotel hotels", "Hotel Hotels", "n Hotels", "place indoors building"),
    ("bed beds", "Bett Betten", "n Bettes", "surface seat legs"),
    ("wall walls", "Wand Wände", "f Wand", "wall"),
)


def _noun(english: str, german: str, grammar: str, words: str) -> Noun:
    en, en_plural = english.split()
    de, de_plural = german.split()
    gender, genitive = grammar.split()
    genders: dict[str, Gender] = {"m": "m", "f": "f", "n": "n"}
    return Noun(en, en_plural, de, de_plural, genders[gender], genitive, tags(words))


NOUNS: tuple[Noun, ...] = tuple(_noun(*row) for row in _TABLE)


@cache
def nouns_with(wanted: frozenset[str]) -> tuple[Noun, ...]:
    """The nouns that carry at least one of the wanted tags, in the table's order."""
    return tuple(noun for noun in NOUNS if noun.tags & wanted)


def noun(english: str) -> Noun:
    """The noun of that English singular; KeyError if the lexicon has none."""
    for entry in NOUNS:
        if entry.en == english:
            return entry
    raise KeyError(english)
