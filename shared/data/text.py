"""Text in one piece, for language models: Python's own sources, wikitext-2, or a folder."""

import hashlib
import sys
import sysconfig
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.data.files import read_lines
from shared.data.folder import announce, refuse, split_of
from shared.data.hub import load_from_hub
from shared.errors import InputError

# Left out: tests and tools, generated tables, and what distributions patch or package apart, so
# that every machine with the same Python has the same text.
NOT_STDLIB = {
    *("test", "idlelib", "turtledemo", "turtle", "tkinter", "lib2to3", "ensurepip", "venv"),
    *("distutils", "pydoc_data", "encodings", "sysconfig", "site", "antigravity", "this", "msilib"),
}
SUFFIXES = (".txt", ".md", ".py")
WITHOUT_HUB = (
    "two ways on: your own text with --dataset DIR (.txt, .md or .py files), "
    "or Python's own sources, which every machine has, with --dataset stdlib"
)


@dataclass(frozen=True)
class TextCorpus:
    """Text to train on, to choose by and to report on; `notes` as in ParallelCorpus."""

    name: str
    train: str
    validation: str
    test: str
    notes: tuple[str, ...] = ()


def load_text(dataset: str | Path) -> TextCorpus:
    """Load text by name (stdlib, wikitext-2) or from a folder of .txt, .md and .py files.

    Text files with "train", "validation" (val, dev) and "test" in their names are these splits;
    without "train" those with none of the words are it. Where no name has one, a twentieth of the
    files is held out for each of validation and test, chosen by a hash of the name. What is then
    still missing is cut off the end of the training text.

    Raises:
        InputError: what was given cannot be used; the message says what, where and what would do.
    """
    dataset = str(dataset)
    if dataset == "stdlib":
        return _load_stdlib()
    if dataset == "wikitext-2":
        return _load_wikitext(dataset)
    if dataset and Path(dataset).is_dir():
        return _load_folder(Path(dataset))
    names, pairs = ["stdlib", "wikitext-2"], ["grammar", "multi30k", "wmt16"]
    refuse(dataset, names, pairs, "a language model")


def _load_wikitext(dataset: str) -> TextCorpus:
    splits = load_from_hub(dataset, otherwise=WITHOUT_HUB)
    train, validation, test = (
        "".join(_ended(row["text"]) for row in splits[split])
        for split in ("train", "validation", "test")
    )
    return TextCorpus(dataset, train, validation, test)


def _load_stdlib() -> TextCorpus:
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if _in_stdlib(path.relative_to(root).parts)
    ]
    if len(names) < 3:
        raise InputError(f"{root} holds no sources of Python's standard library; use a folder")
    version = ".".join(map(str, sys.version_info[:3]))
    splits, note = _by_hash(names)
    train, validation, test = (
        "".join(_ended(_read_source(root / name)) for name in splits[split])
        for split in ("train", "validation", "test")
    )
    return TextCorpus(f"stdlib of Python {version}", train, validation, test, (note,))


def _in_stdlib(parts: Sequence[str]) -> bool:
    top = parts[0].removesuffix(".py")
    if top not in sys.stdlib_module_names or top in NOT_STDLIB or top.startswith("_sysconfig"):
        return False
    return not {"test", "tests", "site-packages", "__pycache__"} & set(parts)


def _read_source(path: Path) -> str:
    """A source file in the encoding that it declares; one that nobody can read counts as empty."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _load_folder(folder: Path) -> TextCorpus:
    names = _text_files(folder)
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for name in names:
        split = None if name.removesuffix(".gz").endswith(".py") else split_of(Path(name).name)
        if split:
            splits[split].append(name)
    used = {name for files in splits.values() for name in files}
    rest = [name for name in names if name not in used]
    if splits["train"]:
        notes = [f"not read: {name}" for name in rest]
    elif used:  # a test that somebody has named must not be trained on
        splits["train"], notes = rest, []
        if not rest:
            raise InputError(f"{folder} has no training text, only {', '.join(sorted(used)[:8])}")
    elif len(names) >= 3:
        splits, note = _by_hash(names)
        notes = [note]
    else:
        splits, notes = {"train": names, "validation": [], "test": []}, []
    parts = {
        split: "".join(_read_text(folder / name) for name in files)
        for split, files in splits.items()
    }
    for split in ("test", "validation"):
        if not parts[split]:
            parts["train"], parts[split] = _cut(parts["train"], folder)
            notes.append(f"no {split} split: the last lines of train are taken for it")
    name = folder.resolve().name
    announce(name, notes)
    return TextCorpus(name, parts["train"], parts["validation"], parts["test"], tuple(notes))


def _text_files(folder: Path) -> list[str]:
    found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    names = sorted(
        path.as_posix()
        for path in found
        if path.name.removesuffix(".gz").endswith(SUFFIXES)
        and not any(part.startswith(".") for part in path.parts)
    )
    if names:
        return names
    seen = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise InputError(
        f"{folder} has no text; it holds {seen}; expected files ending in "
        f"{', '.join(SUFFIXES)}, plain or .gz"
    )


def _by_hash(names: Sequence[str]) -> tuple[dict[str, list[str]], str]:
    """Names of files shared out to splits: by a hash, so that neighbours do not all go together."""
    held = max(1, len(names) // 20)
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    splits = {
        "validation": order[:held],
        "test": order[held : 2 * held],
        "train": order[2 * held :],
    }
    note = f"{len(names)} files: {held} each for validation and test, by a hash of their names"
    return {split: sorted(files) for split, files in splits.items()}, note


def _cut(text: str, folder: Path) -> tuple[str, str]:
    lines = text.splitlines(keepends=True)
    if len(lines) < 2:
        raise InputError(f"{folder} holds {len(lines)} lines of text to train on, too few to cut")
    held = max(1, len(lines) // 20)
    return "".join(lines[:-held]), "".join(lines[-held:])


def _read_text(path: Path) -> str:
    return "".join(line + "\n" for line in read_lines(path))


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
