"""The shipped corpus is what its data card says, and training holds no combination of the test.

What is held out stands in held_out.tsv, with the forms of its words. It is looked for in the text
by the word order of the two languages.
"""

import re
from collections import Counter, defaultdict
from functools import cache
from hashlib import sha256
from itertools import chain
from typing import NamedTuple

import pytest

from shared.data.corpora import GRAMMAR_FOLDER, load_corpus
from shared.data.pairs import Pair

SPLITS = {"train": 15_000, "validation": 1_000, "test": 1_000}
CARD = (GRAMMAR_FOLDER / "README.md").read_text(encoding="utf-8")
FLAT_CARD = " ".join(CARD.split())

# The construction of a sentence is the first whose sign stands in its "English<tab>German".
NUMBER = (
    r"(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|"
    r"(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:-\w+)?)"
)
DETERMINER = rf"(?:an?|the|this|these|my|your|our|his|her|their|{NUMBER})"
CONJUNCTIONS = {
    **{"when (als)": "als", "when (wenn)": "wenn", "before (bevor)": "bevor"},
    **{"if (falls)": "falls", "because": "weil", "although": "obwohl"},
}
CONSTRUCTIONS = {
    **{name: f", {word} " for name, word in CONJUNCTIONS.items()},
    **{f"{name} first": f"\t{word.title()} " for name, word in CONJUNCTIONS.items()},
    **{"that": ", dass ", "whether": ", ob "},
    **{
        word: rf"^{word.title()} .*\?"
        for word in ("who", "whom", "what", "which", "where", "when", "why")
    },
    "relative subject inside": r" who .*\t.*, (?:der|die|das) .*, ",
    "relative dat inside": r" whom .*\t.*, (?:dem|denen|der) .*, ",
    "relative acc inside": r" (?:whom|that) .*\t.*, (?:den|die|das) .*, ",
    "relative end": " who ",
    "two acts": " and ",
    "clock": r" (?:o'clock|half past|quarter)\b",
    "count": rf" (?:only one|{NUMBER}(?! days)) ",
    "yes-no": r"\?",
    "nobody": "^No ",
    "negated": r"\b(?:not|cannot) ",
    "fronted": "^(?:A (?:week|month|year)|Because|During|Every|In|Last|Next|Now|On|Soon|"
    "This morning|Three days|Today|Tomorrow|Yesterday) ",
    "plain": "",
}
# The tense of a verb: which of its forms, and what stands before it in its clause.
ALONE = r"(?!.*\b(?:has|have|had|did|do|does|will|can|cannot|could|should|to|am|is|are|was|were)\b)"
FORMS = ("base", "third", "past", "participle", "ing")
TENSES = {
    "present": {"third": ALONE, "base": rf"{ALONE}|.*\bdo(?:es)?\b(?!.* to $)"},
    "past": {"past": ALONE, "base": r".*\bdid\b(?!.* to $)"},
    "perfect": {"participle": r".*\b(?:has|have)\b(?!.* to $)"},
    "progressive": {"ing": r".*\b(?:am|is|are)\b"},
    "must": {"base": r"(?!.*\bdid\b).*\b(?:have|has) to $"},
    "had to": {"base": r".*\bhad to $|.*\bdid\b.* have to $"},
    "want": {"base": r"(?!.*\bdid\b).*\bwants? to $"},
    "wanted": {"base": r".*\bwanted to $|.*\bdid\b.* want to $"},
    "may": {"base": r".*\b(?:am|is|are)\b.* allowed to $"},
    "might": {"base": r".*\b(?:was|were)\b.* allowed to $"},
    **{word: {"base": rf".*\b{word}(?:not)?\b"} for word in ("can", "could", "should")},
    "future": {"base": r".*\bwill\b"},
}
CLAUSE_ENDS = re.compile(r",|\b(?:that|who|whom|whether|because|although|when|before|if)\b(?! of)")
AUXILIARIES = (
    "(?: (?:has|have|had|am|is|are|was|were|do|does|did|will|can|cannot|could|should|not|to|wants?|"
    "wanted|allowed|never|always|often|already|just|usually|sometimes))*"
)
# Between a verb and its object stands no other verb and no preposition.
BETWEEN = (
    r"(?: (?!(?:am|is|are|was|were|and|not|in|into|to|at|on|onto|from|under|behind|next|for|of|"
    r"during|every|last)\b)[\w'-]+)*"
)
BE = "(?:is|are|was|were)"


