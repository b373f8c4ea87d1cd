"""The adjectives and the kinds of nouns that each can describe."""

from functools import cache

from shared.data.grammar.words import Adjective, Noun, tags

_TABLE: tuple[tuple[str, str, str], ...] = (
    ("old", "alt", "person animal goods mail readable transport place part"),
    ("young", "jung", "person animal"),
    ("tall", "groß", "person"),
    ("big", "groß", "animal goods mail food place transport surface"),
    ("small", "klein", "person animal goods mail food place transport small surface"),
    ("friendly", "freundlich", "person"),
    ("tired", "müde/müd", "person animal"),
    ("happy", "glücklich", "person"),
    ("sad", "traurig", "person"),
    ("rich", "reich", "person"),
    ("poor", "arm", "person"),
    ("clever", "klug", "person pet"),
    ("brave", "mutig", "person"),
    ("sick", "krank", "person animal"),
    ("strong", "stark", "person wild"),
    ("hungry", "hungrig", "person animal"),
    ("new", "neu", "goods readable place transport part small"),
    ("red", "rot", "goods part"),
    ("blue", "blau", "goods part"),
    ("green", "grün", "goods part"),
    ("black", "schwarz", "goods animal small"),
    ("white", "weiß", "goods part"),
    ("yellow", "gelb", "goods"),
    ("heavy", "schwer", "heavy"),
    ("beautiful", "schön", "goods place animal mail"),
    ("expensive", "teuer/teur", "goods"),
    ("cheap", "billig", "goods"),
    ("clean", "sauber", "clothing vehicle stands place part"),
    ("dirty", "schmutzig", "clothing vehicle stands place part toy"),
    ("warm", "warm", "clothing hot indoors baked"),
    ("cold", "kalt", "drink indoors"),
    ("fresh", "frisch", "food fruit baked"),
    ("sweet", "süß", "fruit"),
    ("dark", "dunkel/dunkl", "clothing place"),
    ("long", "lang", "readable"),
    ("good", "gut", "person machine food"),
    ("bad", "schlecht", "machine"),
)


def _adjective(en: str, german: str, words: str) -> Adjective:
    de, _, stem = german.partition("/")
    return Adjective(en, de, stem or de, tags(words))


ADJECTIVES: tuple[Adjective, ...] = tuple(_adjective(*row) for row in _TABLE)


@cache
def adjectives_for(noun: Noun) -> tuple[Adjective, ...]:
    """The adjectives that can describe the noun, in the table's order."""
    fitting = (entry for entry in ADJECTIVES if entry.tags & noun.tags)
    return tuple(a for a in fitting if "young" not in noun.tags or a.en not in ("young", "old"))


def adjective(english: str) -> Adjective:
    """The adjective of that English form; KeyError if the lexicon has none."""
    for entry in ADJECTIVES:
        if entry.en == english:
            return entry
    raise KeyError(english)


_GROUPS = (
    tags("old new young"),
    tags("big small tall"),
    tags("expensive cheap"),
    tags("clean dirty"),
    tags("warm cold"),
    tags("good bad"),
    tags("red blue green black white yellow"),
)


def compatible(first: Adjective, second: Adjective) -> bool:
    """Whether one thing can be both: not new and old, not red and blue, not twice the same."""
    pair = {first.en, second.en}
    return first != second and not any(pair <= group for group in _GROUPS)
