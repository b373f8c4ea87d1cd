"""Jupyter's server leaves a notebook of the course as git has it when it is opened and saved."""

import copy
import json
import shutil
from importlib import import_module
from types import SimpleNamespace

import pytest
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import get_kernel_dict
from jupyter_server.services.contents.filemanager import FileContentsManager

from shared.cli.command import ROOT
from shared.cli.saving import as_it_is_stored
from shared.cli.setup import enable_saving

NOTEBOOK = ROOT / "lessons" / "lesson22_ecosystem" / "lesson.ipynb"


def test_opening_and_saving_a_notebook_changes_no_byte(tmp_path):
    enable_saving(tmp_path)
    (asked,) = (tmp_path / "etc" / "jupyter" / "jupyter_server_config.d").iterdir()
    (name,) = json.loads(asked.read_text())["ServerApp"]["jpserver_extensions"]
    manager = FileContentsManager(root_dir=str(tmp_path))
    import_module(name)._load_jupyter_server_extension(SimpleNamespace(contents_manager=manager))
    shutil.copy(NOTEBOOK, tmp_path)
    model = manager.get("lesson.ipynb")
    metadata = model["content"]["metadata"]
    assert metadata["kernelspec"]["display_name"] == get_kernel_dict()["display_name"]
    assert metadata["language_info"].keys() == IPythonKernel.language_info.keys()
    metadata["language_info"] = {**IPythonKernel.language_info, "version": "3.99.9"}
    manager.save(model, "lesson.ipynb")
    assert (tmp_path / "lesson.ipynb").read_bytes() == NOTEBOOK.read_bytes()


@pytest.mark.parametrize(
    ("path", "id", "kernel", "ours"),
    [
        ("lessons/lesson01_toy/lesson.ipynb", "c-0123abcd", "python3", True),
        ("my_lesson.ipynb", "c-0123abcd", "python3", False),
        ("lesson.ipynb", "0123abcd-4567", "python3", False),
        ("lesson.ipynb", None, "python3", False),
        ("lesson.ipynb", "c-0123abcd", "julia", False),
    ],
)
def test_other_notebooks_are_left_alone(path, id, kernel, ours):
    metadata = {"kernelspec": {"name": kernel}, "language_info": {"version": "3.99.9"}}
    cells = [{"cell_type": "code"}, {"cell_type": "code", "id": id} if id else {}]
    model = {"type": "notebook", "content": {"metadata": metadata, "cells": cells}}
    before = copy.deepcopy(model)
    as_it_is_stored(model, path)
    assert (model != before) == ours
