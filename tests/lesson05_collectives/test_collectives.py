"""Bandwidths by formula, and the ring between network namespaces."""

import subprocess

import pytest
import torch

from shared.measuring.bandwidth import bus_factor, fit_line
from shared.ranks.forked import run_ranks
from shared.ranks.links import throttled_links, why_not
from solutions.lesson05_collectives import ring_all_reduce


def test_the_line_is_found_from_its_own_points():
    sizes = [2.0**power for power in range(2, 28, 2)]
    line = fit_line(sizes, [5e-5 + size / 2e9 for size in sizes])
    assert line.latency == pytest.approx(5e-5, rel=1e-6)
    assert line.bandwidth == pytest.approx(2e9, rel=1e-6)
    assert line.seconds(2e9) == pytest.approx(1.00005)


def test_bus_factors():
    assert [bus_factor("all_reduce", n) for n in (1, 2, 4)] == [0.0, 1.0, 1.5]
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == 0.75


def other_side(rank):
    mine = torch.full((3,), float(rank))
    ring_all_reduce(mine)
    return mine.tolist()


@pytest.mark.skipif(why_not() != "", reason=f"throttled links: {why_not()}")
def test_ranks_in_namespaces_meet_and_leave_nothing_behind():
    with throttled_links(3, 200) as links:
        assert run_ranks(other_side, 3, before=links.enter) == 3 * [[3.0, 3.0, 3.0]]
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in links.names if name in left]
