"""A course of one lesson on the real shared/, whose checks a test writes."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_course(course: Path, checks: str) -> Path:
    """Write the course into a folder; the folder of its lesson, lesson01_toy."""
    shutil.copytree(ROOT / "shared", course / "shared", ignore=shutil.ignore_patterns("__py*"))
    lesson = course / "lessons" / "lesson01_toy"
    lesson.mkdir(parents=True)
    (lesson / "checks.py").write_text(checks)
    return lesson