class Combination(NamedTuple):
    """Two things that meet in a sentence, each by the forms of its words."""

    split: str
    kind: str
    first: str
    second: str


@cache
def held_out() -> list[Combination]:
    """The combinations that are kept for validation and for test."""
    lines = (GRAMMAR_FOLDER / "held_out.tsv").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "split\tkind\tfirst\tsecond"
    return [Combination(*line.split("\t")) for line in lines[1:]]


@cache
def corpus() -> dict[str, list[Pair]]:
    """The pairs of each split."""
    loaded = load_corpus("grammar")
    return {split: getattr(loaded, split) for split in SPLITS}


def words(text: str) -> list[str]:
    """The words of a text without capitals and marks."""
    return re.findall(r"[\w'-]+", text.lower())


def construction(pair: Pair) -> str:
    """The name of the construction of a sentence."""
    return next(n for n, sign in CONSTRUCTIONS.items() if re.search(sign, "\t".join(pair)))


def signs_of_quality(adjective: str, noun: str) -> list[str]:
    """How a noun bears an adjective: the big house; the house is big; it is big; is it big."""
    said = rf"{BE}(?: not)? {adjective}\b"
    return [
        rf"\b{adjective} {noun}",
        rf"^(?:(?! (?:who|whom|that) ).)*{noun}(?!') {said}",
        rf"^{BE} .*{noun} {adjective}\b",
        rf"^\w+ {noun} {BE} .* but \w+ {said}",
        rf"^\w+ (?:\w+ )?{noun} (?:who|whom|that) .* {said}\.",
    ]


def signs_with_verb(kind: str, words_of_verb: str, noun: str) -> list[str]:
    """How a noun is the subject or the object of a verb."""
    forms, follows = verb_forms(words_of_verb)
    verb = rf"(?<!\bthe )\b(?:{'|'.join(forms)}){follows}\b"
    if kind == "subject":
        return [rf"{noun}{AUXILIARIES} {verb}", rf"{noun} .* and {verb}"]
    asked, shared = rf"^which (?:\w+ )?{noun} .*{verb}", rf"{noun}.* and {verb} (?:it|them)\b"
    return [rf"{verb}{BETWEEN} {noun}(?!')", asked, shared]


def verb_forms(text: str) -> tuple[list[str], str]:
    """The five forms of a verb, and what must follow them: a particle, or another's no particle."""
    *forms, last = text.split()
    if last.startswith("+"):
        return forms, f" {last[1:]}"
    alone = {
        "come": "(?! back)",
        "put": f"(?! on {DETERMINER} )",
        "clean": "(?! kitchen)",  # not the adjective
        "have": rf"(?! to )(?!.* (?:{'|'.join(participles())})\b)",  # not the auxiliary
    }
    return [*forms, last], alone.get(forms[0], "")


@cache
def participles() -> list[str]:
    """The past participles of all verbs in held_out.tsv."""
    verbs = [c.first.split() for c in held_out() if c.kind not in ("adjective", "number")]
    return sorted({forms[FORMS.index("participle")] for forms in verbs})


def has_tense(clause: str, words_of_verb: str, tense: str) -> bool:
    """Whether the clause has the verb in that tense."""
    forms, follows = verb_forms(words_of_verb)
    return any(
        re.match(before, clause[: found.start()])
        for form, before in TENSES[tense].items()
        for found in re.finditer(rf"\b{forms[FORMS.index(form)]}{follows}\b", clause)
    )


def holds(pair: Pair, combination: Combination) -> bool:
    """Whether the sentence has the combination."""
    _, kind, first, second = combination
    text = pair.src[0].lower() + pair.src[1:]
    clauses = [clause for clause in CLAUSE_ENDS.split(text) if clause]
    if kind == "construction":
        name, _, tense = second.rpartition("/")
        found = any(has_tense(clause, first, tense) for clause in clauses)
        return found and construction(pair) == name
    noun = rf"\b(?:{second.replace(' ', '|')})\b"
    if kind == "adjective":
        return any(re.search(sign, text) for sign in signs_of_quality(first, noun))
    if kind == "number":
        sign = rf" {first} (?!euros|years)(?:\w+ )?{noun}|{noun} (?:costs?|is) {first}\."
        return re.search(sign, text) is not None
    signs = signs_with_verb(kind, first, noun)
    return any(re.search(sign, clause) for sign in signs for clause in clauses)


