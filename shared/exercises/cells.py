"""The code of a notebook or a module, as text: nothing here runs it."""

import json
from pathlib import Path

from shared.errors import InputError

EDITION = ".edition.json"  # in a class's: its last lesson, its files, where earlier answers are


def code_of(path: Path) -> str:
    """Return the code of a module, or of all code cells of a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    return "\n".join(source for source, _ in code_cells(path))


def code_cells(path: Path) -> list[tuple[str, list[str]]]:
    """Return source and tags of each code cell.

    By json alone: nbformat takes longer to import than torch, in every rank that runs `--mine`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"no notebook at {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as a notebook: {error}") from None
    try:
        cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
        return [("".join(each["source"]), each["metadata"].get("tags", [])) for each in cells]
    except (AttributeError, KeyError, TypeError):
        raise InputError(
            f"{path} cannot be read as a notebook: it has no cells as Jupyter (nbformat 4) writes"
            " them"
        ) from None
