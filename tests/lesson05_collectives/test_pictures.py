"""The picture of the collectives: what each leaves on each of three ranks."""

import torch

from lessons.lesson05_collectives.experiments import outcomes
from shared.ranks.forked import run_ranks


def test_what_each_collective_leaves_on_each_rank():
    held = run_ranks(outcomes, 3)
    start = [of_rank["start"] for of_rank in held]
    total = sum(start)
    diagonal = torch.stack([start[rank][rank] for rank in range(3)])
    for rank, of_rank in enumerate(held):
        own_place = torch.zeros(3, 1, 1)
        own_place[rank] = 1
        at_root = float(rank == 0)
        expected = {
            "start": start[rank],
            "broadcast": start[0],
            "scatter": start[0] * own_place,
            "gather": diagonal * at_root,
            "all-gather": diagonal,
            "all-to-all": torch.stack([start[source][rank] for source in range(3)]),
            "reduce": total * at_root,
            "all-reduce": total,
            "reduce-scatter": total * own_place,
        }
        assert list(of_rank) == list(expected)
        for name, blocks in expected.items():
            assert torch.equal(of_rank[name], blocks), f"{name} on rank {rank}"
