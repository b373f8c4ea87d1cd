"""Right answers to lesson 05 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import functools
import itertools
import operator

import torch
import torch.distributed as dist


def padded(tensor, group):
    """n equal pieces of the tensor as a list of copies, the last of them filled up with zeros."""
    n = dist.get_world_size(group)
    flat = tensor.detach().reshape(-1)
    missing = -flat.numel() % n
    return list(torch.cat([flat, flat.new_zeros(missing)]).view(n, -1).unbind())


def peers(group):
    """The next rank and the one before, as places in the whole world."""
    world = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    place = world.index(dist.get_rank())
    return world[(place + 1) % len(world)], world[place - 1]


def finish(*works):
    """Wait for all."""
    for work in works:
        work.wait()


def swap(out, into, group):
    """Send to the next rank and receive from the one before as one batch."""
    after, before = peers(group)
    operations = [
        dist.P2POp(dist.isend, out, after, group),
        dist.P2POp(dist.irecv, into, before, group),
    ]
    finish(*dist.batch_isend_irecv(operations))


# 05.1


def travelling_partial_sum(tensor, group=None):
    """One chunk travels: what comes, plus this rank's own part of it, is what leaves next."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    own = padded(tensor, group)
    partial = own[rank - 1].clone()
    for step in range(2, n + 1):
        incoming = torch.empty_like(partial)
        swap(partial, incoming, group)
        partial = own[(rank - step) % n] + incoming
    return partial


def indexed_reduce_scatter(tensor, group=None):
    """A matrix with a row a chunk; irecv first, then a blocking send, places in the group."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    size = -(tensor.numel() // -n)
    rows = torch.zeros(n, size, dtype=tensor.dtype, device=tensor.device)
    rows.flatten()[: tensor.numel()] = tensor.detach().flatten()
    incoming = rows.new_empty(size)
    for out in [(rank - 1 - step) % n for step in range(n - 1)]:
        handle = dist.irecv(incoming, group=group, group_src=(rank - 1) % n)
        dist.send(rows[out], group=group, group_dst=(rank + 1) % n)
        finish(handle)
        rows[(out - 1) % n].add_(incoming)
    return rows[rank].clone()


# 05.2


def chain_of_arrivals(chunk, group=None):
    """A list of arrivals, own chunk first, each passed on; put into the order of ranks last."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    arrived = [chunk.detach().flatten().clone()]
    while len(arrived) < n:
        arrived.append(torch.empty_like(arrived[-1]))
        swap(arrived[-2], arrived[-1], group)
    by_rank = {(rank - age) % n: each for age, each in enumerate(arrived)}
    return torch.cat([by_rank[each] for each in range(n)])


def recursive_all_gather(chunk, group=None):
    """A function that calls itself, and one roll at the end in place of places."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)

    def pass_on(latest, left):
        if left == 0:
            return [latest]
        following = torch.zeros_like(latest)
        handle = dist.isend(latest, group=group, group_dst=(rank + 1) % n)
        dist.recv(following, group=group, group_src=(rank + n - 1) % n)
        finish(handle)
        return [latest, *pass_on(following, left - 1)]

    newest_last = pass_on(chunk.detach().contiguous().view(-1), n - 1)
    return torch.stack(newest_last[::-1]).roll(rank + 1, dims=0).flatten()


# 05.3


def one_loop(tensor, group=None):
    """Both halves as one loop of 2 (n - 1) steps: in the first half add, in the second replace."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    pieces = padded(tensor, group)
    for step in range(2 * (n - 1)):
        out, into = (rank - step) % n, (rank - step - 1) % n
        incoming = torch.empty_like(pieces[into])
        swap(pieces[out], incoming, group)
        pieces[into] = pieces[into] + incoming if step < n - 1 else incoming
    with torch.no_grad():
        tensor.copy_(torch.cat(pieces)[: tensor.numel()].reshape(tensor.shape))


def two_halves_of_ones_own(tensor, group=None):
    """The two answers above, joined; the result is written through `.data`."""
    whole = recursive_all_gather(travelling_partial_sum(tensor, group), group)
    tensor.data[...] = whole[: tensor.numel()].view_as(tensor)


# 05.4


def halved_range(tensor, src=0, group=None):
    """The holder of a range of places sends to its middle and keeps the lower half."""
    n = dist.get_world_size(group)
    place = (dist.get_rank(group) - src) % n
    buffer = tensor.detach().clone(memory_format=torch.contiguous_format)
    low, high = 0, n
    while high - low > 1:
        middle = (low + high + 1) // 2
        if place == low:
            dist.send(buffer, group=group, group_dst=(middle + src) % n)
        elif place == middle:
            dist.recv(buffer, group=group, group_src=(low + src) % n)
        low, high = (low, middle) if place < middle else (middle, high)
    tensor.detach().copy_(buffer)


def binomial_tree(tensor, src=0, group=None):
    """By the bits of the place: the highest is the parent's round, those above it are children."""
    n = dist.get_world_size(group)
    place = (dist.get_rank(group) - src) % n
    world = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    who = [world[(each + src) % n] for each in range(n)]
    travelling = tensor.detach().contiguous()
    if place > 0:
        parent = place - (1 << (place.bit_length() - 1))
        dist.recv(travelling, src=who[parent], group=group)
        tensor.detach().copy_(travelling)
    children = itertools.takewhile(
        lambda child: child < n, (place + (1 << bit) for bit in itertools.count(place.bit_length()))
    )
    for child in children:
        dist.send(travelling, dst=who[child], group=group)


# 05.5


def all_receives_at_once(tensor, group=None):
    """Rank 0 starts every receive, adds in the order of ranks, and starts every send."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    own = tensor.detach().clone(memory_format=torch.contiguous_format)
    if rank == 0:
        parts = [own] + [torch.empty_like(own) for _ in range(1, n)]
        finish(*[dist.irecv(parts[r], group=group, group_src=r) for r in range(1, n)])
        own = functools.reduce(operator.add, parts)
        finish(*[dist.isend(own, group=group, group_dst=r) for r in range(1, n)])
    else:
        dist.send(own, group=group, group_dst=0)
        dist.recv(own, group=group, group_src=0)
    tensor.detach().copy_(own)


def flat_boss(tensor, group=None):
    """One flat buffer, places in the whole world, written back under no_grad."""
    boss, *others = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    flat = tensor.detach().flatten().clone()
    if dist.get_rank() != boss:
        finish(dist.isend(flat, boss, group=group))
        finish(dist.irecv(flat, boss, group=group))
    else:
        incoming = torch.zeros_like(flat)
        for other in others:
            dist.recv(incoming, other, group=group)
            flat = flat + incoming
        for other in others:
            dist.send(flat, other, group=group)
    with torch.no_grad():
        tensor.copy_(flat.unflatten(0, tensor.shape) if tensor.dim() else flat[0])


ALTERNATIVES = {
    "05.1": [travelling_partial_sum, indexed_reduce_scatter],
    "05.2": [chain_of_arrivals, recursive_all_gather],
    "05.3": [one_loop, two_halves_of_ones_own],
    "05.4": [halved_range, binomial_tree],
    "05.5": [all_receives_at_once, flat_boss],
}
