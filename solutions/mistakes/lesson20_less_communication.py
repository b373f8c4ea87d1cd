"""Wrong answers to lesson 20, each with the words that the check must say to it."""

from typing import Any

import torch
import torch.distributed as dist

from shared.ddp.averaging import average_flat, sum_flat
from shared.exercises.mistakes import mistake
from shared.less_communication.packing import orthonormal, pack_signs, unpack_signs
from shared.less_communication.states import ready
from shared.ranks.collectives import all_gather
from solutions import lesson20_less_communication as right

# 20.1 fp16_hook


def in_half(scaled=True, after=False, wait=False, dtype=torch.float16):
    """The hook, with what is to go wrong."""

    def hook(group, bucket):
        buffer = bucket.buffer()
        half = buffer.to(dtype)
        n = dist.get_world_size(group)
        if scaled and not after:
            half /= n
        future = dist.all_reduce(half, group=group, async_op=True).get_future()
        if wait:
            future.wait()

        def back(done):
            buffer.copy_(done.value()[0])
            return buffer.div_(n) if after else buffer

        return future.then(back)

    return hook


@mistake("20.1", says="the sum over the ranks, not the mean")
def fp16_hook(group, bucket):
    return in_half(scaled=False)(group, bucket)


@mistake("20.1", says="divided after the sum")
def fp16_hook(group, bucket):
    return in_half(after=True)(group, bucket)


@mistake("20.1", says="the message still has 32 bits a number")
def fp16_hook(group, bucket):
    return in_half(dtype=torch.float32)(group, bucket)


@mistake("20.1", says="the hook waits for its message")
def fp16_hook(group, bucket):
    return in_half(wait=True)(group, bucket)


# 20.2 topk_with_error_feedback


def forgetful(hook, state, bucket):
    """The right hook, for which nothing was kept."""
    state.keep(bucket, torch.zeros_like(bucket.buffer()))
    return hook(state, bucket)


@mistake("20.2", says="what is not sent is forgotten")
def topk_with_error_feedback(state, bucket):
    return forgetful(right.topk_with_error_feedback, state, bucket)


class ByIndex:
    """A state that keeps a residual for a bucket's index, where it still has the right size."""

    def __init__(self, state):
        if not hasattr(state, "by_index"):
            state.by_index = {}
        self.inner, self.kept = state, state.by_index

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def recall(self, bucket):
        old, buffer = self.kept.get(bucket.index()), bucket.buffer()
        return old if old is not None and old.shape == buffer.shape else torch.zeros_like(buffer)

    def keep(self, bucket, residual):
        self.kept[bucket.index()] = residual


@mistake("20.2", says="a bucket's index stands for other parameters")
def topk_with_error_feedback(state, bucket):
    by_index: Any = ByIndex(state)
    return right.topk_with_error_feedback(by_index, bucket)


@mistake("20.2", says="each rank's are of different places")
def topk_with_error_feedback(state, bucket):
    whole = bucket.buffer() + state.recall(bucket)
    places = whole.abs().topk(state.count(whole.numel())).indices
    values = whole[places]
    average_flat([values], state.group)
    sent = torch.zeros_like(whole)
    sent[places] = values
    state.keep(bucket, whole - sent)
    return ready(sent)


# 20.3 one_bit_with_error_feedback


def gathered(mine, state):
    whole = mine.new_empty(state.world_size * mine.numel())
    all_gather(whole, mine.contiguous(), state.group).wait()
    return whole.split(mine.numel())


def signed(state, bucket, byte=False, own=False, one=False):
    """The hook, with what is to go wrong."""
    buffer = bucket.buffer()
    whole = buffer + state.recall(bucket)
    sizes = [buffer.numel()] if one else [g.numel() for g in bucket.gradients()]
    scales = torch.stack([part.abs().mean() for part in whole.split(sizes)])
    times = torch.tensor(sizes)
    plus = torch.where(whole >= 0, 1.0, -1.0).to(whole)
    state.keep(bucket, whole - plus * scales.repeat_interleave(times))
    packed = (whole >= 0).to(torch.uint8) if byte else pack_signs(whole)
    total = torch.zeros_like(buffer)
    for bits, theirs in zip(gathered(packed, state), gathered(scales, state), strict=True):
        one_sign = 2.0 * bits - 1 if byte else unpack_signs(bits, whole.numel(), whole.dtype)
        total += one_sign * (scales if own else theirs).repeat_interleave(times)
    return ready(total / state.world_size)


@mistake("20.3", says="what is not sent is forgotten")
def one_bit_with_error_feedback(state, bucket):
    return forgetful(right.one_bit_with_error_feedback, state, bucket)


