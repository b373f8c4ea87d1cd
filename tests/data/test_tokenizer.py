"""The tokenizer: lossless on any text, the same each time, and clear about foreign files."""

import json
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.data.corpora import GRAMMAR_FOLDER, load_corpus
from shared.data.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    SMALLEST_VOCABULARY,
    SPECIALS,
    UNK_ID,
    Tokenizer,
)
from shared.errors import InputError

SENTENCES = [
    "Der alte Mann liest heute eine Zeitung.",
    "Die alte Frau liest heute ein Buch.",
    "The old man reads a newspaper today.",
    "The old woman reads a book today.",
    "Straßenbahnhaltestelle, Straßenbahn und Haltestelle.",
] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(SENTENCES, 400)


STRANGE = [
    "",
    " ",
    "  a",
    "a\n\tb\r\n",
    "\0",
    "ß ü Ä €",
    "日本語 😀👩‍🔬",
    "\ufeff",
    "<pad><eos> <unk>",
]


@pytest.mark.parametrize("text", [*STRANGE, *SENTENCES[:5]])
def test_round_trip_of_chosen_texts(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_round_trip_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(len(SPECIALS) <= token < tokenizer.vocab_size for token in ids)


@given(st.lists(st.integers(0, SMALLEST_VOCABULARY - 1)))
def test_any_ids_decode_to_some_text(tokenizer, ids):
    assert isinstance(tokenizer.decode(ids), str)


def test_specials_have_their_ids_and_no_text_makes_them(tokenizer):
    assert (PAD_ID, BOS_ID, EOS_ID, UNK_ID) == (0, 1, 2, 3)
    vocabulary = json.loads(tokenizer.to_json())["model"]["vocab"]
    assert [vocabulary[special] for special in SPECIALS] == [0, 1, 2, 3]
    for text in SPECIALS:
        assert min(tokenizer.encode(text)) > UNK_ID
    ids = tokenizer.encode("Die alte Frau")
    assert tokenizer.decode([BOS_ID, *ids, EOS_ID, PAD_ID, PAD_ID]) == "Die alte Frau"


def test_a_frequent_word_is_one_token_wherever_it_stands(tokenizer):
    (start,) = tokenizer.encode("alte")
    assert tokenizer.encode("Die alte")[-1] == start
    assert tokenizer.pieces("Die alte Frau.") == [" Die", " alte", " Frau", "."]


def test_batches_are_the_same_as_one_by_one(tokenizer):
    texts = [*STRANGE, *SENTENCES]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.decode_batch(tokenizer.encode_batch(texts)) == texts
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode_batch([]) == []


def test_training_twice_gives_the_same_tokenizer_in_any_process(tokenizer):
    code = (
        "import sys; from shared.data.tokenizer import Tokenizer; "
        "sys.stdout.write(Tokenizer.train(eval(sys.stdin.read()), 400).to_json())"
    )
    for seed, parallel in (("1", "true"), ("2", "false")):
        environment = os.environ | {"PYTHONHASHSEED": seed, "TOKENIZERS_PARALLELISM": parallel}
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=repr(SENTENCES),
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == tokenizer.to_json()


def test_a_larger_vocabulary_makes_fewer_tokens():
    sizes = [300, 325, 350]
    trained = [Tokenizer.train(SENTENCES, size) for size in sizes]
    assert [tokenizer.vocab_size for tokenizer in trained] == sizes
    tokens = [sum(map(len, tokenizer.encode_batch(SENTENCES))) for tokenizer in trained]
    assert tokens[0] > tokens[1] > tokens[2]


def test_a_small_corpus_fills_only_part_of_the_vocabulary():
    assert Tokenizer.train(["ab ab"], 5000).vocab_size < 270


def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "new folder" / "tokenizer.json"
    tokenizer.save(path)
    again = Tokenizer.load(path)
    assert again.to_json() == tokenizer.to_json()
    for text in [*STRANGE, *SENTENCES]:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == text
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]


def test_a_copy_in_another_process_works(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("<pad> Die alte") == tokenizer.encode("<pad> Die alte")


def refused(call, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, (word, message)


def test_foreign_and_missing_files(tokenizer, tmp_path):
    path = tmp_path / "t.json"
    refused(lambda: Tokenizer.load(path), str(path), "No such file")
    refused(lambda: Tokenizer.load(tmp_path), str(tmp_path), "directory")
    for content in ("", "no JSON", "[]", "3", '{"a": 1}', tokenizer.to_json()[:1000]):
        path.write_text(content)
        refused(lambda: Tokenizer.load(path), str(path), "holds no tokenizer")
    path.write_bytes(b"\xff\xfe\x00\x80")
    refused(lambda: Tokenizer.load(path), "binary")
    path.write_text(tokenizer.to_json().replace("<pad>", "[PAD]"))
    refused(lambda: Tokenizer.load(path), "of another kind", "<pad>")


def test_a_place_that_cannot_be_written(tokenizer, tmp_path):
    (tmp_path / "file").write_text("x")
    refused(lambda: tokenizer.save(tmp_path / "file" / "t.json"), "cannot be written")
    (tmp_path / "taken.json").mkdir()
    refused(lambda: tokenizer.save(tmp_path / "taken.json"), "cannot be written")
    assert not list(tmp_path.glob("*.part"))


def test_bad_arguments(tokenizer):
    refused(lambda: Tokenizer.train(SENTENCES, 259), "vocab_size is 259", "at least 260")
    refused(lambda: tokenizer.encode(3), "text 0 is 3 of type int")
    refused(lambda: tokenizer.encode_batch(["a", "b\ud800"]), "text 1", "surrogate", "character 1")
    refused(
        lambda: tokenizer.decode([5, 400]), "token id 400", f"vocabulary of {tokenizer.vocab_size}"
    )
    refused(lambda: tokenizer.decode([-1]), "token id -1")


@pytest.mark.skipif(not GRAMMAR_FOLDER.is_dir(), reason="datasets/grammar_en_de is not there")
def test_round_trip_of_the_shipped_corpus():
    corpus = load_corpus("grammar")
    tokenizer = Tokenizer.train([side for pair in corpus.train for side in pair], 4000)
    held_out = [side for pair in corpus.test for side in pair]
    assert tokenizer.decode_batch(tokenizer.encode_batch(held_out)) == held_out
