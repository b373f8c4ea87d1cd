"""A folder of parallel text: which of its files are which split, and the pairs in them."""

import difflib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn

from shared.data.files import read_lines, read_rows, shorten
from shared.data.pairs import Pair
from shared.errors import InputError

Empty = Literal["error", "drop"]
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "devel", "newsdev"),
    "test": ("test", "newstest"),
}
TABLES = {
    "jsonl": "JSON lines",
    "ndjson": "JSON lines",
    "json": "JSON lines",
    "parquet": "parquet",
}
FORMATS = ("text", "JSON lines", "parquet")  # the order in which they are preferred


@dataclass
class Source:
    """Files that belong together: two sides of text, or the shards of one table."""

    stem: str
    format: str
    files: dict[str, Path] = field(default_factory=dict)  # side of text, or name of a shard


class PairReader:
    """Reads the pairs of sources, one language to another, and keeps count of what it dropped."""

    def __init__(self, src: str, tgt: str, empty: Empty) -> None:
        self.src, self.tgt, self.empty = src, tgt, empty
        self.dropped = 0

    def read(self, source: Source) -> list[Pair]:
        """All pairs of a source in the order of its files."""
        if source.format == "text":
            return self._read_text(source)
        rows = chain.from_iterable(read_rows(path) for path in source.files.values())
        return self.from_rows(rows, name=", ".join(path.name for path in source.files.values()))

    def _read_text(self, source: Source) -> list[Pair]:
        src_path, tgt_path = source.files[self.src], source.files[self.tgt]
        src, tgt = read_lines(src_path), read_lines(tgt_path)
        if len(src) != len(tgt):
            longer = src_path if len(src) > len(tgt) else tgt_path
            first = min(len(src), len(tgt)) + 1
            raise InputError(
                f"{src_path} has {len(src)} lines and {tgt_path.name} has {len(tgt)}: "
                f"line {first} of {longer.name} has no partner; line n of one must translate "
                "line n of the other"
            )
        pairs = [Pair(a.strip(), b.strip()) for a, b in zip(src, tgt, strict=True)]
        full = [pair for pair in pairs if all(pair)]
        if len(full) < len(pairs):
            empty = [
                _count_lines(path, [n for n, pair in enumerate(pairs, 1) if not pair[side]])
                for side, path in enumerate((src_path, tgt_path))
            ]
            self._drop(len(pairs) - len(full), "; ".join(filter(None, empty)))
        return full

    def from_rows(self, rows: Iterable[tuple[str, Mapping[str, Any]]], name: str) -> list[Pair]:
        """The pairs of table rows; each row comes with its place, for error messages."""
        full: list[Pair] = []
        empty: list[str] = []
        for place, row in rows:
            pair = self._pair_of_row(row, place)
            if all(pair):
                full.append(pair)
            else:
                empty.append(place)
        if empty:
            self._drop(len(empty), f"{name}: {len(empty)} with an empty side (first: {empty[0]})")
        return full

    def _pair_of_row(self, row: Mapping[str, Any], place: str) -> Pair:
        inner = row.get("translation", row)
        for columns in ((self.src, self.tgt), ("src", "tgt"), ("source", "target")):
            if isinstance(inner, Mapping) and all(column in inner for column in columns):
                return Pair(*(_sentence(inner[c], c, place) for c in columns))
        seen = ", ".join(inner) if isinstance(inner, Mapping) else shorten(repr(inner))
        raise InputError(
            f"{place}: found the columns {seen or '(none)'}; expected {self.src!r} and "
            f"{self.tgt!r}, or 'translation' with both inside, or 'src' and 'tgt'"
        )

    def _drop(self, number: int, seen: str) -> None:
        if self.empty == "error":
            raise InputError(
                f"{seen}: complete them, or leave these pairs out with "
                "load_corpus(..., empty='drop'), in a script --empty drop"
            )
        self.dropped += number


def _count_lines(path: Path, numbers: list[int], show: int = 5) -> str:
    if not numbers:
        return ""
    listed = ", ".join(map(str, numbers[:show])) + (", ..." if len(numbers) > show else "")
    lines = "line is" if len(numbers) == 1 else "lines are"
    return f"{path}: {len(numbers)} {lines} empty ({listed})"


