"""What ranks wait for: events made by hand, of which every part is known."""

import pytest

from shared.pipeline.executor import Event
from shared.pipeline.measuring import measured_bubble
from shared.pipeline.schedules import (
    bubble,
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
    prerequisites,
)
from shared.pipeline.waiting import seconds_without_messages, split_waiting


def events_of(table, seconds, message=0.0):
    """A step of this table; stage s takes seconds[s] a piece, a message `message` on its way."""
    rows, ends, free = [[c for c in row if c] for row in table], {}, [0.0] * len(table)
    runs = [[] for _ in table]
    places = {c: rank for rank, row in enumerate(rows) for c in row}
    while any(rows):
        for rank, row in enumerate(rows):
            while row and all(c in ends for c in prerequisites(row[0], len(seconds))):
                cell = row.pop(0)
                came = [
                    ends[c] + message * (places[c] != rank)
                    for c in prerequisites(cell, len(seconds))
                ]
                start = max([free[rank], *came])
                ends[cell] = free[rank] = start + seconds[cell.stage]
                runs[rank].append(Event(cell, start, ends[cell]))
    return runs


@pytest.mark.parametrize(
    ("table", "ranks", "batches", "chunks"),
    [
        (gpipe_schedule(3, 4), 3, 4, 1),
        (one_f_one_b_schedule(4, 8), 4, 8, 1),
        (interleaved_schedule(2, 4, 2), 2, 4, 2),
    ],
)
def test_equal_stages_without_messages_wait_for_the_schedule_alone(table, ranks, batches, chunks):
    formula = bubble(ranks, batches, chunks)
    found = split_waiting(events_of(table, [0.5] * ranks * chunks), formula)
    assert found.schedule == pytest.approx(formula)
    assert (found.unequal, found.messages) == pytest.approx((0, 0), abs=1e-12)


def test_a_slow_stage_and_messages_are_told_apart():
    table, formula = gpipe_schedule(3, 4), bubble(3, 4)
    slow = events_of(table, [1.0, 2.0, 1.0])
    assert seconds_without_messages(slow) == 2 * (4 + 3 * 2)  # 2 (sum + (m - 1) max)
    found = split_waiting(slow, formula)
    assert found.unequal > 0.1
    assert found.messages == pytest.approx(0, abs=1e-12)
    late = events_of(table, [1.0] * 3, message=0.25)
    found = split_waiting(late, formula)
    assert found.unequal == pytest.approx(0, abs=1e-12)
    assert found.messages == pytest.approx(4 * 0.25 / (12 + 4 * 0.25))  # 2 borders and back
    for runs in (slow, late):
        assert split_waiting(runs, formula).total == pytest.approx(measured_bubble(runs))
