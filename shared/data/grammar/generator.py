"""The corpus: draws sentences and sorts them into training, validation and test.

A combination is a pair of words, or of a verb and a construction, that meet in a sentence
(`sentences.py`). A hash of its name decides once and for all whether it is kept for validation or
for test; training holds no sentence with either.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shared.data.grammar import one_clause as one
from shared.data.grammar import two_clauses as two
from shared.data.grammar.drawing import Dice
from shared.data.grammar.nouns import NOUNS
from shared.data.grammar.sentences import Sentence
from shared.data.pairs import Pair

SEED = 2017
NUM_TRAIN, NUM_VALIDATION, NUM_TEST = 15_000, 1_000, 1_000
MIN_WORD_COUNT = 10
_TEST_PERMILLE, _VALIDATION_PERMILLE = 50, 30

_MARKS = str.maketrans(",.?'", "    ")
_LEMMAS = {form: noun.en for noun in NOUNS for form in (noun.en, noun.en_plural)}

CONSTRUCTIONS: tuple[tuple[Callable[[Dice], Sentence], int], ...] = (
    (one.plain, 18),
    (one.fronted, 14),
    (one.negated, 9),
    (one.nobody, 2),
    (one.yes_no, 6),
    (one.who, 4),
    (one.what, 2),
    (one.which, 3),
    (one.where, 2),
    (one.when_why, 3),
    (one.describe, 6),
    (one.belongings, 4),
    (one.price, 8),
    (one.age, 4),
    (one.count, 6),
    (one.clock, 3),
    (two.reason, 8),
    (two.content, 8),
    (two.earlier, 5),
    (two.later, 4),
    (two.relative_subject, 4),
    (two.relative_object, 5),
    (two.relative_end, 3),
    (two.contrast, 4),
    (two.two_acts, 4),
)


class Splits(NamedTuple):
    """The corpus: sentences of training, validation and test."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


def role(combination: str) -> str:
    """The split that a combination belongs to: `test`, `validation` or `train` (all three)."""
    bucket = zlib.crc32(combination.encode()) % 1000
    if bucket < _TEST_PERMILLE:
        return "test"
    return "validation" if bucket < _TEST_PERMILLE + _VALIDATION_PERMILLE else "train"


def split_of(sentence: Sentence) -> str:
    """The split of a sentence; "" if it has combinations of both validation and test."""
    roles = {role(combination) for combination in sentence.combinations} - {"train"}
    if not roles:
        return "train"
    return roles.pop() if len(roles) == 1 else ""


def sentences(seed: int = SEED) -> Iterator[Sentence]:
    """An endless stream of different sentences; no English and no German one comes twice."""
    dice = Dice(seed)
    english: set[str] = set()
    german: set[str] = set()
    while True:
        sentence = dice.weighted(CONSTRUCTIONS)(dice)
        if sentence.pair.src in english or sentence.pair.tgt in german:
            continue
        if repeats_a_noun(sentence.pair.src):
            continue
        english.add(sentence.pair.src)
        german.add(sentence.pair.tgt)
        yield sentence


def repeats_a_noun(english: str) -> bool:
    """Whether a noun comes twice (The man helped the man), which nobody would say."""
    found = [_LEMMAS[w] for w in english.translate(_MARKS).lower().split() if w in _LEMMAS]
    return len(found) != len(set(found))


def generate_sentences(seed: int = SEED) -> dict[str, list[Sentence]]:
    """The three splits with constructions and combinations, for tests and statistics."""
    wanted = {"train": NUM_TRAIN, "validation": 2 * NUM_VALIDATION, "test": 2 * NUM_TEST}
    found: dict[str, list[Sentence]] = {name: [] for name in wanted}
    stream = sentences(seed)
    while any(len(found[name]) < number for name, number in wanted.items()):
        sentence = next(stream)
        name = split_of(sentence)
        if name and len(found[name]) < wanted[name]:
            found[name].append(sentence)
    counts = word_counts([sentence.pair for sentence in found["train"]])
    for name, number in (("validation", NUM_VALIDATION), ("test", NUM_TEST)):
        known = [s for s in found[name] if all(counts[w] >= MIN_WORD_COUNT for w in words(s.pair))]
        assert len(known) >= number, f"{len(known)} sentences of known words, {number} wanted"
        found[name] = known[:number]
    return found


def words(pair: Pair) -> list[str]:
    """The words of both sides, tagged by language, without commas and closing marks."""
    found = []
    for language, text in zip(("en", "de"), pair, strict=True):
        found += [f"{language}:{word.strip(',.?').lower()}" for word in text.split(" ")]
    return found


def word_counts(pairs: list[Pair]) -> Counter[str]:
    """How often each word occurs."""
    return Counter(word for pair in pairs for word in words(pair))


def generate(seed: int = SEED) -> Splits:
    """The corpus of that seed; the one in datasets/ is the default seed's."""
    found = generate_sentences(seed)
    splits = ([sentence.pair for sentence in found[name]] for name in Splits._fields)
    return Splits(*splits)