def _sentence(value: Any, column: str, place: str) -> str:
    if value is None:  # how a table writes a missing sentence
        return ""
    if not isinstance(value, str):
        raise InputError(
            f"{place}: column {column!r} holds {shorten(repr(value))}; expected a sentence"
        )
    if "\0" in value:
        raise InputError(f"{place}: column {column!r} holds a NUL character; expected a sentence")
    return " ".join(value.splitlines()).strip()


def find_splits(folder: Path, src: str, tgt: str) -> tuple[dict[str, Source], list[str]]:
    """Which sources of a folder are train, validation and test, and notes on what was left out.

    A split is told by a word in the file name ("test_2016_flickr.en.gz" is test). A folder with
    one source that bears no such word is all training data. Of several sources for a split the
    shortest name is taken, so "test" goes before "test_2016_flickr".

    Raises:
        InputError: no folder, no training data, or a side of text without the other.
    """
    sources = _sources(folder, src, tgt)
    splits: dict[str, Source] = {}
    notes: list[str] = []
    for split in SPLIT_WORDS:
        found = [s for s in sources if split_of(s.stem) == split]
        if split == "train" and not found and len(sources) == 1:
            found = [s for s in sources if split_of(s.stem) is None]
        if found:
            found.sort(key=lambda s: (FORMATS.index(s.format), len(s.stem), s.stem))
            splits[split] = found[0]
            _check_sides(folder, found[0], src, tgt)
        if len(found) > 1:
            names = ", ".join(f"{s.stem} ({s.format})" for s in found[1:])
            notes.append(f"{split} is {found[0].stem} ({found[0].format}); not read: {names}")
    if "train" not in splits:
        raise InputError(_nothing_found(folder, src, tgt))
    return splits, notes


def _sources(folder: Path, src: str, tgt: str) -> list[Source]:
    sources: dict[tuple[str, str], Source] = {}
    for path in _files(folder):
        name = path.name.removesuffix(".gz")
        stem, _, ending = name.rpartition(".")
        if ending in (src, tgt):
            kind, part = "text", ending
        elif ending in TABLES:
            kind, part = TABLES[ending], name
            stem = re.sub(r"-\d+-of-\d+$", "", stem)  # the shards of one table
            if ending == "json" and split_of(stem) is None:
                continue  # somebody's settings
        else:
            continue
        source = sources.setdefault((stem, kind), Source(stem, kind))
        source.files.setdefault(part, path)  # "train.en" sorts before "train.en.gz" and wins
    return list(sources.values())


def _files(folder: Path) -> list[Path]:
    try:
        files = [path for path in folder.iterdir() if path.is_file()]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror or error}") from error
    return sorted(path for path in files if not path.name.startswith("."))


def split_of(stem: str) -> str | None:
    """The split that a word in a file name tells: "newstest2016" is test."""
    for word in re.findall(r"[a-z]+", stem.lower()):
        for split, words in SPLIT_WORDS.items():
            if word in words:
                return split
    return None


def _check_sides(folder: Path, source: Source, src: str, tgt: str) -> None:
    if source.format != "text" or len(source.files) == 2:
        return
    there = next(iter(source.files.values()))
    missing = tgt if src in source.files else src
    raise InputError(
        f"{folder} has {there.name} but no {source.stem}.{missing} (plain or .gz): "
        "both sides are needed, line by line"
    )


def _nothing_found(folder: Path, src: str, tgt: str) -> str:
    names = [path.name for path in sorted(folder.iterdir())]
    seen = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"{folder} has no training data; it holds {seen or 'nothing'}; expected "
        f"train.{src} and train.{tgt} (plain or .gz), train.jsonl or train.parquet"
    )


def refuse(
    dataset: str, names: Sequence[str], other_names: Sequence[str], purpose: str
) -> NoReturn:
    """Say why `dataset` is neither one of the names nor a folder, and what would do."""
    offer = f"one of {', '.join(names)}"
    path = Path(dataset)
    if dataset in other_names:
        raise InputError(f"dataset {dataset!r} is not for {purpose}; take {offer}, or a folder")
    if dataset and path.exists():
        raise InputError(f"dataset {dataset!r} is a file; give its folder: {str(path.parent)!r}")
    close = difflib.get_close_matches(dataset, names, n=1)
    raise InputError(
        f"dataset {dataset!r} is neither a folder nor {offer}"
        + (f"; did you mean {close[0]!r}?" if close else "")
    )


def announce(name: str, notes: Sequence[str]) -> None:
    """Say notes on stderr, or wherever the caller's logging goes; of several ranks rank 0 does."""
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            logging.getLogger(__name__).warning("%s: %s", name, note)
