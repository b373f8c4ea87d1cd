"""Lesson 05, the instructor's side: collectives from messages.

Later lessons take torch's own collectives, so the answers live in this module. The
lesson's one idea: what an operation costs is what its busiest rank has to send, and the ring makes
all ranks equally busy. The rest is arithmetic modulo n, and there the mistakes are made.

Points are the difficulty at the exercise (13 in all). Ask for the sentence behind a right answer:
"which chunk do you send in step 0, and why not your own", "who sends most", "what do 1,000 ranks
pay for four bytes".

All functions send bytes, not numbers: whatever torch can add can be summed, also what a backend's
own all-reduce refuses (int16 for gloo).
"""

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

__all__ = [
    "central_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "tree_broadcast",
]

# What comes needs a place. One of this size is the same memory in every call; a longer one the
# system hands out anew, page by page, which takes about as long as the message.
PIECE_BYTES = 16 * 2**20


def ring_reduce_scatter(
    tensor: Shaped[Tensor, "..."], group: dist.ProcessGroup | None = None
) -> Shaped[Tensor, " chunk"]:
    """Add the tensors of all ranks; return this rank's n-th of the sum. `tensor` is left as it is.

    The tensor is flattened and padded with zeros to n equal chunks; rank r returns chunk r, of
    ceil(numel / n) numbers. In each of n - 1 steps every rank sends one chunk to the next rank of
    the ring, (rank + 1) mod n, and adds what comes from the one before: (n - 1) chunks leave
    each rank.
    """
    chunks = _padded(tensor.detach().reshape(-1), dist.get_world_size(group))
    _add_around(chunks, group)
    return chunks[dist.get_rank(group)].clone()


def ring_all_gather(
    chunk: Shaped[Tensor, "..."], group: dist.ProcessGroup | None = None
) -> Shaped[Tensor, " gathered"]:
    """Put the chunks of all ranks one behind the other, in the order of ranks, on every rank.

    All chunks have one size; the result is flat, n times as long. In each of n - 1 steps every
    rank passes on to the next rank, (rank + 1) mod n, what came last: (n - 1) chunks leave each
    rank.
    """
    gathered = chunk.detach().new_empty(dist.get_world_size(group), chunk.numel())
    gathered[dist.get_rank(group)] = chunk.detach().reshape(-1)
    _pass_around(gathered, group)
    return gathered.view(-1)


