"""A course of one tiny lesson, to try the machinery on."""

import importlib.util
import sys
from pathlib import Path

import pytest

HELPER = Path(__file__).with_name("toy_course.py")


@pytest.fixture(scope="session")
def toy_module():
    """The helper beside this file: under --import-mode=importlib no test can import it by name."""
    spec = importlib.util.spec_from_file_location("toy_course", HELPER)
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_course"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def toy(toy_module, tmp_path):
    """A fresh toy course with nothing solved."""
    return toy_module.ToyCourse(tmp_path / "course")
