"""The code of a notebook or a module, as text: nothing here runs it."""

import json
import re
from pathlib import Path
from typing import Any

from shared.errors import InputError

EDITION = ".edition.json"  # in a class's: its last lesson, its files, where earlier answers are
COURSE_ID = re.compile(r"^c-[0-9a-f]{8}(-\d+)?$")  # of a cell; one that was added has another

# As JupyterLab writes it; the version is that of the Python whose outputs are stored.
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {
        "codemirror_mode": {"name": "ipython", "version": 3},
        "file_extension": ".py",
        "mimetype": "text/x-python",
        "name": "python",
        "nbconvert_exporter": "python",
        "pygments_lexer": "ipython3",
        "version": "3.11.7",
    },
}


def code_of(path: Path) -> str:
    """Return the code of a module, or of all code cells of a notebook, as Python reads it."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    return "\n".join(re.sub(r"\A%%ranks.*", "", source) for source, _ in code_cells(path))


def code_cells(path: Path) -> list[tuple[str, list[str]]]:
    """Return source and tags of each code cell.

    By json alone: nbformat takes longer to import than torch, in every rank that runs `--mine`.
    """
    cells = [cell for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code"]
    return [(source_of(cell), cell["metadata"].get("tags", [])) for cell in cells]


def read_notebook(path: Path) -> dict[str, Any]:
    """Return what a notebook's file holds; InputError where it is missing or is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no notebook at {path}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a notebook: {error}") from None
    return parse(text, path)


def source_of(cell: dict[str, Any]) -> str:
    """Return a cell's text, which a notebook may hold line by line."""
    return "".join(cell["source"])


def parse(text: str, place: object) -> dict[str, Any]:
    """Return what a notebook's JSON holds; InputError where it has no cells as Jupyter has them."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} cannot be read as a notebook: {error}") from None
    try:
        for cell in content["cells"]:
            cell["cell_type"], source_of(cell), cell["metadata"].get("tags", [])
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{place} cannot be read as a notebook: it has no cells as Jupyter (nbformat 4) writes"
            " them"
        ) from None
    return content
