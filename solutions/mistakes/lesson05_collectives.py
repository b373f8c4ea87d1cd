"""Wrong answers that people give to lesson 05, each with the words that its check must say."""

import torch
import torch.distributed as dist

from shared.exercises.mistakes import mistake
from solutions import lesson05_collectives as right


def _padded(tensor, n):
    flat = tensor.detach().reshape(-1)
    chunk = -(-flat.numel() // n)
    return torch.cat([flat, flat.new_zeros(n * chunk - flat.numel())]).view(n, chunk)


def _place(group):
    return dist.get_rank(group), dist.get_world_size(group)


def _pass_on(outgoing, incoming, group):
    """Send and receive at once, around the ring."""
    rank, n = _place(group)
    out = _bytes(outgoing.contiguous())
    out = dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % n)
    into = dist.P2POp(dist.irecv, _bytes(incoming), group=group, group_peer=(rank - 1) % n)
    for work in dist.batch_isend_irecv([out, into]):
        work.wait()


def _bytes(message):
    return message.view(-1).view(torch.uint8)


# 05.1 ring_reduce_scatter


@mistake("05.1", says="rank r returns chunk r + 1: the ring ends one place too late")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    chunks = _padded(tensor, n)
    for step in range(n - 1):
        came = torch.empty_like(chunks[0])
        _pass_on(chunks[(rank - step) % n], came, group)
        chunks[(rank - step - 1) % n] += came
    return chunks[(rank + 1) % n]


@mistake("05.1", says="torch's own reduce_scatter does the work")
def ring_reduce_scatter(tensor, group=None):
    chunks = _padded(tensor, _place(group)[1])
    mine = torch.empty_like(chunks[0])
    dist.reduce_scatter(mine, list(chunks), group=group)
    return mine


@mistake("05.1", says="in torch.int64")
def ring_reduce_scatter(tensor, group=None):
    whole_numbers = not (tensor.is_floating_point() or tensor.is_complex())
    return right.ring_reduce_scatter(tensor.float() if whole_numbers else tensor, group)


@mistake("05.1", says="right in the whole world, wrong in a sub-group")
def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, None)


@mistake("05.1", says="a barrier: send and recv already wait for each other")
def ring_reduce_scatter(tensor, group=None):
    dist.barrier(group)
    return right.ring_reduce_scatter(tensor, group)


# 05.2 ring_all_gather


@mistake("05.2", says="the chunk of the rank after it never arrives: it takes n - 1 steps")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    parts = [torch.zeros_like(chunk.detach().reshape(-1)) for _ in range(n)]
    parts[rank] = chunk.detach().reshape(-1)
    for step in range(n - 2):
        _pass_on(parts[(rank - step) % n], parts[(rank - step - 1) % n], group)
    return torch.cat(parts)


@mistake("05.2", says="but the last rank's comes first")
def ring_all_gather(chunk, group=None):
    n = _place(group)[1]
    return right.ring_all_gather(chunk, group).view(n, -1).roll(1, 0).reshape(-1)


@mistake("05.2", says="a deadlock")
def ring_all_gather(chunk, group=None):
    """All ranks send at once, and none receives before its message was taken."""
    rank, n = _place(group)
    gathered = chunk.new_zeros(n, chunk.numel())
    gathered[rank] = chunk.reshape(-1)
    for step in range(n - 1):
        dist.send(gathered[(rank - step) % n], group_dst=(rank + 1) % n, group=group)
        came = torch.empty_like(gathered[0])
        dist.recv(came, group_src=(rank - 1) % n, group=group)
        gathered[(rank - step - 1) % n] = came
    return gathered.view(-1)


_kept = {}


@mistake("05.2", says="the next call writes into what this one returned")
def ring_all_gather(chunk, group=None):
    found = right.ring_all_gather(chunk, group)
    return _kept.setdefault((found.shape, found.dtype), torch.empty_like(found)).copy_(found)


@mistake("05.2", says="the numbers travel in a wider dtype than the tensor's")
def ring_all_gather(chunk, group=None):
    real = chunk.is_floating_point()
    return right.ring_all_gather(chunk.double() if real else chunk, group).to(chunk.dtype)


@mistake("05.2", says="right in the whole world, wrong in a sub-group")
def ring_all_gather(chunk, group=None):
    return right.ring_all_gather(chunk, None)


# 05.3 ring_all_reduce


def _whole(tensor, group):
    """The sum as a flat tensor, padding included."""
    return right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)


@mistake("05.3", says="the padding is cut off at the front")
def ring_all_reduce(tensor, group=None):
    whole = _whole(tensor, group)
    tensor.detach().copy_(whole[len(whole) - tensor.numel() :].view(tensor.shape))


@mistake("05.3", says="view() refuses a tensor that is not contiguous")
def ring_all_reduce(tensor, group=None):
    tensor.detach().view(-1).copy_(_whole(tensor, group)[: tensor.numel()])