@mistake("20.3", says="a byte for each sign")
def one_bit_with_error_feedback(state, bucket):
    return signed(state, bucket, byte=True)


@mistake("20.3", says="by this rank's own scales")
def one_bit_with_error_feedback(state, bucket):
    return signed(state, bucket, own=True)


@mistake("20.3", says="one scale for the whole bucket")
def one_bit_with_error_feedback(state, bucket):
    return signed(state, bucket, one=True)


# 20.4a low_rank_mean


def iterated(matrices, factors, group, made=orthonormal, sum_up=sum_flat):
    """The power iteration, with what is to go wrong."""
    lefts = [m @ made(q) for m, q in zip(matrices, factors, strict=True)]
    sum_up(lefts, group)
    lefts = [made(p) for p in lefts]
    rights = [m.T @ p for m, p in zip(matrices, lefts, strict=True)]
    average_flat(rights, group)
    for m, p, q in zip(matrices, lefts, rights, strict=True):
        m.copy_(p @ q.T)
    return rights


@mistake("20.4a", says="P's columns are not at right angles")
def low_rank_mean(matrices, factors, group=None):
    return iterated(matrices, factors, group, made=lambda x: x)


@mistake("20.4a", says="a message for each matrix")
def low_rank_mean(matrices, factors, group=None):
    def one_by_one(tensors, group):
        for each in tensors:
            sum_flat([each], group)

    return iterated(matrices, factors, group, sum_up=one_by_one)


@mistake("20.4a", says="not the new ones")
def low_rank_mean(matrices, factors, group=None):
    right.low_rank_mean(matrices, factors, group)
    return list(factors)


@mistake("20.4a", says="the factors that were given are overwritten")
def low_rank_mean(matrices, factors, group=None):
    for q in factors:
        q.copy_(orthonormal(q))
    return right.low_rank_mean(matrices, factors, group)


# 20.4b power_sgd


@mistake("20.4b", says="what is not sent is forgotten")
def power_sgd(state, bucket):
    if state.steps > state.start:
        return forgetful(right.power_sgd, state, bucket)
    return right.power_sgd(state, bucket)


@mistake("20.4b", says="something is kept or drawn before state.start")
def power_sgd(state, bucket):
    own, early = bucket.buffer().clone(), state.steps < state.start
    future = right.power_sgd(state, bucket)
    if early:
        state.keep(bucket, own - bucket.buffer())
    return future


@mistake("20.4b", says="counts buckets, not steps")
def power_sgd(state, bucket):
    future = right.power_sgd(state, bucket)
    state.steps += not bucket.is_last()
    return future


# 20.5 LocalSGD


@mistake("20.5", says="a momentum of 1.5 is accepted")
class LocalSGD(right.LocalSGD):
    def __init__(self, parameters, every, outer_lr=1.0, outer_momentum=0.0, group=None):
        super().__init__(parameters, every, outer_lr, min(outer_momentum, 0.99), group)


@mistake("20.5", says="the outer gradient has the wrong sign")
class LocalSGD(right.LocalSGD):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.outer_lr = -self.outer_lr


@mistake("20.5", says="the ranks start apart")
class LocalSGD(right.LocalSGD):
    def __init__(self, parameters, *args, **kwargs):
        trained = [p for p in parameters if p.requires_grad]
        own = [p.detach().clone() for p in trained]
        super().__init__(trained, *args, **kwargs)
        for p, start, mine in zip(self.parameters, self.agreed, own, strict=True):
            p.data.copy_(mine)
            start.copy_(mine)


@mistake("20.5", says="in which the ranks do not agree")
class LocalSGD(right.LocalSGD):
    def step(self):
        average_flat([p.detach().clone() for p in self.parameters], self.group)  # "to compare"
        return super().step()


# 20.6 hierarchical_all_reduce


@mistake("20.6", says="the whole tensor is sent across")
def hierarchical_all_reduce(x, inside, across):
    for group in (inside, across):
        if dist.get_world_size(group) > 1:
            dist.all_reduce(x, group=group)


@mistake("20.6", says="the groups are exchanged")
def hierarchical_all_reduce(x, inside, across):
    right.hierarchical_all_reduce(x, across, inside)


@mistake("20.6", says="it knows of no nodes")
def hierarchical_all_reduce(x, inside, across):
    dist.all_reduce(x)


@mistake("20.6", says="the mean, not the sum")
def hierarchical_all_reduce(x, inside, across):
    right.hierarchical_all_reduce(x, inside, across)
    x /= dist.get_world_size()
