"""Parallel text by name or from a folder: the corpus a translator learns from."""

import random
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from shared.data.folder import Empty, PairReader, announce, find_splits, refuse
from shared.data.hub import load_from_hub
from shared.data.pairs import Pair
from shared.errors import InputError

GRAMMAR_FOLDER = Path(__file__).resolve().parents[2] / "datasets" / "grammar_en_de"
WITHOUT_HUB = (
    "two ways on: your own files with --dataset DIR (train.en and train.de), "
    "or the corpus that ships with the course with --dataset grammar"
)
HUB_NAMES = ("multi30k", "wmt16")
HELD_OUT_SHARE, HELD_OUT_MOST = 0.05, 1000


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs to train on, to choose by and to report on.

    `notes` says what the reader did that the user should know: a split that it made, pairs that
    it dropped, files that it left aside. load_corpus says them on stderr too.
    """

    name: str
    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    src_lang: str = "en"
    tgt_lang: str = "de"
    notes: tuple[str, ...] = ()


def load_corpus(
    dataset: str | Path,
    src: str = "en",
    tgt: str = "de",
    empty: Empty = "error",
    max_train: int | None = None,
) -> ParallelCorpus:
    """Load a corpus by name (grammar, multi30k, wmt16) or from a folder of the user's own files.

    Args:
        dataset: a name, or a folder with train, validation and test as text (train.en and
            train.de, plain or .gz), JSON lines or parquet. Splits that are missing are cut from
            train, always the same pairs.
        src, tgt: the languages: endings of the text files, columns of the tables.
        empty: what to do with a pair that has an empty side: "error" or "drop". The hub's data
            sets are known to hold some; there they are always dropped.
        max_train: use the first so many training pairs (wmt16 has 4.5 million).

    Raises:
        InputError: what was given cannot be used; the message says what, where and what would do.
    """
    _check_arguments(src, tgt, empty, max_train)
    dataset = str(dataset)
    if dataset in HUB_NAMES:
        corpus = _load_hub(dataset, src, tgt, max_train)
    elif dataset == "grammar":
        corpus = _load_grammar(dataset, src, tgt)
    elif dataset and Path(dataset).is_dir():
        corpus = _load_folder(dataset, src, tgt, empty)
    else:
        refuse(dataset, ["grammar", *HUB_NAMES], ["stdlib", "wikitext-2"], "translation")
    if max_train is not None:
        corpus = replace(corpus, train=corpus.train[:max_train])
    for split in ("train", "validation", "test"):
        if not getattr(corpus, split):
            raise InputError(f"dataset {dataset!r}: no pairs in {split}")
    announce(corpus.name, corpus.notes)
    return corpus


def _check_arguments(src: str, tgt: str, empty: str, max_train: int | None) -> None:
    if src == tgt:
        raise InputError(f"source and target language are both {src!r}; they must differ")
    if empty not in ("error", "drop"):
        raise InputError(f"empty is {empty!r}; it must be 'error' or 'drop'")
    if max_train is not None and max_train < 1:
        raise InputError(f"max_train is {max_train}; it must be at least 1")


def _load_grammar(dataset: str, src: str, tgt: str) -> ParallelCorpus:
    if {src, tgt} != {"en", "de"}:
        raise InputError(f"dataset 'grammar' has the languages en and de, not {src} and {tgt}")
    if not GRAMMAR_FOLDER.is_dir():
        raise InputError(
            f"{GRAMMAR_FOLDER} is missing; it comes with the course: git checkout -- datasets"
        )
    return replace(_load_folder(str(GRAMMAR_FOLDER), src, tgt, empty="error"), name=dataset)


def _load_hub(dataset: str, src: str, tgt: str, max_train: int | None) -> ParallelCorpus:
    splits = load_from_hub(dataset, otherwise=WITHOUT_HUB)
    reader = PairReader(src, tgt, empty="drop")

    def pairs(split: str, most: int | None = None) -> list[Pair]:
        rows = islice(splits[split], most)
        places = ((f"{dataset} {split}, row {n}", row) for n, row in enumerate(rows, start=1))
        return reader.from_rows(places, name=f"{dataset} {split}")

    train, validation, test = pairs("train", max_train), pairs("validation"), pairs("test")
    notes = tuple(_dropped(reader))
    return ParallelCorpus(dataset, train, validation, test, src, tgt, notes)


def _load_folder(dataset: str, src: str, tgt: str, empty: Empty) -> ParallelCorpus:
    folder = Path(dataset)
    sources, notes = find_splits(folder, src, tgt)
    reader = PairReader(src, tgt, empty)
    pairs = {split: reader.read(source) for split, source in sources.items()}
    notes += _dropped(reader)
    for split in ("test", "validation"):
        if split not in pairs:
            pairs["train"], pairs[split] = hold_out(pairs["train"], dataset)
            notes.append(
                f"{folder} has no {split} split: {len(pairs[split])} pairs were taken from train "
                f"({len(pairs['train'])} are left)"
            )
    return ParallelCorpus(
        name=folder.resolve().name,
        train=pairs["train"],
        validation=pairs["validation"],
        test=pairs["test"],
        src_lang=src,
        tgt_lang=tgt,
        notes=tuple(notes),
    )


def _dropped(reader: PairReader) -> list[str]:
    return [f"dropped {reader.dropped} pairs with an empty side"] if reader.dropped else []


def hold_out(pairs: list[Pair], dataset: str) -> tuple[list[Pair], list[Pair]]:
    """Cut 5 % of the pairs off, at most 1,000: (what is left, what was cut), both in order.

    The same pairs give the same cut. All pairs with the same source sentence go to the same
    side: a sentence seen in training would make the held-out score look better than it is.
    """
    sentences = list(dict.fromkeys(pair.src for pair in pairs))
    if len(sentences) < 2:
        raise InputError(
            f"{dataset} has {len(sentences)} different source sentences in train, too few to cut "
            "validation and test from; add pairs, or files for these splits"
        )
    random.Random(0).shuffle(sentences)
    wanted = max(1, min(HELD_OUT_MOST, round(HELD_OUT_SHARE * len(sentences))))
    chosen = set(sentences[:wanted])
    left = [pair for pair in pairs if pair.src not in chosen]
    return left, [pair for pair in pairs if pair.src in chosen]