@mistake("05.3", says="everything goes through one rank")
def ring_all_reduce(tensor, group=None):
    right.central_all_reduce(tensor, group)


@mistake("05.3", says="the ranks hold sums that differ in their last bits")
def ring_all_reduce(tensor, group=None):
    whole = right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)[: tensor.numel()]
    own = tensor.detach().reshape(-1)
    if tensor.is_floating_point():  # what "the sum of the others, and mine last" comes to
        whole = (whole - own) + own
    tensor.detach().copy_(whole.view(tensor.shape))


def _summed(tensor, group):
    """The right sum, as a new tensor."""
    whole = right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)
    return whole[: tensor.numel()].view(tensor.shape)


@mistake("05.3", says="right in the whole world, wrong in a sub-group")
def ring_all_reduce(tensor, group=None):
    tensor.detach().copy_(_summed(tensor, None))


# 05.4 tree_broadcast


@mistake("05.4", says="it is the tensor of rank 0, whatever src is")
def tree_broadcast(tensor, src=0, group=None):
    right.tree_broadcast(tensor, 0, group)


@mistake("05.4", says="the tensor is as it was: nothing arrived")
def tree_broadcast(tensor, src=0, group=None):
    right.tree_broadcast(tensor.detach().clone(), src, group)


@mistake("05.4", says="it is no tree of the smallest depth")
def tree_broadcast(tensor, src=0, group=None):
    rank, n = _place(group)
    place = (rank - src) % n  # a heap: the children of place p are 2 p + 1 and 2 p + 2
    message = tensor.detach().contiguous()
    if place:
        dist.recv(_bytes(message), group_src=((place - 1) // 2 + src) % n, group=group)
    for child in (2 * place + 1, 2 * place + 2):
        if child < n:
            dist.send(_bytes(message), group_dst=(child + src) % n, group=group)
    tensor.detach().copy_(message)


@mistake("05.4", says="torch's own broadcast does the work")
def tree_broadcast(tensor, src=0, group=None):
    message = tensor.detach().contiguous()
    dist.broadcast(message, group_src=src, group=group)
    tensor.detach().copy_(message)


@mistake("05.4", says="in a sub-group the ranks do not find each other")
def tree_broadcast(tensor, src=0, group=None):
    n = _place(group)[1]
    place = (dist.get_rank() - src) % n  # the rank in the world
    message = tensor.detach().contiguous()
    have = 1
    while have < n:
        if place < have and place + have < n:
            dist.send(_bytes(message), dst=(place + have + src) % n, group=group)
        elif have <= place < 2 * have:
            dist.recv(_bytes(message), src=(place - have + src) % n, group=group)
        have *= 2
    tensor.detach().copy_(message)


@mistake("05.4", says="the numbers travel in float32 and lose digits")
def tree_broadcast(tensor, src=0, group=None):
    narrow = tensor.detach().float() if tensor.dtype == torch.float64 else tensor
    right.tree_broadcast(narrow, src, group)
    tensor.detach().copy_(narrow)


# 05.5 central_all_reduce


@mistake("05.5", says="only rank 0 has the sum: nobody sent it back")
def central_all_reduce(tensor, group=None):
    total = tensor.detach().clone()
    right.central_all_reduce(total, group)
    if dist.get_rank(group) == 0:
        tensor.detach().copy_(total)


@mistake("05.5", says="rank 0 counts its own tensor twice")
def central_all_reduce(tensor, group=None):
    if dist.get_rank(group) == 0:
        tensor.detach().mul_(2)
    right.central_all_reduce(tensor, group)


@mistake("05.5", says="a deadlock")
def central_all_reduce(tensor, group=None):
    rank, n = _place(group)
    total = tensor.detach().clone()
    came = torch.empty_like(total)
    for other in [r for r in range(n) if (r == 0) != (rank == 0)]:
        dist.send(total, group_dst=other, group=group)
        dist.recv(came, group_src=other, group=group)
        total += came
    tensor.detach().copy_(total)


@mistake("05.5", says="an empty tensor is received from anyone")
def central_all_reduce(tensor, group=None):
    rank, n = _place(group)
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if rank:
        dist.send(_bytes(total), group_dst=0, group=group)
        dist.recv(_bytes(total), group_src=0, group=group)
    else:
        came = torch.empty_like(total)
        for _ in range(1, n):
            dist.recv(_bytes(came), group=group)
            total += came
        for other in range(1, n):
            dist.send(_bytes(total), group_dst=other, group=group)
    tensor.detach().copy_(total)


@mistake("05.5", says="the numbers travel in a wider dtype than the tensor's")
def central_all_reduce(tensor, group=None):
    wide = tensor.detach().double() if tensor.is_floating_point() else tensor
    right.central_all_reduce(wide, group)
    tensor.detach().copy_(wide)


@mistake("05.5", says="the parameter no longer requires a gradient")
def central_all_reduce(tensor, group=None):
    right.central_all_reduce(tensor, group)
    tensor.requires_grad_(False)
