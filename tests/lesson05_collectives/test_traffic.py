"""shared/measuring/traffic.py sees every operation, however it was started."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed import isend
from torch.nn.parallel import DistributedDataParallel

from shared.measuring.traffic import count_traffic
from shared.ranks.forked import run_ranks


def seen(traffic):
    """What a test compares of each call."""
    return [(call.op, call.num_bytes, call.peer) for call in traffic.calls]


def point_to_point(rank):
    x = torch.ones(10)
    with count_traffic() as traffic:
        if rank == 0:
            isend(x, 1).wait()
            dist.send(x.double(), 1)
        else:
            dist.recv(x, 0)
            dist.recv(x.double())
        pair = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x.clone(), 1 - rank)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
    return seen(traffic), traffic.sent_bytes, traffic.bytes_of("recv")


def test_messages_and_their_peers():
    first, second = run_ranks(point_to_point, 2)
    assert first[0] == [("send", 40, 1), ("send", 80, 1), ("send", 40, 1), ("recv", 40, 1)]
    assert second[0] == [("recv", 40, 0), ("recv", 80, None), ("send", 40, 0), ("recv", 40, 0)]
    assert first[1:] == (160, 40)
    assert second[1:] == (40, 160)


def collectives(rank):
    x, parts = torch.ones(10), [torch.empty(10), torch.empty(10)]
    with count_traffic() as traffic:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 1)
        dist.reduce(x, 1)
        dist.all_gather(parts, x)
        dist.reduce_scatter(x.clone(), parts)
        dist.gather(x, parts if rank == 0 else None, 0)
        dist.scatter(x, parts if rank == 0 else None, 0)
        dist.all_to_all_single(x.clone(), x)
        dist.barrier()
        functional.all_reduce(x, "sum", dist.group.WORLD).sum()
    return seen(traffic)


def test_collectives_and_their_bytes():
    first, second = run_ranks(collectives, 2)
    common = [("all_reduce", 40, None)] * 2 + [("broadcast", 40, 1), ("reduce", 40, 1)]
    common += [("all_gather", 40, None), ("reduce_scatter", 80, None), ("gather", 40, 0)]
    last = [("all_to_all", 40, None), ("barrier", 0, None), ("all_reduce", 40, None)]
    assert first == [*common, ("scatter", 80, 0), *last]
    assert second == [*common, ("scatter", 0, 0), *last]


def sub_group(rank):
    group = dist.new_group([1, 2])
    with count_traffic() as traffic:
        if rank:
            dist.broadcast(torch.ones(3), src=2, group=group)
    return [(*call, size) for call, size in zip(seen(traffic), [2], strict=False)]


def test_peers_are_ranks_of_the_world():
    assert run_ranks(sub_group, 3) == [[]] + 2 * [[("broadcast", 12, 2, 2)]]


def ddp_step(rank):
    model = DistributedDataParallel(nn.Linear(4, 4))
    with count_traffic() as traffic:
        model(torch.ones(2, 4)).sum().backward()
    before = traffic.count("all_reduce"), traffic.bytes_of("all_reduce")
    model(torch.ones(2, 4)).sum().backward()  # after the block nothing is counted
    return before, traffic.count("all_reduce")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_ddp_starts_inside_backward_is_seen():
    assert run_ranks(ddp_step, 2) == 2 * [((1, 80), 1)]
