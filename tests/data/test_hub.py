"""Data sets of the Hugging Face hub: over HTTP, out of the cache, and with no network at all."""

import json
import os
import socket
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import datasets.config
import pyarrow
import pyarrow.parquet
import pytest

from shared.data import hub
from shared.data.corpora import load_corpus
from shared.data.text import load_text
from shared.errors import InputError

SPLITS = {
    split: [{"en": f"{split} sentence {n}", "de": f"Satz {n} für {split}"} for n in range(number)]
    for split, number in (("train", 20), ("validation", 5), ("test", 5))
}
# Lays the process's answer out as one line, as the scripts do.
LOAD = """
import sys
from shared.data import hub
from shared.data.corpora import load_corpus
hub.PROBE_SECONDS = 2
try:
    corpus = load_corpus("multi30k")
except ValueError as error:
    sys.exit(f"error: {error}")
print(len(corpus.train), len(corpus.validation), len(corpus.test), corpus.test[4].tgt)
"""


def serve(root: Path):
    spec = spec_from_file_location("stand_in_hub", Path(__file__).with_name("stand_in_hub.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.serve(root)


def write_parquet(folder: Path, config: str, splits: dict[str, list[dict]]) -> hub.HubDataset:
    """A repository with parquet files and a configuration, as wmt16 and wikitext have them."""
    (folder / config).mkdir(parents=True)
    files = ""
    for split, rows in splits.items():
        path = folder / config / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        files += f"  - split: {split}\n    path: {config}/{split}-*\n"
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    )
    return hub.HubDataset(str(folder), config)


def write_repository(root: Path, name: str) -> hub.HubDataset:
    """Files named and filled as the repository on the hub is."""
    source = hub.HUB[name]
    folder = root / source.path
    if name == "wmt16":
        rows = {split: [{"translation": row} for row in rows] for split, rows in SPLITS.items()}
        return write_parquet(folder, "de-en", rows)
    if name == "wikitext-2":
        rows = {s: [{"text": ""}, {"text": f" = {s} = \n"}, {"text": " x . \n"}] for s in SPLITS}
        return write_parquet(folder, "wikitext-2-raw-v1", rows)
    folder.mkdir(parents=True)
    for split, file in (("train", "train"), ("validation", "val"), ("test", "test")):
        lines = [json.dumps(row, ensure_ascii=False) for row in SPLITS[split]]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    return hub.HubDataset(str(folder))


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """Every data set of HUB as local files of the same schema."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in hub.HUB:
        source = write_repository(tmp_path / "repositories", name)
        assert source.config == hub.HUB[name].config
        monkeypatch.setitem(hub.HUB, name, source)


@pytest.mark.parametrize("name", ["multi30k", "wmt16"])
def test_translation_schemas_on_local_files(local_hub, name):
    corpus = load_corpus(name)
    for split, rows in SPLITS.items():
        assert getattr(corpus, split) == [(row["en"], row["de"]) for row in rows]
    reverse = load_corpus(name, src="de", tgt="en", max_train=4)
    assert reverse.train == [(row["de"], row["en"]) for row in SPLITS["train"][:4]]
    with pytest.raises(InputError, match=f"{name} train, row 1: .* 'fr'"):
        load_corpus(name, src="fr")


def test_wikitext_schema_on_local_files(local_hub):
    corpus = load_text("wikitext-2")
    assert corpus.train == " = train = \n x . \n"
    assert corpus.test == " = test = \n x . \n"


def test_empty_sides_of_the_hubs_data_are_dropped_and_counted(local_hub):
    file = Path(hub.HUB["multi30k"].path) / "train.jsonl"
    file.write_text(file.read_text() + '\n{"en": " ", "de": "leer"}')
    corpus = load_corpus("multi30k")
    assert len(corpus.train) == 20
    assert corpus.notes == ("dropped 1 pairs with an empty side",)


def test_a_split_that_is_missing(local_hub):
    (Path(hub.HUB["multi30k"].path) / "test.jsonl").unlink()
    with pytest.raises(InputError, match=r"\['test'\].*--dataset DIR.*--dataset grammar"):
        load_corpus("multi30k")


def test_text_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "hub_answers", lambda seconds: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(InputError, match=r"cannot reach .*--dataset DIR.*--dataset stdlib"):
        load_text("wikitext-2")


# Over HTTP: each case is a process of its own, since the address of the hub is read on import


def load(home: Path, address: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(home)}
    command = [sys.executable, "-c", LOAD]  # a silent hub must not hold it for ever: timeout
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def silent_hub():
    """A hub that takes connections and never says a word: the worst kind of network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_from_the_hub_and_then_from_the_cache(tmp_path, silent_hub):
    write_repository(tmp_path / "hub", "multi30k")
    with serve(tmp_path / "hub") as address:
        from_hub = load(tmp_path / "home", address)
    from_cache = load(tmp_path / "home", silent_hub)
    for done in (from_hub, from_cache):
        assert done.returncode == 0, done.stderr
        assert done.stdout == "20 5 5 Satz 4 für test\n"


def test_no_network_is_one_line_with_two_ways_on(tmp_path, silent_hub):
    done = load(tmp_path, silent_hub)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    for words in ("cannot reach", "bentrevett/multi30k", "--dataset DIR", "--dataset grammar"):
        assert words in done.stderr


def test_a_hub_without_the_data_set_is_one_line(tmp_path):
    with serve(tmp_path) as address:
        done = load(tmp_path / "home", address)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert "loading bentrevett/multi30k failed" in done.stderr


def test_whether_the_hub_answers(monkeypatch, tmp_path, silent_hub):
    from huggingface_hub import constants

    with serve(tmp_path) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert hub.hub_answers(5)
    monkeypatch.setattr(constants, "ENDPOINT", silent_hub)
    assert not hub.hub_answers(0.3)  # and comes back at all
