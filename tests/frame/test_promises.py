"""The table of promises names tests that exist, in every room of engines."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = (TESTS / "promises.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)
    lacking = [
        f"{path}::{name}"
        for path, name in named
        if f"\ndef {name}(" not in (TESTS / path).read_text(encoding="utf-8")
    ]
    assert not lacking
    rows = re.findall(r"(?m)^\| (\w+) \|.*::test_", TABLE)
    rooms = {"training", "sharding", "tensor_parallel", "pipeline", "parallel3d"}
    assert set(rows) == rooms
    assert len(rows) == len(TABLE.strip().splitlines()) - 6
