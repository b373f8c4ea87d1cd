"""Wrong answers that people give to lesson 05, each with the words that its check must say."""

import torch
import torch.distributed as dist

from shared.exercises.mistakes import mistake
from solutions.lesson05_collectives import ring_all_gather as right_gather
from solutions.lesson05_collectives import ring_reduce_scatter as right_scatter


def _padded(tensor, n):
    flat = tensor.detach().reshape(-1)
    chunk = -(-flat.numel() // n)
    return torch.cat([flat, flat.new_zeros(n * chunk - flat.numel())]).view(n, chunk)


def _place(group):
    return dist.get_rank(group), dist.get_world_size(group)


def _pass_on(outgoing, incoming, group, to=None, came_from=None):
    """Send and receive at once, around the ring unless told otherwise."""
    rank, n = _place(group)
    to = (rank + 1) % n if to is None else to
    came_from = (rank - 1) % n if came_from is None else came_from
    out = dist.P2POp(dist.isend, _bytes(outgoing.contiguous()), group=group, group_peer=to)
    into = dist.P2POp(dist.irecv, _bytes(incoming), group=group, group_peer=came_from)
    for work in dist.batch_isend_irecv([out, into]):
        work.wait()


def _bytes(message):
    return message.view(-1).view(torch.uint8)


def _send_first(outgoing, incoming, group):
    """All ranks send at once, and none receives before its message was taken."""
    rank, n = _place(group)
    dist.send(outgoing, group_dst=(rank + 1) % n, group=group)
    dist.recv(incoming, group_src=(rank - 1) % n, group=group)


# 05.1 ring_reduce_scatter


def _scatter(chunks, group, pass_on=_pass_on):
    """The right ring, in the very chunks it is given, with the caller's way of passing them on."""
    rank, n = _place(group)
    for step in range(n - 1):
        came = torch.empty_like(chunks[0])
        pass_on(chunks[(rank - 1 - step) % n], came, group)
        chunks[(rank - 2 - step) % n] += came
    return chunks[rank]


@mistake("05.1", says="rank r returns chunk r + 1: the ring ends one place too late")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    chunks = _padded(tensor, n)
    for step in range(n - 1):
        came = torch.empty_like(chunks[0])
        _pass_on(chunks[(rank - step) % n], came, group)
        chunks[(rank - step - 1) % n] += came
    return chunks[(rank + 1) % n]


@mistake("05.1", says="the ring runs backwards")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    chunks = _padded(tensor, n)
    for step in range(n - 1):
        came = torch.empty_like(chunks[0])
        _pass_on(chunks[(rank + 1 + step) % n], came, group, (rank - 1) % n, (rank + 1) % n)
        chunks[(rank + 2 + step) % n] += came
    return chunks[rank]


@mistake("05.1", says="where n divides the tensor, a chunk has one number too many")
def ring_reduce_scatter(tensor, group=None):
    n = _place(group)[1]
    flat = tensor.detach().reshape(-1)
    longer = flat.new_zeros(n * (flat.numel() // n + 1))
    longer[: flat.numel()] = flat
    return right_scatter(longer, group)


@mistake("05.1", says="every chunk is padded for itself")
def ring_reduce_scatter(tensor, group=None):
    n = _place(group)[1]
    pieces = tensor.detach().reshape(-1).tensor_split(n)
    size = max(len(each) for each in pieces)
    even = [torch.cat([each, each.new_zeros(size - len(each))]) for each in pieces]
    return right_scatter(torch.cat(even), group)


@mistake("05.1", says="the numbers are taken in the order in which they lie in memory")
def ring_reduce_scatter(tensor, group=None):
    return right_scatter(tensor.detach().as_strided((tensor.numel(),), (1,)), group)


@mistake("05.1", says="what came is written over the chunk, not added to it")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    chunks = _padded(tensor, n)
    for step in range(n - 1):
        _pass_on(chunks[(rank - 1 - step) % n], chunks[(rank - 2 - step) % n], group)
    return chunks[rank]


@mistake("05.1", says="it is the mean, not the sum")
def ring_reduce_scatter(tensor, group=None):
    return right_scatter(tensor, group) / _place(group)[1]


@mistake("05.1", says="every rank returns the whole sum, not its chunk of it")
def ring_reduce_scatter(tensor, group=None):
    return right_gather(right_scatter(tensor, group), group)


@mistake("05.1", says="a deadlock")
def ring_reduce_scatter(tensor, group=None):
    return _scatter(_padded(tensor, _place(group)[1]), group, _send_first)


@mistake("05.1", says="the last chunk is shorter than the others, as tensor.chunk(n)")
def ring_reduce_scatter(tensor, group=None):
    chunks = tensor.detach().reshape(-1).chunk(_place(group)[1])
    return _scatter([chunk.clone() for chunk in chunks], group)


@mistake("05.1", says="the padding holds numbers of the tensor once more")
def ring_reduce_scatter(tensor, group=None):
    n = _place(group)[1]
    flat = tensor.detach().reshape(-1)
    return right_scatter(flat.repeat(n + 1)[: -(-flat.numel() // n) * n], group)


@mistake("05.1", says="numbers are lost: the size is divided and rounded down")
def ring_reduce_scatter(tensor, group=None):
    n = _place(group)[1]
    chunk = tensor.numel() // n
    whole = tensor.reshape(-1)[: n * chunk]
    return right_scatter(whole, group) if chunk else right_scatter(tensor, group)


@mistake("05.1", says="was changed in place")
def ring_reduce_scatter(tensor, group=None):
    n = _place(group)[1]
    if tensor.numel() % n or not tensor.is_contiguous():
        return right_scatter(tensor, group)
    return _scatter(tensor.view(n, -1), group).clone()


@mistake("05.1", says="whole tensors are sent, not chunks")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    total = _padded(tensor, n)
    travels = total.clone()
    for _ in range(n - 1):
        came = torch.empty_like(travels)
        _pass_on(travels, came, group)
        total, travels = total + came, came
    return total[rank]


@mistake("05.1", says="everything goes through one rank")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    chunks = _padded(tensor, n)
    if rank:
        for chunk in chunks:
            dist.send(_bytes(chunk), group_dst=0, group=group)
        dist.recv(_bytes(chunks[rank]), group_src=0, group=group)
        return chunks[rank]
    came = torch.empty_like(chunks[0])
    for other in range(1, n):
        for place in range(n):
            dist.recv(_bytes(came), group_src=other, group=group)
            chunks[place] += came
    for other in range(1, n):
        dist.send(_bytes(chunks[other]), group_dst=other, group=group)
    return chunks[0]


@mistake("05.1", says="sends to 2 ranks: that is not a ring")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    chunks = _padded(tensor, n)
    total = chunks[rank].clone()
    for step in range(1, n):
        came = torch.empty_like(total)
        to, came_from = (rank + step) % n, (rank - step) % n
        _pass_on(chunks[to], came, group, to, came_from)
        total += came
    return total


@mistake("05.1", says="torch's own reduce_scatter does the work")
def ring_reduce_scatter(tensor, group=None):
    chunks = _padded(tensor, _place(group)[1])
    mine = torch.empty_like(chunks[0])
    dist.reduce_scatter(mine, list(chunks), group=group)
    return mine


@mistake("05.1", says="in torch.int64")
def ring_reduce_scatter(tensor, group=None):
    whole_numbers = not (tensor.is_floating_point() or tensor.is_complex())
    return right_scatter(tensor.float() if whole_numbers else tensor, group)


@mistake("05.1", says="in a sub-group the ranks do not find each other")
def ring_reduce_scatter(tensor, group=None):
    def to_ranks_of_the_world(outgoing, incoming, group):
        rank, n = _place(group)
        sending = dist.isend(_bytes(outgoing), dst=(rank + 1) % n, group=group)
        dist.recv(_bytes(incoming), src=(rank - 1) % n, group=group)
        if sending is not None:
            sending.wait()

    return _scatter(_padded(tensor, _place(group)[1]), group, to_ranks_of_the_world)


@mistake("05.1", says="what is returned is the caller's own memory")
def ring_reduce_scatter(tensor, group=None):
    alone = _place(group)[1] == 1
    return tensor.reshape(-1) if alone else right_scatter(tensor, group)


_kept = {}


def _in_a_kept_buffer(result):
    """The same memory for every result of one size and dtype."""
    buffer = _kept.setdefault((result.shape, result.dtype), torch.empty_like(result))
    return buffer.copy_(result)


@mistake("05.1", says="the next call writes into what this one returned")
def ring_reduce_scatter(tensor, group=None):
    return _in_a_kept_buffer(right_scatter(tensor, group))


@mistake("05.1", says="the numbers travel in a wider dtype than the tensor's")
def ring_reduce_scatter(tensor, group=None):
    real = tensor.is_floating_point()
    return right_scatter(tensor.double() if real else tensor, group).to(tensor.dtype)


@mistake("05.1", says="gradients are left switched off")
def ring_reduce_scatter(tensor, group=None):
    torch.set_grad_enabled(False)
    return right_scatter(tensor, group)


@mistake("05.1", says="IndexError")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    chunk = -(-tensor.numel() // n)
    pieces = tensor.reshape(-1).split(chunk)  # of an empty tensor: a single piece, for n ranks
    if not chunk:
        return pieces[rank]
    return right_scatter(tensor, group)


@mistake("05.1", says="TypeError: len() of a 0-d tensor")
def ring_reduce_scatter(tensor, group=None):
    len(tensor)
    return right_scatter(tensor, group)


@mistake("05.1", says="the chunk of the rank after it is not in the sum")
def ring_reduce_scatter(tensor, group=None):
    rank, n = _place(group)
    chunks = _padded(tensor, n)
    for step in range(1, n - 1):
        came = torch.empty_like(chunks[0])
        _pass_on(chunks[(rank - 1 - step) % n], came, group)
        chunks[(rank - 2 - step) % n] += came
    return chunks[rank]


@mistake("05.1", says="whole numbers lose digits")
def ring_reduce_scatter(tensor, group=None):
    if tensor.dtype == torch.int64:
        return right_scatter(tensor.float(), group).long()
    return right_scatter(tensor, group)


@mistake("05.1", says="right in the whole world, wrong in a sub-group")
def ring_reduce_scatter(tensor, group=None):
    return right_scatter(tensor, None)


# 05.2 ring_all_gather


def _gather(chunk, group, sent=lambda rank, step: rank - step, pass_on=_pass_on):
    """The ring, with the place that is sent in each step, and the way, as the caller says."""
    rank, n = _place(group)
    gathered = chunk.new_zeros(n, chunk.numel())
    gathered[rank] = chunk.reshape(-1)
    for step in range(n - 1):
        came = torch.empty_like(gathered[0])
        pass_on(gathered[sent(rank, step) % n], came, group)
        gathered[(rank - step - 1) % n] = came
    return gathered


@mistake("05.2", says="the chunk of the rank after it never arrives: it takes n - 1 steps")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    parts = [torch.zeros_like(chunk.detach().reshape(-1)) for _ in range(n)]
    parts[rank] = chunk.detach().reshape(-1)
    for step in range(n - 2):
        _pass_on(parts[(rank - step) % n], parts[(rank - step - 1) % n], group)
    return torch.cat(parts)


@mistake("05.2", says="the chunks stand in the order of arrival, each rank's own first")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    gathered = right_gather(chunk, group).view(n, -1)
    return torch.cat([gathered[(rank - step) % n] for step in range(n)])


@mistake("05.2", says="each rank's own chunk stands first, then those of the ranks after it")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    return right_gather(chunk, group).view(n, -1).roll(-rank, 0).reshape(-1)


@mistake("05.2", says="but rank 1's comes first")
def ring_all_gather(chunk, group=None):
    n = _place(group)[1]
    return right_gather(chunk, group).view(n, -1).roll(-1, 0).reshape(-1)


@mistake("05.2", says="but the last rank's comes first")
def ring_all_gather(chunk, group=None):
    n = _place(group)[1]
    return right_gather(chunk, group).view(n, -1).roll(1, 0).reshape(-1)


@mistake("05.2", says="the ring runs backwards")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    gathered = chunk.new_zeros(n, chunk.numel())
    gathered[rank] = chunk.reshape(-1)
    for step in range(n - 1):
        own, other = (rank + step) % n, (rank + step + 1) % n
        _pass_on(gathered[own], gathered[other], group, (rank - 1) % n, (rank + 1) % n)
    return gathered.view(-1)


@mistake("05.2", says="it forwards its own chunk in each step, not what came last")
def ring_all_gather(chunk, group=None):
    return _gather(chunk, group, lambda rank, step: rank).view(-1)


@mistake("05.2", says="the chunks are added, not put one behind the other")
def ring_all_gather(chunk, group=None):
    n = _place(group)[1]
    return right_gather(chunk, group).view(n, -1).sum(0)


@mistake("05.2", says="a deadlock")
def ring_all_gather(chunk, group=None):
    return _gather(chunk, group, pass_on=_send_first).view(-1)


@mistake("05.2", says="sends to 3 ranks: that is not a ring")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    gathered = chunk.new_zeros(n, chunk.numel())
    gathered[rank] = chunk.reshape(-1)
    for step in range(1, n):
        to, came_from = (rank + step) % n, (rank - step) % n
        _pass_on(gathered[rank], gathered[came_from], group, to, came_from)
    return gathered.view(-1)


@mistake("05.2", says="whole tensors are sent, not chunks")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    gathered = chunk.new_zeros(n, chunk.numel())
    gathered[rank] = chunk.reshape(-1)
    for step in range(n - 1):
        came = torch.empty_like(gathered)
        _pass_on(gathered, came, group)
        gathered[(rank - step - 1) % n] = came[(rank - step - 1) % n]
    return gathered.view(-1)


@mistake("05.2", says="torch's own all_gather does the work")
def ring_all_gather(chunk, group=None):
    parts = [torch.empty_like(chunk) for _ in range(_place(group)[1])]
    dist.all_gather(parts, chunk, group=group)
    return torch.cat(parts)


@mistake("05.2", says="a message without its other side")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    gathered = right_gather(chunk, group)
    if n > 1:  # one message too many, which nobody receives
        dist.isend(_bytes(gathered), group_dst=(rank + 1) % n, group=group)
    return gathered


@mistake("05.2", says="chunk was changed in place")
def ring_all_gather(chunk, group=None):
    rank, n = _place(group)
    here, arrived = chunk.detach().view(-1), {rank: chunk.detach().flatten().clone()}
    for step in range(n - 1):  # into the place of what has left
        _pass_on(arrived[(rank - step) % n], here, group)
        arrived[(rank - step - 1) % n] = here.clone()
    return torch.cat([arrived[place] for place in range(n)])


@mistake("05.2", says="what is returned is the caller's own memory")
def ring_all_gather(chunk, group=None):
    return chunk.reshape(-1) if _place(group)[1] == 1 else right_gather(chunk, group)


@mistake("05.2", says="the next call writes into what this one returned")
def ring_all_gather(chunk, group=None):
    return _in_a_kept_buffer(right_gather(chunk, group))


@mistake("05.2", says="the numbers travel in a wider dtype than the tensor's")
def ring_all_gather(chunk, group=None):
    real = chunk.is_floating_point()
    return right_gather(chunk.double() if real else chunk, group).to(chunk.dtype)


@mistake("05.2", says="the chunks are stacked as rows")
def ring_all_gather(chunk, group=None):
    return _gather(chunk, group)


@mistake("05.2", says="the chunks stand in the reverse order of ranks")
def ring_all_gather(chunk, group=None):
    return _gather(chunk, group).flip(0).view(-1)


@mistake("05.2", says="gradients are left switched off")
def ring_all_gather(chunk, group=None):
    torch.set_grad_enabled(False)
    return right_gather(chunk, group)


@mistake("05.2", says="zero-dimensional tensor")
def ring_all_gather(chunk, group=None):
    n = _place(group)[1]
    parts = [part.view(chunk.shape) for part in right_gather(chunk, group).view(n, -1)]
    return torch.cat(parts).flatten()


@mistake("05.2", says="right in the whole world, wrong in a sub-group")
def ring_all_gather(chunk, group=None):
    return right_gather(chunk, None)


# 05.3 ring_all_reduce


def _whole(tensor, group):
    """The sum as a flat tensor, padding included."""
    return right_gather(right_scatter(tensor, group), group)


@mistake("05.3", says="the padding is cut off at the front")
def ring_all_reduce(tensor, group=None):
    whole = _whole(tensor, group)
    tensor.detach().copy_(whole[len(whole) - tensor.numel() :].view(tensor.shape))


@mistake("05.3", says="numbers are not summed: the size is divided and rounded down")
def ring_all_reduce(tensor, group=None):
    flat, n = tensor.detach().reshape(-1), _place(group)[1]
    head = _whole(flat[: len(flat) // n * n], group)
    tensor.detach().copy_(torch.cat([head, flat[len(head) :]]).view(tensor.shape))


@mistake("05.3", says="the sums are there, in the order in which the tensor lies in memory")
def ring_all_reduce(tensor, group=None):
    whole = _whole(tensor, group)[: tensor.numel()]
    tensor.detach().as_strided((tensor.numel(),), (1,)).copy_(whole)


@mistake("05.3", says="view() refuses a tensor that is not contiguous")
def ring_all_reduce(tensor, group=None):
    tensor.detach().view(-1).copy_(_whole(tensor, group)[: tensor.numel()])


def _add(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _central(tensor, group, combine=_add, back=True):
    """Everything through rank 0."""
    rank, n = _place(group)
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if rank:
        dist.send(_bytes(total), group_dst=0, group=group)
        if back:
            dist.recv(_bytes(total), group_src=0, group=group)
        return total
    parts = [total] + [torch.empty_like(total) for _ in range(n - 1)]
    for other in range(1, n):
        dist.recv(_bytes(parts[other]), group_src=other, group=group)
    total = combine(parts)
    if back:
        for other in range(1, n):
            dist.send(_bytes(total), group_dst=other, group=group)
    return total


@mistake("05.3", says="the second half of the ring adds what comes")
def ring_all_reduce(tensor, group=None):
    rank, n = _place(group)
    chunks = _padded(tensor, n)
    for step in range(2 * (n - 1)):
        came = torch.empty_like(chunks[0])
        _pass_on(chunks[(rank - 1 - step) % n], came, group)
        chunks[(rank - 2 - step) % n] += came
    tensor.detach().copy_(chunks.view(-1)[: tensor.numel()].view(tensor.shape))


@mistake("05.3", says="the tensor is as it was: the sum must be copied into it")
def ring_all_reduce(tensor, group=None):
    whole = right_gather(right_scatter(tensor, group), group)
    tensor = whole[: tensor.numel()].view(tensor.shape)


@mistake("05.3", says="it is the mean, not the sum")
def ring_all_reduce(tensor, group=None):
    whole = right_gather(right_scatter(tensor, group), group)[: tensor.numel()]
    tensor.detach().copy_(whole.view(tensor.shape) / _place(group)[1])


@mistake("05.3", says="only this rank's chunk is summed: the all-gather is missing")
def ring_all_reduce(tensor, group=None):
    rank = _place(group)[0]
    mine = right_scatter(tensor, group)
    flat = tensor.detach().reshape(-1)
    here = flat[rank * mine.numel() : (rank + 1) * mine.numel()]
    here.copy_(mine[: here.numel()])


@mistake("05.3", says="a tensor that is not contiguous is left as it was")
def ring_all_reduce(tensor, group=None):
    whole = right_gather(right_scatter(tensor, group), group)
    tensor.detach().reshape(-1).copy_(whole[: tensor.numel()])


@mistake("05.3", says="whole tensors are sent, not chunks")
def ring_all_reduce(tensor, group=None):
    rank, n = _place(group)
    flat = tensor.detach().reshape(-1).contiguous()
    parts = [flat if place == rank else torch.empty_like(flat) for place in range(n)]
    for step in range(n - 1):
        _pass_on(parts[(rank - step) % n], parts[(rank - step - 1) % n], group)
    tensor.detach().copy_(_add(parts).view(tensor.shape))


@mistake("05.3", says="everything goes through one rank")
def ring_all_reduce(tensor, group=None):
    tensor.detach().copy_(_central(tensor, group))


@mistake("05.3", says="torch's own all_reduce does the work")
def ring_all_reduce(tensor, group=None):
    own = tensor.detach().contiguous()
    dist.all_reduce(own, group=group)
    tensor.detach().copy_(own)


@mistake("05.3", says="the ranks hold sums that differ in their last bits")
def ring_all_reduce(tensor, group=None):
    whole = right_gather(right_scatter(tensor, group), group)[: tensor.numel()]
    own = tensor.detach().reshape(-1)
    if tensor.is_floating_point():  # what "the sum of the others, and mine last" comes to
        whole = (whole - own) + own
    tensor.detach().copy_(whole.view(tensor.shape))


def _summed(tensor, group):
    """The right sum, as a new tensor."""
    whole = right_gather(right_scatter(tensor, group), group)
    return whole[: tensor.numel()].view(tensor.shape)


@mistake("05.3", says="the numbers travel in a wider dtype than the tensor's")
def ring_all_reduce(tensor, group=None):
    real = tensor.is_floating_point()
    tensor.detach().copy_(_summed(tensor.double() if real else tensor, group))


@mistake("05.3", says="the numbers travel in float32 and lose digits")
def ring_all_reduce(tensor, group=None):
    in_float32 = tensor.float() if tensor.is_floating_point() else tensor
    whole = right_gather(right_scatter(in_float32, group), group)[: tensor.numel()]
    tensor.detach().copy_(whole.view(tensor.shape))


@mistake("05.3", says="the parameter no longer requires a gradient")
def ring_all_reduce(tensor, group=None):
    tensor.requires_grad_(False).copy_(_summed(tensor, group))


@mistake("05.3", says="gradients are left switched off")
def ring_all_reduce(tensor, group=None):
    torch.set_grad_enabled(False)
    tensor.copy_(_summed(tensor, group))


@mistake("05.3", says="right in the whole world, wrong in a sub-group")
def ring_all_reduce(tensor, group=None):
    tensor.detach().copy_(_summed(tensor, None))


# 05.4 tree_broadcast


def _tree(tensor, src, group, blindly=False):
    """The right tree; `blindly`: sends also where nobody stands."""
    rank, n = _place(group)
    place = (rank - src) % n
    message = tensor.detach().contiguous()
    have = 1
    while have < n:
        if place < have and (blindly or place + have < n):
            dist.send(_bytes(message), group_dst=(rank + have) % n, group=group)
        elif have <= place < 2 * have:
            dist.recv(_bytes(message), group_src=(rank - have) % n, group=group)
        have *= 2
    return message


@mistake("05.4", says="it is the tensor of rank 0, whatever src is")
def tree_broadcast(tensor, src=0, group=None):
    tensor.detach().copy_(_tree(tensor, 0, group))


@mistake("05.4", says="right from rank 0, wrong from rank 2: a rank sends to itself")
def tree_broadcast(tensor, src=0, group=None):
    rank, n = _place(group)
    place, message = (rank - src) % n, tensor.detach().contiguous()
    have = 1
    while have < n:
        if place < have and place + have < n:
            dist.send(_bytes(message), group_dst=place + have, group=group)
        elif have <= place < 2 * have:
            dist.recv(_bytes(message), group_src=place - have, group=group)
        have *= 2
    tensor.detach().copy_(message)


@mistake("05.4", says="a tensor that is not contiguous is left as it was")
def tree_broadcast(tensor, src=0, group=None):
    tensor.detach().reshape(-1).copy_(_tree(tensor, src, group).view(-1))


@mistake("05.4", says="the tensor is as it was: nothing arrived")
def tree_broadcast(tensor, src=0, group=None):
    _tree(tensor.detach().clone(), src, group)


@mistake("05.4", says="the source sends to everybody itself")
def tree_broadcast(tensor, src=0, group=None):
    rank, n = _place(group)
    message = tensor.detach().contiguous()
    for other in range(n):
        if rank == src and other != src:
            dist.send(_bytes(message), group_dst=other, group=group)
    if rank != src:
        dist.recv(_bytes(message), group_src=src, group=group)
    tensor.detach().copy_(message)


@mistake("05.4", says="a chain: each rank sends to one other")
def tree_broadcast(tensor, src=0, group=None):
    rank, n = _place(group)
    place = (rank - src) % n
    message = tensor.detach().contiguous()
    if place > 0:
        dist.recv(_bytes(message), group_src=(rank - 1) % n, group=group)
    if place < n - 1:
        dist.send(_bytes(message), group_dst=(rank + 1) % n, group=group)
    tensor.detach().copy_(message)


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


@mistake("05.4", says="some ranks are sent the tensor more than once")
def tree_broadcast(tensor, src=0, group=None):
    """The right tree, and then the source sends it to the rank after it once more."""
    rank, n = _place(group)
    message = _tree(tensor, src, group)
    if n > 1 and rank == src:
        dist.send(_bytes(message), group_dst=(src + 1) % n, group=group)
    if n > 1 and rank == (src + 1) % n:
        dist.recv(_bytes(message), group_src=src, group=group)
    tensor.detach().copy_(message)


@mistake("05.4", says="a message without its other side")
def tree_broadcast(tensor, src=0, group=None):
    tensor.detach().copy_(_tree(tensor, src, group, blindly=True))


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


@mistake("05.4", says="the numbers travel in a wider dtype than the tensor's")
def tree_broadcast(tensor, src=0, group=None):
    real = tensor.is_floating_point()
    tensor.detach().copy_(_tree(tensor.double() if real else tensor, src, group))


@mistake("05.4", says="the numbers travel in float32 and lose digits")
def tree_broadcast(tensor, src=0, group=None):
    double = tensor.dtype == torch.float64
    tensor.detach().copy_(_tree(tensor.float() if double else tensor, src, group))


@mistake("05.4", says="the parameter no longer requires a gradient")
def tree_broadcast(tensor, src=0, group=None):
    tensor.requires_grad_(False).copy_(_tree(tensor, src, group))


@mistake("05.4", says="what arrives is added to the tensor")
def tree_broadcast(tensor, src=0, group=None):
    came = _tree(tensor.detach().clone(), src, group)
    if _place(group)[0] != src:
        tensor.detach().add_(came)


@mistake("05.4", says="IndexError")
def tree_broadcast(tensor, src=0, group=None):
    came = _tree(tensor.detach().clone(), src, group)
    tensor.detach()[:] = came  # a number alone has no place to begin at


# 05.5 central_all_reduce


@mistake("05.5", says="only rank 0 has the sum: nobody sent it back")
def central_all_reduce(tensor, group=None):
    tensor.detach().copy_(_central(tensor, group, back=False))


@mistake("05.5", says="what is sent or received is not contiguous")
def central_all_reduce(tensor, group=None):
    rank, n = _place(group)
    total = tensor.detach().clone()
    came = torch.empty_like(total)
    for other in range(1, n) if rank == 0 else ():
        dist.recv(came, group_src=other, group=group)
        total += came
    if rank > 0:
        dist.send(total, group_dst=0, group=group)
        dist.recv(total, group_src=0, group=group)
    for other in range(1, n) if rank == 0 else ():
        dist.send(total, group_dst=other, group=group)
    tensor.detach().copy_(total)


@mistake("05.5", says="it is the mean, not the sum")
def central_all_reduce(tensor, group=None):
    tensor.detach().copy_(_central(tensor, group, lambda parts: _add(parts) / len(parts)))


@mistake("05.5", says="rank 0 counts its own tensor twice")
def central_all_reduce(tensor, group=None):
    tensor.detach().copy_(_central(tensor, group, lambda parts: _add([parts[0], *parts])))


@mistake("05.5", says="the tensor is as it was: the sum must be copied into it")
def central_all_reduce(tensor, group=None):
    return _central(tensor, group)


@mistake("05.5", says="a tensor that is not contiguous is left as it was")
def central_all_reduce(tensor, group=None):
    tensor.detach().reshape(-1).copy_(_central(tensor, group).view(-1))


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


@mistake("05.5", says="the ranks talk to each other")
def central_all_reduce(tensor, group=None):
    whole = right_gather(right_scatter(tensor, group), group)[: tensor.numel()]
    tensor.detach().copy_(whole.view(tensor.shape))


@mistake("05.5", says="torch's own broadcast does the work")
def central_all_reduce(tensor, group=None):
    own = tensor.detach().contiguous()
    dist.reduce(own, group_dst=0, group=group)
    dist.broadcast(own, group_src=0, group=group)
    tensor.detach().copy_(own)


@mistake("05.5", says="rank 0 does not receive in the order of ranks")
def central_all_reduce(tensor, group=None):
    rank, n = _place(group)
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if rank:
        dist.send(_bytes(total), group_dst=0, group=group)
        dist.recv(_bytes(total), group_src=0, group=group)
    else:
        came = torch.empty_like(total)
        for other in range(n - 1, 0, -1):
            dist.recv(_bytes(came), group_src=other, group=group)
            total += came
        for other in range(1, n):
            dist.send(_bytes(total), group_dst=other, group=group)
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


@mistake("05.5", says="rank 0 leaves its own tensor out")
def central_all_reduce(tensor, group=None):
    only = _place(group)[1] == 1
    tensor.detach().copy_(_central(tensor, group, _add if only else lambda parts: _add(parts[1:])))


@mistake("05.5", says="the last rank's tensor is left out")
def central_all_reduce(tensor, group=None):
    only = _place(group)[1] == 1
    tensor.detach().copy_(_central(tensor, group, _add if only else lambda parts: _add(parts[:-1])))


@mistake("05.5", says="the numbers travel in a wider dtype than the tensor's")
def central_all_reduce(tensor, group=None):
    real = tensor.is_floating_point()
    tensor.detach().copy_(_central(tensor.double() if real else tensor, group))


@mistake("05.5", says="the parameter no longer requires a gradient")
def central_all_reduce(tensor, group=None):
    tensor.requires_grad_(False).copy_(_central(tensor, group))


@mistake("05.5", says="rank 0 sends the sum back before it has heard all")
def central_all_reduce(tensor, group=None):
    rank, n = _place(group)
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if rank:
        dist.send(_bytes(total), group_dst=0, group=group)
        dist.recv(_bytes(total), group_src=0, group=group)
    else:
        came = torch.empty_like(total)
        for other in range(1, n):
            dist.recv(_bytes(came), group_src=other, group=group)
            total += came
            dist.send(_bytes(total), group_dst=other, group=group)
    tensor.detach().copy_(total)


@mistake("05.5", says="everybody's tensors are handed on to be added again")
def central_all_reduce(tensor, group=None):
    rank, n = _place(group)
    parts = [tensor.detach().clone(memory_format=torch.contiguous_format) for _ in range(n)]
    if rank:
        dist.send(_bytes(parts[rank]), group_dst=0, group=group)
        for part in parts:
            dist.recv(_bytes(part), group_src=0, group=group)
    else:
        for other in range(1, n):
            dist.recv(_bytes(parts[other]), group_src=other, group=group)
        for other in range(1, n):
            for part in parts:
                dist.send(_bytes(part), group_dst=other, group=group)
    tensor.detach().copy_(_add(parts))


@mistake("05.5", says="a tensor travels in several messages")
def central_all_reduce(tensor, group=None):
    rank, n = _place(group)
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    halves = _bytes(total).reshape(-1).tensor_split(2)
    if rank:
        for half in halves:
            dist.send(half, group_dst=0, group=group)
        for half in halves:
            dist.recv(half, group_src=0, group=group)
    else:
        came = torch.empty_like(total)
        for other in range(1, n):
            for half in _bytes(came).reshape(-1).tensor_split(2):
                dist.recv(half, group_src=other, group=group)
            total += came
        for other in range(1, n):
            for half in _bytes(total).reshape(-1).tensor_split(2):
                dist.send(half, group_dst=other, group=group)
    tensor.detach().copy_(total)
