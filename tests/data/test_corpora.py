"""Parallel text from folders of every kind, and one clear line for every kind of bad folder."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.data.corpora import GRAMMAR_FOLDER, hold_out, load_corpus
from shared.data.files import read_lines
from shared.data.pairs import Pair
from shared.errors import InputError

PAIRS = [Pair(f"sentence {n}", f"Satz {n} für Übung") for n in range(30)]
SPLITS = {"train": PAIRS[:20], "val": PAIRS[20:25], "test": PAIRS[25:]}


def write_text(folder: Path, splits=SPLITS, gz: bool = False, end: str = "\n", head: bytes = b""):
    for split, pairs in splits.items():
        for side, language in enumerate(("en", "de")):
            data = head + "".join(pair[side] + end for pair in pairs).encode()
            if gz:
                (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / f"{split}.{language}").write_bytes(data)


def schema(name: str, pair: Pair) -> dict:
    en, de = pair
    return {
        "languages": {"id": 7, "en": en, "de": de},
        "translation": {"translation": {"de": de, "en": en}},
        "src-tgt": {"src": en, "tgt": de},
        "source-target": {"source": en, "target": de},
    }[name]


SCHEMAS = ["languages", "translation", "src-tgt", "source-target"]


def expect_splits(corpus) -> None:
    assert corpus.train == SPLITS["train"]
    assert corpus.validation == SPLITS["val"]
    assert corpus.test == SPLITS["test"]
    assert corpus.notes == ()


def refused(folder, *words: str, **arguments) -> str:
    with pytest.raises(InputError) as caught:
        load_corpus(str(folder), **arguments)
    message = str(caught.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, (word, message)
    return message


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
def test_text_files(tmp_path, gz, end, head):
    write_text(tmp_path, gz=gz, end=end, head=head)
    expect_splits(load_corpus(str(tmp_path)))


def test_last_line_without_end_and_outer_spaces(tmp_path):
    write_text(tmp_path)
    (tmp_path / "test.en").write_text("  a b \nc")
    (tmp_path / "test.de").write_text("A B\t\n C")
    assert load_corpus(tmp_path).test == [("a b", "A B"), ("c", "C")]


@pytest.mark.parametrize("strange", ["\x85", "\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\r"])
def test_only_newlines_end_lines(tmp_path, strange):
    path = tmp_path / "x.en"
    path.write_bytes(f"one{strange}still one\ntwo\n".encode())
    assert read_lines(path) == [f"one{strange}still one", "two"]


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0")), min_size=1))
@settings(max_examples=60, deadline=None)
def test_lines_come_back_as_written(tmp_path_factory, lines):
    if lines[0].startswith("\ufeff"):
        lines[0] = lines[0].lstrip("\ufeff")
    path = tmp_path_factory.getbasetemp() / "lines.gz"
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    assert read_lines(path) == lines


@pytest.mark.parametrize("ending", ["jsonl", "json", "ndjson", "jsonl.gz", "array.json", "parquet"])
@pytest.mark.parametrize("layout", SCHEMAS)
def test_tables(tmp_path, ending, layout):
    for split, pairs in SPLITS.items():
        rows = [schema(layout, pair) for pair in pairs]
        path = tmp_path / f"{split}.{ending}"
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        if ending == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif ending == "array.json":
            path.write_text(json.dumps(rows, indent=1))
        elif ending.endswith(".gz"):
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
    expect_splits(load_corpus(tmp_path))


def test_shards_of_a_table_are_read_in_order(tmp_path):
    for split, pairs in (("validation", SPLITS["val"]), ("test", SPLITS["test"])):
        rows = [schema("translation", pair) for pair in pairs]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    for shard in range(2):
        rows = [schema("translation", pair) for pair in PAIRS[10 * shard : 10 * shard + 10]]
        path = tmp_path / f"train-0000{shard}-of-00002.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    expect_splits(load_corpus(tmp_path))


@pytest.mark.parametrize(
    ("validation", "test"),
    [("val", "test_2016_flickr"), ("dev", "newstest2016"), ("validation.de-en", "TEST.de-en")],
)
def test_usual_names_of_splits(tmp_path, validation, test):
    names = {"train": "train", "val": validation, "test": test}
    write_text(tmp_path, {names[split]: pairs for split, pairs in SPLITS.items()})
    expect_splits(load_corpus(tmp_path))


def test_the_other_direction(tmp_path):
    write_text(tmp_path)
    corpus = load_corpus(tmp_path, src="de", tgt="en")
    assert corpus.train[0] == (PAIRS[0].tgt, PAIRS[0].src)
    assert (corpus.src_lang, corpus.tgt_lang) == ("de", "en")


def test_several_test_sets_take_one_and_say_so(tmp_path):
    write_text(tmp_path)
    for name in ("test_2017", "test_2018"):
        write_text(tmp_path, {name: PAIRS[:3]})
    corpus = load_corpus(tmp_path)
    assert corpus.test == SPLITS["test"]
    assert "test_2017" in corpus.notes[0]
    assert "test_2018" in corpus.notes[0]


def test_missing_splits_are_cut_from_train(tmp_path):
    pairs = [Pair(f"s {n % 150}", f"t {n}") for n in range(300)]
    write_text(tmp_path, {"train": pairs})
    corpus = load_corpus(tmp_path)
    assert corpus == load_corpus(tmp_path)
    parts = (corpus.train, corpus.validation, corpus.test)
    assert sorted(pair for part in parts for pair in part) == sorted(pairs)
    sources = [{pair.src for pair in part} for part in parts]
    assert not (sources[0] & sources[1] | sources[0] & sources[2] | sources[1] & sources[2])
    assert [len(part) for part in parts] == [270, 14, 16]
    assert "no test split: 16 pairs" in corpus.notes[0]
    assert "no validation split: 14 pairs" in corpus.notes[1]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_notes_are_said_once(tmp_path, monkeypatch, caplog, rank):
    write_text(tmp_path, {"train": PAIRS})
    monkeypatch.setenv("RANK", rank)
    corpus = load_corpus(tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert said == ([f"{corpus.name}: {note}" for note in corpus.notes] if rank == "0" else [])


def test_one_unnamed_source_is_all_training_data(tmp_path):
    write_text(tmp_path, {"europarl.de-en": PAIRS})
    assert len(load_corpus(tmp_path).notes) == 2


def test_held_out_pairs_are_few_and_need_enough():
    pairs = [Pair(str(n), str(n)) for n in range(30_000)]
    left, held = hold_out(pairs, "x")
    assert (len(left), len(held)) == (29_000, 1000)
    with pytest.raises(InputError, match="1 different source sentences"):
        hold_out([Pair("a", "b")] * 5, "x")


def test_too_few_pairs_to_cut(tmp_path):
    write_text(tmp_path, {"train": PAIRS[:2]})
    refused(tmp_path, "too few", str(tmp_path))


def test_max_train(tmp_path):
    write_text(tmp_path)
    corpus = load_corpus(tmp_path, max_train=3)
    assert corpus.train == PAIRS[:3]
    assert len(corpus.test) == 5


# What is wrong with a folder, and the words that the message must hold


def test_different_lengths(tmp_path):
    write_text(tmp_path)
    with (tmp_path / "train.en").open("a") as file:
        file.write("one more\nand one\n")
    refused(tmp_path, "train.en has 22 lines", "train.de has 20", "line 21 of train.en")
    with (tmp_path / "train.de").open("a") as file:
        file.write("x\n" * 7)
    refused(tmp_path, "line 23 of train.de has no partner")


def test_empty_lines(tmp_path):
    write_text(tmp_path)
    pairs = list(PAIRS[:20])
    for n in (3, 8):
        pairs[n] = Pair(" \t", pairs[n].tgt)
    pairs[11] = Pair(pairs[11].src, "")
    write_text(tmp_path, {"train": pairs})
    refused(
        tmp_path, "train.en: 2 lines are empty (4, 9)", "train.de: 1 line is empty (12)", "drop"
    )
    corpus = load_corpus(tmp_path, empty="drop")
    assert corpus.train == [pair for n, pair in enumerate(PAIRS[:20]) if n not in (3, 8, 11)]
    assert corpus.notes == ("dropped 3 pairs with an empty side",)


def test_many_empty_lines_are_not_all_listed(tmp_path):
    write_text(tmp_path, {"train": [Pair("", "x")] * 1000})
    assert len(refused(tmp_path, "1000 lines are empty (1, 2, 3, 4, 5, ...)")) < 300
    refused(tmp_path, "0 different source sentences", empty="drop")
    write_text(tmp_path, {"val": PAIRS[:3], "test": PAIRS[:3]})
    refused(tmp_path, "no pairs in train", empty="drop")


def test_empty_cells_of_a_table(tmp_path):
    rows = [schema("languages", pair) for pair in PAIRS]
    rows[4]["de"] = ""
    rows[9]["en"] = None
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    refused(tmp_path, "train.jsonl: 2 with an empty side", "train.jsonl, line 5", "drop")
    assert "dropped 2 pairs" in load_corpus(tmp_path, empty="drop").notes[0]


@pytest.mark.parametrize("gz", [False, True])
def test_invalid_utf8(tmp_path, gz):
    write_text(tmp_path)
    data = (tmp_path / "train.de").read_bytes().replace("Satz 6 für".encode(), b"Satz 6 f\xfcr")
    (tmp_path / "train.de").unlink()
    name = "train.de.gz" if gz else "train.de"
    (tmp_path / name).write_bytes(gzip.compress(data) if gz else data)
    refused(tmp_path, f"{name}, line 7", "byte 9 of the line is 0xfc", "ISO-8859-1")


def test_truncated_gzip(tmp_path):
    write_text(tmp_path, gz=True)
    path = tmp_path / "train.en.gz"
    path.write_bytes(path.read_bytes()[:-20])
    refused(tmp_path, "train.en.gz", "truncated")
    path.write_bytes(b"plain text\n")
    refused(tmp_path, "train.en.gz", "not a sound .gz file")


def test_damaged_gzip(tmp_path):
    write_text(tmp_path, gz=True)
    path = tmp_path / "train.en.gz"
    data = bytearray(path.read_bytes())
    data[30] ^= 0xFF
    path.write_bytes(bytes(data))
    refused(tmp_path, "train.en.gz")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_utf16_and_nul(tmp_path, encoding):
    write_text(tmp_path)
    (tmp_path / "val.en").write_text("a\nb\n", encoding=encoding)
    refused(tmp_path, "val.en", "UTF-16", "UTF-8")


def test_lines_that_end_as_on_an_old_mac_are_not_one_line(tmp_path):
    write_text(tmp_path, end="\r")
    refused(tmp_path, ".en", r"end in \r alone")


def test_empty_file(tmp_path):
    write_text(tmp_path)
    (tmp_path / "test.de").write_bytes(b"")
    refused(tmp_path, "test.de", "empty")


def test_missing_side(tmp_path):
    write_text(tmp_path)
    (tmp_path / "val.de").unlink()
    refused(tmp_path, "has val.en but no val.de")


def test_folder_without_the_expected_files(tmp_path):
    refused(tmp_path, "holds nothing", "train.en and train.de")
    for name in ("a.csv", "notes.txt", "settings.json"):
        (tmp_path / name).write_text("{}")
    refused(tmp_path, "a.csv, notes.txt, settings.json", "train.jsonl")
    refused(tmp_path, "train.fr and train.es", src="fr", tgt="es")


def test_names_that_are_none(tmp_path):
    refused(tmp_path / "nowhere", "neither a folder nor one of grammar, multi30k, wmt16")
    refused("multi30", "did you mean 'multi30k'")
    refused("wikitext-2", "not for translation")
    refused("", "neither a folder")
    (tmp_path / "train.en").write_text("x")
    refused(tmp_path / "train.en", "is a file", f"'{tmp_path}'")


def test_arguments_that_make_no_sense(tmp_path):
    write_text(tmp_path)
    refused(tmp_path, "both 'en'", tgt="en")
    refused(tmp_path, "'skip'", "'drop'", empty="skip")
    refused(tmp_path, "max_train is 0", max_train=0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("not json", ["no JSON", "seen: not json"]),
        ('{"en": "a"', ["no JSON"]),
        ('["a", "b"]', ["expected an object", "seen:"]),
        ('{"english": "a", "german": "b"}', ["english, german", "'en' and 'de'"]),
        ('{"translation": {"en": "a"}}', ["found the columns en"]),
        ('{"translation": "a"}', ["'a'", "'translation' with both inside"]),
        ('{"en": 3, "de": "b"}', ["'en' holds 3"]),
        ('{"en": "a\\u0000", "de": "b"}', ["NUL"]),
        ("{}", ["(none)"]),
    ],
)
def test_bad_json_lines(tmp_path, line, words):
    good = [json.dumps(schema("languages", pair)) for pair in PAIRS[:4]]
    (tmp_path / "train.jsonl").write_text("\n".join([*good, "", line]))
    refused(tmp_path, "train.jsonl, line 6", *words)


def test_bad_json_array(tmp_path):
    (tmp_path / "train.json").write_text('[\n{"en": "a", "de": "b"},\n{"en": }]')
    refused(tmp_path, "train.json, line 3", "no JSON")


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 100_000])
def test_json_that_python_will_not_read(tmp_path, value):
    (tmp_path / "train.jsonl").write_text(f'{{"en": "a", "de": "b"}}\n{{"en": {value}')
    refused(tmp_path, "train.jsonl, line 2", "cannot be read")
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.json").write_text(f"[{value}")
    refused(tmp_path, "train.json", "cannot be read")


def test_bad_parquet(tmp_path):
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 and then nonsense")
    refused(tmp_path, "train.parquet", "not a sound parquet file")
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"], "b": ["y"]}), path)
    refused(tmp_path, "train.parquet, row 1", "a, b")
    pyarrow.parquet.write_table(pyarrow.table({"en": pyarrow.array([], "string")}), path)
    refused(tmp_path, "train.parquet", "no rows")


def test_line_breaks_inside_a_cell_become_spaces(tmp_path):
    rows = [{"en": "a\nb", "de": "c\r\nd"}, {"en": "e", "de": "f"}, {"en": "g", "de": "h"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = load_corpus(tmp_path)
    assert ("a b", "c d") in [*corpus.train, *corpus.validation, *corpus.test]


# The shipped corpus


@pytest.mark.skipif(not GRAMMAR_FOLDER.is_dir(), reason="datasets/grammar_en_de is not there")
def test_grammar_in_both_directions():
    corpus = load_corpus("grammar")
    assert corpus.name == "grammar"
    assert corpus.notes == ()
    assert min(len(corpus.train), len(corpus.validation), len(corpus.test)) > 100
    assert load_corpus("grammar", src="de", tgt="en").test[0] == corpus.test[0][::-1]
    refused("grammar", "fr", src="fr")
