"""Data files as users have them: text, JSON lines and parquet, plain or gzip.

Whatever is wrong with a file ends in an InputError that names the file and the line, because
"invalid start byte" without a line number does not help anyone with a million lines.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.errors import InputError

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_lines(path: Path) -> list[str]:
    r"""Read a UTF-8 file, plain or .gz, and return its lines without their ends.

    A line ends at "\n" alone, with the "\r" before it if there is one. str.splitlines() would
    also break at U+0085, U+2028 and others, which occur inside sentences: from there on the two
    sides of a parallel corpus would be off by one line, and nobody would notice.
    """
    lines: list[str] = []
    try:
        with _open_binary(path) as file:
            for number, raw in enumerate(file, start=1):
                lines.append(_decode(raw, path, number))
    except (EOFError, zlib.error) as error:
        raise InputError(
            f"{path}: the .gz file is truncated or damaged after line {len(lines)}: "
            "copy or download it again"
        ) from error
    except gzip.BadGzipFile as error:
        raise InputError(
            f"{path}: not a sound .gz file ({error}): copy it again, or rename it if it is plain"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not lines:
        raise InputError(f"{path}: the file is empty; it should hold one sentence a line")
    if len(lines) == 1 and "\r" in lines[0]:
        how = r"tr '\r' '\n' < FILE makes them UNIX's"
        raise InputError(rf"{path}: its lines end in \r alone, as an old Mac's: {how}")
    return lines


def _open_binary(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _decode(raw: bytes, path: Path, number: int) -> str:
    if number == 1:
        if raw.startswith(UTF16_MARKS):
            raise InputError(
                f"{path}: the file is UTF-16; save it as UTF-8: iconv -f UTF-16 -t UTF-8 FILE"
            )
        raw = raw.removeprefix(codecs.BOM_UTF8)
    if b"\0" in raw:
        raise InputError(
            f"{path}, line {number}: holds a NUL byte, so this is no UTF-8 text "
            "(binary, or UTF-16 without a mark?); save it as UTF-8"
        )
    try:
        return raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, line {number}: byte {error.start + 1} of the line is "
            f"0x{raw[error.start]:02x}, which is not UTF-8 here; if the file is Latin-1: "
            "iconv -f ISO-8859-1 -t UTF-8 FILE"
        ) from error


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a JSON-lines, JSON or parquet file; place is "FILE, line N"."""
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = read_lines(path)
    if lines[0].lstrip().startswith("["):
        yield from _json_array_rows(path, lines)
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue  # a blank line between JSON objects holds no pair, so none is lost
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                f"{path}, line {number}: no JSON ({error.msg} at column {error.colno}); "
                f'each line should be an object such as {{"en": "...", "de": "..."}}; '
                f"seen: {shorten(line)}"
            ) from error
        except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
            raise InputError(f"{path}, line {number}: cannot be read ({error})") from error
        yield f"{path}, line {number}", _as_object(row, f"{path}, line {number}")


def _json_array_rows(path: Path, lines: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        rows = json.loads("\n".join(lines))
    except json.JSONDecodeError as error:
        raise InputError(
            f"{path}, line {error.lineno}: no JSON ({error.msg} at column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, item {number}", _as_object(row, f"{path}, item {number}")


def _as_object(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise InputError(
            f'{place}: expected an object such as {{"en": "...", "de": "..."}}, '
            f"seen: {shorten(json.dumps(row, ensure_ascii=False))}"
        )
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow  # slow to import, and only parquet needs it
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(
            f"{path}: not a sound parquet file ({shorten(str(error))}): copy it again"
        ) from error
    if number == 0:
        raise InputError(f"{path}: the table has no rows; it should hold one pair a row")


def shorten(text: str, limit: int = 80) -> str:
    """One line of at most `limit` characters, for error messages."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
