"""The quick start of nbformat: no grammar is built, and notebooks are checked as before."""

import subprocess
import sys

from shared.exercises.lessons import ROOT

CODE = """
import sys
import shared.exercises.quick_nbformat
import nbformat
from nbformat.validator import NotebookValidationError

nbformat.validate(nbformat.read("lessons/lesson02_attention/lesson.ipynb", as_version=4))
try:
    nbformat.validate({"nbformat": 4, "nbformat_minor": 5, "metadata": 3, "cells": []})
except NotebookValidationError:
    print("refused", "lark" in sys.modules)
"""


def test_notebooks_are_checked_and_no_grammar_is_built():
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "refused False\n", done.stderr


def test_pytest_loads_it_before_nbval():
    """In this very process."""
    assert "nbval.plugin" in sys.modules
    assert "lark" not in sys.modules
