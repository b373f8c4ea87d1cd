"""Right answers to lesson 20 in another style: every check has to let them pass.

`ALTERNATIVES` maps an exercise's id to the answers to it.
"""

import torch
import torch.distributed as dist

from shared.less_communication.packing import pack_signs, unpack_signs
from shared.less_communication.states import ready
from solutions import lesson20_less_communication as right
from solutions.alternatives.rare_messages import (
    ByVelocity,
    OneVector,
    average,
    by_lists,
    by_tensors,
)


def by_adding(group, bucket):
    """Added into a tensor of zeros, and back into the bucket."""
    buffer, ranks = bucket.buffer(), dist.get_world_size(group)
    half = torch.zeros(buffer.numel(), dtype=torch.float16, device=buffer.device)
    half.add_(buffer.half(), alpha=1 / ranks)
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda _: buffer.zero_().add_(half))


def split_half(group, bucket):
    """Divided in 32 bits, and a new tensor for the value."""
    half = (bucket.buffer() / dist.get_world_size(group)).half()
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].to(bucket.buffer().dtype))


def everybody(mine, group):
    """Lists in the place of one tensor."""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return parts


def by_mask(state, bucket):
    """The residual by subtraction, the sum from a stack of dense tensors."""
    whole = state.recall(bucket) + bucket.buffer()
    places = torch.argsort(whole.abs(), descending=True)[: state.count(whole.numel())]
    values = everybody(whole[places], state.group)
    every = everybody(places.to(torch.int32), state.group)
    dense = [
        torch.zeros_like(whole).index_copy(0, where.long(), one)
        for one, where in zip(values, every, strict=True)
    ]
    state.keep(bucket, whole - torch.zeros_like(whole).index_copy(0, places, whole[places]))
    return ready(torch.stack(dense).mean(0))


def later(state, bucket):
    """Messages begun, and put together where DDP waits."""
    buffer, n = bucket.buffer(), state.world_size
    buffer += state.recall(bucket)
    places = buffer.abs().topk(state.count(buffer.numel())).indices.sort().values
    values, every = buffer[places], []
    residual = buffer.clone()
    residual.index_fill_(0, places, 0)
    state.keep(bucket, residual)
    futures = []
    for mine in (values, places.int()):
        every.append([torch.empty_like(mine) for _ in range(n)])
        work = dist.all_gather(every[-1], mine, group=state.group, async_op=True)
        futures.append(work.get_future())

    def put_together(done):
        buffer.zero_()
        for one, where in zip(*every, strict=True):
            buffer.scatter_add_(0, where.long(), one)
        return buffer.div_(n)

    return torch.futures.collect_all(futures).then(put_together)


