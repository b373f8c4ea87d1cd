"""An extension of Jupyter's server: to open a notebook of the course and save it changes no byte.

JupyterLab writes into every notebook which Python has opened it, and git calls it modified. Set-up
puts into .venv what asks for the extension; elsewhere Jupyter does without.
"""

from pathlib import Path
from typing import Any

from shared.exercises.cells import COURSE_ID, METADATA


def _load_jupyter_server_extension(app: Any) -> None:
    app.contents_manager.register_pre_save_hook(as_it_is_stored)


def as_it_is_stored(model: dict[str, Any], path: str, **_: Any) -> None:
    """Put the course's own words about the kernel back before a lesson's notebook is written."""
    if Path(path).name == "lesson.ipynb" and model["type"] == "notebook":
        metadata, cells = model["content"]["metadata"], model["content"].get("cells", [])
        ours = any(COURSE_ID.match(cell.get("id", "")) for cell in cells)
        if ours and metadata.get("kernelspec", {}).get("name") == METADATA["kernelspec"]["name"]:
            metadata.update(METADATA)
