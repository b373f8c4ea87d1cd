"""Wrong answers to lesson 15, each with the words that the check must say to it."""

import itertools

import torch
import torch.distributed as dist
from torch.autograd import Function

from shared.exercises.mistakes import mistake
from shared.pipeline.schedules import Cell, timetable
from solutions import lesson15_pipeline_parallel as right

# 15.1 split_stages


def refuse(costs, num_stages):
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{num_stages} stages")
    if min(costs) < 0:
        raise ValueError(f"a cost of {min(costs)}")


def ranges(ends):
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def best(costs, num_stages, badness):
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    every = (ranges((0, *cut, len(costs))) for cut in cuts)
    return min(every, key=lambda cut: badness([sum(costs[i] for i in each) for each in cut]))


@mistake("15.1", says="every stage has as many parts")
def split_stages(costs, num_stages):
    refuse(costs, num_stages)
    return ranges([i * len(costs) // num_stages for i in range(num_stages + 1)])


@mistake("15.1", says="there is a cut whose slowest stage is faster")
def split_stages(costs, num_stages):
    refuse(costs, num_stages)
    cuts = [range(i, i + 1) for i in range(len(costs))]
    while len(cuts) > num_stages:  # the two neighbours that cost the least together become one
        pairs = [sum(costs[a.start : b.stop]) for a, b in itertools.pairwise(cuts)]
        at = pairs.index(min(pairs))
        cuts[at : at + 2] = [range(cuts[at].start, cuts[at + 1].stop)]
    return cuts


@mistake("15.1", says="a part is in no stage")
def split_stages(costs, num_stages):
    cuts = right.split_stages(costs, num_stages)
    return [*cuts[:-1], range(cuts[-1][0], len(costs) - 1)] if len(cuts[-1]) > 1 else cuts


@mistake("15.1", says="it looks at all cuts")
def split_stages(costs, num_stages):
    refuse(costs, num_stages)
    return best(costs, num_stages, max)


@mistake("15.1", says="a cost of -1 is accepted")
def split_stages(costs, num_stages):
    refuse([abs(x) for x in costs], num_stages)
    return right.split_stages([abs(x) for x in costs], num_stages)


@mistake("15.1", says="the stages' costs are made alike")
def split_stages(costs, num_stages):
    refuse(costs, num_stages)
    return best(costs, num_stages, lambda sums: sum(x**2 for x in sums))


# 15.2 send_activation


def sender(forward, backward):
    """send_activation from what is done with the tensors, and with empty ones for gradients."""

    class Send(Function):
        @staticmethod
        def forward(ctx, link, *tensors):
            ctx.link, ctx.like = link, [(x.shape, x.dtype) for x in tensors]
            forward(link, [x.detach() for x in tensors])
            return torch.zeros(())

        @staticmethod
        def backward(ctx, *_):
            return None, *backward(ctx.link, [torch.empty(s, dtype=t) for s, t in ctx.like])

    return lambda link, *tensors: Send.apply(link, *tensors)


def send_all(link, tensors):
    for x in tensors:
        link.send(x, link.activations)


def receive_all(link, empty):
    return [link.receive(x, link.gradients) for x in empty]


@mistake("15.2", says="before the other side has received, send_activation must be back")
def send_activation(link, *tensors):
    def wait(link, tensors):
        for x in tensors:
            dist.send(x.contiguous(), link.peer, group=link.activations)

    return sender(wait, receive_all)(link, *tensors)


@mistake("15.2", says="the activations travel in another dtype")
def send_activation(link, *tensors):
    return sender(lambda link, x: send_all(link, [y.float() for y in x]), receive_all)(
        link, *tensors
    )


@mistake("15.2", says="what arrives: the two tensors are exchanged")
def send_activation(link, *tensors):
    return sender(lambda link, x: send_all(link, x[::-1]), receive_all)(link, *tensors)


@mistake("15.2", says="backward waits for gradients where none come")
def send_activation(link, *tensors):
    def other(link, empty):
        return [link.receive(x, link.activations) for x in empty]

    return sender(send_all, other)(link, *tensors)


@mistake("15.2", says="a tensor that is not contiguous")
def send_activation(link, *tensors):
    class Send(Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            send_all(link, [x.detach() for x in tensors])
            return torch.zeros(())

        @staticmethod
        def backward(ctx, *_):
            return tuple(receive_all(link, [torch.empty_like(x) for x in ctx.saved_tensors]))

    return Send.apply(*tensors)


# 15.2b recv_activation


def receiver(backward, group="activations"):
    """recv_activation from what is done with the gradients."""

    class Receive(Function):
        @staticmethod
        def forward(ctx, link, tensors, _):
            ctx.link = link
            return tuple(link.receive(x, getattr(link, group)) for x in tensors)

        @staticmethod
        def backward(ctx, *gradients):
            backward(ctx.link, gradients)
            return None, None, None

    def recv_activation(link, shapes, dtype=torch.float32, device="cpu"):
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        return Receive.apply(link, tensors, torch.zeros((), requires_grad=True))

    return recv_activation


def back(link, gradients):
    for x in gradients:
        link.send(x, link.gradients)


@mistake("15.2b", says="it waits where nothing comes")
def recv_activation(link, shapes, dtype=torch.float32, device="cpu"):
    return receiver(back, "gradients")(link, shapes, dtype, device)


@mistake("15.2b", says="device is not used")
def recv_activation(link, shapes, dtype=torch.float32, device="cpu"):
    return receiver(back)(link, shapes, dtype)


@mistake("15.2b", says="a tuple of one is asked for")
def recv_activation(link, shapes, dtype=torch.float32, device="cpu"):
    came = receiver(back)(link, shapes, dtype, device)
    return came if len(came) > 1 else came[0]


@mistake("15.2b", says="what comes is not waited for")
def recv_activation(link, shapes, dtype=torch.float32, device="cpu"):
    class Started(Function):
        @staticmethod
        def forward(ctx, _):
            empty = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
            for x in empty:
                dist.irecv(x, link.peer, group=link.activations)
            return tuple(empty)

        @staticmethod
        def backward(ctx, *gradients):
            back(link, gradients)

    return Started.apply(torch.zeros((), requires_grad=True))


@mistake("15.2b", says="backward waits until the other side has taken the gradients")
def recv_activation(link, shapes, dtype=torch.float32, device="cpu"):
    def wait(link, gradients):
        for x in gradients:
            dist.send(x.contiguous(), link.peer, group=link.gradients)

    return receiver(wait)(link, shapes, dtype, device)


@mistake("15.2b", says="the gradients: nothing travels")
def recv_activation(link, shapes, dtype=torch.float32, device="cpu"):
    return receiver(lambda link, gradients: None)(link, shapes, dtype, device)


# 15.3 to 15.5: orders of work


def below_1(*numbers):
    for number in numbers:
        if number < 1:
            raise ValueError(f"{number} is below 1")


def forwards(m, s):
    return [Cell("F", i, s) for i in range(m)]


def backwards(m, s):
    return [Cell("B", i, s) for i in range(m)]


def turns(first, then, warmup):
    """Forwards and backwards in turns after a warm-up."""
    warmup = min(warmup, len(first))
    steady = [c for pair in zip(first[warmup:], then, strict=False) for c in pair]
    return [*first[:warmup], *steady, *then[len(first) - warmup :]]


def one_each(p, m, warmup):
    below_1(p, m)
    return timetable([turns(forwards(m, s), backwards(m, s), warmup(s)) for s in range(p)])


@mistake("15.3", says="nothing overlaps")
def gpipe_schedule(num_stages, num_micro_batches):
    return one_each(num_stages, num_micro_batches, lambda s: 0)


@mistake("15.3", says="the backwards begin with the first micro-batch")
def gpipe_schedule(num_stages, num_micro_batches):
    m = num_micro_batches
    below_1(num_stages, m)
    return timetable([forwards(m, s) + backwards(m, s) for s in range(num_stages)])


@mistake("15.3", says="these are orders, not slots")
def gpipe_schedule(num_stages, num_micro_batches):
    m = num_micro_batches
    below_1(num_stages, m)
    return [forwards(m, s) + backwards(m, s)[::-1] for s in range(num_stages)]


@mistake("15.3", says="the slots are not the earliest")
def gpipe_schedule(num_stages, num_micro_batches):
    table = right.gpipe_schedule(num_stages, num_micro_batches)
    return [[*row, None] for row in table]


@mistake("15.3", says="it is the other way round")
def gpipe_schedule(num_stages, num_micro_batches):
    table = right.gpipe_schedule(num_stages, num_micro_batches)
    return [list(column) for column in zip(*table, strict=True)]


@mistake("15.3", says="0 stages is accepted")
def gpipe_schedule(num_stages, num_micro_batches):
    if num_stages < 1 or num_micro_batches < 1:
        return []
    return right.gpipe_schedule(num_stages, num_micro_batches)


@mistake("15.4", says="all forwards come before the first backward, as in GPipe")
def one_f_one_b_schedule(num_stages, num_micro_batches):
    return one_each(num_stages, num_micro_batches, lambda s: num_micro_batches)


@mistake("15.4", says="nothing overlaps")
def one_f_one_b_schedule(num_stages, num_micro_batches):
    return one_each(num_stages, num_micro_batches, lambda s: 0)


@mistake("15.4", says="the warm-up is too short")
def one_f_one_b_schedule(num_stages, num_micro_batches):
    return one_each(num_stages, num_micro_batches, lambda s: max(0, num_stages - 2 - s))


@mistake("15.4", says="the forwards ahead are counted from the wrong end")
def one_f_one_b_schedule(num_stages, num_micro_batches):
    return one_each(num_stages, num_micro_batches, lambda s: s)


@mistake("15.4", says="a rank empties itself before it begins new micro-batches")
def one_f_one_b_schedule(num_stages, num_micro_batches):
    p, m = num_stages, num_micro_batches
    below_1(p, m)
    orders = []
    for s in range(p):
        ahead, back, k = forwards(m, s), backwards(m, s), p - s
        orders.append([c for i in range(0, m, k) for c in ahead[i : i + k] + back[i : i + k]])
    return timetable(orders)


@mistake("15.4", says="-1 stages is accepted")
def one_f_one_b_schedule(num_stages, num_micro_batches):
    if num_stages < 1:
        return []
    return right.one_f_one_b_schedule(num_stages, num_micro_batches)


def interleave(p, m, v, warmup=None, chunk_back=None, group=None):
    """The right order with parts of it exchanged."""
    below_1(p, m, v)
    if m % p:
        raise ValueError(f"{m} micro-batches are no multiple of {p}")
    group = group or p
    groups = [range(at, at + group) for at in range(0, m, group)]
    first = [(i, c) for each in groups for c in range(v) for i in each]
    then = [(i, chunk_back(c) if chunk_back else v - 1 - c) for i, c in first]
    orders = []
    for r in range(p):
        k = warmup(r) if warmup else (v - 1) * p + (2 if v > 1 else 1) * (p - 1 - r)
        ahead = [Cell("F", i, c * p + r) for i, c in first]
        orders.append(turns(ahead, [Cell("B", i, c * p + r) for i, c in then], k))
    return orders


@mistake("15.5", says="all micro-batches go through a stage before the next stage begins")
def interleaved_schedule(num_ranks, num_micro_batches, num_chunks):
    p, m, v = num_ranks, num_micro_batches, num_chunks
    return timetable(
        interleave(p, m, v, warmup=lambda r: (v - 1) * m + min(v, 2) * (p - 1 - r), group=m)
    )


@mistake("15.5", says="are not looked at: the error is timetable()'s")
def interleaved_schedule(num_ranks, num_micro_batches, num_chunks):
    p, m, v = num_ranks, num_micro_batches, num_chunks
    below_1(p, m, v)
    places = [(k // (p * v) * p + k % p, k % (p * v) // p) for k in range(m * v)]
    orders = []
    for r in range(p):
        ahead = [Cell("F", i, c * p + r) for i, c in places]
        back = [Cell("B", i, (v - 1 - c) * p + r) for i, c in places]
        orders.append(turns(ahead, back, (v - 1) * p + min(v, 2) * (p - 1 - r)))
    return timetable(orders)


@mistake("15.5", says="the warm-up lacks those of the rank's earlier stages")
def interleaved_schedule(num_ranks, num_micro_batches, num_chunks):
    p, m, v = num_ranks, num_micro_batches, num_chunks
    return timetable(interleave(p, m, v, warmup=lambda r: p - 1 - r))


@mistake("15.5", says="all forwards come before the first backward, as in GPipe")
def interleaved_schedule(num_ranks, num_micro_batches, num_chunks):
    p, m, v = num_ranks, num_micro_batches, num_chunks
    return timetable(interleave(p, m, v, warmup=lambda r: m * v))


@mistake("15.5", says="the backwards take a rank's stages from first to last")
def interleaved_schedule(num_ranks, num_micro_batches, num_chunks):
    return timetable(interleave(num_ranks, num_micro_batches, num_chunks, chunk_back=lambda c: c))


@mistake("15.5", says="0 stages a rank is accepted")
def interleaved_schedule(num_ranks, num_micro_batches, num_chunks):
    return right.interleaved_schedule(num_ranks, num_micro_batches, max(1, num_chunks))


# 15.6 which_schedule


@mistake("15.6", says="A is not '1f1b'")
def which_schedule():
    return {**right.which_schedule(), "A": "1f1b"}


@mistake("15.6", says="B is not 'gpipe'")
def which_schedule():
    return {**right.which_schedule(), "B": "gpipe"}


@mistake("15.6", says="C is not 'gpipe'")
def which_schedule():
    return {**right.which_schedule(), "C": "gpipe"}


@mistake("15.6", says="C is not 'none'")
def which_schedule():
    return {**right.which_schedule(), "C": "none"}


@mistake("15.6", says="a picture has no answer")
def which_schedule():
    return {"A": "interleaved", "C": "1f1b", "D": "gpipe"}


@mistake("15.6", says="a word that is no kind of schedule")
def which_schedule():
    return {**right.which_schedule(), "D": "GPipe"}