def having(split: str, combination: Combination) -> set[int]:
    """The numbers of the sentences of a split that have the combination."""
    index = _sentences_by_word(split)
    both = [set().union(*(index[word] for word in words(forms))) for forms in combination[2:]]
    some = both[0] if combination.kind == "construction" else both[0] & both[1]
    return {number for number in some if holds(corpus()[split][number], combination)}


@cache
def _sentences_by_word(split: str) -> dict[str, set[int]]:
    index: dict[str, set[int]] = defaultdict(set)
    for number, pair in enumerate(corpus()[split]):
        for word in words(pair.src):
            index[word.removesuffix("'s").removesuffix("'")].add(number)
    return index


def test_the_files_are_those_of_the_data_card():
    listed = {name: sum for sum, name in re.findall(r"([0-9a-f]{64})  (\S+)", CARD)}
    files = {path.name: path for path in GRAMMAR_FOLDER.iterdir() if path.name != "README.md"}
    assert {name: sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == listed


def test_both_sides_have_a_line_for_each_pair():
    for split, count in SPLITS.items():
        for language in ("en", "de"):
            lines = (GRAMMAR_FOLDER / f"{split}.{language}").read_text(encoding="utf-8").split("\n")
            assert lines.pop() == "", "the last line has its end"
            assert len(lines) == count
            assert all(line and line == line.strip() for line in lines)


@pytest.mark.parametrize("split", SPLITS)
def test_the_data_card_counts_what_is_there(split):
    pairs = corpus()[split]
    english, german = ([len(pair[side].split()) for pair in pairs] for side in (0, 1))
    row = f"| {split} | {len(pairs):,} | {sum(english):,} | {sum(german):,} | {max(german)} |"
    assert row in CARD
    if split == "train":
        sides = [
            len(set(chain.from_iterable(words(pair[side]) for pair in pairs))) for side in (0, 1)
        ]
        figures = "{:,} different English and {:,} different German words".format(*sides)
        assert figures in " ".join(CARD.split())


def test_no_sentence_comes_twice():
    pairs = list(chain.from_iterable(corpus().values()))
    for side in (0, 1):
        assert len({pair[side] for pair in pairs}) == len(pairs)


def test_training_holds_no_combination_of_validation_or_test():
    seen = {combination: having("train", combination) for combination in held_out()}
    assert not {combination for combination, sentences in seen.items() if sentences}


@pytest.mark.parametrize("split", ["validation", "test"])
def test_each_held_out_sentence_has_a_combination_of_its_own_split_and_none_of_the_other(split):
    own, other = set(), set()
    for combination in held_out():
        sentences = having(split, combination)
        if combination.split == split:
            assert sentences, f"no sentence has {combination}"
            own |= sentences
        else:
            other |= sentences
    assert own == set(range(SPLITS[split]))
    assert not other


def test_every_kind_of_combination_is_held_out():
    counts = Counter((each.split, each.kind) for each in held_out())
    kinds = {"adjective", "subject", "object", "construction", "number"}
    assert set(counts) == {(split, kind) for split in ("validation", "test") for kind in kinds}
    assert min(counts.values()) >= 20
    figures = Counter(each.split for each in held_out())
    assert f"{figures['test']} in test, {figures['validation']} in validation" in FLAT_CARD


def test_the_words_and_constructions_of_a_held_out_sentence_are_known_from_training():
    known = Counter(chain.from_iterable(map(parts, corpus()["train"])))
    for pair in corpus()["validation"] + corpus()["test"]:
        rare = {part: known[part] for part in parts(pair) if known[part] < 10}
        assert not rare, f"{pair}: {rare}"
        assert known[construction(pair)] >= 20


def parts(pair: Pair) -> set[str]:
    """The words of both languages, and the construction."""
    sides = zip(("en", "de"), pair, strict=True)
    return {f"{side}:{word}" for side, text in sides for word in words(text)} | {construction(pair)}
