"""How good translations are: BLEU by sacrebleu with its signature, and exact matches.

BLEU depends on how the text is cut into tokens and on case, by several points. A figure without
its signature can be compared with nothing (Post 2018, "A Call for Clarity in Reporting BLEU").
"""

from collections.abc import Sequence
from typing import Any

from sacrebleu.metrics.bleu import BLEU

# "as tokenized" splits at spaces alone: for text that a tokenizer has prepared, as in the
# published scores on Multi30k. On raw text it takes "Hund." for a word.
KINDS: dict[str, dict[str, Any]] = {
    "BLEU, cased, 13a": {},
    "BLEU, lower-cased, 13a": {"lowercase": True},
    "BLEU, lower-cased, as tokenized": {"lowercase": True, "tokenize": "none", "force": True},
}


def score_table(translations: Sequence[str], references: Sequence[str]) -> list[dict[str, Any]]:
    """One row per kind of BLEU (0 to 100, corpus level) and one for exact matches, in per cent."""
    assert len(translations) == len(references), (
        f"{len(translations)} translations, {len(references)} references"
    )
    rows = []
    for name, options in KINDS.items():
        metric = BLEU(**options)
        value = metric.corpus_score(translations, [references]).score
        rows.append({"score": name, "value": value, "signature": str(metric.get_signature())})
    exact = {"score": "exact match, %", "value": exact_match(translations, references)}
    return [*rows, {**exact, "signature": ""}]


def exact_match(translations: Sequence[str], references: Sequence[str]) -> float:
    """Share of translations that are the reference, character by character, in per cent."""
    same = sum(a == b for a, b in zip(translations, references, strict=True))
    return 100.0 * same / max(len(references), 1)
