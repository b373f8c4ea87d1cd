"""The code cells of a notebook that somebody else made, whatever is in the file.

Reading has bounds, and whatever cannot be read ends in one reason. Only what grading needs is
looked at: a notebook whose metadata or outputs are damaged is still graded.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 20_000_000
MAX_VALUES = 1_000_000  # an empty JSON list of 3 bytes takes 64 in memory
MAX_CELL_CHARACTERS = 200_000
MAX_CODE_CHARACTERS = 2_000_000  # some seconds of reading as Python


class Unreadable(Exception):
    """Something of a submission cannot be read; the message is the reason in one line."""


@dataclass(frozen=True)
class CodeCell:
    """One code cell: its place in the notebook from 1, its source, and what else names it.

    `grade_id` is nbgrader's name of the cell ("" where there is none), `damage` says why the
    source cannot be used, "" when it can.
    """

    place: int
    source: str
    grade_id: str = ""
    damage: str = ""


def read_code_cells(notebook: bytes) -> tuple[list[CodeCell], tuple[str, ...]]:
    """The code cells of a notebook in order, and what an instructor may want to know about it.

    Raises Unreadable with the reason for anything that is no notebook of format 3 or 4.
    """
    content = _parse(notebook)
    if not isinstance(content, dict) or "nbformat" not in content:
        raise Unreadable("it is JSON, but no notebook: it has no nbformat number")
    version = content["nbformat"]
    if not isinstance(version, int) or isinstance(version, bool) or not 3 <= version <= 4:
        shown = json.dumps(version)[:40]
        raise Unreadable(f"wrong version: notebook format {shown}; save it as format 4")
    notes = () if version == 4 else ("the notebook has the old format 3",)
    cells = list(_code_cells(_cells(content, version)))
    if (total := sum(len(cell.source) for cell in cells)) > MAX_CODE_CHARACTERS:
        raise Unreadable(
            f"its cells hold {total} characters; at most {MAX_CODE_CHARACTERS} are read"
        )
    return cells, notes


def _parse(notebook: bytes) -> Any:
    if len(notebook) > MAX_BYTES:
        size = len(notebook) / 1e6
        raise Unreadable(f"the notebook has {size:.0f} MB; at most {MAX_BYTES // 10**6} are read")
    if not notebook.strip():
        raise Unreadable("the notebook is an empty file")
    if notebook.lstrip()[:1] == b"<":
        raise Unreadable("not JSON: a web page was saved instead of the notebook")
    if sum(map(notebook.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise Unreadable(f"the notebook may hold more than {MAX_VALUES} values: clear its outputs")
    try:
        return json.loads(notebook.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"not UTF-8 text: byte {error.start} is {notebook[error.start]:#04x}"
        ) from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON: {error.msg} in line {error.lineno}") from None
    except RecursionError:
        raise Unreadable("not a notebook: JSON nested too deeply") from None
    except ValueError as error:  # a number of 10,000 digits
        raise Unreadable(f"not a notebook: {str(error)[:100]}") from None


def _cells(content: dict[str, Any], version: int) -> list[Any]:
    """The cells of either format, as the file has them."""
    if version == 4:
        cells = content.get("cells")
    else:
        sheets = content.get("worksheets")
        parts = [sheet.get("cells") for sheet in _dicts(sheets)]
        cells = [cell for part in parts if isinstance(part, list) for cell in part]
    if not isinstance(cells, list):
        raise Unreadable("not a notebook: it has no list of cells")
    return cells


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []


def _code_cells(cells: list[Any]) -> Iterator[CodeCell]:
    for place, cell in enumerate(cells, 1):
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source, damage = _text(cell.get("source", cell.get("input")))  # "input" in format 3
        yield CodeCell(place, source, _grade_id(cell), damage)


def _text(source: Any) -> tuple[str, str]:
    """The source in one text, and why it cannot be used."""
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        return "", f"its source is no text but {type(source).__name__}"
    if len(source) > MAX_CELL_CHARACTERS:
        cut = source[:MAX_CELL_CHARACTERS]
        return cut, f"it has {len(source)} characters; at most {MAX_CELL_CHARACTERS} are read"
    try:
        source.encode()
    except UnicodeEncodeError as error:
        return source, f"character {error.start} is half a character (a lone surrogate)"
    return source, ""


def _grade_id(cell: dict[str, Any]) -> str:
    """nbgrader's name of a cell; "" where the metadata has none or is damaged."""
    metadata = cell.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    found = nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None
    return found if isinstance(found, str) else ""
