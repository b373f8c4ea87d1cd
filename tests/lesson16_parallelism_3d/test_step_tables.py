"""The tables that 16.4's formulas are found from: what the planner says, and the answers."""

import pytest

from lessons.lesson16_parallelism_3d.experiments.step_tables import (
    data_rows,
    pipeline_rows,
    show,
    tensor_rows,
)
from solutions import lesson16_parallelism_3d as right

TABLES = {
    "compute_and_bubble": pipeline_rows,
    "tensor_parallel_seconds": tensor_rows,
    "data_parallel_seconds": data_rows,
}


@pytest.mark.parametrize("name", TABLES)
def test_an_answer_has_the_numbers_of_the_planner(name):
    for row in TABLES[name]():
        got = getattr(right, name)(**row.given)
        got = got if isinstance(got, tuple) else (got,)
        assert got == pytest.approx(tuple(row.found.values()), rel=1e-9), row


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_a_column_for_what_differs(name, capsys):
    rows = TABLES[name]()
    show(rows)
    head, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) == len(set(lines))
    assert len({len(line) for line in (head, *lines)}) == 1
