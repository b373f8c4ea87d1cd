"""Wrong answers to lesson 20, each with the words that the check must say to it."""

import torch
import torch.distributed as dist

from shared.ddp.averaging import average_flat, sum_flat
from shared.exercises.mistakes import mistake
from shared.less_communication.packing import orthonormal, pack_signs, unpack_signs
from shared.less_communication.states import ready
from shared.ranks.collectives import all_gather
from solutions import lesson20_less_communication as right

# 20.1 fp16_hook


def in_half(
    scaled=True, group_of=lambda group: group, after=False, wait=False, dtype=torch.float16
):
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


@mistake("20.1", says="divided by the number of all ranks")
def fp16_hook(group, bucket):
    half = bucket.buffer().half() / dist.get_world_size()
    future = dist.all_reduce(half, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


# 20.2 topk_with_error_feedback


def gathered(mine, state):
    whole = mine.new_empty(state.world_size * mine.numel())
    all_gather(whole, mine.contiguous(), state.group).wait()
    return whole.split(mine.numel())


def sparse(key=torch.abs, feedback=True, residual=None, mean=True, wide=False):
    """The hook, with what is to go wrong."""

    def hook(state, bucket):
        buffer = bucket.buffer()
        given = buffer.clone()
        whole = buffer + state.recall(bucket) if feedback else given.clone()
        places = key(whole).topk(state.count(whole.numel())).indices
        sent = torch.zeros_like(whole)
        sent[places] = whole[places]
        state.keep(bucket, residual(whole, sent, given) if residual else whole - sent)
        values = gathered(whole[places], state)
        every = gathered(places if wide else places.int(), state)
        buffer.zero_()
        for one, where in zip(values, every, strict=True):
            buffer.index_add_(0, where, one)
        return ready(buffer / state.world_size if mean else buffer)

    return hook


@mistake("20.2", says="what is not sent is forgotten")
def topk_with_error_feedback(state, bucket):
    return sparse(feedback=False)(state, bucket)


@mistake("20.2", says="the residual is of the gradients alone")
def topk_with_error_feedback(state, bucket):
    return sparse(residual=lambda whole, sent, given: given - sent)(state, bucket)


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
    return sparse()(ByIndex(state), bucket)


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


def signed(scale=lambda x: x.abs().mean(), feedback=True, byte=False, whose="each", one=False):
    """The hook, with what is to go wrong."""

    def hook(state, bucket):
        buffer = bucket.buffer()
        whole = buffer + state.recall(bucket) if feedback else buffer.clone()
        sizes = [whole.numel()] if one else [g.numel() for g in bucket.gradients()]
        scales = torch.stack([scale(part) for part in whole.split(sizes)])
        times = torch.tensor(sizes)
        plus = torch.where(whole >= 0, 1.0, -1.0).to(whole)
        state.keep(bucket, whole - plus * scales.repeat_interleave(times))
        packed = (whole >= 0).to(torch.uint8) if byte else pack_signs(whole)
        total = torch.zeros_like(buffer)
        rows = zip(gathered(packed, state), gathered(scales, state), strict=True)
        for bits, theirs in rows:
            theirs = scales if whose == "own" else theirs
            one_sign = 2.0 * bits - 1 if byte else unpack_signs(bits, whole.numel(), whole.dtype)
            total += one_sign * theirs.repeat_interleave(times)
        return ready(total / state.world_size)

    return hook


@mistake("20.3", says="what is not sent is forgotten")
def one_bit_with_error_feedback(state, bucket):
    return signed(feedback=False)(state, bucket)


@mistake("20.3", says="one scale for the whole bucket")
def one_bit_with_error_feedback(state, bucket):
    return signed(one=True)(state, bucket)


@mistake("20.3", says="a byte for each sign")
def one_bit_with_error_feedback(state, bucket):
    return signed(byte=True)(state, bucket)


@mistake("20.3", says="by this rank's own scales")
def one_bit_with_error_feedback(state, bucket):
    return signed(whose="own")(state, bucket)


# 20.4a low_rank_mean


def iterated(left=orthonormal, mean=average_flat, sum_up=sum_flat, returned="new"):
    """The power iteration, with what is to go wrong."""

    def answer(matrices, factors, group=None):
        starts = [orthonormal(q) for q in factors]
        lefts = [m @ q for m, q in zip(matrices, starts, strict=True)]
        sum_up(lefts, group)
        lefts = [left(p) for p in lefts]
        rights = [m.T @ p for m, p in zip(matrices, lefts, strict=True)]
        mean(rights, group)
        for m, p, q in zip(matrices, lefts, rights, strict=True):
            m.copy_(p @ q.T)
        return rights if returned == "new" else list(factors)

    return answer


def one_by_one(tensors, group):
    for each in tensors:
        sum_flat([each], group)


@mistake("20.4a", says="P's columns are not at right angles")
def low_rank_mean(matrices, factors, group=None):
    def loose(matrices, factors, group):
        lefts = [m @ q for m, q in zip(matrices, factors, strict=True)]
        sum_flat(lefts, group)
        rights = [m.T @ p for m, p in zip(matrices, lefts, strict=True)]
        average_flat(rights, group)
        for m, p, q in zip(matrices, lefts, rights, strict=True):
            m.copy_(p @ q.T)
        return rights

    return loose(matrices, factors, group)


@mistake("20.4a", says="the rights are summed, not averaged")
def low_rank_mean(matrices, factors, group=None):
    return iterated(mean=sum_flat)(matrices, factors, group)


@mistake("20.4a", says="a message for each matrix")
def low_rank_mean(matrices, factors, group=None):
    return iterated(sum_up=one_by_one)(matrices, factors, group)


@mistake("20.4a", says="not the new ones")
def low_rank_mean(matrices, factors, group=None):
    return iterated(returned="old")(matrices, factors, group)


@mistake("20.4a", says="the factors that were given are overwritten")
def low_rank_mean(matrices, factors, group=None):
    for q in factors:
        q.copy_(orthonormal(q))
    return iterated()(matrices, factors, group)


# 20.4b power_sgd


def powered(feedback=True, warm=True, vectors=average_flat, start=True, every_bucket=False):
    """The hook, with what is to go wrong."""

    def hook(state, bucket):
        buffer = bucket.buffer()
        plain = start and state.steps < state.start
        state.steps += 1 if every_bucket else bucket.is_last()
        if plain:
            average_flat([buffer], state.group)
            return ready(buffer)
        if feedback:
            buffer += state.recall(bucket)
        whole = buffer.clone()
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        thin = [(p, g.view(g.shape[0], -1)) for p, g in pairs if state.pays(g)]
        vectors([g for _, g in pairs if not state.pays(g)], state.group)
        matrices = [m for _, m in thin]
        known = warm and all(p in state.right for p, _ in thin)
        factors = [state.right[p] for p, _ in thin] if known else state.first_factors(matrices)
        for (p, _), q in zip(
            thin, right.low_rank_mean(matrices, factors, state.group), strict=True
        ):
            state.right[p] = q
        state.keep(bucket, whole - buffer)
        return ready(buffer)

    return hook


@mistake("20.4b", says="what is not sent is forgotten")
def power_sgd(state, bucket):
    return powered(feedback=False)(state, bucket)


@mistake("20.4b", says="a new random factor in every step")
def power_sgd(state, bucket):
    return powered(warm=False)(state, bucket)


@mistake("20.4b", says="something is kept or drawn before state.start")
def power_sgd(state, bucket):
    own, early = bucket.buffer().clone(), state.steps < state.start
    future = powered()(state, bucket)
    if early:
        state.keep(bucket, own - bucket.buffer())
    return future


@mistake("20.4b", says="counts buckets, not steps")
def power_sgd(state, bucket):
    return powered(every_bucket=True)(state, bucket)


# 20.5 LocalSGD


class Apart(right.LocalSGD):
    """The reference, in pieces that can go wrong."""

    def gradients(self):
        moved = [start - p for start, p in zip(self.agreed, self.parameters, strict=True)]
        average_flat(moved, self.group)
        return moved

    def outer(self, p, start, v, gradient):
        v.mul_(self.outer_momentum).add_(gradient)
        start.sub_(gradient + self.outer_momentum * v, alpha=self.outer_lr)
        p.copy_(start)

    @torch.no_grad()
    def step(self):
        self.steps += 1
        if self.steps % self.every:
            return False
        rows = zip(self.parameters, self.agreed, self.velocity, self.gradients(), strict=True)
        for row in rows:
            self.outer(*row)
        return True


@mistake("20.5", says="a momentum of 1.5 is accepted")
class LocalSGD(right.LocalSGD):
    def __init__(self, parameters, every, outer_lr=1.0, outer_momentum=0.0, group=None):
        super().__init__(parameters, every, outer_lr, min(outer_momentum, 0.99), group)


@mistake("20.5", says="the outer gradient has the wrong sign")
class LocalSGD(Apart):
    def gradients(self):
        return [-g for g in super().gradients()]


@mistake("20.5", says="not from where they agreed")
class LocalSGD(Apart):
    def outer(self, p, start, v, gradient):
        mean = start - gradient
        start.copy_(mean)
        super().outer(p, start, v, gradient)


@mistake("20.5", says="the ranks start apart")
class LocalSGD(Apart):
    def __init__(self, parameters, *args, **kwargs):
        parameters = list(parameters)
        own = [p.detach().clone() for p in parameters]
        super().__init__(parameters, *args, **kwargs)
        for p, start, mine in zip(
            self.parameters, self.agreed, [x for x, p in zip(own, parameters, strict=True)
                                           if p.requires_grad], strict=True,
        ):  # fmt: skip
            p.data.copy_(mine)
            start.copy_(mine)


@mistake("20.5", says="in which the ranks do not agree")
class LocalSGD(Apart):
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


@mistake("20.6", says="the sum belongs into it")
def hierarchical_all_reduce(x, inside, across):
    total = x.clone()
    right.hierarchical_all_reduce(total, inside, across)
    return total
