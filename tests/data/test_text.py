"""Text for language models: Python's sources, and folders of one's own."""

import gzip
import hashlib
import os
import subprocess
import sys

import pytest

from shared.data.text import load_text
from shared.errors import InputError


@pytest.fixture(scope="module")
def stdlib():
    return load_text("stdlib")


def refused(folder, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        load_text(folder)
    message = str(caught.value)
    assert "\n" not in message, message
    for word in words:
        assert word in message, (word, message)


def test_stdlib_is_source_text_of_a_useful_size(stdlib):
    assert len(stdlib.train) > 3_000_000
    for part in (stdlib.validation, stdlib.test):
        assert 0.01 < len(part) / len(stdlib.train) < 0.15
    whole = stdlib.train + stdlib.validation + stdlib.test
    assert "class OrderedDict" in whole
    assert "class JSONDecoder" in whole
    for noise in (
        "class IdleConf",
        "class TurtleScreen",
        "build_time_vars",
        "unittest.main()\n\n\n",
    ):
        assert noise not in whole, noise
    assert "." in stdlib.name
    assert str(sys.version_info[1]) in stdlib.name


def test_stdlib_splits_share_no_file(stdlib):
    heads = [
        {part[i : i + 300] for i in range(0, len(part), 300)}
        for part in (stdlib.train, stdlib.validation, stdlib.test)
    ]
    assert not heads[1] & heads[2]
    assert stdlib.validation[:2000] not in stdlib.train
    assert stdlib.test[:2000] not in stdlib.train


def test_stdlib_is_the_same_in_another_process_and_folder(stdlib, tmp_path):
    code = (
        "import hashlib; from shared.data.text import load_text; t = load_text('stdlib'); "
        "print(hashlib.sha256((t.train + t.validation + t.test).encode()).hexdigest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    whole = stdlib.train + stdlib.validation + stdlib.test
    assert done.stdout.strip() == hashlib.sha256(whole.encode()).hexdigest()


def test_named_splits(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"one\r\ntwo")
    (tmp_path / "dev.txt.gz").write_bytes(gzip.compress(b"three\n"))
    (tmp_path / "test.md").write_text("four\n")
    (tmp_path / "README.md").write_text("about\n")
    corpus = load_text(tmp_path)
    assert (corpus.train, corpus.validation, corpus.test) == ("one\ntwo\n", "three\n", "four\n")
    assert corpus.notes == ("not read: README.md",)


def test_missing_splits_are_cut_from_the_end_of_train(tmp_path):
    (tmp_path / "train.txt").write_text("".join(f"{n}\n" for n in range(100)))
    (tmp_path / "test.txt").write_text("test\n")
    corpus = load_text(tmp_path)
    assert corpus.test == "test\n"
    assert corpus.train + corpus.validation == (tmp_path / "train.txt").read_text()
    assert corpus.validation == "95\n96\n97\n98\n99\n"
    assert "validation" in corpus.notes[0]


def test_one_file(tmp_path):
    (tmp_path / "book.txt").write_text("".join(f"{n}\n" for n in range(40)))
    corpus = load_text(tmp_path)
    assert corpus.train + corpus.validation + corpus.test == (tmp_path / "book.txt").read_text()
    assert len(corpus.notes) == 2


def test_many_files_are_split_by_file(tmp_path):
    for n in range(60):
        folder = tmp_path / f"part{n % 7}"
        folder.mkdir(exist_ok=True)
        (folder / f"test_{n}.py").write_text(f"# {n}\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden\n")
    corpus = load_text(tmp_path)
    parts = [part.splitlines() for part in (corpus.train, corpus.validation, corpus.test)]
    assert list(map(len, parts)) == [54, 3, 3]
    assert sorted(line for part in parts for line in part) == sorted(f"# {n}" for n in range(60))
    assert corpus == load_text(tmp_path)


def test_bad_folders_and_names(tmp_path):
    refused(tmp_path, "holds nothing", ".txt, .md, .py")
    (tmp_path / "x.csv").write_text("a")
    refused(tmp_path, "x.csv")
    refused("stdlip", "did you mean 'stdlib'")
    refused("grammar", "not for a language model")
    (tmp_path / "one.txt").write_text("one line\n")
    refused(tmp_path, "1 lines of text")
    (tmp_path / "one.txt").write_bytes(b"a\n\xff\n")
    refused(tmp_path, "one.txt, line 2", "0xff")


@pytest.mark.parametrize("others", [["book"], ["a", "b", "c", "d", "e"]])
def test_a_test_that_has_its_name_is_not_trained_on(tmp_path, others):
    for name in others:
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 30)
    (tmp_path / "test.txt").write_text("SECRET\n" * 3)
    corpus = load_text(tmp_path)
    assert "SECRET" in corpus.test
    assert "SECRET" not in corpus.train + corpus.validation


def test_a_folder_of_tests_alone_has_nothing_to_train_on(tmp_path):
    (tmp_path / "test.txt").write_text("SECRET\n" * 3)
    refused(tmp_path, "has no training text, only test.txt")
