"""Scores are sacrebleu's, with signatures that say how they were made."""

import pytest
import sacrebleu

from shared.training.scoring import exact_match, score_table

SAID = ["Der Hund schläft.", "heute kauft die Frau ein Buch ."]
WANTED = ["Der Hund schläft.", "Heute kauft die Frau ein Buch."]


def test_the_table_is_sacrebleu():
    rows = {row["score"]: row for row in score_table(SAID, WANTED)}
    assert rows["BLEU, cased, 13a"]["value"] == sacrebleu.corpus_bleu(SAID, [WANTED]).score
    assert "case:mixed" in rows["BLEU, cased, 13a"]["signature"]
    assert rows["BLEU, lower-cased, 13a"]["value"] == pytest.approx(100)
    tokenized = sacrebleu.corpus_bleu(SAID, [WANTED], lowercase=True, tokenize="none", force=True)
    assert rows["BLEU, lower-cased, as tokenized"]["value"] == tokenized.score
    assert "tok:none" in rows["BLEU, lower-cased, as tokenized"]["signature"]
    assert rows["exact match, %"]["value"] == 50.0


def test_exact_match():
    assert exact_match(["a", "b"], ["a", "b"]) == 100.0
    assert exact_match([], []) == 0.0
    with pytest.raises(AssertionError, match="2 translations, 1 references"):
        score_table(SAID, WANTED[:1])
