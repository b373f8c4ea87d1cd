"""The collectives by hand: equal to torch's own, with exactly the bytes of the formulas."""

import subprocess
from functools import reduce

import pytest
import torch
import torch.distributed as dist

from shared.measuring.bandwidth import all_gather, bus_factor, fit_line, reduce_scatter
from shared.measuring.traffic import count_traffic
from shared.ranks.forked import run_ranks
from shared.ranks.links import throttled_links, why_not
from solutions.lesson05_collectives import (
    central_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)

SIZES = (0, 1, 2, 3, 5, 7, 12, 29, 60, 101)
DTYPES = [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex128]


def numbers(rank, size, dtype):
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 9, (8, size), generator=generator)[rank].to(dtype)


def all_of_them(rank):
    n = dist.get_world_size()
    for dtype in DTYPES:
        for size in SIZES:
            own = numbers(rank, size, dtype)
            total = reduce(torch.add, [numbers(r, size, dtype) for r in range(n)])
            for all_reduce in (ring_all_reduce, central_all_reduce):
                mine = own.clone()
                all_reduce(mine)
                assert torch.equal(mine, total)
            chunk = -(-size // n)
            padded = torch.cat([total, total.new_zeros(n * chunk - size)])
            assert torch.equal(ring_reduce_scatter(own), padded.view(n, chunk)[rank])
            everything = torch.cat([numbers(r, size, dtype) for r in range(n)])
            assert torch.equal(ring_all_gather(own), everything)
            for src in range(n):
                mine = own.clone()
                tree_broadcast(mine, src)
                assert torch.equal(mine, numbers(src, size, dtype))
    return True


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_values_on_odd_sizes_and_world_sizes(n):
    assert run_ranks(all_of_them, n) == [True] * n


def random_floats(rank):
    own = torch.randn(60, generator=torch.Generator().manual_seed(rank))
    ours, theirs = own.clone(), own.clone()
    ring_all_reduce(ours)
    dist.all_reduce(theirs)
    apart = (ours - theirs).abs().max().item()
    apart = max(apart, (ring_reduce_scatter(own) - reduce_scatter(own)).abs().max().item())
    whole = all_gather(own)
    return apart, ours, torch.equal(whole.chunk(3)[rank], own.chunk(3)[rank])


def test_floats_differ_from_torchs_by_the_order_of_additions_and_not_between_ranks():
    results = run_ranks(random_floats, 3)
    assert max(apart for apart, _, _ in results) < 1e-6
    assert all(torch.equal(ours, results[0][1]) for _, ours, _ in results)
    assert all(same for _, _, same in results)


def bytes_of_each(rank, size):
    sent = []
    for operation in (ring_reduce_scatter, ring_all_gather, ring_all_reduce, central_all_reduce):
        with count_traffic() as traffic:
            operation(torch.ones(size))
        assert set(traffic.ops) <= {"send", "recv"}
        sent.append(traffic.sent_bytes)
    return sent


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bytes_of_every_rank_are_the_formula(n, size):
    chunk, whole = 4 * -(-size // n), 4 * size
    for rank, sent in enumerate(run_ranks(bytes_of_each, n, size)):
        central = (n - 1) * whole if rank == 0 else whole
        assert sent == [(n - 1) * chunk, (n - 1) * whole, 2 * (n - 1) * chunk, central]


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