def ring_all_reduce(tensor: Shaped[Tensor, "..."], group: dist.ProcessGroup | None = None) -> None:
    """Replace the tensor by its sum over all ranks, in place, with the same bits on every rank.

    Any shape, contiguous or not. A reduce-scatter and an all-gather: 2 (n - 1) chunks of
    ceil(numel / n) numbers leave each rank. Both halves work in the tensor's own memory, where
    that is contiguous; a long tensor goes around in blocks.
    """
    n = dist.get_world_size(group)
    flat = tensor.detach().reshape(-1)  # the tensor's own memory, or a copy of it
    for block in flat.split(n * (PIECE_BYTES // flat.itemsize)):
        uneven = block.numel() % n > 0  # the last alone can be
        chunks = _padded(block, n) if uneven else block.view(n, -1)
        _add_around(chunks, group)
        _pass_around(chunks, group)
        if uneven:
            block.copy_(chunks.view(-1)[: block.numel()])
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def tree_broadcast(
    tensor: Shaped[Tensor, "..."], src: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Overwrite the tensor, in place, with that of rank `src` of the group.

    In round k everyone who has it sends it to one who has not, so that ceil(log2 n) rounds are
    enough. Any shape, contiguous or not. `src` counts within the group.
    """
    n = dist.get_world_size(group)
    place = (dist.get_rank(group) - src) % n  # the source stands at 0
    message = tensor.detach().contiguous()
    have = 1  # places 0 to have - 1 hold the tensor
    while have < n:
        if place < have and place + have < n:
            dist.send(_bytes(message), group_dst=(place + have + src) % n, group=group)
        elif have <= place < 2 * have:
            dist.recv(_bytes(message), group_src=(place - have + src) % n, group=group)
        have *= 2
    tensor.detach().copy_(message)


def central_all_reduce(
    tensor: Shaped[Tensor, "..."], group: dist.ProcessGroup | None = None
) -> None:
    """Replace the tensor by its sum over all ranks, in place, by way of rank 0 of the group.

    Rank 0 receives the others' tensors in the order of ranks, adds them, and sends the sum to
    each. Any shape, contiguous or not. The others send one tensor, rank 0 sends n - 1.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    if rank == 0:
        came = torch.empty_like(total)
        for other in range(1, n):  # in the order of ranks: the same sum in every run
            dist.recv(_bytes(came), group_src=other, group=group)
            total += came
        for other in range(1, n):
            dist.send(_bytes(total), group_dst=other, group=group)
    else:
        dist.send(_bytes(total), group_dst=0, group=group)
        dist.recv(_bytes(total), group_src=0, group=group)
    tensor.detach().copy_(total)


def _padded(flat: Shaped[Tensor, " numel"], n: int) -> Shaped[Tensor, "n chunk"]:
    """A copy, with zeros at its end, as n chunks of ceil(numel / n) numbers."""
    chunks = flat.new_zeros(n, -(-flat.numel() // n))
    chunks.view(-1)[: flat.numel()] = flat
    return chunks


def _add_around(chunks: Shaped[Tensor, "n chunk"], group: dist.ProcessGroup | None) -> None:
    """The ring's first half, in place: chunk r of rank r becomes the sum over all ranks."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    came = torch.empty_like(chunks[0])
    for step in range(n - 1):
        # Backwards through the chunks: the last to arrive, with all others in it, is our own.
        _exchange(chunks[(rank - 1 - step) % n], came, group)
        chunks[(rank - 2 - step) % n] += came


def _pass_around(chunks: Shaped[Tensor, "n chunk"], group: dist.ProcessGroup | None) -> None:
    """The second half, in place: every chunk r becomes that of rank r."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for step in range(n - 1):
        _exchange(chunks[(rank - step) % n], chunks[(rank - step - 1) % n], group)


def _exchange(
    outgoing: Shaped[Tensor, " chunk"],
    incoming: Shaped[Tensor, " chunk"],
    group: dist.ProcessGroup | None,
) -> None:
    """Send to the next rank of the ring while receiving from the one before.

    Both are started before either is waited for: a ring in which all send first stands still. In
    one batch, because NCCL runs messages that are started one by one in that order.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    sending = dist.P2POp(dist.isend, _bytes(outgoing), group=group, group_peer=(rank + 1) % n)
    receiving = dist.P2POp(dist.irecv, _bytes(incoming), group=group, group_peer=(rank - 1) % n)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()


def _bytes(message: Shaped[Tensor, "..."]) -> Shaped[Tensor, " num_bytes"]:
    """A contiguous tensor's own memory as bytes: every backend can send those."""
    return message.view(-1).view(torch.uint8)


NOTES = {
    "05.1": """
ring_reduce_scatter: 4 points, 40 minutes.
Look for: padding to n equal chunks; which chunk is sent first; send and receive started together;
a padded copy, so that the caller's tensor survives.
Weigh it: right for sizes that n divides 2, odd sizes 1, the bytes 1. Values alone are worth half:
an answer that sends whole tensors is right and is what the lesson argues against.
Common mistakes: starting with chunk r instead of r - 1, after which rank r holds chunk r + 1, as
many descriptions of the ring have it (harmless inside an all-reduce, wrong as a reduce-scatter);
send before recv on all ranks; numel // n; `dst=(rank + 1) % n` in a sub-group, where dst means the
world's rank and group_dst the group's.
Worth discussing: the direction of the ring does not matter and either passes; nor do
isend/recv/wait against batch_isend_irecv on gloo. On NCCL the batch is needed as soon as both
directions of a pair are in flight.
""",
    "05.2": """
ring_all_gather: 2 points, 15 minutes.
Look for: what came last is what goes out next; the place of a chunk is its rank, not its arrival.
Common mistakes: every rank sends its own chunk to all others: the same bytes, but n - 1
connections for each rank, and on a real network all of them through one switch; the roll by one's
own rank forgotten; all that has been gathered sent again in each step.
""",
    "05.3": """
ring_all_reduce: 2 points, 15 minutes.
Look for: copy_ into the caller's memory, for any strides; the padding cut off again.
Common mistakes: `tensor = ...`, which binds a local name; `reshape(-1).copy_()`, which writes into
a copy when the tensor is not contiguous, the most frequent silent error here; the sum of n
received tensors in an order of one's own, which is right to the last bits only, and weights that
should be equal on all ranks drift apart by them.
""",
    "05.4": """
tree_broadcast: 3 points, 25 minutes.
Look for: places counted from the source; a guard for place + have >= n; src within the group.
Weigh it: a flat loop at the source is worth one point: right, and n - 1 rounds.
Common mistakes: powers of two only; src = 0 assumed; a chain, which is a pipeline without the
chunks that would make one worth while (ask what chunks would change: for large tensors a pipelined
chain beats the tree).
""",
    "05.5": """
central_all_reduce: 2 points, 15 minutes.
Look for: exactly the bad example. The sum in the order of ranks, so that it is the same in each
run: recv from anyone is faster and gives other last bits each time.
Common mistakes: rank 0 sends before it has received all; its own tensor added twice.
Ask: with which n is this no worse than the ring? (Two, in bytes: S from each. Not in time: the
ring sends both ways at once.)
""",
}
