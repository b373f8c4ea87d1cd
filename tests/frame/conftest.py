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


@pytest.fixture(scope="session")
def built_toy(toy_module, tmp_path_factory):
    """A toy course with nothing solved and its outputs stored, made once: for copies only."""
    return toy_module.ToyCourse.make(tmp_path_factory.mktemp("toy") / "course")


@pytest.fixture
def toy(built_toy, tmp_path):
    """A toy course of the test's own, with nothing solved and its outputs stored."""
    return built_toy.copy(tmp_path / "course")
