"""A course of one tiny lesson, to try the machinery on."""

import pytest

from tests.frame.toy_course import ToyCourse


@pytest.fixture(scope="session")
def built_toy(tmp_path_factory):
    """A toy course with nothing solved and its outputs stored, made once: for copies only."""
    return ToyCourse.make(tmp_path_factory.mktemp("toy") / "course")


@pytest.fixture
def toy(built_toy, tmp_path):
    """A toy course of the test's own, with nothing solved and its outputs stored."""
    return built_toy.copy(tmp_path / "course")