def packed_by_shifts(state, bucket):
    """Bits by shifts, first sign in the highest bit."""
    whole = bucket.buffer() + state.recall(bucket)
    numbers, sizes = whole.numel(), [g.numel() for g in bucket.gradients()]
    bits = torch.zeros(-(-numbers // 8) * 8, dtype=torch.uint8)
    bits[:numbers] = (whole >= 0).to(torch.uint8)
    packed = torch.zeros(len(bits) // 8, dtype=torch.uint8)
    for place in range(8):
        packed |= bits[place::8] << (7 - place)
    means = torch.stack([x.abs().sum() / x.numel() for x in whole.split(sizes)])

    def unpack(byte, scale):
        ones = torch.stack([(byte >> (7 - place)) & 1 for place in range(8)], 1)
        sign = ones.flatten()[:numbers].to(whole.dtype) * 2 - 1
        return torch.cat([s * x for s, x in zip(scale, sign.split(sizes), strict=True)])

    state.keep(bucket, whole - unpack(packed, means))
    every = zip(everybody(packed, state.group), everybody(means, state.group), strict=True)
    return ready(torch.stack([unpack(*one) for one in every]).mean(0))


def in_one_message(state, bucket):
    """Signs and scales as bytes of one message."""
    whole = bucket.buffer() + state.recall(bucket)
    sizes = torch.tensor([g.numel() for g in bucket.gradients()])
    scales = torch.stack([x.abs().mean() for x in whole.split(sizes.tolist())])
    packed = pack_signs(whole)
    message = torch.cat([scales.view(torch.uint8), packed])

    def decode(one):
        theirs = one[: 8 * len(sizes)].clone().view(whole.dtype)
        return unpack_signs(one[8 * len(sizes) :], whole.numel(), whole.dtype) * (
            theirs.repeat_interleave(sizes)
        )

    state.keep(bucket, whole - decode(message))
    total = torch.zeros_like(whole)
    for one in everybody(message, state.group):
        total += decode(one)
    return ready(total / state.world_size)


def by_projection(matrices, factors, group=None):
    """P by a QR of its own; nothing done to the factors, since only what they span counts."""
    ranks = dist.get_world_size(group)
    flat = torch.cat([(m @ q).flatten() for m, q in zip(matrices, factors, strict=True)])
    if ranks > 1:
        dist.all_reduce(flat, group=group)
    shapes = [(m.shape[0], q.shape[1]) for m, q in zip(matrices, factors, strict=True)]
    parts = flat.split([rows * wide for rows, wide in shapes])
    lefts = [
        torch.linalg.qr(part.view(shape))[0] for part, shape in zip(parts, shapes, strict=True)
    ]
    flat = torch.cat([(m.T @ p / ranks).flatten() for m, p in zip(matrices, lefts, strict=True)])
    if ranks > 1:
        dist.all_reduce(flat, group=group)
    parts = flat.split([m.shape[1] * p.shape[1] for m, p in zip(matrices, lefts, strict=True)])
    rights = [part.view(m.shape[1], -1) for part, m in zip(parts, matrices, strict=True)]
    for m, p, q in zip(matrices, lefts, rights, strict=True):
        m[:] = torch.einsum("nr,mr->nm", p, q)
    return tuple(rights)


def by_svd(matrices, factors, group=None):
    """Another basis of the same space."""
    n = dist.get_world_size(group)
    lefts = [m @ q for m, q in zip(matrices, factors, strict=True)]
    if n > 1:
        flat = torch.cat([p.ravel() for p in lefts])
        dist.all_reduce(flat, group=group)
        parts = flat.split([p.numel() for p in lefts])
        lefts = [part.reshape(p.shape) for part, p in zip(parts, lefts, strict=True)]
    lefts = [torch.linalg.svd(p, full_matrices=False).U for p in lefts]
    rights = [m.mT @ p for m, p in zip(matrices, lefts, strict=True)]
    if n > 1:
        flat = torch.cat([q.ravel() for q in rights])
        dist.all_reduce(flat, group=group)
        parts = (flat / n).split([q.numel() for q in rights])
        rights = [part.reshape(q.shape) for part, q in zip(parts, rights, strict=True)]
    for m, p, q in zip(matrices, lefts, rights, strict=True):
        m.copy_(p @ q.mT)
    return rights


def by_index(state, bucket):
    """Parameters by number."""
    buffer, first = bucket.buffer(), state.steps
    if bucket.is_last():
        state.steps = first + 1
    if first < state.start:
        average([buffer], state.group)
        return ready(buffer)
    buffer.add_(state.recall(bucket))
    before = buffer.detach().clone()
    parameters, gradients = bucket.parameters(), bucket.gradients()
    pays = [state.pays(g) for g in gradients]
    average([g for g, good in zip(gradients, pays, strict=True) if not good], state.group)
    numbers = [i for i, good in enumerate(pays) if good]
    matrices = [gradients[i].view(len(gradients[i]), -1) for i in numbers]
    if numbers and parameters[numbers[0]] in state.right:
        factors = [state.right[parameters[i]] for i in numbers]
    else:
        factors = state.first_factors(matrices)
    new = by_projection(matrices, factors, state.group) if matrices else ()
    state.right.update({parameters[i]: q for i, q in zip(numbers, new, strict=True)})
    state.keep(bucket, before - buffer)
    return ready(buffer)


def beside(state, bucket):
    """A copy is compressed, and returned."""
    plain = state.steps < state.start
    state.steps += int(bucket.is_last())
    out = bucket.buffer().clone()
    if plain:
        average([out], state.group)
        return ready(out)
    out += state.recall(bucket)
    whole, thin, rest = out.clone(), {}, []
    parts = out.split([g.numel() for g in bucket.gradients()])
    for p, g, part in zip(bucket.parameters(), bucket.gradients(), parts, strict=True):
        if state.pays(g):
            thin[p] = part.view(g.shape[0], -1)
        else:
            rest.append(part)
    average(rest, state.group)
    known = all(p in state.right for p in thin)
    matrices = list(thin.values())
    factors = [state.right[p] for p in thin] if known else state.first_factors(matrices)
    new = right.low_rank_mean(matrices, factors, state.group)
    state.right.update(zip(thin, new, strict=True))
    state.keep(bucket, whole - out)
    return ready(out)


ALTERNATIVES = {
    "20.1": [by_adding, split_half],
    "20.2": [by_mask, later],
    "20.3": [packed_by_shifts, in_one_message],
    "20.4a": [by_projection, by_svd],
    "20.4b": [by_index, beside],
    "20.5": [ByVelocity, OneVector],
    "20.6": [by_lists, by_tensors],
}
assert set(ALTERNATIVES) == set(right.NOTES)
